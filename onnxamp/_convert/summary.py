"""Numbers about a conversion, computed from its analysis."""

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Final

from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis
from onnxamp._convert.plan import Plan
from onnxamp._decide.mincut import Question
from onnxamp._decide.variables.ports import HIGH, NONE
from onnxamp._decide.verdicts import Reason, reason_text
from onnxamp._facts.dtypes import FLOAT, FLOAT32_BYTES, FORMATS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import Node, Origin
from onnxamp._model.protos import stored_bytes
from onnxamp._options.values import Level
from onnxamp._rewrite.prepare import Prepared

_SHARE: Final = 100
_SMALLEST: Final = 4096
"""Weights are large if they take more than a hundredth of all, and more than these bytes."""
_UNHELD: Final = "its numbers do not fit low precision"


@record
class KeptWeight:
    """A weight that is float32 in the result.

    Attributes:
        name: the weight, or the output of a Constant.
        size: in bytes.
        copied: whether the result also stores it in low precision.
        readers: label of a node that reads it in float32, or name of an output that returns it -> the reason.
    """

    name: str
    size: int
    copied: bool
    readers: Mapping[str, str]


def kept_weights(
    analysis: Analysis, stored: int, plan: Plan | None = None
) -> tuple[KeptWeight, ...]:
    """Return the weights in float32 that take more than 1 % of the ``stored`` bytes of all weights, and 4 kB.

    The largest are first. Where a plan was repeated, the reasons are its own. At level O0, where all stay, there are
    none. Complexity: linear in values.
    """
    if analysis.options.level == Level.O0:
        return ()
    graph = analysis.graph
    weights = []
    rows = () if plan is None else plan.rows
    planned = {row.node: _told(row.reason, row.detail) for row in rows if not row.low}
    copies = {copy.value for copy in analysis.edits.copies}
    constants = graph.nodes_of({"Constant"})
    constant_values = set(chain.from_iterable(node.outputs for node in constants))
    for value in graph.values:
        is_stored = value.is_stored or value.index in constant_values
        size = FLOAT32_BYTES * elements(graph.shapes[value.index])
        is_large = size >= _SMALLEST and size * _SHARE > stored
        variable = analysis.ports.produced[value.index]
        is_low = analysis.decision.is_low(variable) and value.index not in copies
        if (
            graph.types[value.index] != FLOAT
            or not is_stored
            or not is_large
            or is_low
        ):
            continue
        readers = dict[str, str]()
        for label, reason in _float32_readers(analysis, value.index):
            why = planned.get(label, reason)
            readers[label] = _UNHELD if analysis.options.weights_only else why
        if readers:
            weights.append(
                KeptWeight(value.name, size, value.index in copies, readers)
            )
    return tuple(sorted(weights, key=lambda weight: (-weight.size, weight.name)))


def _float32_readers(analysis: Analysis, value: int) -> Iterator[tuple[str, str]]:
    """Return the readers that keep a weight in float32, with the reasons."""
    graph = analysis.graph
    ports = analysis.ports
    if graph.values[value].origin is Origin.DEFAULT:
        yield (
            graph.values[value].name,
            "graph input: callers may override it (--freeze-defaults)",
        )
        return
    for node, port in graph.uses[value]:
        variable = ports.consumed[node][port]
        if variable != NONE and not analysis.decision.is_low(variable):
            yield graph.nodes[node].label, _reason(analysis, variable)
    for key in graph.results[value]:
        variable = ports.returned.get(key, NONE)
        if variable != NONE and not analysis.decision.is_low(variable):
            name = graph.scopes[key[0]].proto.output[key[1]].name
            yield name, _reason(analysis, variable, "output: it keeps its type")
    if not graph.uses[value] and not graph.results[value]:
        yield "none", "nothing reads it"


def _reason(
    analysis: Analysis,
    variable: Question,
    fixed: str = "schema: only float32 is allowed here",
) -> str:
    """Return why a port is float32; ``fixed`` is the reason if there was nothing to decide."""
    if variable == HIGH:
        return fixed
    verdict = analysis.verdict(variable)
    return _told(verdict.reason.value, verdict.detail)


def _told(reason: str, detail: str) -> str:
    """Return the reason of a weight's reader in plain words."""
    if reason in (Reason.CUT.value, Reason.EXACT.value):
        return "fewest Casts: its Casts would cost more than its bytes"
    return reason_text(reason, detail)


@record
class Summary:
    """Nodes, Casts and weights of a result.

    Attributes:
        nodes: precision ("low", "float32", "mixed", "no floats", or the other low-precision type) -> number of nodes.
        nodes_before: the same of the original.
        ops: (op type, precision) -> number of nodes.
        casts_before: Casts of the original.
        casts_added: new Casts.
        casts_removed: Casts of the original that are gone.
        pairs_removed: redundant pairs among these: Casts to another type and back that did nothing.
        low_weight_bytes: bytes, in float32, of weights that become low precision.
        fallbacks: (node, op type) of nodes without a kernel on the target for their types, which run on CPU.
        unknown: op types without a schema, which stay in float32.
        overridable: float32 initializers that callers may override.
        kept_weights: weights of more than 1 % of the result, and 4 kB, that stay in float32.
    """

    nodes: Mapping[str, int]
    nodes_before: Mapping[str, int]
    ops: Mapping[tuple[str, str], int]
    casts_before: int
    casts_added: int
    casts_removed: int
    pairs_removed: int
    low_weight_bytes: int
    fallbacks: tuple[tuple[str, str], ...]
    unknown: tuple[str, ...]
    overridable: tuple[str, ...]
    kept_weights: tuple[KeptWeight, ...]

    @property
    def casts_after(self) -> int:
        """Casts of the result."""
        return self.casts_before + self.casts_added - self.casts_removed


def summarize(
    prepared: Prepared, analysis: Analysis, plan: Plan | None = None
) -> Summary:
    """Count nodes, Casts and weights. Complexity: linear in nodes.

    Args:
        prepared: the model that was analyzed, and the Casts that were removed before.
        analysis: the analysis.
        plan: the plan that it repeated, if any.
    """
    graph = analysis.graph
    edits = analysis.edits
    nodes: Counter[str] = Counter()
    before: Counter[str] = Counter()
    ops: Counter[tuple[str, str]] = Counter()
    for node in graph.nodes:
        if node.key in op_facts().uncounted:
            continue
        precision = _precision(analysis, node.index)
        nodes[precision] += 1
        before[_by_types(analysis, node)] += 1
        ops[node.key, precision] += 1
    casts = prepared.casts + sum(node.key == "Cast" for node in graph.nodes)
    low = stored = 0
    for scope in graph.scopes:
        for tensor in scope.proto.initializer:
            size = stored_bytes(tensor)
            stored += size
            low += size if scope.names[tensor.name] in edits.weights else 0
    # Weights that become low precision count with the bytes that they then have.
    stored += low // FLOAT32_BYTES * analysis.options.low.bytes - low
    fallbacks = (graph.nodes[index] for index in analysis.on_cpu)
    return Summary(
        nodes=nodes,
        nodes_before=before,
        ops=ops,
        casts_before=casts,
        casts_added=len(edits.casts),
        casts_removed=prepared.casts + len(edits.removed),
        pairs_removed=prepared.pairs + _pairs(graph, edits.removed),
        low_weight_bytes=low,
        fallbacks=tuple((node.label, node.key) for node in fallbacks),
        unknown=tuple(
            sorted({node.key for node in graph.nodes if node.signature is None})
        ),
        overridable=tuple(
            v.name for v in graph.overridable() if graph.types[v.index] == FLOAT
        ),
        kept_weights=kept_weights(analysis, stored, plan),
    )


def _pairs(graph: Graph, removed: AbstractSet[int]) -> int:
    """Return how many of these Casts stand one after another in pairs."""
    free = set(removed)
    for index in sorted(removed):
        maker = graph.producer(graph.nodes[index].inputs[0])
        if maker is not None and maker.index in free and index in free:
            free -= {maker.index, index}
    return (len(removed) - len(free)) // 2


def _precision(analysis: Analysis, index: int) -> str:
    """Return the precision of a node in the result."""
    sides = set(map(analysis.decision.is_low, analysis.ports.of(index)))
    if not sides:
        return _by_types(analysis, analysis.graph.nodes[index])
    if len(sides) == 2:
        return "mixed"
    return "low" if True in sides else "float32"


def _by_types(analysis: Analysis, node: Node) -> str:
    """Return the precision of a node in the original."""
    types = {*analysis.graph.types_of((*node.inputs, *node.outputs))}
    if FLOAT in types:
        return "float32"
    if analysis.options.low.tensor in types:
        return "low"
    return next(
        (low.name for low in FORMATS.values() if low.tensor in types), "no floats"
    )
