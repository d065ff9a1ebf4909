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
    from onnxamp._tuning.errors.foreseen import Known


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
    """Return a plan with the expected error of its result, as :func:`with_expected_error` does where models run."""
    if not has_runtime():
        return replace(plan, expected=ExpectedError(why=runtime_fault() or ""))
    # Few conversions ask for it, and the rules of gradients take as long to load as a small model to convert.
    from onnxamp._tuning.errors.foreseen import with_expected_error  # noqa: PLC0415

    return with_expected_error(model, plan, run, known, steps=steps)
