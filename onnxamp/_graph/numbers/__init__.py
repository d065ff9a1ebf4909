"""What is known of the numbers that a model computes, from its constants and from the ops that they pass."""
