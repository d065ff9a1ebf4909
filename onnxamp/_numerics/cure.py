"""The next action after a comparison: options that fix a failure, tried before they are suggested.

The original is converted again with more and more nodes kept in float32: broken nodes first, then those with the
largest local error. Each candidate is compared as the failing result was. If values exceed the range of float16,
exponents and folding are tried as well.
"""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from time import monotonic
from typing import Final

from onnxamp._base.errors import OnnxAmpError
from onnxamp._convert.convert import convert
from onnxamp._decide.exponent_rows import value_names
from onnxamp._decide.kinds import find_hazards
from onnxamp._decide.rescaling import find_rescaling
from onnxamp._facts.dtypes import FLOAT16, FORMATS
from onnxamp._facts.kernels import takes_anywhere
from onnxamp._facts.providers import profile_of
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model, ModelSource
from onnxamp._numerics.check import Check
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.judging import misses_parts
from onnxamp._numerics.limits import Limits
from onnxamp._numerics.ranges import measured_ranges, with_ranges
from onnxamp._numerics.results import Cure, DiffReport, OutOfRange, RangeFit, RunCheck
from onnxamp._numerics.rounding import WeightRounder, rounder_of
from onnxamp._options.options import Options
from onnxamp._options.values import DiffMetric, Level, Rescaling
from onnxamp._runtime import CURE_SECONDS
from onnxamp._runtime.engines import choose_engine
from onnxamp._runtime.run import Report, Run

_FEW: Final = 4
MOST_NODES: Final = 64
"""Bounds on the number of nodes that a command may name; within them, three quarters of the rounded nodes."""

TRIALS: Final = 12
"""Conversions that are tried for a comparison."""

_MORE: Final = 4
"""Further ones that are tried to name fewer nodes."""

_ROUNDED: Final = 1e-6
"""Local relative error from which on a node has been rounded: float32 alone stays below."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A conversion; ``sampling`` holds the command-line options for the same inputs."""

    options: Options = field(default_factory=Options)
    sampling: tuple[str, ...] = ()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The comparison of candidates, which is the same as the one that failed.

    Attributes:
        run: the samples, and how models run on them.
        seconds: the time after which no further candidate is tried.
        activity: a description for progress reports.
    """

    run: Run
    limits: Limits = field(default_factory=Limits)
    metric: DiffMetric = "auto"
    seconds: float = CURE_SECONDS
    activity: str = "looking for a fix"


def cure_conversion(
    original: ModelSource,
    command: tuple[str, str],
    recipe: Recipe,
    trial: Trial,
    *,
    tried: bool,
    comparison: Comparison | None = None,
    failed: DiffReport | None = None,
    rounder: WeightRounder | None = None,
    advice: str | None = None,
) -> Cure:
    """Find nodes to keep in float32 so that a conversion meets its limits.

    Args:
        original: the float32 model.
        command: source and target in the suggested command.
        recipe: the conversion to start from.
        trial: how candidates are compared.
        tried: whether this very recipe failed.
        comparison: the comparison to use, if there is one.
        advice: other options that may help; None for what the target suggests.
        rounder: rounds weights with compensation if the recipe asks for it; None to make one.
        failed: the result of this very recipe, with layers, if known; it counts as the first trial.

    Returns:
        The command that meets the limits, or how far the trials came.
    """
    model = Model.of(original)
    if comparison is None:
        comparison = Comparison.of(
            model,
            trial.run,
            trial.limits,
            metric=trial.metric,
            target=recipe.options.target,
        )
    until = monotonic() + trial.seconds
    search = _Search(
        original=model,
        recipe=recipe,
        trial=trial,
        comparison=replace(
            comparison, run=replace(comparison.run, state=None, report=stopping(until))
        ),
        until=until,
        trials=0 if failed is None else 1,
        rounder=rounder or rounder_of(recipe.options, trial.run.bare),
    )
    nodes: tuple[str, ...] = ()
    report = search.compare(nodes, layers=True) if failed is None else failed
    rows = report.layers if report is not None else ()
    rounded = sum(
        row.local is not None and row.local.rel_l2 > _ROUNDED for row in rows
    )
    step = 1
    while report is not None and not report.passed and search.goes_on(TRIALS):
        inner = _overflowing_in_bodies(model.ask(graph_of), report, set(nodes))
        more = inner or _suspects(report, set(nodes), step)
        most = max(_FEW, min(MOST_NODES, rounded * 3 // 4), len(nodes) + len(inner))
        if not more or len(nodes) >= most:
            break
        nodes = (*nodes, *more)[:most]
        # Doubling reaches many nodes in few trials; those too many are left out at the end.
        step = step * 2
        report = search.compare(nodes, layers=True)
    if report is None or not report.passed:
        kept = f" with up to {node_count(nodes)} in float32" if nodes else ""
        when = f" in {trial.seconds:.0f} s" if search.is_late else ""
        if advice is None:
            advice = other_ways(recipe.options.target, recipe.options.dtype)
        is_tried = report is not None or nodes
        misses = f": trials{kept} miss the limits as well" if is_tried else ""
        text = f"No fix was found{when}{misses}. {advice}".rstrip()
        return Cure("", nodes, text, confirmed=False, trials=search.trials)
    nodes = search.fewer(nodes)
    worst = max((diff.rel_l2 for diff in report.outputs if diff.is_float), default=0.0)
    if not nodes and not tried:
        device = recipe.options.target
        meant = "" if device == Options.target else f" for {device}"
        text = f"Tried: a conversion{meant} with onnxamp's lists and hazards passes (relative L2 {worst:.2g})."
    else:
        text = f"Tried: with {node_count(nodes)} more in float32, the conversion passes (relative L2 {worst:.2g})."
    return Cure(
        recipe.command(*command, nodes),
        nodes,
        text,
        confirmed=True,
        trials=search.trials,
    )


@dataclass(slots=True)
class _Search:
    """Trials of a recipe with nodes kept in float32."""

    original: Model
    recipe: Recipe
    trial: Trial
    comparison: Comparison
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

    def compare(self, nodes: Sequence[str], *, layers: bool) -> DiffReport | None:
        """Convert with these nodes in float32, and compare; None if it cannot be converted so, or in time."""
        self.trials += 1
        self.trial.run.report(self.trial.activity, self.trials, TRIALS + _MORE)
        try:
            model = convert(
                self.original, self.recipe.keeping(nodes), rounder=self.rounder
            ).embedded()
        except OnnxAmpError:  # the options contradict each other with these nodes
            return None
        with suppress(OutOfTime):
            return self.comparison.compare(Model(model), layers=layers)
        return None

    def fewer(self, nodes: tuple[str, ...]) -> tuple[str, ...]:
        """Return fewer nodes that are enough: halves of them are left out, then quarters, and so on."""
        size = len(nodes) // 2
        while size and self.goes_on(TRIALS + _MORE):
            for start in range(0, len(nodes), size):
                rest = nodes[:start] + nodes[start + size :]
                report = self.compare(rest, layers=False)
                if report is not None and report.passed:
                    nodes = rest
                    break
                if not self.goes_on(TRIALS + _MORE):
                    return nodes
            size = min(size // 2, len(nodes) // 2)
        return nodes


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


def node_count(nodes: Sized) -> str:
    """Return the number of nodes in words."""
    return "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"


def _suspects(report: DiffReport, kept: set[str], count: int) -> list[str]:
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
    return list(dict.fromkeys(node for _, node in rounded[:count]))


def _overflowing_in_bodies(
    graph: Graph, report: DiffReport, kept: set[str]
) -> list[str]:
    """Return the nodes in bodies that make or read values which inputs bring out of the range of float16.

    Layers are those of the main graph: of a loop, they tell only that something breaks in its body.
    """
    if report.lowest != FLOAT16.name:
        return []
    beyond = {room.value for room in report.rooms if room.found > FLOAT16.max_finite}
    found = dict[str, None]()
    for value in graph.values if beyond else ():
        if value.scope and value.name in beyond and value.producer != ABSENT:
            readers = (index for index, _ in graph.uses[value.index])
            for node in graph.at({value.producer, *readers}):
                if not node.bodies:
                    found[node.proto.name or node.proto.output[0]] = None
    return [name for name in found if name not in kept][:MOST_NODES]


CHECKS: Final = 24
"""Emulated runs that are tried for a model alone."""


def cure_run(model: ModelSource, report: RunCheck, trial: Trial) -> Cure | None:
    """Find nodes that must stay in float32 for a checked model to run without faults.

    On an engine that computes low precision itself, the model is converted again as far as its kernels and its
    arithmetic allow, then with more and more nodes in float32, and each result is checked there.

    Args:
        model: the model that was checked.
        report: what the check found.
        trial: how it was checked; its limits are not used.

    Returns:
        The options, or how far the trials came; None if no low-precision value is at fault: the float32 model fails.
    """
    source = Model.of(model)
    engine = choose_engine(trial.run.provider)
    is_emulated = engine.is_reference
    known = None if is_emulated else profile_of(engine.provider)
    target = known.name if known is not None else "any"
    nodes: dict[str, None] = {}
    most = CHECKS if is_emulated else TRIALS
    checked = report
    trials = 0
    until = monotonic() + trial.seconds
    run = replace(trial.run, workers=None, state=None, report=stopping(until))
    while checked.first_bad is not None and trials < most and len(nodes) <= MOST_NODES:
        around = _around_faults(checked)
        if not around:
            return None
        # The nodes that the target's arithmetic breaks may be enough.
        if trials or known is None:
            if not around.keys() - nodes.keys():
                break
            nodes |= around
        trials += 1
        trial.run.report(trial.activity, trials, most)
        try:
            again = source if is_emulated else _converted(source, target, nodes)
            checked = Check(again, run, keep=frozenset(nodes)).report()
        except OutOfTime:
            break
        except OnnxAmpError:
            if is_emulated:
                raise
            return None  # it cannot be raised to float32, or contradicts itself with these nodes
    names = shlex.quote("|".join(map(re.escape, nodes)))
    count = f"{node_count(nodes)} in float32"
    if checked.first_bad is not None or checked.skipped is not None:
        when = f" in {trial.seconds:.0f} s" if monotonic() > until else ""
        what, where = ("trials", "") if is_emulated else ("conversions", " there")
        text = f"No fix was found{when}: {what} with up to {count} also fail{where}."
        return Cure("", tuple(nodes), text, confirmed=False, trials=trials)
    options = [f"--target {target}"] if known is not None else []
    options += [f"--keep-fp32 {names}"] if nodes else []
    how = f"for {target}" if known is not None else "again"
    more = f" with {count}" if nodes else ""
    text = f"Tried: converted {how}{more}, it has no fault there. Convert the original with"
    if is_emulated:
        text = f"Tried: no fault is left with {count}. Convert the original again with"
    return Cure(" ".join(options), tuple(nodes), text, confirmed=True, trials=trials)


def _converted(model: Model, target: str, nodes: Iterable[str]) -> Model:
    """Return the model converted as far as a target allows, except for some nodes."""
    kept = tuple(map(re.escape, nodes))
    options = Options(Level.O3, from_dtype="auto", target=target, keep_high=kept)
    return Model(convert(model, options).embedded())


def _around_faults(checked: RunCheck) -> dict[str, None]:
    """Return the low-precision nodes that go wrong, and the readers of their outputs."""
    faults = [row for row in checked.values if row.fault and row.dtype in FORMATS]
    nodes = chain.from_iterable((row.node, *row.readers) for row in faults)
    return dict.fromkeys(nodes)


_OPTIONS: Final = Options(Level.O3, rescale=True, from_dtype="auto")
"""A conversion that lowers everything to float16, with exponents where necessary."""

_TYPES: Final = frozenset({"float32", "float16"})
_FAULTS: Final = frozenset({"NaN", "Inf", "saturated"})
"""Faults of values that leave the range."""


def find_fit(model: Model, found: RunCheck, run: Run) -> RangeFit | None:
    """Return the values that do not fit float16, and whether exponents help; None if all fit.

    The model is raised to float32, and its ranges are measured. If exponents help, they are tried: the model is
    converted with them and checked in the same way.

    Args:
        model: the model.
        found: what checking it found.
        run: how it was checked.
    """
    wide = [row for row in found.values if row.dtype in _TYPES]
    reaches = max((row.measured.reference_max for row in wide), default=0.0)
    is_faulty = any(row.fault in _FAULTS for row in wide)
    if not (reaches > FLOAT16.max_finite or is_faulty):
        return None
    is_emulated = choose_engine(run.provider).is_reference
    run = replace(run, provider=run.provider if is_emulated else None)
    try:
        graph, ranges = measured_ranges(model, _OPTIONS, run)
        rescaling = find_rescaling(graph, _OPTIONS, ranges)
        rows = tuple(_out_of_range(graph, ranges.largest, rescaling))
        options = replace(_OPTIONS, rescaling=rescaling)
        helped = any(row.exponent for row in rows)
        result = Model(convert(model, options).embedded()) if helped else None
        again = None if result is None else Check(result, run.bare).report()
    except OnnxAmpError:  # what runs in low precision need not run in float32
        return None
    if not rows:
        return None
    tried = again is not None and again.first_bad is None and again.skipped is None
    return RangeFit(rows, tried=tried, made_up=run.samples.made_up)


def _out_of_range(
    graph: Graph, largest: Mapping[str, float], rescaling: Rescaling
) -> Iterator[OutOfRange]:
    """Yield the values beyond float16's range in the order in which they are computed."""
    exponents = {row.value: row.exponent for row in rescaling.scaled}
    unfit = {row.value: row.why for row in rescaling.unfit}
    hazards = {one.node: one.detail for one in graph.ask(find_hazards, FLOAT16)}
    values = {name: value for value, name in value_names(graph).items()}
    for name, reach in largest.items():
        if reach <= FLOAT16.max_finite:
            continue
        producer = graph.values[values[name]].producer
        exponent = exponents.get(name, 0)
        why = unfit.get(name, "")
        if not why and reach * 2.0**-exponent > FLOAT16.max_finite:
            why = hazards.get(producer, "it stays in float32")
        op = "" if producer == ABSENT else graph.nodes[producer].key
        yield OutOfRange(name, op, reach, 0 if why else exponent, why)


_EVERYWHERE: Final = Options(
    Level.O3, hazards=False, target="float16-only", from_dtype="auto"
)
_WAYS: Final = (
    ("--fold", Options(Level.O0, fold=True, from_dtype="auto")),
    (
        "--rescale",
        Options(Level.O3, rescale=True, target="float16-only", from_dtype="auto"),
    ),
)
"""Options that may make all values fit, in the order in which they are tried, each with its conversion."""


NO_ISLANDS: Final = Cure(
    "",
    (),
    "Float32 nodes cannot fix it there, but --fold or --rescale may: onnxamp check --target float16-only tries both.",
    confirmed=False,
    trials=0,
)
"""The advice for a device that ignores types, where nothing is tried."""


def as_float16(model: Model) -> Model:
    """Return a model as devices run it that ignore types: every op is float16 that can be, without float32 islands.

    Raises:
        ModelError: the model cannot be converted.
    """
    return Model(convert(model, _EVERYWHERE).embedded())


def check_whole(model: Model, check: Callable[[Model], RunCheck]) -> RunCheck:
    """Check a model as it runs on a device that ignores types.

    Overflow becomes NaN there, so faults are called NaN.

    Args:
        model: the model, of any types.
        check: runs a model and measures its values.

    Raises:
        ModelError: the model cannot be converted.
    """
    run = check(as_float16(model))
    bad = run.first_bad
    if bad is not None and bad.alarm.startswith("Inf"):
        bad = replace(
            bad, alarm=bad.alarm.replace("Inf", "overflow, which becomes NaN,", 1)
        )
    ran_on = run.ran_on if run.skipped else f"{run.ran_on} everywhere"
    return replace(run, ran_on=ran_on, first_bad=bad)


def cure_whole(model: Model, check: Callable[[Model], RunCheck], trial: Trial) -> Cure:
    """Find what makes a model fit: folding decomposed ops, or exponents. No float32 island does.

    Args:
        model: the model.
        check: runs a model and measures its values.
        trial: the inputs for ranges, and where they run.
    """
    for trials, (flag, options) in enumerate(_WAYS, 1):
        trial.run.report(trial.activity, trials, len(_WAYS))
        try:
            asked = with_ranges(model, options, trial.run.bare)
            again = check_whole(Model(convert(model, asked).embedded()), check)
        except OnnxAmpError:
            continue
        if again.first_bad is None and again.skipped is None:
            return Cure(
                flag, (), "Tried: all values fit in a conversion with", True, trials
            )
    text = "No fix was found: even with --fold or --rescale, some values do not fit float16."
    return Cure("", (), text, confirmed=False, trials=len(_WAYS))
