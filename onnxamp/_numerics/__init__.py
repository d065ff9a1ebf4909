"""Comparing and checking results: metrics, limits, judgements, and inputs that are hard."""
