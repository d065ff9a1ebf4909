"""The frozen graph of a model, and the analyses of it: types, shapes, constants, patterns, bounds."""
