"""Choices that measurements make: nodes in float32, exponents, rounded weights, and level auto."""
