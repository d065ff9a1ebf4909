"""The read-only half of the pipeline: Graph -> Problem -> Pins -> Decision -> Edits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from onnxamp._decide.pins import Pins, find_pins
from onnxamp._decide.ports import PortVariables
from onnxamp._decide.precision import CutProblem, Decision, Prices
from onnxamp._decide.problem import Problem, find_problem
from onnxamp._decide.verdicts import Reason
from onnxamp._errors import ArgumentError
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.graph import Graph
from onnxamp._model.blobs import Chosen
from onnxamp._options.options import Options
from onnxamp._rewrite.apply import Edits
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
    def on_cpu(self) -> list[int]:
        """Nodes that the target leaves to the CPU in the precision that they have."""
        pins, of_node, is_low = self.pins, self.ports.of_node, self.decision.is_low
        return [
            index
            for index in pins.fallbacks
            if index not in pins.low_alone
            or not all(map(is_low, of_node[index].values()))
        ]

    def without(self, reasons: Mapping[int, frozenset[Reason]]) -> "Analysis":
        """Return the analysis if these reasons did not keep these nodes in float32."""
        return _solved(self.problem, find_pins(self.problem, freed=reasons))


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
    return decided(
        find_problem(graph, options, replayed=replay is not None), replay=replay
    )


@no_collections()
def decided(
    problem: Problem,
    *,
    replay: Mapping[str, bool] | None = None,
    prices: Prices | None = None,
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


@dataclass(frozen=True, slots=True)
class RoundedWeights:
    """The result of compensated rounding.

    Attributes:
        chosen: value of the analyzed graph -> its low-precision numbers. Others are rounded to nearest.
        weights: number of low-precision weights that products read.
        wide: how many of them are too wide for compensation.
        before: relative error of their products on the samples with weights rounded to nearest, root mean square.
        after: the same with these weights.
        samples: where the samples come from.
        made_up: whether they are random.
    """

    chosen: Mapping[int, Chosen] = field(repr=False)
    weights: int
    wide: int
    before: float
    after: float
    samples: str
    made_up: bool

    def note(self) -> str:
        """Return sentences about the changes."""
        if not self.weights:
            return "No product outside subgraphs has a low-precision weight to round with compensation."
        if not self.chosen:
            return f"Compensated rounding does not help: all {self.weights:,} weights are rounded to nearest."
        kept = self.weights - len(self.chosen)
        rest = (
            f"; {kept:,} {'is' if kept == 1 else 'are'} rounded to nearest"
            if kept
            else ""
        )
        wide = f" ({self.wide:,} are too wide)" if self.wide else ""
        return (
            f"Rounded {len(self.chosen):,} of {self.weights:,} weights with compensation{rest}{wide}:"
            f" the error of their products falls from {self.before:.2g} to {self.after:.2g} on"
            f" {self.samples}."
        )


MADE_UP: Final = (
    "Weights were rounded with compensation for random inputs: pass real ones (--inputs, samples), so that products on real"
    " data stay accurate."
)
"""A warning."""

Rounder: TypeAlias = Callable[[Analysis], RoundedWeights]
"""Chooses the low-precision numbers of weights, for options that ask for it."""


def with_rounding(
    analysis: Analysis, rounder: Rounder | None
) -> tuple[Analysis, RoundedWeights | None]:
    """Return the analysis with the rounding that its options ask for, and the facts about it.

    Raises:
        ArgumentError: the options ask for compensation, but there is no rounder. Others as the rounder.
    """
    if not analysis.options.compensates or not analysis.edits:
        return analysis, None
    if rounder is None:
        raise ArgumentError(
            "Compensated rounding (rounding='compensated') needs samples: pass some"
            " (--inputs), or round to nearest (--rounding nearest)."
        )
    found = rounder(analysis)
    warnings = (
        *analysis.pins.warnings,
        *([MADE_UP] if found.made_up and found.chosen else ()),
    )
    pins, edits = analysis.pins._replace(warnings=warnings), analysis.edits
    return replace(
        analysis,
        pins=pins,
        edits=replace(edits, rounded={**edits.rounded, **found.chosen}),
    ), found
