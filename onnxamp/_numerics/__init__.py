"""Comparing and checking results: metrics, limits, ranges, rounding, and the search for nodes at fault."""
