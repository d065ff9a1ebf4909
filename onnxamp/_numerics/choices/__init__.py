"""Choices that a model makes by its values, and how close they are."""
