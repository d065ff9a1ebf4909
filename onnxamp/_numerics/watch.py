"""Watching every float of a model that runs, to find the first op that goes wrong on correct inputs.

Each low-precision value is compared with the exact result of its op on the same inputs: emulation computes both. So
overflow and underflow are told apart from their consequences downstream. On an engine that computes low precision
itself, each op runs there on the exact values of the model in float32, which the CPU computes.

================  =====================================================================================================
fault             when, with inputs that are fine
================  =====================================================================================================
NaN               an element is NaN, and outputs of the model are NaN or infinite: nothing masks it away
Inf               an element overflows: infinite in low precision although its exact result is not; or infinite in
                  float32 already, and outputs are not finite either
all zero          every element is zero although the exact result is not
vanished          zeros where the exact result is more than 5 % of the largest
flushed           so much becomes zero that the value is off by more than 10 % (relative L2)
saturated         elements at the largest finite number of the type although no input has half of it
================  =====================================================================================================

Infinities among a node's inputs (masks) excuse infinities in its outputs.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from secrets import token_hex
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.executor import Memory
from onnxamp._base.records import record
from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, FLOAT_ELEMS, LOW_ELEMS
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._numerics.differences.measure import measure
from onnxamp._numerics.differences.metrics import Measurement, join
from onnxamp._numerics.paired import PairedSessions
from onnxamp._numerics.results import ValueCheck
from onnxamp._runtime.emulate import without_rounding
from onnxamp._runtime.engines import Engine, Progress, Session
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.loop import LoadedSample, Opened, Probe, one_by_one, remembered
from onnxamp._runtime.piecewise.flow import DataflowGraph, dtype_of, origin
from onnxamp._runtime.piecewise.pieces import Executor, start
from onnxamp._runtime.sessions.values import Feeds, check_inputs, to_value

if TYPE_CHECKING:
    import onnxruntime as ort

FLUSHED_ABOVE: Final = 0.1
"""Relative L2 error from which on underflow is a fault; single flushed elements do no harm."""

_LARGEST: Final = {elem: low.max_finite for elem, low in LOW_ELEMS.items()}


class WatchedValue(NamedTuple):
    """A float value, the exact result that it is rounded from (itself if nothing is rounded), and its node."""

    value: str
    exact: str
    node: int


def watched_values(flow: DataflowGraph) -> list[WatchedValue]:
    """Return the floats that the model's nodes compute, in execution order, without values that emulation adds."""
    names = [
        name
        for name in flow.maker
        if name in flow.own and flow.types.get(name) in ANY_FLOAT_TENSORS
    ]
    return sorted(
        (WatchedValue(name, *origin(flow, name)) for name in names),
        key=lambda row: row.node,
    )


def classify(
    flow: DataflowGraph,
    rows: Sequence[WatchedValue],
    measured: Mapping[str, Measurement],
    inputs: Mapping[str, Measurement],
) -> tuple[ValueCheck, ...]:
    """Return for each value whether it is at fault, only passes a fault on, or is fine.

    Args:
        rows: in execution order.
        measured: by value: its exact result (reference) and what rounding left of it (found).
        inputs: likewise for the model's inputs.

    Complexity: linear in nodes.
    """
    ends = _ends(flow, measured)
    # NaN and infinities that ops compute from finite numbers are faults only where they reach outputs: masks use them.
    born = any(m.found_nan or m.found_inf for m in ends)
    by_node = defaultdict[int, list[WatchedValue]](list)
    readers = _readers(flow, rows)
    for row in rows:
        if row.value in measured:
            by_node[row.node].append(row)
    seen = {**inputs, **measured}
    bad = {name for name, m in inputs.items() if m.found_nan}
    checks = []
    for index, node in enumerate(flow.nodes):
        reads = flow.reads[index]
        spoiled = any(name in bad for name in reads)
        for row in by_node[index]:
            checked = _checked(flow, row, seen, spoiled=spoiled, born=born)
            checks.append(replace(checked, readers=readers[row.value]))
            if checked.fault or checked.inherited:
                bad |= {row.value, row.exact}
        if spoiled:
            own = _names_of(by_node[index])
            bad.update(set(node.output) - own - measured.keys())
    return tuple(checks)


def _ends(
    flow: DataflowGraph, measured: Mapping[str, Measurement]
) -> list[Measurement]:
    """Return what is measured of the outputs: of sequences and maps, the tensors that they are made of."""
    ends = list[Measurement]()
    stack = [*flow.outputs]
    seen = set[str]()
    while stack:
        name = stack.pop()
        if name in seen:
            continue
        seen.add(name)
        is_tensor = (flow.types.get(name) or "").startswith("tensor(")
        if name in measured:
            ends.append(measured[name])
        elif name in flow.maker and not is_tensor:
            stack += flow.reads[flow.maker[name]]
    return ends


def _names_of(rows: Iterable[WatchedValue]) -> set[str]:
    """Return the names of values, and of the exact results that they are rounded from."""
    return {*chain.from_iterable((row.value, row.exact) for row in rows)}


def _readers(
    flow: DataflowGraph, rows: Sequence[WatchedValue]
) -> dict[str, tuple[str, ...]]:
    """Return by value the nodes that read it, also through Casts. Linear in reads if few Casts follow each other."""
    direct = defaultdict[str, list[WatchedValue]](list)
    for row in rows:
        for name in flow.reads[row.node]:
            direct[name].append(row)
    readers: dict[str, tuple[str, ...]] = {}
    # From the last, so that the readers of a Cast's result are known when the Cast is met.
    for row in reversed(rows):
        names: dict[str, None] = {}
        for reader in direct[row.value]:
            node = flow.nodes[reader.node]
            passes = op_key(node) in op_facts().relabels
            through = readers.get(reader.value, ())
            names |= dict.fromkeys(through if passes else [node.name or reader.value])
        readers[row.value] = tuple(names)
    return readers


def _checked(
    flow: DataflowGraph,
    row: WatchedValue,
    seen: Mapping[str, Measurement],
    *,
    spoiled: bool,
    born: bool,
) -> ValueCheck:
    m = seen[row.value]
    node = flow.nodes[row.node]
    sources = [seen[name] for name in flow.reads[row.node] if name in seen]
    fault = _fault(flow, row, m, sources, born=born)
    is_all_zero = m.elements > 1 and m.found_zero == m.elements
    odd = fault is not None or m.found_nan > 0 or m.found_inf > 0 or is_all_zero
    is_raised = row.value not in flow.low and any(n in flow.low for n in node.input)
    was_cast = node.op_type == "Identity" and is_raised
    return ValueCheck(
        position=row.node,
        value=row.value,
        node=node.name or row.value,
        op="Cast" if was_cast else op_key(node),
        dtype=dtype_of(flow, row.value),
        measured=m,
        fault=None if spoiled else fault,
        inherited=spoiled and odd,
    )


def _fault(
    flow: DataflowGraph,
    row: WatchedValue,
    m: Measurement,
    sources: Sequence[Measurement],
    *,
    born: bool,
) -> str | None:
    """Return the first fault of the module's table that applies; constants are never at fault."""
    node = flow.nodes[row.node]
    top = _LARGEST.get(flow.low.get(row.value, 0), np.inf)
    if node.op_type == "Constant":
        return None
    contracts = op_key(node) in op_facts().contractions
    counts = m.broken > 0 or born or contracts
    is_own = m.found_inf > 0 and not any(source.found_inf for source in sources)
    if m.found_nan and born:
        return "NaN"
    # An infinite constant is a mask, unless it is a factor of products.
    endless = is_own and counts
    if endless and (contracts or not flow.ask(reads_constant, row.node, np.inf)):
        return "Inf"
    is_all_zero = m.elements > 1 and m.found_zero == m.elements
    faults = {
        "all zero": is_all_zero and m.reference_zero < m.elements,
        "vanished": m.vanished > 0,
        "flushed": m.flushed > 0 and m.rel_l2 > FLUSHED_ABOVE,
        "saturated": m.found_max == top
        and not any(source.found_max >= top / 2 for source in sources),
    }
    fault = next((name for name, applies in faults.items() if applies), None)
    if fault == "saturated" and flow.ask(reads_constant, row.node, top / 2):
        return None
    return fault


def reads_constant(flow: DataflowGraph, node: int, limit: float) -> bool:
    """Return whether a constant of the node has an element of that magnitude. Slow, since it reads weights."""
    arrays = _constants_of(flow, node)
    sizes = (np.abs(array.astype(np.float32)).max(initial=0.0) for array in arrays)
    return any(size >= limit for size in sizes)


def _constants_of(flow: DataflowGraph, node: int) -> Iterator[npt.NDArray[Any]]:
    """Yield the float constants of a node, whether they are part of the graph or fed to it."""
    for name in flow.held[node]:
        constant = flow.constants[name]
        if isinstance(constant, TensorProto) and constant.data_type in FLOAT_ELEMS:
            yield numpy_helper.to_array(constant)
    for name in flow.reads[node]:
        if name in flow.shell.weights:
            yield flow.shell.array(name, raised=True)


@record
class CheckedSample:
    """The conditions that one sample meets, and the measurements of values and inputs."""

    choices: tuple[tuple[str, bool], ...]
    values: Mapping[str, Measurement]
    inputs: Mapping[str, Measurement]


@dataclass(slots=True)
class ValueMeasurements:
    """Measurements of the floats of a model on samples that take the same branches."""

    flow: DataflowGraph
    rows: Sequence[WatchedValue]
    values: dict[str, Measurement] = field(default_factory=dict)
    inputs: dict[str, Measurement] = field(default_factory=dict)

    def add(self, sample: CheckedSample) -> None:
        """Add a sample, or a part of one."""
        join(self.values, sample.values)
        join(self.inputs, sample.inputs)

    def checks(self) -> tuple[ValueCheck, ...]:
        """Return the values so far, in execution order, with their faults."""
        return classify(self.flow, self.rows, self.values, self.inputs)

    def has_fault(self, of_op: Callable[[str], bool]) -> bool:
        """Return whether a value of some op has a fault."""
        return any(row.fault for row in self.checks() if of_op(row.op))


def watched_parts(
    executor: Executor,
    rows: Sequence[WatchedValue],
    feeds: Feeds,
    budget: int,
    *,
    progress: Progress | None = None,
    seen: "Callable[[str, ort.OrtValue], None] | None" = None,
) -> Iterator[CheckedSample]:
    """Run a model with its floats measured, lazily, and yield what each part shows as soon as it has run.

    Args:
        feeds: by input, in any float types.
        budget: bytes to hold at a time.
        progress: called with the nodes that have run, and their number.
        seen: called with each float input and value that is measured.

    Raises:
        RuntimeFailure: ONNX Runtime cannot run a part.
    """
    flow = executor.flow
    done = 0
    reads = Counter[str]()
    for row in rows:
        reads.update({row.value, row.exact})  # once where nothing is rounded
    execution = start(executor, feeds, reads)
    inputs = dict[str, Measurement]()
    values = dict[str, Measurement]()
    for name, value in execution.values.items():
        if value.is_tensor() and value.data_type() in ANY_FLOAT_TENSORS:
            inputs[name] = measure(value, value)
            if seen is not None:
                seen(name, value)
    by_name = {row.value: row for row in rows}
    for part in execution.parts(range(len(flow.nodes)), budget):
        names = flow.outputs_of(part)
        for row in (by_name[name] for name in names if name in by_name):
            value = execution.values[row.value]
            values[row.value] = measure(execution.values[row.exact], value)
            if seen is not None:
                seen(row.value, value)
            execution.used({row.value, row.exact})
        done += len(part)
        if progress is not None:
            progress(done, len(flow.nodes))
        yield CheckedSample(flow.choices, values, inputs)
        inputs = {}
        values = {}
    if not done:
        yield CheckedSample(flow.choices, values, inputs)


_CHECKED: Final = "checked model"
"""The key of the model in the memory of a process."""


@record(kw_only=True)
class CheckProbe(Probe[CheckedSample]):
    """Measuring the values of an emulated model.

    Attributes:
        keep: nodes to compute in float32.
        stops: tells whether a fault of an op ends its sample, after the part of the model that shows it.
        key: stands for the model in the memory of a process.
    """

    model: SentModel
    engine: Engine
    budget: int
    keep: frozenset[str]
    stops: Callable[[str], bool] | None = None
    key: str = field(default_factory=token_hex)

    def watched(
        self, memory: Memory, feeds: Feeds
    ) -> tuple[DataflowGraph, list[WatchedValue]]:
        """Return the model as it runs on a sample, and the values that are measured."""
        return keep_float32(self._session(memory).prepare(feeds).flow, self.keep)

    def _session(self, memory: Memory) -> Session:
        return remembered(
            memory,
            _CHECKED,
            self.key,
            lambda: self.engine.open(self.model.opened(), budget=self.budget),
        )

    def open(self, memory: Memory) -> Opened[CheckedSample]:
        """As :meth:`Probe.open`."""
        session = self._session(memory)
        last: tuple[Executor, Executor, Sequence[WatchedValue]] | None = None

        def measure(item: LoadedSample) -> CheckedSample:
            nonlocal last
            feeds = check_inputs(session.model.proto, item.sample)
            executor = session.prepare(feeds)
            # The next sample with the same branches uses the same executors.
            if last is None or last[0] is not executor:
                flow, rows = keep_float32(executor.flow, self.keep)
                last = executor, Executor(flow, executor.provider), rows
            _, kept, watched = last
            shown = ValueMeasurements(kept.flow, watched)
            for part in watched_parts(
                kept, watched, feeds, self.budget, progress=item.progress
            ):
                shown.add(part)
                if self.stops is not None and shown.has_fault(self.stops):
                    break
            return CheckedSample(executor.flow.choices, shown.values, shown.inputs)

        return Opened(session.prepare_sample, one_by_one(measure))


class EngineProbe(CheckProbe):
    """Measuring what the ops of a model make of exact values on an engine that computes low precision itself."""

    __slots__ = ()

    def watched(
        self, memory: Memory, feeds: Feeds
    ) -> tuple[DataflowGraph, list[WatchedValue]]:
        """As :meth:`CheckProbe.watched`."""
        flow = self._side_by_side(memory).result.prepare(feeds).flow
        return flow, watched_values(flow)

    def _side_by_side(self, memory: Memory) -> PairedSessions:
        """Return the model in float32, and as it runs on the engine.

        Raises:
            ModelError, OpsetError: the model cannot be raised to float32.
        """

        def opened() -> PairedSessions:
            model = self.model.opened()
            exact = Model(without_rounding(model.embedded()))
            reference = self.engine.reference.open(exact, budget=self.budget)
            return PairedSessions(
                reference,
                self.engine.open(model, budget=self.budget),
                accumulated=False,
            )

        return remembered(memory, _CHECKED, self.key, opened)

    def open(self, memory: Memory) -> Opened[CheckedSample]:
        """As :meth:`Probe.open`."""
        sessions = self._side_by_side(memory)
        return Opened(sessions.prepare, one_by_one(partial(_on_engine, sessions)))


def _on_engine(sessions: PairedSessions, item: LoadedSample) -> CheckedSample:
    """Return what a sample shows on an engine.

    Raises:
        RuntimeFailure: the model does not run in float32 on the CPU, or none of its ops runs on the engine.
    """
    feeds = check_inputs(sessions.result.model.proto, item.sample)
    paired = sessions.run(feeds, item.progress)
    flow = sessions.result.prepare(feeds).flow
    values = {
        name: row.local
        for name, row in paired.compared.items()
        if row.local is not None
    }
    notes = (paired.failure, *(row.note for row in paired.compared.values()))
    note = next(filter(None, notes), None)
    if not values and note is not None:
        raise RuntimeFailure(f"None of its ops runs on its own. {note}")
    given = (
        (name, to_value(feeds[name], flow.types.get(name))) for name in flow.inputs
    )
    inputs = {
        name: measure(value, value)
        for name, value in given
        if value.is_tensor() and value.data_type() in ANY_FLOAT_TENSORS
    }
    return CheckedSample(flow.choices, values, inputs)


def keep_float32(
    flow: DataflowGraph, names: Collection[str]
) -> tuple[DataflowGraph, list[WatchedValue]]:
    """Emulate what ``--keep-fp32`` does: the named nodes read each other's exact results; others read rounded ones.

    Args:
        flow: an emulated model.
        names: nodes as reports call them: by name, or by their first value if they have none.

    Returns:
        The model, and its watched values without those that nothing reads rounded any more.

    Complexity: linear in nodes.
    """
    rows = watched_values(flow)
    chosen, exact = _exact_among(flow, rows, names)
    nodes = list(flow.nodes)
    reads = list(flow.reads)
    for index in chosen:
        node = copied(flow.nodes[index])
        node.input[:] = [exact.get(name, name) for name in node.input]
        nodes[index] = node
        reads[index] = tuple(
            dict.fromkeys(exact.get(value, value) for value in reads[index])
        )
    others = (reads[index] for index in range(len(reads)) if index not in chosen)
    rounded = set(chain.from_iterable(others))
    # Integers are cast to float32 then, unless a node that is not chosen reads them rounded.
    for row in rows:
        if row.node not in chosen or row.exact == row.value or _is_rounded(flow, row):
            continue
        if row.value not in rounded:
            nodes[row.node] = copied(flow.nodes[row.node])
            for item in nodes[row.node].attribute:
                item.i = TensorProto.FLOAT if item.name == "to" else item.i
    read = {*flow.outputs, *chain.from_iterable(reads)}
    kept = [
        row
        for row in rows
        if row.node not in chosen or not _is_rounded(flow, row) or row.value in read
    ]
    return replace(flow, nodes=tuple(nodes), reads=tuple(reads)), kept


def _exact_among(
    flow: DataflowGraph, rows: Sequence[WatchedValue], names: Collection[str]
) -> tuple[set[int], dict[str, str]]:
    """Return the named nodes with the Casts that pass on their results, and exact names of the values between them."""
    casts = {
        row.node for row in rows if op_key(flow.nodes[row.node]) in op_facts().relabels
    }
    chosen = {
        row.node for row in rows if (flow.nodes[row.node].name or row.value) in names
    }
    exact = {
        row.value: row.exact
        for row in rows
        if row.node in chosen and _is_rounded(flow, row)
    }
    wanted = set(flow.reads_of(chosen))
    for row in reversed(rows):  # Casts between chosen nodes pass on exact results
        if row.node in casts and row.value in wanted:
            chosen.add(row.node)
            wanted.update(flow.reads[row.node])
    for row in rows:  # Casts to float32 after chosen nodes have nothing to do
        is_raised = row.value not in flow.low and row.node in casts
        if is_raised and not exact.keys().isdisjoint(flow.reads[row.node]):
            chosen.add(row.node)
    exact |= {
        row.value: row.exact
        for row in rows
        if row.node in chosen and row.exact in exact
    }
    return chosen, exact


def _is_rounded(flow: DataflowGraph, row: WatchedValue) -> bool:
    """Return whether the value is rounded from a float32 one, and not cast from integers."""
    return row.exact != row.value and flow.types.get(row.exact) == "tensor(float)"
