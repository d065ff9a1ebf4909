"""Cutting the region around a node out of a model, with what enters it: a small model that reproduces the numbers."""
