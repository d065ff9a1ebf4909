"""Weights whose low-precision numbers are chosen on samples instead of the nearest: what is known of them.

This room runs no model: whoever may run one passes a :data:`Rounder`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from onnxamp._convert.analysis import Analysis
from onnxamp._errors import ArgumentError
from onnxamp._model.blobs import Chosen


@dataclass(frozen=True, slots=True)
class RoundedWeights:
    """What rounding with compensation came to.

    Attributes:
        chosen: value of the analysed graph -> its low-precision numbers. Others are rounded to nearest.
        weights: number of low-precision weights that products read.
        wide: how many of them are too wide to be looked at.
        before: relative error of their products on the samples with weights rounded to nearest, root mean square.
        after: the same with these weights.
        samples: where the samples come from.
        made_up: whether they are random.
    """

    chosen: Mapping[int, Chosen] = field(repr=False)
    weights: int
    wide: int
    before: float
    after: float
    samples: str
    made_up: bool

    def note(self) -> str:
        """What was done, in sentences."""
        if not self.weights:
            return "No product outside of bodies has a low-precision weight that could be rounded with compensation."
        if not self.chosen:
            return f"Rounding with compensation brings nothing: it is to nearest for all {self.weights:,} weights."
        kept = self.weights - len(self.chosen)
        rest = f"; {kept:,} {'is' if kept == 1 else 'are'} rounded to nearest" if kept else ""
        wide = f" ({self.wide:,} are too wide)" if self.wide else ""
        return (
            f"Rounded {len(self.chosen):,} of {self.weights:,} weights of products with compensation{rest}{wide}: the"
            f" error that rounding them brings to their products falls from {self.before:.2g} to {self.after:.2g} on"
            f" {self.samples}."
        )


MADE_UP: Final = (
    "Weights were rounded with compensation for made-up inputs: pass real ones (--inputs, samples), whose products they"
    " shall keep."
)
"""A warning."""

Rounder: TypeAlias = Callable[[Analysis], RoundedWeights]
"""Chooses the low-precision numbers of weights, for options that ask for it."""


def with_rounding(
    analysis: Analysis, rounder: Rounder | None
) -> tuple[Analysis, RoundedWeights | None]:
    """The analysis with the numbers that its options ask for, and what is known of them.

    Raises:
        ArgumentError: the options ask for compensation, but there is no rounder. Others as the rounder.
    """
    if not analysis.options.compensates or not analysis.edits:
        return analysis, None
    if rounder is None:
        raise ArgumentError(
            "Rounding with compensation (rounding='compensated') needs samples of the model's inputs: pass samples"
            " (--inputs), or round to nearest (--rounding nearest)."
        )
    found = rounder(analysis)
    warnings = (*analysis.pins.warnings, *([MADE_UP] if found.made_up and found.chosen else ()))
    pins, edits = analysis.pins._replace(warnings=warnings), analysis.edits
    return replace(analysis, pins=pins, edits=replace(edits, rounded=found.chosen)), found
