"""Running models: sessions and providers, inputs, and float32 emulation of low precision.

The defaults of runs are here.
"""

from typing import Final

BUDGET: Final = 128 << 20
"""Bytes of values and weights that a run holds at a time."""

LEAST = 4
MOST = 16
"""Fewest and most random samples if float16 is accumulated in float16: the error on a single one is random."""

STRESS: Final = 4
"""Steps toward inputs that are hard for a result. More find little: the first step goes to a corner of their range."""

CURE_SECONDS: Final = 60.0
"""Time in which onnxamp searches for a conversion that passes."""
