"""Watching every float of a model that runs, to find the first op that goes wrong although its inputs are fine.

Each low-precision value is compared with the exact result of its op on the same inputs: emulation computes both. So
overflow and underflow are told apart from their consequences downstream.

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

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from onnxamp._dtypes import FLOAT, FLOAT_ELEMS, FORMATS, LOW_TENSORS
from onnxamp._numerics.measure import Measurement, measure
from onnxamp._numerics.results import ValueCheck
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.flow import Flow, dtype_of, origin
from onnxamp._runtime.pieces import Runner, parts_of, start
from onnxamp._runtime.values import Feed

if TYPE_CHECKING:
    import onnxruntime as ort

FLUSHED_ABOVE: Final = 0.1
"""Relative L2 error from which on underflow is a fault; single flushed elements do no harm."""

_LARGEST: Final = {low.elem: low.max_finite for low in FORMATS.values()}
_FLOATS: Final = LOW_TENSORS | {FLOAT, "tensor(double)"}


class Watched(NamedTuple):
    """A float value, the exact result that it is rounded from (itself if nothing is rounded), and its node."""

    value: str
    exact: str
    node: int


def watched_values(flow: Flow) -> list[Watched]:
    """The floats that the model's nodes compute, in execution order, without values that emulation adds."""
    names = [name for name in flow.maker if name in flow.own and flow.types.get(name) in _FLOATS]
    return sorted((Watched(name, *origin(flow, name)) for name in names), key=lambda row: row.node)


def classify(
    flow: Flow,
    rows: Sequence[Watched],
    measured: Mapping[str, Measurement],
    inputs: Mapping[str, Measurement],
) -> tuple[ValueCheck, ...]:
    """Tell of each value whether it is at fault, only passes a fault on, or is fine.

    Args:
        rows: in execution order.
        measured: by value: its exact result (reference) and what rounding left of it (found).
        inputs: likewise for the model's inputs.

    Complexity: linear in nodes.
    """
    ends = [measured[name] for name in flow.outputs if name in measured]
    reaches_outputs = any(m.found_nan or m.found_inf for m in ends)
    return _classified(flow, rows, measured, inputs, born=reaches_outputs)


def _classified(
    flow: Flow,
    rows: Sequence[Watched],
    measured: Mapping[str, Measurement],
    inputs: Mapping[str, Measurement],
    *,
    born: bool,
) -> tuple[ValueCheck, ...]:
    """``born``: whether NaN and infinities that ops compute from finite numbers are faults."""
    by_node: dict[int, list[Watched]] = {}
    readers = _readers(flow, rows)
    for row in rows:
        if row.value in measured:
            by_node.setdefault(row.node, []).append(row)
    seen = {**inputs, **measured}
    bad = {name for name, m in inputs.items() if m.found_nan}
    checks = []
    for index, node in enumerate(flow.nodes):
        reads = flow.reads[index]
        spoiled = any(name in bad for name in reads)
        mine = by_node.get(index, ())
        for row in mine:
            checked = _checked(flow, row, seen, spoiled=spoiled, born=born)
            checks.append(replace(checked, readers=readers.get(row.value, ())))
            if checked.fault or checked.inherited:
                bad |= {row.value, row.exact}
        if spoiled:
            own = {name for row in mine for name in (row.value, row.exact)}
            bad.update(name for name in node.output if name not in own and name not in measured)
    return tuple(checks)


def _readers(flow: Flow, rows: Sequence[Watched]) -> dict[str, tuple[str, ...]]:
    """By value: the nodes that read it, directly or behind Casts. Linear in reads if few Casts follow each other."""
    direct: dict[str, list[Watched]] = {}
    for row in rows:
        for name in flow.reads[row.node]:
            direct.setdefault(name, []).append(row)
    readers: dict[str, tuple[str, ...]] = {}
    for row in reversed(rows):
        names: dict[str, None] = {}
        for reader in direct.get(row.value, ()):
            node = flow.nodes[reader.node]
            passes = op_key(node) in op_facts().relabels
            names.update(
                dict.fromkeys(
                    readers.get(reader.value, ()) if passes else (node.name or reader.value,)
                )
            )
        readers[row.value] = tuple(names)
    return readers


def _checked(
    flow: Flow, row: Watched, seen: Mapping[str, Measurement], *, spoiled: bool, born: bool
) -> ValueCheck:
    m, node = seen[row.value], flow.nodes[row.node]
    sources = [seen[name] for name in flow.reads[row.node] if name in seen]
    fault = _fault(flow, row, m, sources, born=born)
    odd = (
        fault is not None
        or m.found_nan > 0
        or m.found_inf > 0
        or (m.elements > 1 and m.found_zero == m.elements)
    )
    kind = flow.low.get(row.value)
    was_cast = (
        node.op_type == "Identity" and any(name in flow.low for name in node.input) and kind is None
    )
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
    flow: Flow, row: Watched, m: Measurement, sources: Sequence[Measurement], *, born: bool
) -> str | None:
    """The first fault of the module's table that applies; constants are never at fault."""
    node, top = flow.nodes[row.node], _LARGEST.get(flow.low.get(row.value, 0), np.inf)
    if node.op_type == "Constant":
        return None
    contracts = op_key(node) in op_facts().contractions
    endless = (
        m.found_inf > 0
        and (m.broken > 0 or born or contracts)
        and not any(s.found_inf for s in sources)
    )
    if m.found_nan and born:
        return "NaN"
    if endless and (contracts or not _reaches(flow, row.node, np.inf)):
        return "Inf"
    faults = {
        "all zero": m.elements > 1 and m.found_zero == m.elements and m.reference_zero < m.elements,
        "vanished": m.vanished > 0,
        "flushed": m.flushed > 0 and m.rel_l2 > FLUSHED_ABOVE,
        "saturated": m.found_max == top
        and not any(source.found_max >= top / 2 for source in sources),
    }
    fault = next((name for name, applies in faults.items() if applies), None)
    return None if fault == "saturated" and _reaches(flow, row.node, top / 2) else fault


def _reaches(flow: Flow, node: int, limit: float) -> bool:
    """Whether a constant of the node has an element of that magnitude. Slow, since it reads weights."""
    for name in flow.held[node]:
        constant = flow.constants[name]
        if not isinstance(constant, TensorProto) or constant.data_type not in FLOAT_ELEMS:
            continue
        if _largest(numpy_helper.to_array(constant)) >= limit:
            return True
    fed = (name for name in flow.reads[node] if name in flow.shell.weights)
    return any(_largest(flow.shell.array(name, raised=True)) >= limit for name in fed)


def _largest(array: "npt.NDArray[Any]") -> float:
    return float(np.abs(array.astype(np.float32)).max(initial=0.0))


@dataclass(slots=True)
class WatchedRun:
    """A model run part by part with its floats measured; measurements of several samples add up.

    ``rows`` are the values to watch, ``budget`` is the number of bytes to hold at a time.
    """

    runner: Runner
    rows: Sequence[Watched]
    budget: int = BUDGET
    values: dict[str, Measurement] = field(default_factory=dict)
    inputs: dict[str, Measurement] = field(default_factory=dict)

    def parts(
        self, feeds: Mapping[str, Feed], seen: "Callable[[str, ort.OrtValue], None] | None" = None
    ) -> Iterator[Sequence[int]]:
        """Run the model lazily, and yield the nodes of each part behind it.

        Args:
            feeds: by input, in any float types.
            seen: called with each float input and value that is measured.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run a part.
        """
        flow = self.runner.flow
        side = start(
            self.runner,
            feeds,
            Counter(name for row in self.rows for name in {row.value, row.exact}),
        )
        for name, value in side.values.items():
            if value.is_tensor() and "float" in value.data_type():
                self._add(self.inputs, name, value, value, seen)
        rows = {row.value: row for row in self.rows}
        for part in parts_of(flow, range(len(flow.nodes)), self.budget):
            side.run(part)
            for row in (
                row for node in part for name in flow.nodes[node].output if (row := rows.get(name))
            ):
                self._add(
                    self.values, row.value, side.values[row.exact], side.values[row.value], seen
                )
                side.used({row.value, row.exact})
            self.runner.forget()
            yield part

    def _add(
        self,
        into: dict[str, Measurement],
        name: str,
        exact: "ort.OrtValue",
        value: "ort.OrtValue",
        seen: "Callable[[str, ort.OrtValue], None] | None",
    ) -> None:
        measured = measure(exact, value, self.runner.provider)
        into[name] = into[name] + measured if name in into else measured
        if seen is not None:
            seen(name, value)

    def join(self, values: Mapping[str, Measurement], inputs: Mapping[str, Measurement]) -> None:
        """Add what was measured elsewhere."""
        join(self.values, values)
        join(self.inputs, inputs)

    def checks(self) -> tuple[ValueCheck, ...]:
        """The values so far, in execution order, with their faults."""
        return classify(self.runner.flow, self.rows, self.values, self.inputs)


def join(total: dict[str, Measurement], more: Mapping[str, Measurement]) -> None:
    """Add measurements of another sample, by name."""
    for name, measured in more.items():
        total[name] = total[name] + measured if name in total else measured
