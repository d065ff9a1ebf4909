"""Extraction of the region around a node and its inputs from a model: a small model that reproduces the numbers."""
