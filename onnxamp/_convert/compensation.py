"""Weights that are rounded with compensation, as an analysis chose them."""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Final, TypeAlias

from onnxamp._base.errors import ArgumentError
from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis
from onnxamp._model.blobs import Chosen


@record
class RoundedWeights:
    """The result of compensated rounding.

    Attributes:
        chosen: value of the analyzed graph -> its low-precision numbers. Others are rounded to nearest.
        weights: number of low-precision weights that products read.
        wide: how many of them are too wide for compensation.
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
        """Return sentences about the changes."""
        if not self.weights:
            return "No product outside subgraphs has a low-precision weight to round with compensation."
        if not self.chosen:
            return f"Compensated rounding does not help: all {self.weights:,} weights are rounded to nearest."
        kept = self.weights - len(self.chosen)
        rest = ""
        if kept:
            rest = f"; {kept:,} {'is' if kept == 1 else 'are'} rounded to nearest"
        wide = f" ({self.wide:,} are too wide)" if self.wide else ""
        return (
            f"Rounded {len(self.chosen):,} of {self.weights:,} weights with compensation{rest}{wide}:"
            f" the error of their products falls from {self.before:.2g} to {self.after:.2g} on"
            f" {self.samples}."
        )


MADE_UP: Final = (
    "Weights were rounded with compensation for random inputs: pass real ones (--inputs, samples), so that products on real"
    " data stay accurate."
)
"""Warns that weights were rounded for random inputs."""

Rounder: TypeAlias = Callable[[Analysis], RoundedWeights]
"""Chooses the low-precision numbers of weights, for options that ask for it."""


def with_rounding(
    analysis: Analysis, rounder: Rounder | None
) -> tuple[Analysis, RoundedWeights | None]:
    """Return the analysis with the rounding that its options ask for, and the facts about it.

    Raises:
        ArgumentError: the options ask for compensation, but there is no rounder. Others as the rounder.
    """
    if not analysis.options.compensates or not analysis.edits:
        return analysis, None
    if rounder is None:
        raise ArgumentError(
            "Compensated rounding (rounding='compensated') needs samples: pass some"
            " (--inputs), or round to nearest (--rounding nearest)."
        )
    rounded = rounder(analysis)
    if rounded.made_up and rounded.chosen:
        analysis = analysis.with_warnings((*analysis.pins.warnings, MADE_UP))
    edits = analysis.edits
    edits = replace(edits, rounded={**edits.rounded, **rounded.chosen})
    return replace(analysis, edits=edits), rounded
