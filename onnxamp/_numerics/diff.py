"""Comparing two models on the same inputs: their outputs and, if asked, every value that they share."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, get_args

from onnxamp._errors import ArgumentError, ArgumentTypeError, RuntimeFailure
from onnxamp._model.model import Model, ModelSource
from onnxamp._numerics.accept import Accept, AcceptLike
from onnxamp._numerics.compare import compare_outputs
from onnxamp._numerics.limits import Limits
from onnxamp._numerics.metrics import LOWNESS, DiffMetric
from onnxamp._numerics.results import DiffReport
from onnxamp._numerics.rows import listed_outputs
from onnxamp._numerics.tally import Tally, finished, nan_inputs
from onnxamp._numerics.tokens import find_parting, token_outputs
from onnxamp._numerics.walk import SideBySide, Walked
from onnxamp._ops.profiles import emulated_arithmetic
from onnxamp._runtime.advice import input_failure
from onnxamp._runtime.engines import (
    Executable,
    OutputCache,
    Outputs,
    Progress,
    WholeModel,
    engine_name,
    part_of,
)
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Samples, SamplesLike, as_samples
from onnxamp._runtime.session import Provider, choose_provider, is_plugin
from onnxamp._runtime.side import BUDGET, run_alone
from onnxamp._runtime.values import Feed
from onnxamp._target.kernels import check_target

_LOG: Final = logging.getLogger("onnxamp")


def diff_models(
    reference: ModelSource,
    result: ModelSource,
    samples: SamplesLike | None = None,
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
    metric: DiffMetric = "auto",
    accept: AcceptLike | None = None,
    target: str = "cuda",
) -> DiffReport:
    """Run two models on the same samples and compare what they compute.

    On CPU, where ONNX Runtime computes float16 in float32 and hides what a GPU does, low precision is emulated. On CUDA
    each model runs whole, in one session with all fusions as in production, but without TF32; only layers are computed
    one op at a time. On a plugin provider the result runs like that, too, while the reference is computed on the CPU:
    float32 itself may be off there, and the report says how far.

    Args:
        reference: what is right, usually the float32 original: a ModelProto, a path, or an onnx-graphsurgeon Graph.
        result: the model to judge, in the same forms. It may lack inputs of the reference, but no outputs.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts. None for ``count`` random
            samples of the reference (with ``seed``, and sizes of named dimensions from ``dims``).
        layers: compare every value that both models share by name. If outputs miss their limits, this is done anyway.
        limits: what is accepted; the default is a relative L2 error of 1e-5 if both models are float32, 1e-2 if one
            holds float16, 5e-2 if one holds bfloat16.
        provider: "cuda", "cpu", "webgpu", or the package of another plugin provider; None for CUDA if there is a
            device.
        whole: run each model in one session; None for False on CPU alone, where only float32 models can be compared so.
        budget: bytes of values and weights to hold at a time besides the models themselves.
        progress: called with the work that is done and all there is to do.
        metric: "detections" matches the rows of outputs that list detections before it compares them, "elements"
            compares all outputs element by element; "auto" matches rows where an op selected them by their values
            (TopK, NonMaxSuppression, ...).
        accept: a function of the outputs of the reference and of the result, by name, that returns True or False; or
            "package:function". It judges each sample in place of the default limits; ``limits`` hold besides.
        target: whose arithmetic is emulated: "webgpu" sums up float16 in float16, all others in float32.

    Returns:
        The comparison. ``passed`` is the verdict, ``outputs`` hold what was measured, ``first_bad`` names where the
        error starts, ``skipped`` tells why nothing could be compared.

    Raises:
        ArgumentTypeError: a model, the samples or the limits are of another type.
        ArgumentError: the samples do not fit the reference, the result takes inputs that the reference lacks, or it
            lacks outputs that the reference has.
        ModelError: a model cannot be read. RuntimeFailure: the provider is asked for and cannot be used.

    Example:
        >>> import onnxamp
        >>> model = onnxamp.convert_model("models/encoder.onnx", level="O2")
        >>> report = onnxamp.diff_models("models/encoder.onnx", model, provider="cpu")
        >>> report.passed, report.lowest, [output.name for output in report.outputs]
        (True, 'float16', ['last_hidden_state', 'pooled'])
    """
    if not isinstance(limits, Limits | None):
        raise ArgumentTypeError(f"limits must be Limits, as make_limits returns, not {type(limits).__name__}.")
    limits = limits or Limits()
    if accept is not None:
        limits = replace(limits, accept=Accept.of(accept))
    opened, other = Model.of(reference), Model.of(result)
    samples = as_samples(samples, opened, count=count, seed=seed, dims=dims)
    comparison = Comparison.of(
        opened, samples, limits, provider, whole=whole, budget=budget, metric=metric, target=target
    )
    return comparison.compare(other, layers=layers or None, progress=progress)


@dataclass(slots=True)
class Comparison:
    """A reference and samples with which any number of results can be compared.

    What the reference takes to prepare serves all of them, and so do its outputs, as far as they fit in memory.
    """

    reference: Executable
    provider: Provider
    """Where results run."""
    whole: bool
    samples: Samples
    limits: Limits
    selected: frozenset[str]
    """Outputs that may list detections."""
    outputs: OutputCache = field(default_factory=OutputCache)

    @classmethod
    def of(
        cls,
        reference: Model,
        samples: Samples,
        limits: Limits | None,
        provider: Provider | None,
        *,
        whole: bool | None = None,
        budget: int = BUDGET,
        metric: DiffMetric = "auto",
        target: str = "cuda",
    ) -> "Comparison":
        """Arguments and errors as :func:`diff_models`."""
        chosen, limits = choose_provider(provider), limits or Limits()
        limits.check(entry.name for entry in reference.proto.graph.output)
        whole = chosen != "cpu" if whole is None else whole
        home = "cpu" if is_plugin(chosen) else chosen
        arithmetic = emulated_arithmetic(check_target(target)) if chosen == "cpu" else None
        executable = Executable(reference, home, home == "cpu", whole and home == chosen, budget, arithmetic=arithmetic)
        if metric not in get_args(DiffMetric):
            raise ArgumentError(f"Unknown metric {metric!r}: choose one of {', '.join(get_args(DiffMetric))}.")
        return cls(executable, chosen, whole, samples, limits, listed_outputs(reference, metric))

    def try_reference(self, progress: Progress | None = None) -> None:
        """Run the reference on given inputs, to know that they fit it before anything else is done; :meth:`compare`
        keeps what this computes, as far as it fits in memory. Made-up inputs are left alone.

        Raises:
            ArgumentError: the reference does not run on them.
        """
        for number, sample in enumerate(() if self.samples.made_up else self.samples):
            feeds = check_inputs(self.reference.model.proto, sample)
            try:
                self.outputs.keep(number, self.reference.run(feeds, part_of(progress, number, len(self.samples))))
            except RuntimeFailure as error:
                input_failure("The model does not run", error, self.samples, number, self.reference.model)

    def compare(self, result: Model, *, layers: bool | None, progress: Progress | None = None) -> DiffReport:
        """As :func:`diff_models`; ``layers`` is None to compare layers only if outputs miss their limits."""
        one = self.reference
        origin = one if result.origin is one.model else None
        other = Executable(
            result, self.provider, self.provider == "cpu", self.whole, one.budget, origin, one.arithmetic
        )
        report = self._compared(other, bool(layers), progress)
        if layers is None and not report.passed and report.outputs:
            deep = self._compared(other, True, progress)
            return replace(report, first_bad=deep.first_bad, layers=deep.layers)
        return report

    def _compared(self, other: Executable, layers: bool, progress: Progress | None) -> DiffReport:
        one, samples = self.reference, self.samples
        report = DiffReport(
            one.model.label, other.model.label, engine_name(self.provider, "float32"), samples.description,
            len(samples), "float32",
        )  # fmt: skip
        tally, walk = Tally(self.selected), SideBySide(one, other)
        for number, sample in enumerate(samples):
            feeds = check_inputs(one.model.proto, sample)
            try:
                flows = one.prepare(feeds).flow, other.prepare(feeds).flow
                report = self._described(report, *flows)
                walked = self._run(
                    number, feeds, other, walk if layers else None, part_of(progress, number, len(samples))
                )
            except RuntimeFailure as error:
                text = input_failure("The reference does not run", error, samples, number, one.model)
                return replace(report, skipped=text)
            if walked.failure is not None:
                return replace(report, failure=f"The result does not run: {walked.failure}")
            if self.whole and self.provider != "cpu" and number == 0 and report.reference_lowest == "float32":
                report = replace(report, noise=self._noise(feeds, walked.reference))
            tally.add(*flows, walked)
            tally.judge(number, walked, self.limits.accept)
            for name, logits in token_outputs(flows[0]):
                found = partial(self._value, feeds, logits)
                tally.add_tokens(find_parting(name, number, walked.reference[name], walked.result[name], found))
            tally.notes |= dict.fromkeys(nan_inputs(feeds))
            _LOG.debug("compared sample %d of %d", number + 1, len(samples))
        if note := _left_to_cpu(other):
            tally.notes[note] = None
        report = finished(report, tally, self.limits)
        _LOG.info(
            "compared %s with %s on %s: %s", other.model.label, one.model.label, report.ran_on,
            "passed" if report.passed else report.failure or "outside the limits",
        )  # fmt: skip
        return report

    def _noise(self, feeds: Mapping[str, Feed], outputs: Outputs) -> float | None:
        """:func:`noise_floor` of the reference, whose outputs are known from the device or from the CPU."""
        one, on_device = self.reference, self.reference.provider == self.provider
        elsewhere = WholeModel(one.model.path or one.model.proto, "cpu" if on_device else self.provider)
        return noise_floor(elsewhere, feeds, outputs, on_device=on_device)

    def _value(self, feeds: Mapping[str, Feed], name: str) -> Any:
        """A value of the reference."""
        return run_alone(self.reference.prepare(feeds), feeds, [name], self.reference.budget).output(name)

    def _described(self, report: DiffReport, reference: Flow, result: Flow) -> DiffReport:
        """The report with what is known before anything runs."""
        lowest = min(reference.lowest, result.lowest, key=lambda name: LOWNESS[name])
        if self.whole and lowest != "float32" and self.provider == "cpu":
            raise ArgumentError(f"whole=True on CPU would hide what {lowest} does: leave it out, for emulation.")
        ran_on = engine_name(self.provider, lowest, self.reference.arithmetic)
        return replace(
            report, lowest=lowest, ran_on=ran_on, reference_lowest=reference.lowest,
            notes=_unmatched(reference, result),
        )  # fmt: skip

    def _run(
        self,
        number: int,
        feeds: Mapping[str, Feed],
        other: Executable,
        walk: SideBySide | None,
        progress: Progress | None,
    ) -> Walked:
        """Run both models on one sample: side by side if values are compared, whole if that is how they run.

        Raises:
            RuntimeFailure: the reference does not run.
        """
        walked = walk.run(feeds, progress) if walk is not None else Walked({}, {}, {})
        if walk is not None and not other.runs_whole(feeds):
            self.outputs.keep(number, walked.reference)
            return walked
        reference = self.outputs.kept.get(number)
        if reference is None:
            reference = self.reference.run(feeds, part_of(progress, 0, 2))
            self.outputs.keep(number, reference)
        try:
            return Walked(reference, other.run(feeds, part_of(progress, 1, 2)), walked.compared)
        except RuntimeFailure as error:
            return Walked({}, {}, walked.compared, str(error))


def noise_floor(
    elsewhere: WholeModel, feeds: Mapping[str, Feed], outputs: Outputs, *, on_device: bool = True
) -> float | None:
    """The error that the device alone causes: of a float32 model's outputs on the CPU and on another device.

    Args:
        elsewhere: the model, on the one of them that did not make the outputs.
        outputs: what the other one made of the same feeds.
        on_device: whether a device made the outputs, and not the CPU.

    Returns:
        The largest relative L2 error of all float outputs; None if the model does not run.
    """
    try:
        others = elsewhere.run(feeds)
    except RuntimeFailure:
        return None
    on_cpu, found = (others, outputs) if on_device else (outputs, others)
    diffs = (diff for name, value in on_cpu.items() for diff in compare_outputs(name, value, found[name]))
    return max((diff.rel_l2 for diff in diffs if diff.is_float), default=0.0)


def _left_to_cpu(result: Executable) -> str | None:
    """A sentence about the nodes that the engine left to the CPU."""
    left = result.left_to_cpu()
    listed = [f"{op} ({times})" for op, times in left.most_common(5)]
    more = f" and {len(left) - 5} more op types" if len(left) > 5 else ""
    return f"The engine left {left.total()} nodes to the CPU: {', '.join(listed)}{more}." if left else None


def _unmatched(reference: Flow, result: Flow) -> tuple[str, ...]:
    """Inputs and outputs that only one of the models has, and that are not compared."""
    inputs = [name for name in reference.inputs if name not in result.inputs and name not in result.defaults]
    outputs = [name for name in result.outputs if name not in reference.outputs]
    notes = [f"Only the reference takes the input {name!r}." for name in inputs]
    return (*notes, *(f"Only the result gives the output {name!r}; it is not compared." for name in outputs))
