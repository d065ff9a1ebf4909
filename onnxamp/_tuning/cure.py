"""The next action after a comparison: options that fix a failure, tried before they are suggested.

The original is converted again with more and more nodes kept in float32: broken nodes first, then those with the
largest local error. Each candidate is compared as the failing result was.
"""

import re
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from time import monotonic
from typing import Final, Literal

from onnxamp._base.errors import OnnxAmpError
from onnxamp._base.records import record
from onnxamp._base.words import count
from onnxamp._convert.convert import convert
from onnxamp._convert.plan import Plan
from onnxamp._facts.dtypes import FLOAT16, FORMATS
from onnxamp._facts.kernels import takes_anywhere
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.judging import misses_parts
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._options.options import Options
from onnxamp._runtime import CURE_SECONDS
from onnxamp._runtime.engines import Progress
from onnxamp._runtime.run import Report
from onnxamp._tuning.rounding import WeightRounder, rounder_of

_FEW: Final = 4
MOST_NODES: Final = 64
"""Bounds on the number of nodes that a command may name; within them, three quarters of the rounded nodes."""

TRIALS: Final = 12
"""Conversions that are tried for a comparison."""

_MORE: Final = 4
"""Further ones that are tried to name fewer nodes."""

_ROUNDED: Final = 1e-6
"""Local relative error from which on a node has been rounded: float32 alone stays below."""

ACTIVITY: Final = "looking for a fix"
"""What progress bars say during a search, unless it has a longer description."""


@record
class Recipe:
    """A conversion.

    Attributes:
        options: its options.
        sampling: the command-line options for the same inputs.
        plan: decisions to repeat, apart from those about nodes that are kept in float32.
    """

    options: Options = field(default_factory=Options)
    sampling: tuple[str, ...] = ()
    plan: Plan | None = None

    def keeping(self, nodes: Sequence[str]) -> Options:
        """Return the options with these nodes also kept in float32."""
        kept = (*self.options.keep_high, *map(re.escape, nodes))
        return replace(self.options, keep_high=kept)

    def command(self, source: str, target: str, nodes: Sequence[str]) -> str:
        """Return the command for this conversion with these nodes kept in float32."""
        level = ["--level", str(self.options.level)]
        keep = ["--keep-fp32", "|".join(map(re.escape, nodes))] if nodes else []
        return self._written("convert", source, target, level, keep)

    def tuning(self, source: str, target: str, tolerance: float, made_up: int) -> str:
        """Return the command that lowers as much as measurements allow; ``made_up`` is the number of random samples, if
        any.
        """
        limits = ["--tolerance", f"{tolerance:g}", "--allow-slower"]
        is_counted = made_up and "--samples" not in self.sampling
        count = ["--samples", str(made_up)] if is_counted else []
        return self._written("tune", source, target, limits, count)

    def _written(
        self, verb: str, source: str, target: str, first: list[str], last: list[str]
    ) -> str:
        options = [*first, *self.options.written(), *self.sampling, *last]
        return shlex.join(["onnxamp", verb, source, "-o", target, *options])


def cure_conversion(
    original: Model,
    paths: tuple[str, str],
    recipe: Recipe,
    comparison: Comparison,
    *,
    tried: bool,
    seconds: float = CURE_SECONDS,
    activity: str = ACTIVITY,
    failed: DiffReport | None = None,
    rounder: WeightRounder | None = None,
    advice: str | None = None,
) -> Cure:
    """Find nodes to keep in float32 so that a conversion meets its limits.

    Args:
        original: the float32 model.
        paths: source and target in the suggested command.
        recipe: the conversion to start from.
        comparison: compares each candidate as the failing result was compared.
        tried: whether this very recipe failed.
        seconds: the time after which no further candidate is tried.
        activity: a description for progress reports.
        failed: the result of this very recipe, with layers, if known; it counts as the first trial.
        rounder: rounds weights with compensation if the recipe asks for it; None to make one.
        advice: other options that may help; None for what the target suggests.

    Returns:
        The command that meets the limits, or how far the trials came.
    """
    run = comparison.run
    until = monotonic() + seconds
    timed = replace(run, state=None, report=stopping(until))
    search = _Search(
        original=original,
        recipe=recipe,
        comparison=replace(comparison, run=timed),
        progress=run.progress(activity),
        until=until,
        trials=0 if failed is None else 1,
        rounder=rounder or rounder_of(recipe.options, run.bare),
    )
    report, nodes = search.kept(failed)
    if report is None or not report.passed:
        when = f" in {seconds:.0f} s" if search.is_late else ""
        if advice is None:
            advice = other_ways(recipe.options.target, recipe.options.dtype)
        kept = f" with up to {count(len(nodes), 'node')} in float32" if nodes else ""
        is_tried = report is not None and report is not failed
        misses = f": trials{kept} miss the limits as well" if is_tried else ""
        text = f"No fix was found{when}{misses}. {advice}".rstrip()
        return Cure("", nodes, text, confirmed=False, trials=search.trials)
    report, nodes = search.fewer(report, nodes)
    worst = max((diff.rel_l2 for diff in report.outputs if diff.is_float), default=0.0)
    if not nodes and not tried:
        device = recipe.options.target
        meant = "" if device == Options.target else f" for {device}"
        text = f"Tried: a conversion{meant} with onnxamp's lists and hazards passes (relative L2 {worst:.2g})."
    else:
        more = count(len(nodes), "node")
        text = f"Tried: with {more} more in float32, the conversion passes (relative L2 {worst:.2g})."
    written = recipe.command(*paths, nodes)
    return Cure(written, nodes, text, confirmed=True, trials=search.trials)


@dataclass(slots=True)
class _Search:
    """Trials of a recipe with nodes kept in float32."""

    original: Model
    recipe: Recipe
    comparison: Comparison
    progress: Progress
    until: float
    trials: int
    rounder: WeightRounder | None = None

    @property
    def is_late(self) -> bool:
        """Whether the time is up."""
        return monotonic() > self.until

    def goes_on(self, most: int) -> bool:
        """Return whether more may be tried."""
        return self.trials < most and not self.is_late

    def compare(
        self, nodes: Sequence[str], *, layers: Literal[False] | None
    ) -> DiffReport | None:
        """Convert with these nodes in float32, and compare; None if it cannot be converted so, or in time.

        Args:
            nodes: the nodes.
            layers: None to compare layers if outputs miss their limits.
        """
        if self.is_late:
            return None
        self.trials += 1
        self.progress(self.trials, TRIALS + _MORE)
        try:
            model = convert(
                self.original,
                self.recipe.keeping(nodes),
                self.recipe.plan,
                rounder=self.rounder,
            ).embedded()
        except OnnxAmpError:  # the options contradict each other with these nodes
            return None
        with suppress(OutOfTime):
            return self.comparison.compare(Model(model), layers=layers)
        return None

    def kept(
        self, failed: DiffReport | None
    ) -> tuple[DiffReport | None, tuple[str, ...]]:
        """Keep more and more nodes in float32 until the result passes, or the trials or the suspects are used up.

        Args:
            failed: the result without such nodes, with layers; None to compare it first.

        Returns:
            The last comparison, None if there is none, and the nodes that were in float32.
        """
        nodes: tuple[str, ...] = ()
        report = self.compare(nodes, layers=None) if failed is None else failed
        rows = report.layers if report is not None else ()
        rounded = sum(
            row.local is not None and row.local.rel_l2 > _ROUNDED for row in rows
        )
        step = 1
        while report is not None and not report.passed and self.goes_on(TRIALS):
            graph = self.original.ask(graph_of)
            inner = _overflowing_in_bodies(graph, report, set(nodes))
            more = inner or _suspects(report, set(nodes), step)
            most = max(
                _FEW, min(MOST_NODES, rounded * 3 // 4), len(nodes) + len(inner)
            )
            if not more or len(nodes) >= most:
                break
            more_kept = (*nodes, *more)[:most]
            # Doubling reaches many nodes in few trials; those too many are left out at the end.
            step = step * 2
            comparison = self.compare(more_kept, layers=None)
            if comparison is None:
                break
            report = comparison
            nodes = more_kept
        return report, nodes

    def fewer(
        self, passing: DiffReport, nodes: tuple[str, ...]
    ) -> tuple[DiffReport, tuple[str, ...]]:
        """Return fewer nodes that are enough, with the comparison that passes: halves of them are left out, then
        quarters, and so on.
        """
        size = len(nodes) // 2
        while size and self.goes_on(TRIALS + _MORE):
            for start in range(0, len(nodes), size):
                rest = nodes[:start] + nodes[start + size :]
                report = self.compare(rest, layers=False)
                if report is not None and report.passed:
                    passing = report
                    nodes = rest
                    break
                if not self.goes_on(TRIALS + _MORE):
                    return passing, nodes
            size = min(size // 2, len(nodes) // 2)
        return passing, nodes


class OutOfTime(Exception):  # noqa: N818 - nothing went wrong
    """The time for a search is over in the midst of a run."""


def stopping(until: float) -> Report:
    """Return a progress callback that ends a run at a given time.

    Raises:
        OutOfTime: by the report, when it is called later.
    """

    def told(activity: str, done: int, total: int) -> None:
        del activity, done, total
        if monotonic() > until:
            raise OutOfTime

    return told


def other_ways(target: str, dtype: str) -> str:
    """Return other advice for a conversion that does not pass on a target with any nodes in float32."""
    has_other = dtype == "float16" and takes_anywhere(
        target, "MatMul", FORMATS["bfloat16"].tensor
    )
    return f"Level O1{', bfloat16' if has_other else ''} or wider limits may help."


def _suspects(report: DiffReport, kept: set[str], most: int) -> list[str]:
    """Return the nodes to keep next: those that break on the reference's own values; else those with the largest
    error.
    """
    hidden = misses_parts(report)
    rounded = list[tuple[float, str]]()
    broken = list[str]()
    for row in report.layers:
        if row.local is None or row.node in kept or row.local.rel_l2 <= _ROUNDED:
            continue
        rounded.append((row.own_error if hidden else row.local.rel_l2, row.node))
        if row.local.alarm:
            broken.append(row.node)
    if broken:
        return list(dict.fromkeys(broken))
    rounded.sort(key=itemgetter(0), reverse=True)
    return list(dict.fromkeys(node for _, node in rounded[:most]))


def _overflowing_in_bodies(
    graph: Graph, report: DiffReport, kept: set[str]
) -> list[str]:
    """Return the nodes in bodies that make or read values which inputs bring out of the range of float16.

    Layers are those of the main graph: of a loop, they tell only that something breaks in its body.
    """
    if report.lowest != FLOAT16.name:
        return []
    beyond = {room.value for room in report.rooms if room.found > FLOAT16.max_finite}
    labels = dict[str, None]()
    for value in graph.values:
        if value.scope and value.name in beyond and value.producer != ABSENT:
            readers = (index for index, _ in graph.uses[value.index])
            for node in graph.at({value.producer, *readers}):
                if not node.bodies:
                    labels[node.proto.name or node.proto.output[0]] = None
    return [name for name in labels if name not in kept][:MOST_NODES]


NO_ISLANDS: Final = Cure(
    "",
    (),
    "Float32 nodes cannot fix it there, but --fold or --rescale may: onnxamp check --target float16-only tries both.",
    confirmed=False,
    trials=0,
)
"""The advice for a device that ignores types, where nothing is tried."""
