"""Rewriting: preparation of a model, edits planned from a decision, and the one place that applies them."""
