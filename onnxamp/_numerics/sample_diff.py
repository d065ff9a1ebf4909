"""Comparing two models on samples."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from secrets import token_hex
from typing import Final

from onnx import NodeProto

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.executor import Memory
from onnxamp._base.records import record
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._model.exponents import exponents_between
from onnxamp._model.model import Model
from onnxamp._numerics.choices.close_calls import (
    Chooser,
    CloseCalls,
    choosers,
    close_calls,
    read_by,
)
from onnxamp._numerics.choices.inner_choices import inner_choices
from onnxamp._numerics.chosen_tokens import chosen_tokens
from onnxamp._numerics.differences.compare import compare_outputs, worst_rel_l2
from onnxamp._numerics.differences.detections import Detections, compare_matched
from onnxamp._numerics.differences.metrics import (
    LOWNESS,
    TOLERANCES,
    Perplexity,
    TensorDiff,
)
from onnxamp._numerics.paired import (
    Compared,
    PairedOutputs,
    PairedSessions,
)
from onnxamp._numerics.parts import (
    Grouped,
    are_off,
    grouped,
    steady,
    worst_parts,
)
from onnxamp._numerics.remarks import (
    faults,
    left_to_cpu,
    mismatches,
    nan_inputs,
    unmatched,
)
from onnxamp._numerics.results import LayerDiff, Parting
from onnxamp._numerics.saturation import may_saturate, saturation_of
from onnxamp._numerics.text_reader import TextReader, text_reader
from onnxamp._numerics.unseen.changed_inputs import nudged
from onnxamp._numerics.user_functions import Accept
from onnxamp._runtime.engines import (
    Engine,
    Outputs,
    Progress,
    Session,
    engine_on,
    progress_of_part,
)
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.loop import LoadedSample, Opened, Probe, one_by_one, remembered
from onnxamp._runtime.piecewise.choices import Branch
from onnxamp._runtime.piecewise.flow import DataflowGraph, dtype_of, origin
from onnxamp._runtime.sessions.values import Feeds, check_inputs


@record
class RunFacts:
    """Fields of the report that the models have on a sample."""

    lowest: str
    ran_on: str
    reference_lowest: str
    notes: tuple[str, ...]


@record
class SampleDiff:
    """The measurements of one sample.

    Attributes:
        facts: known facts about the models; None if they could not even be prepared.
        error: why the reference does not run on it.
        failure: why the result does not.
        mismatches: differences of outputs that no limit allows.
        rejected: the function of the user that rejects the outputs.
        taken: the branches that the reference takes, as far as they are known.
        grouped: the groups of numbers of outputs that differ in magnitude.
        choices: the choices that depend on values, and how close they are.
    """

    facts: RunFacts | None = None
    error: RuntimeFailure | None = None
    failure: str | None = None
    noise: float | None = None
    outputs: tuple[TensorDiff, ...] = ()
    detections: tuple[Detections, ...] = ()
    layers: tuple[LayerDiff, ...] = ()
    tokens: tuple[Parting, ...] = ()
    perplexity: Perplexity | None = None
    mismatches: tuple[str, ...] = ()
    rejected: str | None = None
    notes: tuple[str, ...] = ()
    taken: tuple[Branch, ...] = ()
    grouped: tuple[Grouped, ...] = ()
    choices: tuple[CloseCalls, ...] = ()

    @property
    def was_compared(self) -> bool:
        """Whether both models ran."""
        return self.error is None and self.failure is None


@dataclass(slots=True, kw_only=True)
class TwoModels(PairedSessions):
    """Two models that are compared on samples.

    Attributes:
        probe: what is compared.
        reader: compares both on texts, if texts are given and they read them.
    """

    probe: "DiffProbe"
    reader: TextReader | None
    _elsewhere: Session | None = None
    """The reference on the engine that does not compute its outputs; opened to measure noise."""

    def compare(self, item: LoadedSample) -> SampleDiff:
        """Return the measurements of a sample.

        Raises:
            ArgumentError: the sample does not fit the reference, the models do not fit each other, or the user's
                function does not say yes or no.
        """
        number, sample, progress = item
        feeds = check_inputs(self.reference.model.proto, sample)
        measured = SampleDiff()
        try:
            flows = self.reference.prepare(feeds).flow, self.result.prepare(feeds).flow
            facts = self._facts(*flows)
            measured = SampleDiff(facts)
            choosing = choosers(*flows) if self.probe.choices else []
            ran = self._run(number, feeds, progress, also=read_by(choosing))
        except RuntimeFailure as error:
            return replace(measured, error=error)
        if ran.failure is not None:
            return replace(measured, failure=ran.failure)
        parts = dict(worst_parts(flows, ran.reference, ran.result))
        reference, result = self._outputs(feeds, flows[0], ran)
        reader = self.reader
        accept = self.probe.accept
        detections, diffs = compare_matched(reference, result, self.probe.selected)
        is_rejected = accept is not None and not accept.takes(reference, result)
        tokens = list(chosen_tokens(self.reference, feeds, reference, result, number))
        try:
            tokens += self._generated(number, feeds, (reference, result))
        except RuntimeFailure as error:
            return replace(measured, failure=str(error))
        return replace(
            measured,
            noise=self._noise(number, feeds, reference, diffs, facts),
            outputs=tuple(
                replace(_as_declared(diff, *flows), part=parts.get(diff.name))
                for diff in diffs
            ),
            detections=tuple(detections),
            layers=tuple(_layers(*flows, ran.compared)),
            tokens=tuple(tokens),
            perplexity=None
            if reader is None
            else reader.perplexity(feeds, reference, result),
            mismatches=tuple(mismatches(reference, result)),
            rejected=accept.name if accept is not None and is_rejected else None,
            notes=tuple(self._notes(number, feeds, ran, (reference, result))),
            taken=tuple(sorted(flows[0].taken)),
            grouped=self._grouped(item, feeds, reference, result),
            choices=tuple(self._close_calls(item, feeds, ran, choosing)),
        )

    def _outputs(
        self, feeds: Feeds, flow: DataflowGraph, ran: PairedOutputs
    ) -> tuple[Outputs, Outputs]:
        """Return the outputs of both models, those of the reference without the parts that were asked for beside them.

        Raises:
            ArgumentError: the result lacks one.
        """
        reference, result = ran.reference, ran.result
        beside = self.reference.parts_of(flow, flow)
        names = [*flow.outputs, *(n for n in reference if n not in beside)]
        reference = {name: reference[name] for name in names if name in reference}
        _check_names(reference, result)
        reader = self.reader
        if reader is None or not self.result.runs_whole(feeds):
            return reference, result
        return reader.defined(feeds, reference), reader.defined(feeds, result)

    def _generated(
        self, number: int, feeds: Feeds, outputs: tuple[Outputs, Outputs]
    ) -> Iterable[Parting]:
        """Return where the models choose other tokens while they generate a text.

        Raises:
            RuntimeFailure: a model does not run.
        """
        if self.reader is None:
            return ()
        return self.reader.generated(
            (self.reference, self.result),
            feeds,
            outputs,
            most=self.probe.generates,
            sample=number,
        )

    def _notes(
        self,
        number: int,
        feeds: Feeds,
        ran: PairedOutputs,
        outputs: tuple[Outputs, Outputs],
    ) -> Iterator[str]:
        """Yield sentences about how the models ran, and on the first sample also about values that saturate."""
        yield from nan_inputs(feeds)
        yield from left_to_cpu(self.result)
        if number == 0:
            yield from self._saturated(feeds, *outputs)
        yield from faults(self.reference, self.result, ran)

    def _close_calls(
        self,
        item: LoadedSample,
        feeds: Feeds,
        ran: PairedOutputs,
        choosing: Sequence[Chooser],
    ) -> Iterator[CloseCalls]:
        """Yield the choices of nodes, and how close they are."""
        models = self.reference, self.result
        known = ran.reference, ran.result
        yield from close_calls(models, feeds, known, choosing)
        # Bodies take a model of their own, so one sample has to do for them.
        if self.probe.choices and not item.number:
            yield from inner_choices(models, feeds, choosing)

    def _grouped(
        self, item: LoadedSample, feeds: Feeds, reference: Outputs, result: Outputs
    ) -> tuple[Grouped, ...]:
        """Return the groups of numbers of outputs; without those that are noise in float32, if one is off."""
        flows = self.reference.prepare(feeds).flow, self.result.prepare(feeds).flow
        groups = tuple(grouped(flows, reference, result))
        if not are_off(groups):
            return groups
        try:
            moved = self.reference.run(nudged(feeds, item.number))
        except RuntimeFailure:
            return groups
        return tuple(steady(groups, reference, moved))

    def _saturated(
        self, feeds: Feeds, reference: Outputs, result: Outputs
    ) -> Iterator[str]:
        """Yield a sentence if int8 products of either model saturate in the sessions that users start."""
        pairs = (
            ("the reference", self.reference, reference),
            ("the result", self.result, result),
        )
        for name, one, outputs in pairs:
            model = one.model
            if not may_saturate(one.engine, model.proto):
                continue
            if saturation := saturation_of(one.engine, model, feeds, outputs):
                yield saturation.note(name)
                return  # the other is the same network

    def _facts(self, reference: DataflowGraph, result: DataflowGraph) -> RunFacts:
        """Return the facts that are known before anything runs."""
        lowest = min(reference.lowest, result.lowest, key=lambda name: LOWNESS[name])
        if self.result.whole and lowest != "float32" and self.result.engine.emulates:
            raise ArgumentError(
                f"whole=True on the CPU would hide the effect of {lowest}: leave it out, and onnxamp emulates {lowest}."
            )
        ran_on = self.result.engine.name(lowest)
        return RunFacts(lowest, ran_on, reference.lowest, unmatched(reference, result))

    def _run(
        self, number: int, feeds: Feeds, progress: Progress, *, also: Sequence[str]
    ) -> PairedOutputs:
        """Run both models on one sample: side by side if values are compared, whole if that is how they run.

        Args:
            number: that of the sample.
            feeds: its inputs.
            progress: is told how far it is.
            also: values of the result to return as well, if it does not run whole.

        Raises:
            RuntimeFailure: the reference does not run.
        """
        layers = self.probe.layers
        paired = PairedOutputs({}, {}, {})
        if layers:
            try:
                paired = self.run(feeds, progress)
            except RuntimeFailure as error:
                paired = paired._replace(failure=str(error))
        one = self.reference
        is_done = paired.failure is None and not self.result.runs_whole(feeds)
        # Side by side, both models have run in the form in which they are compared: nothing is left to run.
        if layers and is_done and not one.runs_as_given(feeds):
            one.outputs.keep(number, paired.reference)
            return paired
        reference = one.run_sample(number, feeds, progress_of_part(progress, 0, 2))
        flow = one.prepare(feeds).flow
        if layers and is_done:
            is_random = any(op_key(node) in op_facts().random for node in flow.nodes)
            strayed = "" if is_random else _strayed(reference, paired.reference)
            return paired._replace(reference=reference, strayed=strayed)
        try:
            wanted = (*one.parts_of(flow, flow), *also)
            result = self.result.run(feeds, progress_of_part(progress, 1, 2), wanted)
        except RuntimeFailure as error:
            return paired._replace(failure=str(error))
        return PairedOutputs(reference, result, paired.compared, apart=paired.failure)

    def _noise(
        self,
        number: int,
        feeds: Feeds,
        outputs: Outputs,
        diffs: Sequence[TensorDiff],
        facts: RunFacts,
    ) -> float | None:
        """:func:`noise_floor` of the reference, if float32 is judged by it or it may explain a large error."""
        one = self.reference
        engine = self.result.engine
        is_exact = not self.result.whole or engine.emulates
        if is_exact or facts.reference_lowest != "float32":
            return None
        worst = max((diff.rel_l2 for diff in diffs if diff.is_float), default=0.0)
        is_judged = number == 0 or facts.lowest == "float32"
        if not is_judged and worst <= TOLERANCES[facts.lowest]:
            return None
        on_device = engine.is_reference
        if self._elsewhere is None:
            elsewhere = engine_on("cpu") if on_device else engine
            self._elsewhere = elsewhere.open(one.model, whole=True)
        return noise_floor(self._elsewhere, feeds, outputs, on_device=on_device)


REFERENCE: Final = "diff reference"
"""The key of the last reference in the memory of a process."""
RESULT: Final = "diff result"
"""The key of the last result."""


@record(kw_only=True)
class DiffProbe(Probe[SampleDiff]):
    """Comparing two models. A process keeps the reference for the next result.

    Attributes:
        key: identifies the reference and how it runs.
        result_key: identifies the result.
        engine: where the result runs.
        whole: whether it runs in one session.
        selected: outputs that may list detections.
        accept: the function of the user that judges outputs.
        layers: compare intermediate values as well.
        groups: and the groups of numbers within each of them.
        is_text: whether the samples are given, so that language models read texts.
        generates: tokens that both generate after a prompt.
        choices: count the choices that are close.
    """

    key: str
    result_key: str = field(default_factory=token_hex)
    reference: SentModel
    result: SentModel
    engine: Engine
    whole: bool
    budget: int
    selected: frozenset[str]
    accept: Accept | None
    layers: bool
    groups: bool = False
    is_text: bool
    generates: int
    choices: bool = False

    def open(self, memory: Memory) -> Opened[SampleDiff]:
        """As :meth:`Probe.open`."""

        def reference() -> Session:
            return reference_on(
                self.engine, self.reference.opened(), self.budget, whole=self.whole
            )

        def result() -> Session:
            return result_on(self.engine, self.result.opened(), one, whole=self.whole)

        one = remembered(memory, REFERENCE, self.key, reference)
        models = TwoModels(
            probe=self,
            reader=text_reader(one.model, self.generates) if self.is_text else None,
            groups=self.groups,
            reference=one,
            result=remembered(memory, RESULT, self.result_key, result),
        )
        return Opened(models.prepare, one_by_one(models.compare))


def _check_names(reference: Outputs, result: Outputs) -> None:
    """Raise an error if the reference has an output that the result lacks."""
    for name in reference:
        if name not in result:
            raise ArgumentError(
                f"The models have different outputs: only the reference has {name!r}."
            )


def reference_on(engine: Engine, model: Model, budget: int, *, whole: bool) -> Session:
    """Return the reference for results on an engine: it runs on the same engine or, for a plugin provider,
    on the CPU.
    """
    session = engine.reference.open(
        model, whole=whole and engine.is_reference, budget=budget, as_given=True
    )
    session.parts = True
    return session


def result_on(
    engine: Engine, model: Model, reference: Session, *, whole: bool
) -> Session:
    """Return the result, as it is compared with a reference."""
    session = engine.open(model, whole=whole, budget=reference.budget)
    session.forced = reference.forced
    return session


def noise_floor(
    elsewhere: Session, feeds: Feeds, outputs: Outputs, *, on_device: bool = True
) -> float | None:
    """Return the error that the device alone causes: of a float32 model's outputs on the CPU and on another device.

    Args:
        elsewhere: the model, on the engine that did not compute the outputs.
        outputs: outputs of the other engine for the same feeds.
        on_device: whether a device computed the outputs, rather than the CPU.

    Returns:
        The largest relative L2 error of all float outputs; None if the model does not run.
    """
    try:
        others = elsewhere.run(feeds)
    except RuntimeFailure:
        return None
    if on_device:
        return worst_rel_l2(others, outputs)
    return worst_rel_l2(outputs, others)


_NOISE: Final = 1e-4
"""Relative error that the order of sums explains: pieces take weights as inputs, which some kernels sum up in another
order.
"""


def _strayed(given: Outputs, prepared: Outputs) -> str:
    """Return the name of an output that the prepared form of a model computes otherwise than the model; "" for none."""
    for name in given.keys() & prepared.keys():
        for diff in compare_outputs(name, given[name], prepared[name]):
            if diff.is_float and diff.size and not diff.rel_l2 <= _NOISE:
                return name
    return ""


def _layers(
    reference: DataflowGraph, result: DataflowGraph, rows: Mapping[str, Compared]
) -> Iterator[LayerDiff]:
    exponents = exponents_between(reference.exponents, result.exponents)
    for name, row in rows.items():
        _, position = origin(reference, name)
        node = reference.nodes[position]
        dtype = dtype_of(result, name)
        label = node.name or name
        # Shapes, indices and masks that are equal say nothing of precision.
        has_error = bool(row.accumulated and row.accumulated.error_max)
        if "float" not in dtype and not has_error:
            continue
        yield LayerDiff(
            position=position,
            value=name,
            node=label,
            op=op_key(node),
            dtype=dtype,
            local=row.local,
            accumulated=row.accumulated,
            note=row.note,
            hidden=row.hidden,
            exponent=exponents.get(name, 0),
            state=_state_of(node, name),
        )


def _state_of(node: NodeProto, name: str) -> str:
    """Return the state of a loop whose last value an output is, by its name in the body; "" for other values."""
    key = op_key(node)
    if key not in op_facts().repeats:
        return ""
    body = attribute(node, "body")
    scanned = attribute(node, "num_scan_inputs") or 0
    before = 2 if key == "Loop" else 0  # the number of the trip, and the condition
    states = body.input[before : len(body.input) - scanned]
    place = list(node.output).index(name)
    return states[place].name if place < len(states) else ""


def _as_declared(
    diff: TensorDiff, reference: DataflowGraph, result: DataflowGraph
) -> TensorDiff:
    """Restore the declared types of values that emulation computed in float32."""

    def declared(flow: DataflowGraph, computed: str) -> str:
        return dtype_of(flow, diff.name) if diff.name in flow.low else computed

    return replace(
        diff,
        reference_dtype=declared(reference, diff.reference_dtype),
        result_dtype=declared(result, diff.result_dtype),
    )
