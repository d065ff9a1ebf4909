"""Comparing two models on the same inputs: their outputs and, where asked, every value that they share."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import ModelSource
from onnxamp._numerics.beside import (
    Opened,
    Progress,
    at_least_one,
    compare_outputs,
    make_ready,
    noise_floor,
    nothing_paired,
    open_model,
    part_of,
    ran_on,
    run_both,
)
from onnxamp._numerics.judging import held_to, size_only
from onnxamp._numerics.limits import LOWNESS, Limits
from onnxamp._numerics.merging import merge
from onnxamp._numerics.metrics import TensorDiff
from onnxamp._numerics.pairing import pair
from onnxamp._numerics.results import DiffReport, LayerDiff
from onnxamp._numerics.walk import Compared, Walked
from onnxamp._ops.facts import op_key
from onnxamp._runtime.flow import Flow, dtype_of, origin
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.measure import Measurement
from onnxamp._runtime.samples import Samples, random_samples
from onnxamp._runtime.session import Provider, choose_provider
from onnxamp._runtime.side import BUDGET

_HOPELESS: Final = 1e-2
"""Noise floor from which on errors say nothing of low precision."""


def diff_models(
    reference: ModelSource,
    result: ModelSource,
    samples: Samples | None = None,
    *,
    layers: bool = False,
    limits: Limits | None = None,
    provider: Provider | None = None,
    whole: bool | None = None,
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> DiffReport:
    """Run both models on the same samples and compare what they compute.

    On CPU, where ONNX Runtime would compute float16 in float32 and hide what a GPU does, models with low-precision
    values are emulated (:mod:`onnxamp._runtime.emulate`). On CUDA each runs whole, in one session with all fusions as
    in production, TF32 off; only layers are computed one op at a time.

    Args:
        reference: what is right; usually the float32 original.
        result: what is judged.
        samples: inputs; made up for the reference (seeded, ``count`` of them, sizes from ``dims``) where None.
        layers: compare every value that both share by name, too. Where outputs fail outright it is done anyway.
        limits: what is accepted; the usual tolerance of the lower precision by default.
        provider: "cuda" or "cpu"; None for CUDA where there is one.
        whole: run each model in one session; None for CUDA. On CPU only float32 models can be compared so.
        budget: bytes of values and weights that may be held at a time besides the models themselves.
        progress: told how far the comparison is.

    Raises:
        ArgumentError: the samples do not fit the models, the result takes inputs that the reference lacks, or lacks
            outputs that the reference has.
        ModelError: a model cannot be read.
    """
    one, other = open_model(reference), open_model(result)
    chosen = choose_provider(provider)
    samples = samples or random_samples(one.proto, count, seed=seed, dims=dims)
    at_least_one(samples)
    limits = limits or Limits()
    limits.check(entry.name for entry in one.proto.graph.output)
    at_once = chosen == "cuda" if whole is None else whole
    found = _diff(one, other, samples, chosen, layers, at_once, limits, budget, progress)
    if not layers and not found.passed and found.outputs:  # then it is wanted where the error comes from
        deep = _diff(one, other, samples, chosen, True, False, limits, budget, progress)
        return replace(found, first_bad=deep.first_bad, layers=deep.layers)
    return found


@dataclass(slots=True)
class _Tally:
    """What the samples have given so far."""

    outputs: dict[str, list[TensorDiff]] = field(default_factory=dict)
    alarms: list[str] = field(default_factory=list)
    layers: dict[str, LayerDiff] = field(default_factory=dict)

    def add(self, reference: Flow, result: Flow, walked: Walked) -> None:
        for name, value in walked.reference.items():
            if name not in walked.result:
                raise ArgumentError(f"The models have different outputs: only the reference has {name!r}.")
            self.alarms += [f"Output {name!r}: {text}" for text in _lost(value, walked.result[name])]
            for diff in compare_outputs(name, value, walked.result[name]):
                self.outputs.setdefault(diff.name, []).append(diff)
        for row in _layers(reference, result, walked.compared):
            self.layers[row.value] = _joined(self.layers.get(row.value), row)


def _diff(
    one: Opened,
    other: Opened,
    samples: Samples,
    provider: Provider,
    layers: bool,
    whole: bool,
    limits: Limits,
    budget: int,
    told: Progress | None,
) -> DiffReport:
    report = DiffReport(
        one.label, other.label, ran_on(provider, "float32"), samples.description, len(samples), "float32"
    )
    ready, tally = None, _Tally()
    wholes = (one.whole(provider), other.whole(provider)) if whole else None
    for number, sample in enumerate(samples):
        feeds = check_inputs(one.proto, sample)
        try:
            ready = make_ready(
                one, other, feeds, provider, paired=pair if layers else nothing_paired, emulated=provider == "cpu",
                budget=budget, before=ready,
            )  # fmt: skip
            reference, result = ready.walk.reference.flow, ready.walk.result.flow
            lowest = min(reference.lowest, result.lowest, key=lambda name: LOWNESS[name])
            report = replace(report, lowest=lowest, ran_on=ran_on(provider, lowest), reference_lowest=reference.lowest)
            if whole and lowest != "float32" and provider == "cpu":
                raise ArgumentError(f"CPU sessions hide what {lowest} does: run the models in pieces there, emulated.")
            walked = run_both(ready.walk, wholes, feeds, part_of(told, number, len(samples)), layers=layers)
        except RuntimeFailure as error:
            which = f" (sample {number + 1} of {len(samples)})" if len(samples) > 1 else ""
            return replace(report, skipped=f"The reference does not run{which}: {error}{samples.hint(error)}")
        if walked.failure is not None:
            return replace(report, failure=f"The result does not run: {walked.failure}")
        if whole and provider == "cuda" and number == 0 and reference.lowest == "float32":
            report = replace(report, noise=noise_floor(one.whole("cpu"), feeds, walked.reference))
        tally.add(reference, result, walked)
        report = replace(report, notes=_unmatched(reference, result))
    return _finished(report, tally, limits)


def _unmatched(reference: Flow, result: Flow) -> tuple[str, ...]:
    """What only one of the models takes or gives, and is not compared."""
    inputs = [name for name in reference.inputs if name not in result.inputs and name not in result.defaults]
    outputs = [name for name in result.outputs if name not in reference.outputs]
    notes = [f"Only the reference takes the input {name!r}." for name in inputs]
    return (*notes, *(f"Only the result gives the output {name!r}; it is not compared." for name in outputs))


def _finished(report: DiffReport, tally: _Tally, limits: Limits) -> DiffReport:
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
    found = replace(report, outputs=outputs, layers=rows, failure=alarms[0] if alarms else None)
    found = held_to(replace(found, notes=(*report.notes, *notes)), limits)
    if floats and all(count == diff.size for diff, count in spoiled):
        return replace(
            found, skipped="The reference's outputs are NaN or infinite throughout: there is no right answer."
        )
    if found.noise is not None and found.noise > _HOPELESS and found.failure is None:
        text = f"Float32 itself, on the same inputs, is off by {found.noise:.0%} there from what the CPU computes"
        return replace(found, skipped=f"{text}: what low precision does cannot be told from its outputs.")
    return found


def _joined(before: LayerDiff | None, now: LayerDiff) -> LayerDiff:
    if before is None:
        return now
    both = _sum(before.local, now.local), _sum(before.accumulated, now.accumulated)
    return replace(before, local=both[0], accumulated=both[1], note=before.note or now.note)


def _sum(one: Measurement | None, other: Measurement | None) -> Measurement | None:
    return one + other if one is not None and other is not None else one or other


def _layers(reference: Flow, result: Flow, rows: Mapping[str, Compared]) -> Iterator[LayerDiff]:
    for name, row in rows.items():
        _, position = origin(reference, name)
        node = reference.nodes[position]
        dtype, label = dtype_of(result, name), node.name or name
        if "float" not in dtype and not (row.accumulated and row.accumulated.error_max):
            continue  # shapes, indices and masks that are as they should be
        yield LayerDiff(position, name, label, op_key(node), dtype, row.local, row.accumulated, row.note)


def _lost(reference: Any, found: Any) -> list[str]:
    """What is wrong with sequences and optionals as such; their elements are compared one by one."""
    if isinstance(reference, list) and isinstance(found, list):
        if len(reference) != len(found):
            return [f"The sequence has {len(found)} elements instead of {len(reference)}."]
        return [text for one, other in zip(reference, found, strict=True) for text in _lost(one, other)]
    if type(reference) is not type(found):
        return [f"It is {type(found).__name__} instead of {type(reference).__name__}."]
    return []
