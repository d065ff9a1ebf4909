"""Choices of low nodes: what they may be, and which of them tolerances have to decide among."""
