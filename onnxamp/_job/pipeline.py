"""The pipeline of a conversion to a file. Commands, folders and interfaces of other converters lead here.

    model -> samples and reference -> measurements that options ask for -> decide and rewrite -> validate, heal -> sink

Functions that return a model or a plan use :mod:`onnxamp._job.in_memory`. Both begin alike
(:mod:`onnxamp._job.beginning`) and measure alike (:mod:`onnxamp._job.measuring`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from onnxamp._base.optional import runtime_fault
from onnxamp._base.records import record
from onnxamp._job import Request
from onnxamp._job.beginning import begun, issue_early_warnings
from onnxamp._job.expecting import expecting
from onnxamp._job.refusals import RefusedError
from onnxamp._job.writing import (
    CONVERSION,
    Conversion,
    Sink,
    staged_conversion,
    unfinished,
)
from onnxamp._model.sources import release_sources

if TYPE_CHECKING:
    from onnxamp._numerics.results import DiffReport
    from onnxamp._runtime.inputs.samples import Samples
    from onnxamp._tuning.results import Tuned


@record(kw_only=True)
class Outcome:
    """The outcome of a request whose result was written.

    Attributes:
        conversion: the result that was written, with its validation.
        tuned: the outcome of level auto; None at other levels, and if its result failed validation and was repaired.
        samples: the samples that models ran on; None if none did.
        compared: the comparison that :attr:`Request.compares` asks for.
    """

    conversion: Conversion
    tuned: "Tuned | None"
    samples: "Samples | None"
    compared: "DiffReport | None" = None


def convert_to_file(request: Request, sink: Sink) -> Outcome:
    """Convert a model that was read from a file, validate the result, and write it whole or not at all.

    A result that fails its validation is healed, or written under another name, as the request says.

    Raises:
        ArgumentError: an option or a path has an impossible value, or the state belongs to another conversion.
        OutputError: the target cannot be written.
        RuntimeFailure: options ask for measurements, and the model does not run.
        Others as :func:`onnxamp._convert.convert.convert`.
    """
    early = issue_early_warnings(request)
    compared = None
    with begun(request) as beginning:
        kept = unfinished(beginning.job, sink)
        job = beginning.measured()
        measures = beginning.measures
        validator = None
        if measures is not None:
            validator = measures.validator(sink, kept)
        job.run.report("converting", 0, 0)
        if measures is None or validator is None:
            with staged_conversion(job, sink, kept=kept) as staged:
                if measures is not None:
                    compared = measures.compared(job, staged)
            conversion = staged.judged()
            if request.validation is not None:
                conversion = replace(conversion, validation=_unvalidated(conversion))
        else:
            validation = request.validation
            assert validation is not None
            try:
                conversion = validator.convert(job, validation.layers)
            except RefusedError as refused:
                conversion = measures.healed(job, validator, refused)
        release_sources()  # the result is in its place
        if job.run.state is not None:
            job.run.state.drop(CONVERSION)
        tuned = None if _is_repaired(conversion) else job.tuned
        # The plan of a tuning has measured reasons, and its own expected error.
        plan = tuned.plan if tuned else expecting(request, job, conversion.plan)
        conversion = replace(conversion, plan=plan)
    request.warn(text for text in conversion.plan.warnings if text not in early)
    return Outcome(
        conversion=conversion,
        tuned=tuned,
        samples=job.run.inputs,
        compared=compared,
    )


def _is_repaired(conversion: Conversion) -> bool:
    """Return whether another result replaces the one that was asked for, which failed its validation."""
    validation = conversion.validation
    cure = None if validation is None else validation.cure
    return cure is not None and cure.applied


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
