"""Comparing results, and what each node contributes to their error."""
