"""Checks of a result before anyone sees it."""
