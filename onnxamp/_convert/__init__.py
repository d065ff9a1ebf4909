"""Conversion: the one pipeline, and what it returns."""
