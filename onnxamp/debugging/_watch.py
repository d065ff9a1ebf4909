"""Running a model op by op while recording all its floats, or those that the op lists of a checker's config choose."""

import re
import sys
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from onnx import TensorProto, numpy_helper

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    NumericsError,
    suggestion,
    warn,
)
from onnxamp._decide.patterns import named_nodes
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import inline_functions
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.results import ValueCheck
from onnxamp._numerics.watch import (
    ValueMeasurements,
    WatchedValue,
    mask_values,
    reads_constant,
    watched_parts,
    watched_values,
)
from onnxamp._options.doors import door
from onnxamp._runtime.engines import Session, engine_on
from onnxamp._runtime.flow import DataflowGraph, dtype_of
from onnxamp._runtime.pieces import Executor
from onnxamp._runtime.samples import SamplesLike, as_samples
from onnxamp._runtime.session import Provider, choose_provider
from onnxamp._runtime.values import Feed, check_inputs, from_value
from onnxamp.debugging._records import (
    StepCheck,
    TensorChecker,
    TensorCheckerConfig,
    ValueRecord,
    counted,
    dump_path,
    range_fault,
    write_dump,
)
from onnxamp.debugging._tensors import (
    DebugMode,
    NumericsWarning,
    TensorStats,
    tensor_stats,
)

if TYPE_CHECKING:
    import onnxruntime as ort

_NAMED: Final = 6
"""The number of values that an error lists per level."""


class ValueFilter(NamedTuple):
    """The values that a checker examines: those in ``only`` (all if it is None) but not in ``skip``.

    In both sets, "" stands for all inputs.
    """

    only: AbstractSet[str] | None = None
    skip: AbstractSet[str] = frozenset()

    def takes(self, record: ValueRecord) -> bool:
        """Return whether a value is examined."""
        name = record.tensor if record.op else ""
        return name not in self.skip and (self.only is None or name in self.only)


def chosen_values(model: Model, config: TensorCheckerConfig) -> ValueFilter:
    """Return the values of a model that a config selects.

    Warns:
        OptionWarning: a name matches nothing in the model.
    """
    checked = config.checked_op_list or ()
    skipped = config.skipped_op_list or ()
    return model.ask(_chosen, tuple(checked), tuple(skipped))


def _chosen(
    model: Model, checked: Sequence[str], skipped: Sequence[str]
) -> ValueFilter:
    if not checked and not skipped:
        return ValueFilter()
    graph = Graph.of(inline_functions(model.proto))
    only = _meant(graph, "checked_op_list", checked)
    skip = _meant(graph, "skipped_op_list", skipped)
    return ValueFilter(only if checked else None, skip)


def _meant(graph: Graph, option: str, names: Sequence[str]) -> frozenset[str]:
    """Return the outputs of the nodes that a list selects."""
    values = set[str]()
    absent = list[str]()
    for name in names:
        nodes = named_nodes(graph, name)
        for node in nodes:
            values.update(graph.nodes[node].proto.output)
        if name == "":
            values.add("")
        elif not nodes:
            present = graph.by_key
            own = name.rpartition("::")[2]
            near = suggestion(present, name) or suggestion(present, own)
            absent.append(f"{option}: no op of the model is a {name!r}.{near}")
    warn(absent)
    return frozenset(values)


class RunRecords(NamedTuple):
    """The records of one run by value, in the order of execution, with the inputs of the model first.

    ``step`` is the number of the run; ``nodes`` maps each value except inputs to the node of the flow that produces it.
    """

    step: int
    flow: DataflowGraph
    records: Mapping[str, ValueRecord]
    nodes: Mapping[str, int]

    def first_bad(self, chosen: ValueFilter) -> ValueRecord | None:
        """Return the first unintended NaN or Inf among the chosen values."""
        rows = self.records.values()
        return next((row for row in rows if row.is_bad and chosen.takes(row)), None)

    def sources(self, tensor: str) -> list[ValueRecord]:
        """Return the float inputs of the node that produces a value, looking through nodes that emulation adds."""
        if tensor not in self.nodes:
            return []
        names = _sources(self.flow, self.nodes[tensor], self.records)
        return [self.records[name] for name in names]

    def error(self, lead: str, bad: ValueRecord, height: int) -> NumericsError:
        """Return the error about a bad value.

        It describes the origin of the value: the first fault, and ``height`` levels of preceding values.
        """
        source = next((row for row in self.records.values() if row.fault), None)
        origins = ""
        if bad.inherited and source is not None:
            origins = f"It started at {source} ({source.fault})."
        level = [bad]
        seen = {bad.tensor}
        for depth in range(height):
            rows = chain.from_iterable(self.sources(later.tensor) for later in level)
            before = {row.tensor: row for row in rows}
            level = [row for name, row in before.items() if name not in seen]
            seen |= before.keys()
            if not level:
                break
            more = f"; and {len(level) - _NAMED} more" if len(level) > _NAMED else ""
            made = "Computed from" if depth == 0 else "Those from"
            origins += f" {made} {'; '.join(map(str, level[:_NAMED]))}{more}."
        text = f"{lead} NaN or Inf in {bad}. {origins.strip()}".rstrip()
        return NumericsError(text, bad.tensor, bad.node, bad.op)


@dataclass(slots=True)
class Watcher:
    """Watches runs of a model, op by op."""

    session: Session
    """The model with low precision emulated, as in :func:`onnxamp._numerics.check.check_run`."""
    _executor: Executor | None = None
    _rows: list[WatchedValue] = field(default_factory=list)

    def watch(
        self,
        step: int,
        sample: Mapping[str, Feed],
        chosen: ValueFilter | None = None,
        *,
        stop: bool = False,
    ) -> RunRecords:
        """Run the model on a sample.

        Args:
            step: the number of the run, for its records.
            sample: arrays by input.
            chosen: the values that can stop the run; None for all.
            stop: whether to stop at the first unintended NaN or Inf among these.

        Raises:
            ArgumentError: the sample does not fit the model.
            RuntimeFailure: the model does not run.
            ModelError, OpsetError, ExternalDataError: the model cannot be prepared.
        """
        feeds = check_inputs(self.session.model.proto, sample)
        executor = self.session.prepare(feeds)
        if executor is not self._executor:
            self._executor, self._rows = executor, watched_values(executor.flow)
        measured = ValueMeasurements(executor.flow, self._rows)
        stats: dict[str, TensorStats] = {}

        is_odd = False

        def see(name: str, value: "ort.OrtValue") -> None:
            nonlocal is_odd
            stats[name] = tensor_stats(np.asarray(from_value(value)))
            is_odd = is_odd or not stats[name].finite

        def so_far() -> RunRecords:
            return records_of(
                step, executor.flow, measured.inputs, measured.checks(), stats
            )

        budget = self.session.budget
        wanted = chosen or ValueFilter()
        for part in watched_parts(executor, measured.rows, feeds, budget, seen=see):
            measured.add(part)
            # Records of all values so far take time, and only those that are not finite end the run.
            if stop and is_odd:
                watched = so_far()
                if watched.first_bad(wanted):
                    return watched
        return so_far()


def records_of(
    step: int,
    flow: DataflowGraph,
    inputs: Iterable[str],
    checks: Sequence[ValueCheck],
    stats: Mapping[str, TensorStats],
) -> RunRecords:
    """Return the records of a run.

    Args:
        step: its number.
        flow: the flow that ran.
        inputs: the names of the float inputs.
        checks: the values that were watched, in the order of execution.
        stats: the statistics of the elements of all these values.
    """
    ranks = flow.ask(_ranks)
    makers_of = {row.value: row.position for row in checks}
    excused = _excused(flow, {**dict.fromkeys(inputs), **makers_of}, stats)
    records = {
        name: ValueRecord.given(
            step,
            name,
            dtype_of(flow, name),
            stats[name],
            is_excused=name in excused,
        )
        for name in inputs
    }
    for row in checks:
        dtype = dtype_of(flow, row.value)
        records[row.value] = ValueRecord(
            step=step,
            position=ranks[flow.maker[row.value]],
            op=row.op,
            node=row.node,
            tensor=row.value,
            dtype=dtype,
            stats=stats[row.value],
            fault=row.fault,
            inherited=row.inherited,
            fp16=range_fault(stats[row.value], dtype, is_excused=row.value in excused),
        )
    return RunRecords(step, flow, records, makers_of)


def _ranks(flow: DataflowGraph) -> Mapping[int, int]:
    """Return the positions of nodes, by index, apart from those that emulation adds."""
    makers = {flow.maker[name] for name in flow.own if name in flow.maker}
    return {node: rank for rank, node in enumerate(sorted(makers))}


def _excused(
    flow: DataflowGraph,
    makers: Mapping[str, int | None],
    stats: Mapping[str, TensorStats],
) -> set[str]:
    """Return values whose elements beyond 1e30 stand for infinity: constants, and masks on their way to a Softmax.

    Args:
        flow: the flow that ran.
        makers: watched value -> the node that computes it, None for inputs; in the order of execution.
        stats: the statistics of these values.
    """
    huge = [name for name in makers if stats[name].has_sentinel]
    masks = flow.ask(mask_values) if huge else frozenset[str]()
    excused = set[str]()
    for name in huge:
        node = makers[name]
        key = "" if node is None else op_key(flow.nodes[node])
        is_excused = key == "Constant" or (node is None and name in masks)
        if node is not None and name in masks and key in op_facts().mask_arithmetic:
            is_excused = not excused.isdisjoint(_sources(flow, node, makers))
            is_excused = is_excused or flow.ask(reads_constant, node, SENTINEL)
        if is_excused:
            excused.add(name)
    return excused


def _sources(flow: DataflowGraph, node: int, known: Container[str]) -> list[str]:
    """Return the known values that a node reads, looking through nodes that emulation adds."""
    sources: dict[str, None] = {}
    waiting = [*reversed(flow.reads[node])]
    while waiting:
        name = waiting.pop()
        if name in known:
            sources[name] = None
        elif name in flow.maker and name not in flow.own:
            waiting += reversed(flow.reads[flow.maker[name]])
    return list(sources)


def conclude(checker: TensorChecker, run: RunRecords, chosen: ValueFilter) -> None:
    """Store the values of a run that the mode of the checker records, and raise or warn of NaN and Inf as the mode
    requires.

    Args:
        checker: the checker.
        run: the records of the run.
        chosen: the values that the checker examines.

    Raises:
        NumericsError: the mode aborts, and there is a NaN or an unintended Inf.
        OutputError: the records cannot be written.
    """
    config = checker.config
    records = _recorded(run, config, chosen)
    file = None
    if config.folder is not None:
        file = dump_path(config.folder, run.step)
        write_dump(file, records)
    checker.steps.append(StepCheck(run.step, records, file))
    if config.aborts and records:
        (bad,) = records
        lead = f"Run {run.step}: there is"
        raise run.error(lead, bad, config.stack_height_limit)
    _warn(config, run.step, records, file)


def _recorded(
    run: RunRecords, config: TensorCheckerConfig, chosen: ValueFilter
) -> tuple[ValueRecord, ...]:
    """Return the records of a run that the mode selects."""
    if config.aborts:
        bad = run.first_bad(chosen)
        return () if bad is None else (bad,)
    rows = run.records.values()
    return tuple(
        row for row in rows if chosen.takes(row) and row.concerns(config.debug_mode)
    )


def _warn(
    config: TensorCheckerConfig,
    step: int,
    records: Sequence[ValueRecord],
    file: Path | None,
) -> None:
    """Warn of problems in a run that continues."""
    where = "" if file is None else f" All are in {str(file)!r}."
    told = []
    if bad := [row for row in records if row.is_bad]:
        told.append(f"there is NaN or Inf in {counted(bad)}; the first is {bad[0]}")
    wide = [row for row in records if row.fp16 and not row.is_bad]
    if wide and config.debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW:
        told.append(
            f"{counted(wide)} beyond float16; the first ({wide[0].fp16}) is {wide[0]}"
        )
    for text in told:
        warnings.warn(
            f"Run {step}: {text}.{where}", NumericsWarning, stacklevel=_caller()
        )


def _caller() -> int:
    """Return the stack level of the code that called onnxamp, seen from the caller of this function."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None:
        if not frame.f_globals["__name__"].startswith("onnxamp."):
            break
        frame = frame.f_back
        level += 1
    return level


@dataclass(frozen=True, slots=True)
class LayerCheck:
    """The records of one layer, for each sample (``step``) in turn.

    Attributes:
        inputs: the float inputs of the layer: values of other nodes, model inputs, and weights (only once).
        values: the float outputs of the nodes of the layer.

    Example:
        >>> from onnxamp.debugging import check_layer_numerics
        >>> check = check_layer_numerics("models/encoder.onnx", ".*attention.*")
        >>> check.bad
        ()
    """

    inputs: tuple[ValueRecord, ...]
    values: tuple[ValueRecord, ...]

    @property
    def bad(self) -> tuple[ValueRecord, ...]:
        """The records with NaN or unintended Inf, inputs first."""
        return tuple(row for row in (*self.inputs, *self.values) if row.is_bad)

    def __str__(self) -> str:
        return "\n".join(
            ["inputs", *map(str, self.inputs), "values", *map(str, self.values)]
        )


@door
@unchanged_sources()
def check_layer_numerics(
    model: ModelSource,
    layer: str | Iterable[str] | None = None,
    samples: SamplesLike | None = None,
    *,
    debug_mode: DebugMode = DebugMode.CHECK_NAN_INF_AND_ABORT,
    provider: Provider | None = None,
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
) -> LayerCheck:
    """Check the inputs, weights and values of a layer of a model.

    The counterpart of ``paddle.amp.debugging.check_layer_numerics``, which decorates the ``forward`` of a layer; here a
    layer is a set of nodes. The first NaN or unintended Inf is an error; other modes return all records and, except for
    CHECK_ALL, warn (:class:`NumericsWarning`).

    Args:
        model: a ModelProto with its weights loaded, a path, or an onnx-graphsurgeon Graph.
        layer: names of nodes or of their outputs; a string that is not a name is a regular expression for full names,
            such as ``"decoder/0/.*"``.
        samples: inputs of the *model*: a dict of arrays, an iterable of dicts, a path (.npz, .json or a folder), or
            :class:`onnxamp.Samples`; None for random ones.
        debug_mode: the reaction to a problem.
        provider: "cuda" or "cpu"; None for CUDA if there is a device. Low precision is emulated on both.
        seed, count, dims: the seed, number and named sizes of random samples.

    Raises:
        NumericsError: the mode aborts, and there is a NaN or an unintended Inf.
        ArgumentError: the layer has no node with float outputs, or the samples do not fit the model.
        ArgumentTypeError: an argument has the wrong type.
        ModelError: the model cannot be read.
        RuntimeFailure: the model does not run.

    Example:
        >>> from onnxamp.debugging import check_layer_numerics
        >>> check = check_layer_numerics("models/encoder.onnx", ".*attention.*", count=2)
        >>> sorted({record.step for record in check.values})
        [0, 1]
    """
    if layer is None:
        raise ArgumentTypeError(
            "check_layer_numerics decorates no functions: call it with a model and the names of the nodes of a layer."
        )
    names: list[Any] = [layer]
    if isinstance(layer, Iterable) and not isinstance(layer, str):
        names = list(layer)
    if not names or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"layer must be the name of a node, or several names, not {layer!r}."
        )
    opened = Model.of(model)
    samples = as_samples(samples, opened, count=count, seed=seed, dims=dims)
    watcher = Watcher(engine_on(choose_provider(provider), emulates=True).open(opened))
    inputs: list[ValueRecord] = []
    values: list[ValueRecord] = []
    for step, sample in enumerate(samples):
        run = watcher.watch(step, sample)
        outputs = _outputs(run, names)
        values += outputs
        nodes = {run.nodes[row.tensor] for row in outputs}
        rows = chain.from_iterable(run.sources(output.tensor) for output in outputs)
        sources = {row.tensor: row for row in rows}
        inputs += [
            row for name, row in sources.items() if run.nodes.get(name) not in nodes
        ]
        if step == 0:  # weights are the same in all runs
            inputs += _weights(run.flow, nodes)
        check = LayerCheck(tuple(inputs), tuple(values))
        if debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT and check.bad:
            raise run.error("There is", check.bad[0], 1)
    alarming = [row for row in (*inputs, *values) if row.concerns(debug_mode)]
    if alarming and debug_mode is not DebugMode.CHECK_ALL:
        what = "NaN or Inf"
        if debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW:
            what = "Beyond float16"
        text = (
            f"{what} in {counted(alarming)} of the layer; the first is {alarming[0]}."
        )
        warnings.warn(text, NumericsWarning, stacklevel=_caller())
    return check


def _outputs(run: RunRecords, names: Iterable[str]) -> list[ValueRecord]:
    """Return the records of the nodes with these names.

    Raises:
        ArgumentError: a name matches nothing.
    """
    produced = [run.records[name] for name in run.nodes]
    chosen: set[str] = set()
    for name in names:
        # A name comes first, because names may hold characters that mean something else in a regular expression.
        matches = _matching(produced, name.__eq__)
        matches = matches or _matching(produced, _compiled(name).fullmatch)
        if not matches:
            raise ArgumentError(
                f"No node with float outputs is called {name!r} or matches it as a regular expression; the first ones"
                f" are {', '.join(repr(row.node) for row in produced[:5]) or 'none'}."
            )
        chosen |= matches
    return [row for row in produced if row.tensor in chosen]


def _matching(
    records: Iterable[ValueRecord], fits: Callable[[str], object]
) -> set[str]:
    return {row.tensor for row in records if fits(row.node) or fits(row.tensor)}


def _compiled(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error:
        return re.compile(re.escape(text))  # names may contain unbalanced brackets


def _weights(flow: DataflowGraph, nodes: Iterable[int]) -> Iterator[ValueRecord]:
    """Yield the records of the float weights of the nodes, including constants."""
    names = list[str]()
    for node in sorted(nodes):
        names += (*flow.held[node], *flow.reads[node])
    for name in dict.fromkeys(names):
        constant = flow.constants.get(name)
        if name in flow.shell.weights:
            array = flow.shell.array(name, raised=True)
        elif isinstance(constant, TensorProto):
            array = numpy_helper.to_array(constant)
        else:
            continue
        if array.dtype.kind == "f":
            yield ValueRecord.given(
                0,
                name,
                dtype_of(flow, name),
                tensor_stats(np.asarray(array)),
                is_excused=True,
            )
