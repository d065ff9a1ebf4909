"""What samples show, one after another, and the report that comes of it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from onnxamp._errors import ArgumentError
from onnxamp._numerics.accept import Accept
from onnxamp._numerics.compare import merge
from onnxamp._numerics.detections import Detections, compare_matched
from onnxamp._numerics.limits import Limits, apply_limits, size_only
from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.metrics import TensorDiff
from onnxamp._numerics.pairing import exponents_between
from onnxamp._numerics.results import DiffReport, LayerDiff
from onnxamp._numerics.tokens import Parting
from onnxamp._numerics.walk import Compared, Walked
from onnxamp._ops.facts import op_key
from onnxamp._runtime.flow import Flow, dtype_of, origin
from onnxamp._runtime.values import Feed

_HOPELESS: Final = 1e-2
"""Noise floor from which on errors tell nothing about low precision."""


@dataclass(slots=True)
class Tally:
    """What the samples have shown so far."""

    selected: frozenset[str]
    outputs: dict[str, list[TensorDiff]] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    layers: dict[str, LayerDiff] = field(default_factory=dict)
    notes: dict[str, None] = field(default_factory=dict)
    detections: dict[tuple[str, ...], Detections] = field(default_factory=dict)
    tokens: dict[str, Parting] = field(default_factory=dict)

    def add(self, reference: Flow, result: Flow, walked: Walked) -> None:
        """Add a sample.

        Raises:
            ArgumentError: the result lacks an output of the reference.
        """
        for name, value in walked.reference.items():
            if name not in walked.result:
                raise ArgumentError(f"The models have different outputs: only the reference has {name!r}.")
            self.alarms += [f"Output {name!r}: {text}" for text in _mismatches(value, walked.result[name])]
        detections, diffs = compare_matched(walked.reference, walked.result, self.selected)
        for found in detections:
            before = self.detections.get(found.outputs)
            self.detections[found.outputs] = found if before is None else before + found
        for diff in diffs:
            self.outputs.setdefault(diff.name, []).append(diff)
        for row in _layers(reference, result, walked.compared):
            self.layers[row.value] = _joined(self.layers.get(row.value), row)

    def judge(self, number: int, walked: Walked, accept: Accept | None) -> None:
        """Ask the user's function about a sample.

        Raises:
            ArgumentError: it does not say yes or no.
        """
        if accept is None:
            return
        self.notes.setdefault(f"{accept.name!r} judges the outputs.")
        if not accept.takes(walked.reference, walked.result):
            self.alarms.append(f"{accept.name!r} rejects the outputs of sample {number}.")

    def add_tokens(self, found: Parting | None) -> None:
        """Add the tokens of a sample."""
        if found is not None:
            before = self.tokens.get(found.output)
            self.tokens[found.output] = found if before is None else before.and_then(found)


def nan_inputs(feeds: Mapping[str, Feed]) -> Iterator[str]:
    """Sentences about inputs that hold NaN, which spoils whatever it meets."""
    for name, feed in feeds.items():
        if isinstance(feed, np.ndarray) and feed.dtype.kind == "f" and (count := int(np.isnan(feed).sum())):
            yield f"Input {name!r} holds NaN in {count:,} of {feed.size:,} elements."


def finished(report: DiffReport, tally: Tally, limits: Limits) -> DiffReport:
    """The report with what all samples showed, judged by the limits."""
    outputs = tuple(merge(diffs) for diffs in tally.outputs.values())
    alarms = [*tally.alarms, *(f"Output {d.name!r}: {d.alarm}" for d in outputs if d.alarm and not size_only(d))]
    rows = tuple(sorted(tally.layers.values(), key=lambda row: row.position))
    floats = [diff for diff in outputs if diff.is_float and diff.size]
    spoiled = [(diff, diff.reference_nan + diff.reference_inf) for diff in floats]
    notes = [
        f"The reference itself is NaN or infinite in {count:,} of {diff.size:,} elements of output {diff.name!r}."
        for diff, count in spoiled
        if count
    ]
    report = replace(
        report, outputs=outputs, layers=rows, failure=alarms[0] if alarms else None,
        detections=tuple(tally.detections.values()), tokens=tuple(tally.tokens.values()),
    )  # fmt: skip
    report = apply_limits(replace(report, notes=(*report.notes, *notes, *tally.notes)), limits)
    if floats and all(count == diff.size for diff, count in spoiled):
        text = "The reference's outputs are NaN or infinite throughout: there is no right answer to compare with."
        return replace(report, skipped=" ".join([text, *tally.notes]))
    if report.noise is not None and report.noise > _HOPELESS and report.failure is None:
        text = f"Float32 itself, on the same inputs, is off by {report.noise:.0%} there from what the CPU computes"
        return replace(report, skipped=f"{text}: its outputs cannot tell what low precision does.")
    return report


def _joined(before: LayerDiff | None, now: LayerDiff) -> LayerDiff:
    if before is None:
        return now
    both = _sum(before.local, now.local), _sum(before.accumulated, now.accumulated)
    return replace(before, local=both[0], accumulated=both[1], note=before.note or now.note)


def _sum(one: Measurement | None, other: Measurement | None) -> Measurement | None:
    return one + other if one is not None and other is not None else one or other


def _layers(reference: Flow, result: Flow, rows: Mapping[str, Compared]) -> Iterator[LayerDiff]:
    exponents = exponents_between(reference, result)
    for name, row in rows.items():
        _, position = origin(reference, name)
        node = reference.nodes[position]
        dtype, label = dtype_of(result, name), node.name or name
        if "float" not in dtype and not (row.accumulated and row.accumulated.error_max):
            continue  # shapes, indices and masks that are equal
        yield LayerDiff(
            position, name, label, op_key(node), dtype, row.local, row.accumulated, row.note, exponents.get(name, 0)
        )


def _mismatches(reference: Any, result: Any) -> list[str]:
    """Differences between sequences and optionals as such; their elements are compared one by one."""
    if isinstance(reference, list) and isinstance(result, list):
        if len(reference) != len(result):
            return [f"The sequence has {len(result)} elements instead of {len(reference)}."]
        return [text for one, other in zip(reference, result, strict=True) for text in _mismatches(one, other)]
    if type(reference) is not type(result):
        return [f"It is {type(result).__name__} instead of {type(reference).__name__}."]
    return []
