"""Running a model op by op while recording all its floats, or those that the op lists of a checker's config choose."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from onnxamp._base.errors import NumericsError, warn
from onnxamp._base.words import count
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.results import ValueCheck
from onnxamp._numerics.watch import (
    ValueMeasurements,
    WatchedValue,
    reads_constant,
    watched_parts,
    watched_values,
)
from onnxamp._runtime.engines import Session
from onnxamp._runtime.piecewise.flow import DataflowGraph, dtype_of
from onnxamp._runtime.piecewise.pieces import Executor
from onnxamp._runtime.sessions.values import Feed, check_inputs, from_value
from onnxamp.debugging._checker import StepCheck, TensorChecker, TensorCheckerConfig
from onnxamp.debugging._chosen import ValueFilter
from onnxamp.debugging._records import (
    ValueRecord,
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

    def _before(self, tensor: str) -> list[ValueRecord]:
        """Return the records of the values that a value depends on, in the order of execution."""
        names = set[str]()
        waiting = [tensor]
        while waiting:
            name = waiting.pop()
            if name not in names and name in self.flow.maker:
                waiting += self.flow.reads[self.flow.maker[name]]
            names.add(name)
        names.discard(tensor)
        return [row for name, row in self.records.items() if name in names]

    def error(self, lead: str, bad: ValueRecord, height: int) -> NumericsError:
        """Return the error about a bad value.

        It describes the origin of the value: the first NaN or Inf that it depends on, or else the first fault, and
        ``height`` levels of preceding values.
        """
        earlier = self._before(bad.tensor)
        source = next((row for row in earlier if row.is_bad), None)
        source = source or next((row for row in earlier if row.fault), None)
        origins = ""
        if bad.inherited and source is not None:
            fault = f" ({source.fault})" if source.fault else ""
            origins = f"It started at {source}{fault}."
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
            beginning = "Computed from" if depth == 0 else "Those from"
            origins += f" {beginning} {'; '.join(map(str, level[:_NAMED]))}{more}."
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
    masks = flow.ask(_mask_values) if huge else frozenset[str]()
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


def _mask_values(flow: DataflowGraph) -> frozenset[str]:
    """Return values that reach a Softmax through mask arithmetic, or an attention as its mask. Complexity: linear in
    nodes.
    """
    facts = op_facts()
    waiting = list[str]()
    for node, reads in zip(flow.nodes, flow.reads, strict=True):
        key = op_key(node)
        if key in facts.mask_sinks:
            waiting += reads
        ports = facts.mask_inputs.get(key, ())
        waiting += (node.input[port] for port in ports if port < len(node.input))
    masks = set[str]()
    while waiting:
        name = waiting.pop()
        if name in masks:
            continue
        masks.add(name)
        if name not in flow.maker:
            continue
        maker = flow.maker[name]
        # Values that emulation has added are rounded forms of what they are computed from.
        is_arithmetic = op_key(flow.nodes[maker]) in facts.mask_arithmetic
        if is_arithmetic or name not in flow.own:
            waiting += flow.reads[maker]
    return frozenset(masks)


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
    texts = []
    if bad := [row for row in records if row.is_bad]:
        texts.append(
            f"there is NaN or Inf in {count(len(bad), 'value')}; the first is {bad[0]}"
        )
    wide = [row for row in records if row.fp16 and not row.is_bad]
    if wide and config.debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW:
        texts.append(
            f"{count(len(wide), 'value')} beyond float16; the first ({wide[0].fp16}) is {wide[0]}"
        )
    warn([f"Run {step}: {text}.{where}" for text in texts], NumericsWarning)
