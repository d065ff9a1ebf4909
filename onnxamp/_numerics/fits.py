"""What a checked model's values need to fit float16: which leave its range, and which of them exponents bring back."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Final

from onnxamp._convert.convert import convert
from onnxamp._decide.hazards import find_hazards
from onnxamp._decide.rescaling import find_rescaling, value_names
from onnxamp._dtypes import FLOAT16
from onnxamp._errors import OnnxAmpError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model
from onnxamp._numerics.check import Check
from onnxamp._numerics.cure import Trial
from onnxamp._numerics.ranges import measured_ranges, with_ranges
from onnxamp._numerics.results import Cure, OutOfRange, RangeFit, RunCheck
from onnxamp._options.levels import Level, Rescaling
from onnxamp._options.options import Options
from onnxamp._runtime.run import Run

_OPTIONS: Final = Options(Level.O3, rescale=True, from_dtype="auto")
"""What is asked: may all be float16, with exponents where it takes them?"""

_TYPES: Final = frozenset({"float32", "float16"})
_FAULTS: Final = frozenset({"NaN", "Inf", "saturated"})
"""Faults of values that leave the range."""


def find_fit(model: Model, found: RunCheck, run: Run) -> RangeFit | None:
    """Which values do not fit float16, and whether they do with exponents; None where all fit.

    The model is raised to float32, and its ranges are measured. Where exponents help, they are tried: the model is
    converted with them, and checked as it was.

    Args:
        model: the model.
        found: what checking it found.
        run: how it was checked.
    """
    if not any(
        row.dtype in _TYPES
        and (row.measured.reference_max > FLOAT16.max_finite or row.fault in _FAULTS)
        for row in found.values
    ):
        return None
    run = replace(run, provider=run.provider if run.engine.is_reference else None)
    try:
        graph, ranges = measured_ranges(model, _OPTIONS, run)
        rescaling = find_rescaling(graph, _OPTIONS, ranges)
        rows = tuple(_out_of_range(graph, ranges.largest, rescaling))
        options = replace(_OPTIONS, rescaling=rescaling)
        helped = any(row.exponent for row in rows)
        result = Model(convert(model, options).embedded()) if helped else None
        again = None if result is None else Check(result, run.bare).report()
    except OnnxAmpError:  # what runs as it is need not run in float32, as opaque ops do
        return None
    if not rows:
        return None
    tried = again is not None and again.first_bad is None and again.skipped is None
    return RangeFit(rows, tried=tried, made_up=run.samples.made_up)


def _out_of_range(
    graph: Graph, largest: Mapping[str, float], rescaling: Rescaling
) -> Iterator[OutOfRange]:
    """The values beyond float16's range in the order in which they are computed."""
    exponents = {row.value: row.exponent for row in rescaling.scaled}
    unfit = {row.value: row.why for row in rescaling.unfit}
    hazards = {
        hazard.node: hazard.detail for hazard in graph.ask(find_hazards, FLOAT16)
    }
    values = {name: value for value, name in value_names(graph).items()}
    for name, reach in largest.items():
        if reach <= FLOAT16.max_finite:
            continue
        producer = graph.values[values[name]].producer
        exponent, why = exponents.get(name, 0), unfit.get(name, "")
        if not why and reach * 2.0**-exponent > FLOAT16.max_finite:
            why = hazards.get(producer, "it stays float32")
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
"""What may make all values fit: options, and the conversion that they stand for."""


NO_ISLANDS: Final = Cure(
    "",
    (),
    "No float32 node cures it there: --fold or --rescale may; onnxamp check --target float16-only tries both.",
    confirmed=False,
    trials=0,
)
"""What to do about a conversion whose values do not fit."""


def as_float16(model: Model) -> Model:
    """A model as devices run it that do not honour types: every op is float16 that can be, without float32 islands.

    Raises:
        ModelError: the model cannot be converted.
    """
    return Model(convert(model, _EVERYWHERE).embedded())


def check_whole(model: Model, check: Callable[[Model], RunCheck]) -> RunCheck:
    """Check a model as it runs where types are not honoured.

    Overflow becomes NaN there, so a fault is named so.

    Args:
        model: the model, of whatever types.
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
    """Find out what makes a model fit: one op in place of a decomposed one, or exponents. No float32 island does.

    Args:
        model: the model.
        check: runs a model and measures its values.
        trial: the inputs for ranges, and where they are measured.
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
    text = (
        "No cure was found: values do not fit float16 with --fold or --rescale either."
    )
    return Cure("", (), text, confirmed=False, trials=len(_WAYS))
