"""Defaults of runs."""

from typing import Final

BUDGET: Final = 128 << 20
"""Bytes of values and weights that a run holds at a time."""

LEAST, MOST = 4, 16
"""Random samples where float16 is summed up in float16, at least and at most: the error that one shows is a draw."""

CURE_SECONDS: Final = 60.0
"""Time in which onnxamp searches for a conversion that passes."""
