"""What runs take unless users ask for something else."""

from typing import Final

BUDGET: Final = 128 << 20
"""Bytes of values and weights that a run holds at a time."""

CURE_SECONDS: Final = 60.0
"""Time in which onnxamp searches for a conversion that passes."""
