"""Bounds of every number that a model computes, for every input: what no input can bring out of range."""
