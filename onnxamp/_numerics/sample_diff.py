"""Compare two models on one sample."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from secrets import token_hex
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._numerics.compare import compare_outputs
from onnxamp._numerics.detections import Detections, compare_matched
from onnxamp._numerics.limits import Accept
from onnxamp._numerics.metrics import LOWNESS, TOLERANCES, Perplexity, TensorDiff
from onnxamp._numerics.paired import (
    Compared,
    PairedOutputs,
    PairedSessions,
    exponents_between,
)
from onnxamp._numerics.results import LayerDiff, Parting
from onnxamp._numerics.texts import defined, generated, perplexity
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.decoder import Decoder, tokens_input
from onnxamp._runtime.engines import (
    Engine,
    Outputs,
    Progress,
    Session,
    engine_on,
    part_of,
)
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.flow import DataflowGraph, dtype_of, origin
from onnxamp._runtime.loop import Item, Opened, Probe, one_by_one, remembered
from onnxamp._runtime.pieces import run_alone
from onnxamp._runtime.values import Feeds, check_inputs
from onnxamp._workers.executor import Memory


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Fields of the report that the models have on a sample."""

    lowest: str
    ran_on: str
    reference_lowest: str
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SampleDiff:
    """The measurements of one sample.

    Attributes:
        facts: known facts about the models; None if they could not even be prepared.
        error: why the reference does not run on it.
        failure: why the result does not.
        mismatches: differences of outputs that no limit allows.
        rejected: the function of the user that rejects the outputs.
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

    @property
    def was_compared(self) -> bool:
        """Whether both models ran."""
        return self.error is None and self.failure is None


@dataclass(slots=True)
class TwoModels(PairedSessions):
    """Two models that are compared on samples.

    Attributes:
        selected: outputs that may list detections.
        accept: the function of the user that judges outputs.
        layers: compare intermediate values as well.
        decoder: the roles of the inputs of both, if they are decoders that read given texts.
        generates: tokens that both generate after a prompt.
    """

    selected: frozenset[str] = frozenset()
    accept: Accept | None = None
    layers: bool = False
    decoder: Decoder | None = None
    generates: int = 0
    _elsewhere: Session | None = None
    """The reference that did not run."""

    def compare(self, item: Item) -> SampleDiff:
        """Return the measurements of a sample.

        Raises:
            ArgumentError: the sample does not fit the reference, the models do not fit each other, or the user's
                function does not say yes or no.
        """
        number, sample, progress = item
        feeds = check_inputs(self.reference.model.proto, sample)
        found = SampleDiff()
        try:
            flows = self.reference.prepare(feeds).flow, self.result.prepare(feeds).flow
            facts = self._facts(*flows)
            found = SampleDiff(facts)
            paired = self._run(number, feeds, progress)
        except RuntimeFailure as error:
            return replace(found, error=error)
        if paired.failure is not None:
            return replace(found, failure=paired.failure)
        missing = next(
            (name for name in paired.reference if name not in paired.result), None
        )
        if missing is not None:
            raise ArgumentError(
                f"The models have different outputs: only the reference has {missing!r}."
            )
        if self.decoder is not None and self.result.runs_whole(feeds):
            one, other = (
                defined(self.decoder, feeds, outputs)
                for outputs in (paired.reference, paired.result)
            )
            paired = paired._replace(reference=one, result=other)
        detections, diffs = compare_matched(
            paired.reference, paired.result, self.selected
        )
        rejected = None
        if self.accept is not None and not self.accept.takes(
            paired.reference, paired.result
        ):
            rejected = self.accept.name
        tokens = [*self._tokens(number, feeds, flows[0], paired)]
        if self.decoder is not None and self.decoder.is_prompt(feeds):
            try:
                tokens += generated(
                    self.decoder,
                    (self.reference, self.result),
                    feeds,
                    (paired.reference, paired.result),
                    most=self.generates,
                    sample=number,
                )
            except RuntimeFailure as error:
                return replace(found, failure=str(error))
        return replace(
            found,
            noise=self._noise(feeds, paired.reference)
            if self._needs_noise(number, facts, diffs)
            else None,
            outputs=tuple(_as_declared(diff, *flows) for diff in diffs),
            detections=tuple(detections),
            layers=tuple(_layers(*flows, paired.compared)),
            tokens=tuple(tokens),
            perplexity=None
            if self.decoder is None
            else perplexity(self.decoder, feeds, paired.reference, paired.result),
            mismatches=tuple(
                f"Output {name!r}: {text}"
                for name, value in paired.reference.items()
                for text in _differences(value, paired.result[name])
            ),
            rejected=rejected,
            notes=(*nan_inputs(feeds), *_left_to_cpu(self.result)),
        )

    def _needs_noise(
        self, number: int, facts: RunFacts, diffs: Sequence[TensorDiff]
    ) -> bool:
        """Return whether the noise of the device matters, because float32 is judged by it or because it may explain a
        large error.
        """
        if (
            not self.result.whole
            or self.result.engine.emulates
            or facts.reference_lowest != "float32"
        ):
            return False
        worst = max((diff.rel_l2 for diff in diffs if diff.is_float), default=0.0)
        return (
            number == 0
            or facts.lowest == "float32"
            or not worst <= TOLERANCES[facts.lowest]
        )

    def _facts(self, reference: DataflowGraph, result: DataflowGraph) -> RunFacts:
        """Return the facts that are known before anything runs."""
        lowest = min(reference.lowest, result.lowest, key=lambda name: LOWNESS[name])
        if self.result.whole and lowest != "float32" and self.result.engine.emulates:
            raise ArgumentError(
                f"whole=True on the CPU would hide the effect of {lowest}: leave it out, and onnxamp emulates {lowest}."
            )
        ran_on = self.result.engine.name(lowest)
        return RunFacts(lowest, ran_on, reference.lowest, _unmatched(reference, result))

    def _run(self, number: int, feeds: Feeds, progress: Progress) -> PairedOutputs:
        """Run both models on one sample: side by side if values are compared, whole if that is how they run.

        Raises:
            RuntimeFailure: the reference does not run.
        """
        paired = self.run(feeds, progress) if self.layers else PairedOutputs({}, {}, {})
        if self.layers and not self.result.runs_whole(feeds):
            self.reference.outputs.keep(number, paired.reference)
            return paired
        reference = self.reference.run_sample(number, feeds, part_of(progress, 0, 2))
        try:
            return PairedOutputs(
                reference,
                self.result.run(feeds, part_of(progress, 1, 2)),
                paired.compared,
            )
        except RuntimeFailure as error:
            return PairedOutputs({}, {}, paired.compared, str(error))

    def _noise(self, feeds: Feeds, outputs: Outputs) -> float | None:
        """:func:`noise_floor` of the reference, whose outputs are known from the device or from the CPU."""
        one, on_device = self.reference, self.result.engine.is_reference
        if self._elsewhere is None:
            elsewhere = engine_on("cpu") if on_device else self.result.engine
            self._elsewhere = elsewhere.open(one.model, whole=True)
        return noise_floor(self._elsewhere, feeds, outputs, on_device=on_device)

    def _tokens(
        self, number: int, feeds: Feeds, flow: DataflowGraph, paired: PairedOutputs
    ) -> Iterator[Parting]:
        for name, logits in _token_outputs(flow):
            found = partial(self._value, feeds, logits)
            parting = _find_parting(
                name, number, paired.reference[name], paired.result[name], found
            )
            if parting is not None:
                yield parting

    def _value(self, feeds: Feeds, name: str) -> Any:
        """Return a value of the reference."""
        return run_alone(
            self.reference.prepare(feeds), feeds, [name], self.reference.budget
        ).output(name)


REFERENCE: Final = "diff reference"
"""The key of the last reference in the memory of a process."""
RESULT: Final = "diff result"
"""The key of the last result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiffProbe(Probe[SampleDiff]):
    """Comparing two models. A process keeps the reference for the next result.

    Attributes:
        key: identifies the reference and how it runs.
        result_key: identifies the result.
        engine: where the result runs.
        whole: whether it runs in one session.
        layers: compare intermediate values as well.
        is_text: whether the samples are given, so that a decoder reads texts.
        Others as for :class:`TwoModels`.
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
    is_text: bool
    generates: int

    def open(self, memory: Memory) -> Opened[SampleDiff]:
        """As :meth:`Probe.open`."""

        def reference() -> Session:
            return reference_on(
                self.engine, self.reference.opened(), self.budget, whole=self.whole
            )

        def result() -> Session:
            return result_on(self.engine, self.result.opened(), one, whole=self.whole)

        one = remembered(memory, REFERENCE, self.key, reference)
        reads = self.is_text and tokens_input(one.model.proto) is not None
        decoder = Decoder.of(one.model) if reads else None
        if decoder is not None and not (decoder.caches or self.generates):
            decoder = None  # a network that fills gaps in texts has inputs and outputs of the same length
        models = TwoModels(
            decoder=decoder,
            generates=self.generates,
            reference=one,
            result=remembered(memory, RESULT, self.result_key, result),
            selected=self.selected,
            accept=self.accept,
            layers=self.layers,
        )
        return Opened(models.prepare, one_by_one(models.compare))


def reference_on(engine: Engine, model: Model, budget: int, *, whole: bool) -> Session:
    """Return the reference for results on an engine: it runs on the same engine or, for a plugin provider,
    on the CPU.
    """
    return engine.reference.open(
        model, whole=whole and engine.is_reference, budget=budget
    )


def result_on(
    engine: Engine, model: Model, reference: Session, *, whole: bool
) -> Session:
    """Return the result, as it is compared with a reference."""
    return engine.open(model, whole=whole, budget=reference.budget)


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
    on_cpu, found = (others, outputs) if on_device else (outputs, others)
    diffs = (
        diff
        for name, value in on_cpu.items()
        for diff in compare_outputs(name, value, found[name])
    )
    return max((diff.rel_l2 for diff in diffs if diff.is_float), default=0.0)


def _unmatched(reference: DataflowGraph, result: DataflowGraph) -> tuple[str, ...]:
    """Inputs and outputs that only one of the models has, and that are not compared."""
    inputs = [
        name
        for name in reference.inputs
        if name not in result.inputs and name not in result.defaults
    ]
    outputs = [name for name in result.outputs if name not in reference.outputs]
    notes = [f"Only the reference takes the input {name!r}." for name in inputs]
    return (
        *notes,
        *(
            f"Only the result has the output {name!r}; it is not compared."
            for name in outputs
        ),
    )


def nan_inputs(feeds: Feeds) -> Iterator[str]:
    """Yield sentences about inputs with NaN, which spreads through the model."""
    for name, feed in feeds.items():
        if (
            isinstance(feed, np.ndarray)
            and feed.dtype.kind == "f"
            and (count := int(np.isnan(feed).sum()))
        ):
            yield f"Input {name!r} holds NaN in {count:,} of {feed.size:,} elements."


def _left_to_cpu(result: Session) -> Iterator[str]:
    """Yield a sentence about the nodes that the engine left to the CPU."""
    left = result.left_to_cpu()
    listed = [f"{op} ({times})" for op, times in left.most_common(5)]
    more = f" and {len(left) - 5} more op types" if len(left) > 5 else ""
    if left:
        yield f"The engine left {left.total()} nodes to the CPU: {', '.join(listed)}{more}."


def _layers(
    reference: DataflowGraph, result: DataflowGraph, rows: Mapping[str, Compared]
) -> Iterator[LayerDiff]:
    exponents = exponents_between(reference, result)
    for name, row in rows.items():
        _, position = origin(reference, name)
        node = reference.nodes[position]
        dtype, label = dtype_of(result, name), node.name or name
        if "float" not in dtype and not (row.accumulated and row.accumulated.error_max):
            continue  # shapes, indices and masks that are equal
        yield LayerDiff(
            position=position,
            value=name,
            node=label,
            op=op_key(node),
            dtype=dtype,
            local=row.local,
            accumulated=row.accumulated,
            note=row.note,
            exponent=exponents.get(name, 0),
        )


def _as_declared(
    diff: TensorDiff, reference: DataflowGraph, result: DataflowGraph
) -> TensorDiff:
    """Restore the declared types of values that emulation computed in float32."""
    one, other = (
        dtype_of(flow, diff.name) if diff.name in flow.low else ""
        for flow in (reference, result)
    )
    return replace(
        diff,
        reference_dtype=one or diff.reference_dtype,
        result_dtype=other or diff.result_dtype,
    )


def _differences(reference: Any, result: Any) -> list[str]:
    """Return the differences of sequences, maps and optionals as such; their elements are compared one by one."""
    if isinstance(reference, Mapping) and isinstance(result, Mapping):
        lost = [key for key in reference if key not in result]
        new = [key for key in result if key not in reference]
        texts = [f"The map lacks the {_keys(lost)}."] if lost else []
        return texts + ([f"Only the result's map has the {_keys(new)}."] if new else [])
    if isinstance(reference, list) and isinstance(result, list):
        if len(reference) != len(result):
            return [
                f"The sequence has {len(result)} elements instead of {len(reference)}."
            ]
        return [
            text
            for one, other in zip(reference, result, strict=True)
            for text in _differences(one, other)
        ]
    if type(reference) is not type(result):
        return [f"It is {type(result).__name__} instead of {type(reference).__name__}."]
    return []


_MOST_KEYS: Final = 5
"""Keys that a sentence names."""


def _keys(keys: Sequence[Any]) -> str:
    named = ", ".join(map(repr, keys[:_MOST_KEYS]))
    return (
        f"key {named}"
        if len(keys) == 1
        else f"{len(keys)} keys {named}{', ...' if len(keys) > _MOST_KEYS else ''}"
    )


def _token_outputs(flow: DataflowGraph) -> Iterator[tuple[str, str]]:
    """Outputs of a model that ArgMax gives, with the value whose rows it searches."""
    carriers = op_facts().carriers
    for output in flow.outputs:
        name = output
        while name in flow.maker:
            node = flow.nodes[flow.maker[name]]
            if op_key(node) == "ArgMax":
                yield output, node.input[0]
            if op_key(node) not in carriers:
                break
            name = node.input[0]


def _find_parting(
    output: str,
    sample: int,
    reference: Any,
    result: Any,
    logits: Callable[[], npt.NDArray[Any]],
) -> Parting | None:
    """Compare the tokens of one sample; None if they are no arrays [sequences, positions] of one shape.

    Args:
        logits: computes the logits of the reference; called only if tokens differ.
    """
    if not (isinstance(reference, np.ndarray) and isinstance(result, np.ndarray)):
        return None
    if reference.ndim != 2 or reference.shape != result.shape:
        return None
    differs = reference != result
    parted = np.flatnonzero(differs.any(-1))
    if not len(parted):
        return Parting(output, len(reference), sample=sample)
    row = int(parted[0])
    position = int(differs[row].argmax())
    token, other = int(reference[row, position]), int(result[row, position])
    gap = _gap(logits(), reference, row * reference.shape[1] + position, token, other)
    return Parting(
        output=output,
        sequences=len(reference),
        parted=len(parted),
        sample=sample,
        sequence=row,
        position=position,
        reference=token,
        result=other,
        gap=gap,
    )


def _gap(
    logits: npt.NDArray[Any],
    tokens: npt.NDArray[Any],
    place: int,
    token: int,
    other: int,
) -> float | None:
    """Return the gap at a place; None if the logits are in another order than the tokens."""
    table = np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])
    if len(table) != tokens.size or not np.array_equal(
        table.argmax(-1), tokens.ravel()
    ):
        return None
    return float(table[place, token] - table[place, other])
