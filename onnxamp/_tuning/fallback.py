"""Level auto in place of a conversion that failed its validation."""

import logging
from dataclasses import replace
from typing import Final

from onnxamp._convert.plan import Plan
from onnxamp._errors import OnnxAmpError
from onnxamp._model.model import Model
from onnxamp._numerics.rounding import WeightRounder
from onnxamp._options.options import Options
from onnxamp._runtime.run import Run
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.tune import tune

_LOG: Final = logging.getLogger("onnxamp")


def measured_plan(
    model: Model, options: Options, search: Search, run: Run, rounder: WeightRounder | None
) -> Plan | None:
    """Return what level auto finds; None where it lowers nothing, or the model cannot be tuned.

    It lowers as much as it may, as the other levels do, however long the result is estimated to take.

    Args:
        model: the original.
        options: those of the conversion, at level auto.
        search: the tolerance, and the time in which candidates are searched for.
        run: on what models run.
        rounder: rounds weights, if the options ask for it.
    """
    try:
        tuned = tune(model, options, replace(search, allow_slower=True), run, rounder)
    except OnnxAmpError as error:
        _LOG.info("level auto cannot be measured: %s", error)
        return None
    return tuned.plan if tuned.held and any(row.low for row in tuned.plan.rows) else None
