"""Conversions that write no file: they return the model, or only decide."""

from typing import TYPE_CHECKING

from onnxamp._convert.convert import Converted, convert, decide
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._job import Request
from onnxamp._job.beginning import begun, issue_early_warnings
from onnxamp._job.expecting import expecting

if TYPE_CHECKING:
    from onnxamp._tuning.results import Tuned


def convert_in_memory(request: Request) -> tuple[Converted, "Tuned | None"]:
    """Convert a model, and return the result without validating it.

    Returns:
        The converted model, and the outcome of level auto if that is the level.

    Raises:
        As :func:`onnxamp._job.pipeline.convert_to_file`, apart from writing.
    """
    early = issue_early_warnings(request)
    with begun(request) as beginning:
        job = beginning.measured()
        converted = convert(job.model, job.options, job.plan, rounder=job.rounder)
    warnings = converted.analysis.pins.warnings
    if job.tuned is not None:
        warnings = job.tuned.plan.warnings
    request.warn(text for text in warnings if text not in early)
    return converted, job.tuned


def plan_in_memory(request: Request) -> tuple[Plan, "Tuned | None"]:
    """Decide the precision of every float without rewriting the model. The plan contains the warnings.

    Raises:
        As :func:`convert_in_memory`.
    """
    early = issue_early_warnings(request)
    with begun(request) as beginning:
        job = beginning.measured()
        if job.tuned is not None:
            request.warn(text for text in job.tuned.plan.warnings if text not in early)
            return job.tuned.plan, job.tuned
        plan = make_plan(decide(job.model, job.options).analysis)
        return expecting(request, job, plan), None
