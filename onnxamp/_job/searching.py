"""What the options of a conversion leave to measurements: level auto, exponents, ranges, and rounded weights."""

from dataclasses import replace

from onnxamp._job import Job, Request, Validation
from onnxamp._numerics.comparison import Comparison
from onnxamp._runtime import STRESS
from onnxamp._tuning.ranges import with_ranges
from onnxamp._tuning.results import Search
from onnxamp._tuning.rounding import rounder_of
from onnxamp._tuning.tune import tune


def searched(job: Job, request: Request, comparison: Comparison | None) -> Job:
    """Return a conversion with everything that its options leave to measurements.

    Args:
        job: the conversion.
        request: how the user asked for it.
        comparison: what compares results with the original, whose limits become those of level auto if these are wider;
            None if results are not validated.

    Raises:
        ArgumentError: a sample does not fit the model. RuntimeFailure: the model does not run.
    """
    if request.is_rounded:
        job = replace(job, rounder=rounder_of(job.options, job.run))
    if request.is_tuned:
        job = _tuned(job, request.validation)
    if comparison is not None:
        comparison.try_reference()
        if job.tuned is not None and job.tuned.coarse:
            # Errors from the model's own rounding to integers must not fail the validation of a tuned result.
            limits = comparison.limits
            widest = max(limits.tolerance or 0.0, job.tuned.tolerance)
            comparison.limits = replace(limits, tolerance=widest)
    if job.plan is None and job.options.lacks_ranges:
        steps = STRESS if request.validation is None else request.validation.stress
        options = with_ranges(job.model, job.options, job.run, steps)
        job = replace(job, options=options)
    return job


def _tuned(job: Job, validation: Validation | None) -> Job:
    """Return the conversion that level auto finds."""
    search = job.search or Search()
    if validation is not None:
        search = replace(search, stress=validation.stress)
    tuned = tune(job.model, job.options, search, job.run, job.rounder)
    return replace(job, tuned=tuned, plan=tuned.plan, options=tuned.plan.options)
