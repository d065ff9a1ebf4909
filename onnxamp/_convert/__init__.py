"""Conversion: the one pipeline, and its results."""
