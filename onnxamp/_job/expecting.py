"""The error to expect of a conversion, which plans contain if a request asks for it."""

from dataclasses import replace
from typing import TYPE_CHECKING

from onnxamp._base.optional import has_runtime, runtime_fault
from onnxamp._convert.plan import ExpectedError, Plan
from onnxamp._job import Job, Request
from onnxamp._model.model import Model
from onnxamp._runtime import STRESS
from onnxamp._runtime.run import Run, RunOptions

if TYPE_CHECKING:
    from onnxamp._tuning.foreseen import Known


def expecting(request: Request, job: Job, plan: Plan) -> Plan:
    """Return a plan with the error to expect of its result, if the request asks for that."""
    if not request.expects:
        return plan
    validation = request.validation
    steps = STRESS if validation is None else validation.stress
    return foreseen(job.model, plan, job.run, steps=steps)


def foreseen(
    model: Model,
    plan: Plan,
    run: Run | RunOptions,
    known: "Known | None" = None,
    *,
    steps: int = STRESS,
) -> Plan:
    """Return a plan with the expected error of its result, or with the reason why it is unknown.

    Args:
        model: the original.
        plan: of its conversion.
        run: the samples, and where the model runs on them.
        known: measurements for other plans with the same run; new measurements are added. None for a single plan.
        steps: steps toward inputs that are hard for the result, which show whether values may leave the range.

    Raises:
        ArgumentError: a sample does not fit the model.
    """
    if not has_runtime():
        return replace(plan, expected=ExpectedError(why=runtime_fault() or ""))
    # Few conversions ask for it, and the rules of gradients take as long to load as a small model to convert.
    from onnxamp._numerics.stress import Stress  # noqa: PLC0415
    from onnxamp._runtime.requested import requested_samples  # noqa: PLC0415
    from onnxamp._tuning.foreseen import with_expected_error  # noqa: PLC0415

    options = plan.options
    ranges = options.input_ranges
    if isinstance(run, RunOptions):
        inputs = requested_samples(run, model, ranges=dict(ranges))
        run = Run(inputs=inputs, report=run.report)
    stressed = dict[str, float]()
    if options.low.is_narrow:
        stressed = Stress(options.low, steps, ranges).overflowing(model, run.samples)
    if options.rescaling is not None:
        for scaled in options.rescaling.scaled:
            stressed.pop(scaled.value, None)  # its exponent leaves it more room
    return with_expected_error(model, plan, run, known, stressed)
