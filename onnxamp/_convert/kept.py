"""Large weights that stay float32, with what keeps them so."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from onnxamp._convert.analysis import Analysis
from onnxamp._convert.plan import Plan
from onnxamp._decide.decision import verdict_on
from onnxamp._decide.ports import HIGH, NONE
from onnxamp._decide.verdicts import Reason, told
from onnxamp._dtypes import FLOAT
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import Origin
from onnxamp._options.levels import Level

_SHARE: Final = 100
_SMALLEST: Final = 4096
"""Weights are large that take more than a hundredth of all, and these bytes."""


@dataclass(frozen=True, slots=True)
class KeptWeight:
    """A weight that is float32 in the result.

    Attributes:
        name: the weight, or the output of a Constant.
        size: in bytes.
        copied: whether the result holds it in low precision, too.
        readers: label of a node that reads it in float32, or name of an output that returns it -> the reason.
    """

    name: str
    size: int
    copied: bool
    readers: Mapping[str, str]


def kept_weights(analysis: Analysis, stored: int, plan: Plan | None = None) -> tuple[KeptWeight, ...]:
    """Weights that stay float32 and take more than 1 % of the ``stored`` bytes of all weights, and 4 kB.

    The largest are first. Where a plan was repeated, the reasons are its own. At level O0, where all stay, there are
    none. Complexity: linear in values.
    """
    if analysis.options.level == Level.O0:
        return ()
    graph, found = analysis.graph, []
    planned = {row.node: _told(row.reason, row.detail) for row in plan.rows if not row.low} if plan is not None else {}
    for value in graph.values:
        producer = graph.producer(value.index)
        is_stored = value.origin in (Origin.INITIALIZER, Origin.DEFAULT)
        if graph.types[value.index] != FLOAT or not (
            is_stored or (producer is not None and producer.key == "Constant")
        ):
            continue
        size = 4 * elements(graph.shapes[value.index])
        if size >= _SMALLEST and size * _SHARE > stored and (readers := dict(_float32_readers(analysis, value.index))):
            readers = {label: planned.get(label, reason) for label, reason in readers.items()}
            copied = any(copy.value == value.index for copy in analysis.edits.copies)
            found.append(KeptWeight(value.name, size, copied, readers))
    return tuple(sorted(found, key=lambda weight: (-weight.size, weight.name)))


def _float32_readers(analysis: Analysis, value: int) -> Iterator[tuple[str, str]]:
    """Who reads or returns a weight in float32, and why."""
    graph, ports = analysis.graph, analysis.ports
    if graph.values[value].origin is Origin.DEFAULT:
        yield graph.values[value].name, "graph input: callers may override it (--freeze-defaults)"
        return
    for node, port in graph.uses[value]:
        variable = ports.consumed[node][port]
        if variable != NONE and not analysis.decision.is_low(variable):
            yield graph.nodes[node].label, _reason(analysis, variable)
    for key in graph.results[value]:
        variable = ports.returned.get(key, NONE)
        if variable != NONE and not analysis.decision.is_low(variable):
            yield (
                graph.scopes[key[0]].proto.output[key[1]].name,
                _reason(analysis, variable, "output: it keeps its type"),
            )
    if not graph.uses[value] and not graph.results[value]:
        yield "none", "nothing reads it"


def _reason(analysis: Analysis, variable: int, fixed: str = "schema: it takes float32 alone here") -> str:
    if variable == HIGH:
        return fixed
    verdict = verdict_on(analysis.problem, analysis.pins, analysis.decision, variable)
    return _told(verdict.reason.value, verdict.detail)


def _told(reason: str, detail: str) -> str:
    if reason in (Reason.CUT.value, Reason.EXACT.value):
        return "fewest Casts: those for it would cost more than its bytes"
    return told(reason, detail)
