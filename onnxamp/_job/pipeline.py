"""The pipeline of a conversion. All entry points lead here: functions, commands, folders, and interfaces of other
converters.

    model -> samples and reference -> measurements that options ask for -> decide and rewrite -> validate, heal -> sink

Python functions that return a model use :func:`convert_in_memory`, everything that writes a file
:func:`convert_to_file`, and those that only decide :func:`plan_in_memory`. They begin alike (:func:`_begun`) and
measure alike (:func:`_settled`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnxamp._base.optional import has_runtime, runtime_fault
from onnxamp._base.state import opened
from onnxamp._convert.convert import Converted, convert, decide
from onnxamp._convert.misspelled import early_warnings, refuse_misspelled
from onnxamp._convert.plan import ExpectedError, Plan, make_plan
from onnxamp._facts.signature import declared_ops
from onnxamp._job import Job, Request
from onnxamp._model.model import Model
from onnxamp._model.sources import release_sources
from onnxamp._runtime.run import Run, RunOptions
from onnxamp._tuning.results import Search

if TYPE_CHECKING:
    from onnxamp._gradients.expected import Known
    from onnxamp._job.writing import Conversion, Sink, StagedConversion
    from onnxamp._numerics.diff import Comparison
    from onnxamp._numerics.results import DiffReport
    from onnxamp._runtime.samples import Samples
    from onnxamp._tuning.results import Tuned


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a request whose result was written.

    Attributes:
        conversion: the result that was written, with its validation.
        tuned: the outcome of level auto; None at other levels.
        samples: the samples that models ran on; None if none did.
        compared: the comparison that :attr:`Request.compares` asks for.
    """

    conversion: "Conversion"
    tuned: "Tuned | None"
    samples: "Samples | None"
    compared: "DiffReport | None" = None


def convert_to_file(request: Request, sink: "Sink") -> Outcome:
    """Convert a model that was read from a file, validate the result, and write it whole or not at all.

    A result that fails its validation is healed, or written under another name, as the request says.

    Raises:
        ArgumentError: an option or a path has an impossible value, or the state belongs to another conversion.
        OutputError: the target cannot be written.
        RuntimeFailure: options ask for measurements, and the model does not run.
        Others as :func:`onnxamp._convert.convert.convert`.
    """
    from onnxamp._job.writing import CONVERSION, staged_conversion, unfinished  # noqa: PLC0415 - only files need it

    early = _early_warnings(request)
    compared = None
    with _begun(request) as (begun, comparison):
        kept = unfinished(begun, sink)
        job = _settled(request, begun, comparison)
        job.run.report("converting", 0, 0)
        if comparison is None:
            with staged_conversion(job, sink, kept=kept) as staged:
                compared = _compared(job, staged, layers=request.compares)
            conversion = staged.judged()
            if request.validation is not None:
                conversion = replace(conversion, validation=_unvalidated(conversion))
        else:
            from onnxamp._job.healing import healed  # noqa: PLC0415 - loads what runs models
            from onnxamp._job.validation import RefusedError, Validator  # noqa: PLC0415
            from onnxamp._numerics.proof import UpgradeProof  # noqa: PLC0415

            validation = request.validation
            assert validation is not None
            validator = Validator(comparison, sink, UpgradeProof(comparison), kept)
            try:
                conversion, report = validator.convert(job, validation.layers)
            except RefusedError as refused:
                conversion, report = healed(job, validator, validation, refused)
            conversion = replace(conversion, validation=report)
        release_sources()  # the result is in its place
        if job.run.state is not None:
            job.run.state.drop(CONVERSION)
        # The plan of a tuning has measured reasons, and its own expected error.
        tuned = job.tuned
        plan = tuned.plan if tuned else _expecting(request, job, conversion.plan)
        conversion = replace(conversion, plan=plan)
    request.warn(text for text in conversion.plan.warnings if text not in early)
    return Outcome(
        conversion=conversion,
        tuned=job.tuned,
        samples=job.run.inputs,
        compared=compared,
    )


def convert_in_memory(request: Request) -> tuple[Converted, "Tuned | None"]:
    """Convert a model, and return the result without validating it.

    Returns:
        The converted model, and the outcome of level auto if that is the level.

    Raises:
        As :func:`convert_to_file`, apart from writing.
    """
    early = _early_warnings(request)
    with _begun(request) as (begun, _):
        job = _settled(request, begun, None)
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
    early = _early_warnings(request)
    with _begun(request) as (begun, _):
        job = _settled(request, begun, None)
        if job.tuned is not None:
            request.warn(text for text in job.tuned.plan.warnings if text not in early)
            return job.tuned.plan, job.tuned
        plan = make_plan(decide(job.model, job.options).analysis)
        return _expecting(request, job, plan), None


def _expecting(request: Request, job: Job, plan: Plan) -> Plan:
    """Return a plan with the error to expect of its result, if the request asks for that."""
    return foreseen(job.model, plan, job.run) if request.expects else plan


def foreseen(
    model: Model, plan: Plan, run: Run | RunOptions, known: "Known | None" = None
) -> Plan:
    """Return a plan with the expected error of its result, or with the reason why it is unknown.

    Args:
        model: the original.
        plan: of its conversion.
        run: the samples, and where the model runs on them.
        known: measurements for other plans with the same run; new measurements are added. None for a single plan.

    Raises:
        ArgumentError: a sample does not fit the model.
    """
    if not has_runtime():
        return replace(plan, expected=ExpectedError(why=runtime_fault() or ""))
    from onnxamp._gradients.expected import with_expected_error  # noqa: PLC0415 - loads what runs models

    if isinstance(run, RunOptions):
        ranges = dict(plan.options.input_ranges)
        run = Run(inputs=run.draw(model, ranges=ranges), report=run.report)
    return with_expected_error(model, plan, run, known)


@contextmanager
def _begun(request: Request) -> Iterator[tuple[Job, "Comparison | None"]]:
    """Draw samples, open the state, and start the worker processes that a request asks for.

    Yields:
        The conversion before any measurement, and the comparison for validation, if it is validated.
    """
    asked = request.run
    options = request.options
    model = request.model
    with declared_ops(options.custom_ops):
        run = Run(
            provider=asked.provider,
            renews=asked.renews,
            report=asked.report,
            budget=asked.budget,
        )
        comparison = _comparison(request, run)
        if comparison is not None:
            run = replace(run, inputs=comparison.run.samples)
        elif request.measures or (request.expects and has_runtime()):
            ranges = dict(options.input_ranges)
            run = replace(run, inputs=asked.draw(model, ranges=ranges))
        gpus = run.engine.reference.gpus if run.runs_models else 0
        with (
            opened(asked.state, renew=asked.renews) as state,
            asked.place.sharing(gpus=gpus) as workers,
        ):
            run = replace(run, workers=workers, state=state)
            if comparison is not None:
                comparison.run = replace(comparison.run, workers=workers)
            yield (
                Job(
                    model=model,
                    options=options,
                    plan=request.plan,
                    run=run,
                    search=request.search,
                    explains=request.explains,
                ),
                comparison,
            )


def _comparison(request: Request, run: Run) -> "Comparison | None":
    """Return the comparison of results with the original; None if they are not validated, or cannot be run here."""
    if request.validation is None or not has_runtime():
        return None
    from onnxamp._job.validation import comparison_for  # noqa: PLC0415 - loads what runs models

    return comparison_for(request, request.validation, run)


def _compared(
    job: Job, staged: "StagedConversion", *, layers: bool | None
) -> "DiffReport | None":
    """Compare a result with the original, which it may replace, on the samples of the job; None if not asked for."""
    if layers is None:
        return None
    from onnxamp._numerics.diff import Comparison  # noqa: PLC0415 - few conversions are compared without limits

    comparison = Comparison.of(job.model, replace(job.run, workers=None, state=None))
    with staged.saved.stage.shown() as written:
        result = Model.read(written)
        return comparison.compare(result, layers=layers, activity="comparing values")


def _unvalidated(conversion: "Conversion") -> "DiffReport":
    """Return a report that says why a result was not validated: ONNX Runtime is not installed."""
    from onnxamp._numerics.results import DiffReport  # noqa: PLC0415 - loads what compares models

    return DiffReport(
        reference=str(conversion.source),
        result=str(conversion.target),
        ran_on="",
        inputs="",
        samples=0,
        lowest=conversion.plan.dtype,
        skipped=runtime_fault(),
    )


def _early_warnings(request: Request) -> list[str]:
    """Issue the warnings that are known before anything slow runs, and return them.

    Raises:
        ArgumentError: a name matches nothing, and the options are strict about names.
    """
    if request.plan is not None:
        return []
    with declared_ops(request.options.custom_ops):
        if not request.measures and request.validation is None:
            refuse_misspelled(request.model, request.options)
            return []
        early = early_warnings(request.model, request.options)
    request.warn(early)
    return early


def _settled(request: Request, job: Job, comparison: "Comparison | None") -> Job:
    """Return a conversion with the measurements that its options ask for: level auto, ranges, and rounding of weights.

    Raises:
        ArgumentError: a sample does not fit the model. RuntimeFailure: the model does not run.
    """
    if not job.run.runs_models:
        return job
    if request.is_rounded:
        from onnxamp._numerics.rounding import rounder_of  # noqa: PLC0415 - needs scipy, and few options ask for it

        job = replace(job, rounder=rounder_of(job.options, job.run))
    if request.is_tuned:
        job = _tuned(job)
    if comparison is not None:
        comparison.try_reference()
        if job.tuned is not None and job.tuned.coarse:
            # What the model's own rounding to integers moves must not fail the validation of a tuned result.
            limits = comparison.limits
            widest = max(limits.tolerance or 0.0, job.tuned.tolerance)
            comparison.limits = replace(limits, tolerance=widest)
    if job.plan is None and job.options.lacks_ranges:
        from onnxamp._numerics.ranges import with_ranges  # noqa: PLC0415 - few options ask for it

        job = replace(job, options=with_ranges(job.model, job.options, job.run))
    return job


def _tuned(job: Job) -> Job:
    """Return the conversion that level auto finds."""
    from onnxamp._tuning.tune import tune  # noqa: PLC0415 - only level auto needs it

    tuned = tune(job.model, job.options, job.search or Search(), job.run, job.rounder)
    return replace(job, tuned=tuned, plan=tuned.plan, options=tuned.plan.options)
