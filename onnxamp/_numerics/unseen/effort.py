"""Limits on the searches for inputs that overflow, and for large errors, by the work of the model."""

from typing import Final, NamedTuple

from onnxamp._graph.graph import Graph, graph_of
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.larger import work_of_run
from onnxamp._runtime import STRESS
from onnxamp._runtime.sessions.values import Feeds, shapes_of

_WORK: Final = 7 << 30
"""Work of all steps at the default of their number: half of what a small model takes to be converted and validated."""

_ERROR_WORK: Final = 1 << 32
"""Work of the search for a large error, at the same default."""

_ERROR_RUNS: Final = 16
"""Most inputs of this search for each step that is asked for."""

_DOWN: Final = 10
"""Steps toward a small divisor for each one that is asked for. A distance of two points of four numbers vanishes in
about 30 steps.
"""

_DIVISORS: Final = 2
"""Most divisors that are made small."""

_LEAST_RUNS: Final = 4
"""Inputs without which this search does not begin."""

_START_WORK: Final = 1 << 30
"""Work that the choice of a start may take."""

_NODE: Final = 1 << 17
"""Operations in the time that a runtime takes for a node, however small."""

_ELEMENT: Final = 60
"""Operations that take as long as reading or writing an element."""

_FEWEST: Final = 2
"""Runs of the least effort: one step. What it reaches is measured by a run without gradients."""

_FEW_STEPS: Final = 2
"""Steps from which on another climb is worth more than further steps: most of the way is done by the first two."""

_STARTS: Final = 8
"""Most starts of an ascent. Of four steps from a sample, a network of Relu and random weights shows about 74 % of the
largest magnitude that long searches find; after one step from each of eight starts, from the best of them, 86 %.
"""

_ROUNDS: Final = 3
"""Most times that as many steps are taken again where a value ends close to the end of the range."""


class Effort(NamedTuple):
    """How far an ascent may go.

    Attributes:
        starts: inputs among which it finds its start.
        steps: the steps of each climb.
        rounds: times that a climb may take as many steps again.
        has_lesser: whether it also climbs toward the end of the value that is farther from overflow.
    """

    starts: int
    steps: int
    rounds: int
    has_lesser: bool

    @property
    def is_least(self) -> bool:
        """Whether one step toward one end is all."""
        return self.steps == 1 and not self.has_lesser and not self.rounds

    @classmethod
    def within(cls, steps: int, work: int) -> "Effort":
        """Return the effort that so much work for each run leaves: fewer steps first, then fewer climbs.

        Work is counted, because a limit in seconds would make results depend on the machine.

        Args:
            steps: the steps that are asked for.
            work: that of one run.
        """
        work = max(work, 1)
        allowed = _for_steps(_WORK, steps)
        runs = max(allowed // work, _FEWEST)
        climbs, most = _climbs(steps, runs)
        # From each start one step toward either end: two runs of each.
        starts = _START_WORK // (4 * work)
        rounds = runs // (climbs * (most + 1)) - 1
        return cls(
            starts=max(1, min(starts, _STARTS)),
            steps=most,
            rounds=max(0, min(rounds, _ROUNDS)),
            has_lesser=climbs > 1,
        )


def _for_steps(work: int, steps: int) -> int:
    """Return the work that is allowed for so many steps, from the work at their default number; never less."""
    return work * max(steps, STRESS) // STRESS


def _climbs(steps: int, runs: int) -> tuple[int, int]:
    """Return how many climbs so many runs allow, and the steps of each."""
    enough = min(steps, _FEW_STEPS)
    most = min(steps, runs // 2 - 1)
    if most >= enough:
        return 2, most
    # A run begins each climb, and one looks at all values where it ends.
    return 1, min(steps, max(runs - 2, 1))


class ErrorEffort(NamedTuple):
    """How far the search for a large error may go.

    Attributes:
        inputs: how many it may try; 0 if they would be too few.
        steps: the steps of each descent toward a small divisor.
        divisors: how many divisors it may make small.
    """

    inputs: int
    steps: int
    divisors: int

    @classmethod
    def within(cls, steps: int, work: int) -> "ErrorEffort":
        """Return the effort that the work of the model leaves.

        Args:
            steps: the steps of an ascent that are asked for.
            work: that of one run of the model; its conversion takes as much.
        """
        runs = _for_steps(_ERROR_WORK, steps) // (2 * max(work, 1))
        inputs = min(_ERROR_RUNS * steps, runs)
        down = _DOWN * steps
        # A step runs the model and its gradient, which is no more than two runs of both models.
        divisors = min((runs - inputs) // (2 * down), _DIVISORS) if down else 0
        return cls(inputs if inputs >= _LEAST_RUNS else 0, down, divisors)


def operations_of(model: Model, sample: Feeds) -> int:
    """Return the work of a run on a sample, counted in operations."""
    shapes = tuple(shapes_of(sample).items())
    return model.ask(graph_of).ask(_counted, shapes)


def _counted(graph: Graph, inputs: tuple[tuple[str, tuple[int, ...]], ...]) -> int:
    """Return the work of a run.

    Args:
        graph: the model.
        inputs: names of its inputs, each with its shape.
    """
    flops, moved = work_of_run(graph, graph.shapes_of(dict(inputs)))
    return flops + _ELEMENT * moved + _NODE * len(graph.nodes)
