"""The read-only half of the pipeline, Graph -> Problem -> Pins -> Decision -> Edits."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from onnxamp._base.public import no_collections
from onnxamp._base.records import record
from onnxamp._decide.mincut import Question
from onnxamp._decide.pins.find import Pins, find_pins
from onnxamp._decide.precision import CutProblem, Decision, Prices, verdict_on
from onnxamp._decide.problem import Problem, find_problem
from onnxamp._decide.variables.ports import PortVariables
from onnxamp._decide.verdicts import Basis, Verdict
from onnxamp._facts.dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node, Ports
from onnxamp._options.options import Options
from onnxamp._rewrite.edits.apply import Edits
from onnxamp._rewrite.edits.plan_edits import plan_edits
from onnxamp._rewrite.prepare import Prepared


@record
class Analysis:
    """A solved problem, and the edits that carry the decision out."""

    problem: Problem
    pins: Pins
    decision: Decision
    edits: Edits

    @classmethod
    def of(cls, problem: Problem, pins: Pins, decision: Decision) -> "Analysis":
        """Return the analysis of a solved problem."""
        return cls(problem, pins, decision, plan_edits(problem, decision))

    def with_warnings(self, warnings: Iterable[str]) -> "Analysis":
        """Return the same with these warnings in place of its own."""
        return replace(self, pins=self.pins._replace(warnings=tuple(warnings)))

    @property
    def graph(self) -> Graph:
        """The graph that was analyzed."""
        return self.problem.graph

    @property
    def options(self) -> Options:
        """The options of the conversion."""
        return self.problem.options

    @property
    def ports(self) -> PortVariables:
        """The precision variables."""
        return self.problem.ports

    @property
    def casts(self) -> int:
        """Number of new Casts."""
        return len(self.edits.casts)

    @property
    def on_cpu(self) -> list[int]:
        """Nodes that the target leaves to the CPU in the precision that they have."""
        is_low = self.decision.is_low
        nodes = list[int]()
        for index, free in self.problem.freedoms.items():
            is_fine = free.only_low and all(map(is_low, self.ports.of(index)))
            if free.falls_back and not is_fine:
                nodes.append(index)
        return nodes

    def verdict(self, variable: Question) -> Verdict:
        """Return the verdict on a variable."""
        return verdict_on(self.problem, self.pins, self.decision, variable)

    def without(self, reasons: Mapping[int, frozenset[Basis]]) -> "Analysis":
        """Return the analysis if these reasons did not keep these nodes in float32."""
        pins = find_pins(self.problem, freed=reasons)
        decision = CutProblem(self.problem, pins).decide()
        return Analysis.of(self.problem, pins, decision)


def analyze(
    graph: Graph, options: Options, replay: Mapping[str, bool] | None = None
) -> Analysis:
    """Decide the precision of every float in a graph.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        replay: decisions of a plan to repeat (variable key -> low).

    Raises:
        ModelError, OpsetError, ContradictionError: see :func:`find_problem`.
    """
    with no_collections():
        problem = find_problem(graph, options, replayed=replay is not None)
        pins = find_pins(problem, replay=replay)
        decision = CutProblem(problem, pins).decide()
        return Analysis.of(problem, pins, decision)


@no_collections()
def solve(problem: Problem, prices: Prices | None = None) -> Analysis:
    """Solve a problem again, at other prices.

    Args:
        problem: the problem.
        prices: measurements, for level "auto".
    """
    pins = find_pins(problem, measured=prices.pins if prices else None)
    return Analysis.of(problem, pins, CutProblem(problem, pins).decide(prices))


def low_nodes(analysis: Analysis) -> frozenset[int]:
    """Return nodes with a low-precision port."""
    is_low = analysis.decision.of_ports()
    types = analysis.graph.types
    ports = analysis.ports
    low_results = {
        value
        for value, variable in enumerate(ports.produced)
        if is_low[variable] and types[value] == FLOAT
    }
    nodes = set[int]()
    for node, consumed in zip(analysis.graph.nodes, ports.consumed, strict=True):
        for value, variable in zip(node.inputs, consumed, strict=True):
            if is_low[variable] and types[value] == FLOAT:
                nodes.add(node.index)
                break
        if not low_results.isdisjoint(node.outputs):
            nodes.add(node.index)
    return frozenset(nodes)


def low_ports(analysis: Analysis, node: Node) -> Ports:
    """Return the low-precision ports of a node."""
    types = analysis.graph.types
    is_low = analysis.decision.is_low
    consumed = analysis.ports.consumed[node.index]
    produced = analysis.ports.produced
    inputs = [
        port
        for port, value in enumerate(node.inputs)
        if types[value] == FLOAT and is_low(consumed[port])
    ]
    outputs = [
        port
        for port, value in enumerate(node.outputs)
        if types[value] == FLOAT and is_low(produced[value])
    ]
    return Ports(tuple(inputs), tuple(outputs))


def is_low(analysis: Analysis, node: int) -> bool:
    """Return whether all precision variables of a node are low."""
    return all(analysis.decision.low[variable] for variable in analysis.ports.of(node))


@record
class Decided:
    """A prepared model, and the decision about it.

    Attributes:
        prepared: the model, made ready.
        analysis: the decision.
        refusal: the beginning of the sentence that refuses it, if a run shows that its float32 model does not compute
            the same as the original; "" if it needs no such proof.
    """

    prepared: Prepared
    analysis: Analysis
    refusal: str = ""

    @property
    def graph(self) -> Graph:
        """The graph of the prepared model."""
        return self.prepared.graph

    def told(self, *notes: str, refused: Iterable[str] = ()) -> "Decided":
        """Return the same with more notes, and with sentences about candidates that were refused before it."""
        prepared = replace(
            self.prepared,
            notes=(*self.prepared.notes, *notes),
            refused=(*self.prepared.refused, *refused),
        )
        return replace(self, prepared=prepared)

    def warned(self, warning: str) -> "Decided":
        """Return the same with one more warning."""
        warnings = (*self.analysis.pins.warnings, warning)
        return replace(self, analysis=self.analysis.with_warnings(warnings))
