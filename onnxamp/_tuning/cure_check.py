"""Cures of a checked model whose values go wrong: nodes in float32, exponents, or folds, each checked again."""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from time import monotonic
from typing import Final

from onnxamp._base.errors import OnnxAmpError
from onnxamp._base.words import count
from onnxamp._convert.convert import convert
from onnxamp._convert.float16_only import as_float16
from onnxamp._decide.exponents.rescaling import find_rescaling
from onnxamp._decide.exponents.rows import value_names
from onnxamp._decide.kinds import find_hazards
from onnxamp._facts.dtypes import FLOAT16, FORMATS
from onnxamp._facts.providers import profile_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model
from onnxamp._numerics.check import Check
from onnxamp._numerics.results import Cure, OutOfRange, RangeFit, RunCheck
from onnxamp._options.options import Options
from onnxamp._options.values import Level, Rescaling
from onnxamp._runtime import CURE_SECONDS
from onnxamp._runtime.engines import choose_engine
from onnxamp._runtime.run import Run
from onnxamp._tuning.cure import (
    ACTIVITY,
    MOST_NODES,
    TRIALS,
    OutOfTime,
    stopping,
)
from onnxamp._tuning.ranges import measured_ranges, with_ranges

CHECKS: Final = 24
"""Emulated runs that are tried for a model alone."""


def cure_run(
    source: Model, report: RunCheck, run: Run, seconds: float = CURE_SECONDS
) -> Cure | None:
    """Find nodes that must stay in float32 for a checked model to run without faults.

    On an engine that computes low precision itself, the model is converted again as far as its kernels and its
    arithmetic allow, then with more and more nodes in float32, and each result is checked there.

    Args:
        source: the model that was checked.
        report: what the check found.
        run: the samples, and how the model ran on them.
        seconds: the time after which nothing more is tried.

    Returns:
        The options, or how far the trials came; None if no low-precision value is at fault: the float32 model fails.
    """
    engine = choose_engine(run.provider)
    is_emulated = engine.is_reference
    known = None if is_emulated else profile_of(engine.provider)
    target = known.name if known is not None else "any"
    nodes: dict[str, None] = {}
    most = CHECKS if is_emulated else TRIALS
    checked = report
    finished: tuple[str, ...] = ()
    trials = 0
    until = monotonic() + seconds
    timed = replace(run, workers=None, state=None, report=stopping(until))
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
        run.report(ACTIVITY, trials, most)
        try:
            again = source if is_emulated else _converted(source, target, nodes)
            checked = Check(again, timed, keep=frozenset(nodes)).report()
            finished = tuple(nodes)
        except OutOfTime:
            break
        except OnnxAmpError:
            if is_emulated:
                raise
            return None  # it cannot be raised to float32, or contradicts itself with these nodes
    if checked.first_bad is not None or checked.skipped is not None:
        when = f" in {seconds:.0f} s" if monotonic() > until else ""
        what, where = ("trials", "") if is_emulated else ("conversions", " there")
        text = f"No fix was found{when}"
        if finished:
            kept = f"{count(len(finished), 'node')} in float32"
            text = f"{text}: {what} with up to {kept} also fail{where}"
        return Cure("", finished, f"{text}.", confirmed=False, trials=trials)
    named = None if known is None else known.name
    options, text = _fix(nodes, named, is_emulated=is_emulated)
    return Cure(options, tuple(nodes), text, confirmed=True, trials=trials)


def _fix(
    nodes: Collection[str], target: str | None, *, is_emulated: bool
) -> tuple[str, str]:
    """Return the options with which no fault is left, and a sentence that leads to them.

    Args:
        nodes: the nodes that stay in float32.
        target: the target of the engine that computes low precision itself; None if it has no profile.
        is_emulated: whether low precision was emulated instead.
    """
    options = [] if target is None else [f"--target {target}"]
    if nodes:
        names = "|".join(map(re.escape, nodes))
        options.append(f"--keep-fp32 {shlex.quote(names)}")
    kept = f"{count(len(nodes), 'node')} in float32"
    if is_emulated:
        text = f"Tried: no fault is left with {kept}. Convert the original again with"
    else:
        how = "again" if target is None else f"for {target}"
        more = f" with {kept}" if nodes else ""
        text = f"Tried: converted {how}{more}, it has no fault there. Convert the original with"
    return " ".join(options), text


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


def find_fit(model: Model, checked: RunCheck, run: Run) -> RangeFit | None:
    """Return the values that do not fit float16, and whether exponents help; None if all fit.

    The model is raised to float32, and its ranges are measured. If exponents help, they are tried: the model is
    converted with them and checked in the same way.

    Args:
        model: the model.
        checked: what checking it found.
        run: how it was checked.
    """
    wide = [row for row in checked.values if row.dtype in _TYPES]
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
    exponents = rescaling.exponents
    unfit = {row.value: row.why for row in rescaling.unfit}
    hazards = {
        hazard.node: hazard.detail for hazard in graph.ask(find_hazards, FLOAT16)
    }
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


_WAYS: Final = (
    ("--fold", Options(Level.O0, fold=True, from_dtype="auto")),
    (
        "--rescale",
        Options(Level.O3, rescale=True, target="float16-only", from_dtype="auto"),
    ),
)
"""Options that may make all values fit, in the order in which they are tried, each with its conversion."""


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


def cure_whole(
    model: Model,
    check: Callable[[Model], RunCheck],
    run: Run,
    seconds: float = CURE_SECONDS,
) -> Cure:
    """Find what makes a model fit: folding decomposed ops, or exponents. Float32 nodes cannot help there.

    Args:
        model: the model.
        check: runs a model and measures its values.
        run: the inputs for ranges, and where they run.
        seconds: the time after which no other way is tried.
    """
    until = monotonic() + seconds
    tried = list[str]()
    for trials, (flag, options) in enumerate(_WAYS, 1):
        if monotonic() > until:
            break
        tried.append(flag)
        run.report(ACTIVITY, trials, len(_WAYS))
        try:
            asked = with_ranges(model, options, run.bare)
            again = check_whole(Model(convert(model, asked).embedded()), check)
        except OnnxAmpError:
            continue
        if again.first_bad is None and again.skipped is None:
            return Cure(
                flag, (), "Tried: all values fit in a conversion with", True, trials
            )
    text = f"No fix was found in {seconds:.0f} s."
    if tried:
        text = f"No fix was found: even with {' or '.join(tried)}, some values do not fit float16."
    return Cure("", (), text, confirmed=False, trials=len(tried))
