"""The read-only half of the pipeline: Graph -> Problem -> Pins -> Decision -> Edits."""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxamp._decide.decision import Decision, Prices
from onnxamp._decide.pins import Pins, find_pins
from onnxamp._decide.ports import PortVariables
from onnxamp._decide.precision import CutProblem
from onnxamp._decide.problem import Problem, find_problem
from onnxamp._decide.verdicts import Reason
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.graph import Graph
from onnxamp._options.options import Options
from onnxamp._rewrite.edits import Edits
from onnxamp._rewrite.plan_edits import plan_edits


@dataclass(frozen=True, slots=True)
class Analysis:
    """A solved problem, and the edits that carry the decision out."""

    problem: Problem
    pins: Pins
    decision: Decision
    edits: Edits

    @property
    def graph(self) -> Graph:
        """The graph that was analysed."""
        return self.problem.graph

    @property
    def options(self) -> Options:
        """The options of the conversion."""
        return self.problem.options

    @property
    def ports(self) -> PortVariables:
        """The precision variables."""
        return self.problem.ports

    def without(self, reasons: Mapping[int, frozenset[Reason]]) -> "Analysis":
        """The analysis if these reasons did not keep these nodes in float32."""
        return _solved(self.problem, find_pins(self.problem, freed=reasons))


def analyse(graph: Graph, options: Options, replay: Mapping[str, bool] | None = None) -> Analysis:
    """Decide the precision of every float in a graph.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        replay: decisions of a plan to repeat (variable key -> low).

    Raises:
        ModelError, OpsetError, ContradictionError: see :func:`find_problem`.
    """
    return decided(find_problem(graph, options, replayed=replay is not None), replay=replay)


@no_collections()
def decided(
    problem: Problem, *, replay: Mapping[str, bool] | None = None, prices: Prices | None = None
) -> Analysis:
    """Solve a problem. The same problem can be solved again at other prices.

    Args:
        problem: the problem.
        replay: decisions of a plan to repeat.
        prices: measurements, for level "auto".
    """
    pins = find_pins(problem, replay=replay, measured=prices.pins if prices else None)
    return _solved(problem, pins, prices)


def _solved(problem: Problem, pins: Pins, prices: Prices | None = None) -> Analysis:
    decision = CutProblem(problem, pins).decide(prices)
    return Analysis(problem, pins, decision, plan_edits(problem, decision))
