"""The precision variables of a model: one for each type parameter of a node."""
