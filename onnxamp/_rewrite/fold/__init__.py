"""Decomposed patterns rewritten into the one standard op that they are, exactly, before anything is decided.

The forms are data (``_data/folds.toml``); each kind has additional conditions that a form cannot express.
"""
