"""Tuning several models that work together: a function of the user runs them, and they share one error budget."""
