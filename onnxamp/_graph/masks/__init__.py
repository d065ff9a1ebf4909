"""Masks of attention: where they come from, and the scores that they reach."""
