"""The report on two models: the measurements of all samples, judged by the limits."""

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import chain
from typing import Final

from onnxamp._numerics.choices.close_calls import CloseCalls
from onnxamp._numerics.differences.detections import Detections
from onnxamp._numerics.differences.merge import merge
from onnxamp._numerics.differences.metrics import (
    PartError,
    Perplexity,
    TensorDiff,
    both,
    join,
)
from onnxamp._numerics.judging import apply_limits
from onnxamp._numerics.limits import COARSE, Limits, size_only
from onnxamp._numerics.parts import Grouped
from onnxamp._numerics.results import DiffReport, LayerDiff, Parting
from onnxamp._numerics.sample_diff import SampleDiff
from onnxamp._numerics.user_functions import Accept
from onnxamp._runtime.piecewise.choices import Branch

_HOPELESS: Final = 1e-2
"""Noise floor above which errors mean nothing for low precision."""


class Tally:
    """The measurements so far.

    Attributes:
        accept: the function of the user that judges outputs.
        usual: how many samples a verdict takes first, if there are more because errors are close; 0 if not.
    """

    def __init__(self, accept: Accept | None, usual: int = 0) -> None:
        self.accept = accept
        self.usual = usual
        self.of_samples = dict[int, tuple[TensorDiff, ...]]()
        self.refused = set[int]()
        self.alarms, self.notes = list[str](), dict[str, None]()
        self.layers = dict[str, LayerDiff]()
        self.detections = dict[tuple[str, ...], Detections]()
        self.tokens = dict[str, Parting]()
        self.perplexity: Perplexity | None = None
        self.taken = set[Branch]()
        self.grouped = dict[str, Grouped]()
        self.choices = dict[str, CloseCalls]()

    def add(self, number: int, sample: SampleDiff) -> None:
        """Add a sample."""
        self.of_samples[number] = sample.outputs
        if sample.mismatches or sample.rejected is not None:
            self.refused.add(number)
        self.alarms += sample.mismatches
        self.taken.update(sample.taken)
        join(self.grouped, {group.output: group for group in sample.grouped})
        join(
            self.detections,
            {detection.outputs: detection for detection in sample.detections},
        )
        join(self.layers, {row.value: row for row in sample.layers})
        join(self.choices, {calls.node: calls for calls in sample.choices})
        join(self.tokens, {tokens.output: tokens for tokens in sample.tokens})
        if self.accept is not None:
            self.notes.setdefault(f"{self.accept.name!r} judges the outputs.")
        if sample.rejected is not None:
            text = f"{sample.rejected!r} rejects the outputs of sample {number}."
            self.alarms.append(text)
        self.perplexity = both(self.perplexity, sample.perplexity)
        self.notes |= dict.fromkeys(sample.notes)

    def worst_sample(self, missed: Collection[str]) -> int:
        """Return the number of the sample that shows best why some outputs miss their limits.

        Outputs that no limit allows come first, then those that break, then the largest error of a whole or a part.
        """

        def badness(number: int) -> tuple[bool, bool, float]:
            diffs = [diff for diff in self.of_samples[number] if diff.name in missed]
            is_broken = any(diff.bad is not None for diff in diffs)
            errors = (max(diff.rel_l2, diff.part_rel_l2 or 0.0) for diff in diffs)
            return number in self.refused, is_broken, max(errors, default=0.0)

        return max(self.of_samples, key=badness)

    def merged(self) -> Iterator[TensorDiff]:
        """Yield the measurements of each output over all samples."""
        outputs = dict[str, list[TensorDiff]]()
        for diff in chain.from_iterable(self.of_samples.values()):
            outputs.setdefault(diff.name, []).append(diff)
        for name, diffs in outputs.items():
            diff = merge(diffs)
            worst = self.grouped[name].worst if name in self.grouped else None
            first = [one.rel_l2 for one in diffs[: self.usual]]
            yield replace(
                diff,
                part=_clearer(diff.part, worst),
                usual_rel_l2=max(first, default=None),
            )


_CLEARLY: Final = 1.1
"""By what factor a group has to be worse than a value that the output joins, whose name says more about the cause."""


def _clearer(joined: PartError | None, group: PartError | None) -> PartError | None:
    """Return the part to report: that with the larger error, or the one with a name if they are about the same."""
    if joined is None or group is None:
        return joined or group
    return group if group.rel_l2 > _CLEARLY * joined.rel_l2 else joined


def finished(report: DiffReport, tally: Tally, limits: Limits) -> DiffReport:
    """Return the report with the measurements of all samples, judged by the limits."""
    outputs = tuple(tally.merged())
    broken = [diff for diff in outputs if diff.alarm and not size_only(diff)]
    if limits.allows_any_number:
        broken = [diff for diff in broken if not diff.has_vanished]
    alarms = [*tally.alarms, *(f"Output {d.name!r}: {d.alarm}" for d in broken)]
    rows = tuple(sorted(tally.layers.values(), key=lambda row: row.position))
    floats = [diff for diff in outputs if diff.is_float and diff.size]
    spoiled = [(diff, diff.reference_nan + diff.reference_inf) for diff in floats]
    notes = [
        f"The reference itself is NaN or infinite in {count:,} of {diff.size:,} elements of output {diff.name!r}."
        for diff, count in spoiled
        if count
    ]
    report = replace(
        report,
        outputs=outputs,
        layers=rows,
        failure=alarms[0] if alarms else None,
        detections=tuple(tally.detections.values()),
        tokens=tuple(tally.tokens.values()),
        perplexity=tally.perplexity,
        choices=tuple(tally.choices.values()),
        coarse=limits.coarse or None,
    )
    if limits.coarse and report.lowest != "float32":
        notes.append(COARSE.format(limits.coarse))
    report = apply_limits(
        replace(report, notes=(*report.notes, *notes, *tally.notes)), limits
    )
    others = [diff for diff in outputs if diff.size and not diff.is_float]
    are_spoiled = bool(floats) and all(count == diff.size for diff, count in spoiled)
    if are_spoiled and not others and report.failure is None:
        text = "The reference's outputs are NaN or infinite throughout: there is nothing valid to compare with."
        return replace(report, skipped=" ".join([text, *tally.notes]))
    if (
        report.noise is not None
        and report.noise > _HOPELESS
        and report.failure is None
    ):
        text = f"Float32 itself, on the same inputs, is off by {100 * report.noise:.0f} % there from what the CPU computes"
        return replace(
            report, skipped=f"{text}: its outputs say nothing about low precision."
        )
    return report
