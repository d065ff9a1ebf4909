"""Level auto in place of a conversion that failed its validation."""

import logging
from dataclasses import replace
from typing import Final

from onnxamp._convert.plan import Plan
from onnxamp._errors import OnnxAmpError
from onnxamp._model.model import Model
from onnxamp._numerics.rounding import WeightRounder
from onnxamp._options.options import Options
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.tune import tune

_LOG: Final = logging.getLogger("onnxamp")


def measured_plan(
    model: Model, search: Search, rounder: WeightRounder | None, options: Options, tolerance: float, seconds: float
) -> Plan | None:
    """What level auto finds within a tolerance; None where it lowers nothing, or the model cannot be tuned.

    It lowers as much as it may, as the other levels do, whatever that is estimated to take.

    Args:
        model: the original.
        search: the other arguments of the tuning.
        rounder: rounds weights, if the options ask for it.
        options: those of the conversion, at level auto.
        tolerance: the largest accepted error.
        seconds: time in which candidates are looked for.
    """
    try:
        tuned = tune(model, options, replace(search, tolerance=tolerance, seconds=seconds, allow_slower=True), rounder)
    except OnnxAmpError as error:
        _LOG.info("level auto cannot be measured: %s", error)
        return None
    return tuned.plan if tuned.held and any(row.low for row in tuned.plan.rows) else None
