"""Checking a model for devices that compute in float16 whatever its types say."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from onnxamp._convert.convert import convert
from onnxamp._errors import OnnxAmpError
from onnxamp._model.model import Model
from onnxamp._numerics.cure import Trial
from onnxamp._numerics.ranges import with_ranges
from onnxamp._numerics.results import Cure, RunCheck
from onnxamp._options.levels import Level
from onnxamp._options.options import Options

_OPTIONS: Final = Options(Level.O3, hazards=False, target="float16-only", from_dtype="auto")
_WAYS: Final = (
    ("--fold", Options(Level.O0, fold=True, from_dtype="auto")),
    ("--rescale", Options(Level.O3, rescale=True, target="float16-only", from_dtype="auto")),
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
    return Model(convert(model, _OPTIONS).embedded())


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
        bad = replace(bad, alarm=bad.alarm.replace("Inf", "overflow, which becomes NaN,", 1))
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
            return Cure(flag, (), "Tried: all values fit in a conversion with", True, trials)
    text = "No cure was found: values do not fit float16 with --fold or --rescale either."
    return Cure("", (), text, confirmed=False, trials=len(_WAYS))
