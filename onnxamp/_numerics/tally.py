"""Measurements of a comparison's samples, and the report that follows."""

from dataclasses import dataclass, field, replace
from typing import Final

from onnxamp._numerics.compare import merge
from onnxamp._numerics.detections import Detections
from onnxamp._numerics.limits import COARSE, Accept, Limits, apply_limits, size_only
from onnxamp._numerics.metrics import Measurement, Perplexity, TensorDiff
from onnxamp._numerics.results import DiffReport, LayerDiff, Parting
from onnxamp._numerics.sample_diff import SampleDiff

_HOPELESS: Final = 1e-2
"""Noise floor above which errors mean nothing for low precision."""


@dataclass(slots=True)
class Tally:
    """The measurements so far."""

    accept: Accept | None
    outputs: dict[str, list[TensorDiff]] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    layers: dict[str, LayerDiff] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    detections: dict[tuple[str, ...], Detections] = field(default_factory=dict)
    tokens: dict[str, Parting] = field(default_factory=dict)
    perplexity: Perplexity | None = None

    def add(self, number: int, sample: SampleDiff) -> None:
        """Add a sample."""
        self.alarms += sample.mismatches
        for found in sample.detections:
            others = self.detections.get(found.outputs)
            self.detections[found.outputs] = found if others is None else others + found
        for diff in sample.outputs:
            self.outputs.setdefault(diff.name, []).append(diff)
        for row in sample.layers:
            self.layers[row.value] = _joined(self.layers.get(row.value), row)
        if self.accept is not None:
            self.notes.setdefault(f"{self.accept.name!r} judges the outputs.")
        if sample.rejected is not None:
            self.alarms.append(
                f"{sample.rejected!r} rejects the outputs of sample {number}."
            )
        for tokens in sample.tokens:
            before = self.tokens.get(tokens.output)
            self.tokens[tokens.output] = (
                tokens if before is None else before.and_then(tokens)
            )
        if sample.perplexity is not None:
            earlier = self.perplexity
            self.perplexity = (
                sample.perplexity if earlier is None else earlier + sample.perplexity
            )
        self.notes |= dict.fromkeys(sample.notes)


def finished(report: DiffReport, tally: Tally, limits: Limits) -> DiffReport:
    """Return the report with the measurements of all samples, judged by the limits."""
    outputs = tuple(merge(diffs) for diffs in tally.outputs.values())
    alarms = [
        *tally.alarms,
        *(
            f"Output {d.name!r}: {d.alarm}"
            for d in outputs
            if d.alarm and not size_only(d)
        ),
    ]
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
    )
    if limits.coarse and report.lowest != "float32":
        notes.append(COARSE.format(limits.coarse))
    report = apply_limits(
        replace(report, notes=(*report.notes, *notes, *tally.notes)), limits
    )
    if floats and all(count == diff.size for diff, count in spoiled):
        text = "The reference's outputs are NaN or infinite throughout: there is nothing valid to compare with."
        return replace(report, skipped=" ".join([text, *tally.notes]))
    if report.noise is not None and report.noise > _HOPELESS and report.failure is None:
        text = f"Float32 itself, on the same inputs, is off by {100 * report.noise:.0f} % there from what the CPU computes"
        return replace(
            report, skipped=f"{text}: its outputs say nothing about low precision."
        )
    return report


def _joined(before: LayerDiff | None, now: LayerDiff) -> LayerDiff:
    if before is None:
        return now
    both = _sum(before.local, now.local), _sum(before.accumulated, now.accumulated)
    return replace(
        before, local=both[0], accumulated=both[1], note=before.note or now.note
    )


def _sum(one: Measurement | None, other: Measurement | None) -> Measurement | None:
    return one + other if one is not None and other is not None else one or other
