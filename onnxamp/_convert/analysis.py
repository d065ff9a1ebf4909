"""The read-only half of the pipeline: from a graph and options to a decision and the edits that carry it out."""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxamp._decide.pins import Pins, find_pins
from onnxamp._decide.precision import Decision, Prices, decide
from onnxamp._decide.problem import Problem, find_problem
from onnxamp._decide.terms import Terms
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.graph import Graph
from onnxamp._options.options import Options
from onnxamp._rewrite.edits import Edits
from onnxamp._rewrite.plan_edits import plan_edits


@dataclass(frozen=True, slots=True)
class Analysis:
    """What is known about a model, what was decided, and what changes."""

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
        """What the user asked for."""
        return self.problem.options

    @property
    def terms(self) -> Terms:
        """The precision variables."""
        return self.problem.terms


def analyse(graph: Graph, options: Options, replay: Mapping[str, bool] | None = None) -> Analysis:
    """Decide for every float of a graph in which precision it lives.

    Args:
        replay: decisions to repeat (variable key -> low), see :mod:`onnxamp._convert.plan`.

    Raises:
        ModelError, OpsetError, ContradictionError: see :func:`find_problem`.
    """
    return decided(find_problem(graph, options, settled=replay is not None), replay=replay)


@no_collections()
def decided(problem: Problem, *, replay: Mapping[str, bool] | None = None, prices: Prices | None = None) -> Analysis:
    """Solve a problem, which can be solved again for other prices.

    Args:
        prices: what was measured of nodes, for level auto.
    """
    pins = find_pins(problem, replay=replay, measured=prices.pins if prices else None)
    decision = decide(problem, pins, prices)
    return Analysis(problem, pins, decision, plan_edits(problem, decision))
