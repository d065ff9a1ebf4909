"""Looking at every float of a model that ran: the first op that goes wrong although its inputs were fine.

Each low value is held against the exact result of its op on the same inputs: emulation computes both, the op in float32
and what the low type leaves of it. So overflow and underflow are told apart from what they do further on.

================  =====================================================================================================
fault             when, with inputs that are fine
================  =====================================================================================================
NaN               some element is NaN, and so are outputs or they are infinite: nothing masks it away
Inf               an element overflows: infinite in the low type, though its exact result is not; or infinite in float32
                  already, where outputs are not finite either
all zero          every element is zero, though the exact result is not
vanished          zeros where the exact result is more than 5 % of the largest
flushed           so much becomes zero that the value is off by more than 10 % (relative L2)
saturated         elements at the largest finite number of the low type, though no input has half of it
================  =====================================================================================================

Infinities among a node's inputs (masks) excuse infinities in its outputs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, numpy_helper

from onnxamp._dtypes import LOW_TYPES
from onnxamp._numerics.results import ValueCheck
from onnxamp._ops.facts import op_facts, op_key
from onnxamp._runtime.flow import Flow, dtype_of, origin
from onnxamp._runtime.measure import Measurement
from onnxamp._runtime.protos import LOW_ELEMS

FLUSHED_ABOVE: Final = 0.1
"""Relative L2 error from which on underflow is a fault: single elements that flush do no harm."""

_LARGEST: Final = {low.elem: low.max_finite for low in LOW_TYPES.values()}
_FLOATS: Final = frozenset({"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"})


@dataclass(frozen=True, slots=True)
class Watched:
    """A float value, the exact result that it is rounded from (itself where nothing is rounded), and its node."""

    value: str
    exact: str
    node: int


def watched_values(flow: Flow) -> list[Watched]:
    """The floats that nodes of the model make, in execution order; what emulation adds is seen through."""
    names = [name for name in flow.maker if name in flow.own and flow.types.get(name) in _FLOATS]
    return sorted((Watched(name, *origin(flow, name)) for name in names), key=lambda row: row.node)


def classify(
    flow: Flow, rows: Sequence[Watched], measured: Mapping[str, Measurement], inputs: Mapping[str, Measurement]
) -> tuple[ValueCheck, ...]:
    """Say of each value whether it is at fault, only passes a fault on, or is fine.

    Args:
        rows: in execution order.
        measured: by value: its exact result (reference) and what became of it (found).
        inputs: likewise for the model's inputs.

    Complexity: linear in nodes.
    """
    found = _classified(flow, rows, measured, inputs, born=False)
    ends = [measured[name] for name in flow.outputs if name in measured]
    hurts = any(m.found_nan or m.found_inf for m in ends)
    return _classified(flow, rows, measured, inputs, born=True) if hurts else found


def _classified(
    flow: Flow,
    rows: Sequence[Watched],
    measured: Mapping[str, Measurement],
    inputs: Mapping[str, Measurement],
    *,
    born: bool,
) -> tuple[ValueCheck, ...]:
    """``born``: whether NaN and infinities that ops make of finite numbers are faults."""
    by_node: dict[int, list[Watched]] = {}
    readers = _readers(flow, rows)
    for row in rows:
        if row.value in measured:
            by_node.setdefault(row.node, []).append(row)
    seen = {**inputs, **measured}
    bad = {name for name, m in inputs.items() if m.found_nan}
    found = []
    for index, node in enumerate(flow.nodes):
        reads = flow.reads[index]
        spoiled = any(name in bad for name in reads)
        mine = by_node.get(index, ())
        for row in mine:
            checked = _checked(flow, row, seen, spoiled=spoiled, born=born)
            found.append(replace(checked, readers=readers.get(row.value, ())))
            if checked.fault or checked.inherited:
                bad |= {row.value, row.exact}
        if spoiled:
            own = {name for row in mine for name in (row.value, row.exact)}
            bad.update(name for name in node.output if name not in own and name not in measured)
    return tuple(found)


def _readers(flow: Flow, rows: Sequence[Watched]) -> dict[str, tuple[str, ...]]:
    """By value: the nodes that read it, directly or behind Casts. Linear in reads, for few Casts in a row."""
    direct: dict[str, list[Watched]] = {}
    for row in rows:
        for name in flow.reads[row.node]:
            direct.setdefault(name, []).append(row)
    found: dict[str, tuple[str, ...]] = {}
    for row in reversed(rows):
        names: dict[str, None] = {}
        for reader in direct.get(row.value, ()):
            node = flow.nodes[reader.node]
            passes = node.op_type in ("Cast", "Identity")
            names.update(dict.fromkeys(found.get(reader.value, ()) if passes else (node.name or reader.value,)))
        found[row.value] = tuple(names)
    return found


def _checked(flow: Flow, row: Watched, seen: Mapping[str, Measurement], *, spoiled: bool, born: bool) -> ValueCheck:
    m, node = seen[row.value], flow.nodes[row.node]
    sources = [seen[name] for name in flow.reads[row.node] if name in seen]
    fault = _fault(flow, row, m, sources, born=born)
    odd = fault is not None or m.found_nan > 0 or m.found_inf > 0 or (m.elements > 1 and m.found_zero == m.elements)
    kind = flow.low.get(row.value)
    was_cast = node.op_type == "Identity" and any(name in flow.low for name in node.input) and kind is None
    return ValueCheck(
        row.node,
        row.value,
        node.name or row.value,
        "Cast" if was_cast else op_key(node),
        dtype_of(flow, row.value),
        m,
        None if spoiled else fault,
        spoiled and odd,
    )


def _fault(flow: Flow, row: Watched, m: Measurement, sources: Sequence[Measurement], *, born: bool) -> str | None:
    """The first fault of the module's table that applies; constants are at fault for nothing."""
    node, top = flow.nodes[row.node], _LARGEST.get(flow.low.get(row.value, 0), np.inf)
    if node.op_type == "Constant":
        return None
    contracts = op_key(node) in op_facts().contractions
    endless = m.found_inf > 0 and (m.broken > 0 or born or contracts) and not any(s.found_inf for s in sources)
    if m.found_nan and born:
        return "NaN"
    if endless and (contracts or not _reaches(flow, row.node, np.inf)):
        return "Inf"
    faults = {
        "all zero": m.elements > 1 and m.found_zero == m.elements and m.reference_zero < m.elements,
        "vanished": m.vanished > 0,
        "flushed": m.flushed > 0 and m.rel_l2 > FLUSHED_ABOVE,
        "saturated": m.found_max == top and not any(source.found_max >= top / 2 for source in sources),
    }
    fault = next((name for name, applies in faults.items() if applies), None)
    return None if fault == "saturated" and _reaches(flow, row.node, top / 2) else fault


def _reaches(flow: Flow, node: int, limit: float) -> bool:
    """Whether a constant of the node has an element of that magnitude. It reads weights, so it is asked last."""
    for name in flow.held[node]:
        constant = flow.constants[name]
        if not isinstance(constant, TensorProto) or constant.data_type not in _ARRAYS:
            continue
        if _largest(numpy_helper.to_array(constant)) >= limit:
            return True
    fed = (name for name in flow.reads[node] if name in flow.shell.weights)
    return any(_largest(flow.shell.array(name, raised=True)) >= limit for name in fed)


def _largest(array: "npt.NDArray[Any]") -> float:
    return float(np.abs(array.astype(np.float32)).max(initial=0.0))


_ARRAYS: Final = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, *LOW_ELEMS})
