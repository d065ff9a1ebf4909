"""Conversions that are validated before they are put in their place, and cured where they fail.

A result is written to a temporary name and compared with the original there. If it fails, nodes are looked for that
must stay float32, and that conversion is written instead; where none is found in time, the float32 model is. A failing
result never takes the place of another file.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from onnxamp._convert.convert import Conversion, Sink, convert_to_file
from onnxamp._convert.plan import Plan
from onnxamp._model.model import Model
from onnxamp._numerics.cure import Recipe, Trial, cure_conversion
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.limits import Limits
from onnxamp._numerics.metrics import TOLERANCES
from onnxamp._numerics.results import DiffReport
from onnxamp._options.options import Level, Options


class _RefusedError(Exception):
    """A result that failed its validation, before it was put in its place."""

    def __init__(self, report: DiffReport) -> None:
        super().__init__()
        self.report = report


@dataclass(frozen=True, slots=True)
class Validation:
    """How results are validated.

    Attributes:
        comparison: compares them with the original.
        failed: where a result goes that fails and is not cured.
        layers: compare all values, too; None if outputs miss their limits.
        heals: look for a cure.
        sampling: options of the command line that make it run on the same inputs.
        seconds: for which cures are looked for, about.
        progress: called with the activity, the work that is done, and all there is to do.
    """

    comparison: Comparison
    failed: Path
    layers: bool | None
    heals: bool
    sampling: tuple[str, ...]
    seconds: float
    progress: Callable[[str, int, int], None]


def convert_validated(
    model: Model, sink: Sink, options: Options, validation: Validation, plan: Plan | None = None
) -> tuple[Conversion, DiffReport]:
    """Convert a model, and write what passes: the conversion, one with more nodes in float32, or the float32 model.

    With a plan, which is not to be changed, and where ``validation.heals`` is False, a conversion that fails is written
    to ``validation.failed``.

    Raises:
        As :func:`onnxamp._convert.convert.convert_to_file` and :meth:`Comparison.compare`.
    """
    try:
        return _attempt(model, sink, options, validation, plan)
    except _RefusedError as refused:
        failure = refused.report
    if plan is not None or not validation.heals:
        validation.failed.parent.mkdir(parents=True, exist_ok=True)
        made = convert_to_file(model, replace(sink, target=validation.failed), options, plan)
        return made, replace(failure, result=str(validation.failed))
    compared = validation.comparison
    recipe = Recipe(replace(options, hazards=True), validation.sampling)
    trial = Trial(
        compared.samples, compared.limits, compared.provider, compared.reference.budget,
        seconds=validation.seconds,
        progress=lambda done, total: validation.progress(_looking(validation.seconds), done, total),
    )  # fmt: skip
    command = (str(model.path), str(sink.target))
    cure = cure_conversion(
        model, command, recipe, trial, tried=options.hazards, comparison=compared,
        failed=failure if recipe.options == options else None,
    )  # fmt: skip
    why = failure.failure or next(iter(failure.warnings), "")
    cure = replace(cure, applied=True, failure=why, first_bad=failure.first_bad)
    if cure.confirmed:
        with suppress(_RefusedError):
            made, report = _attempt(model, sink, recipe.keeping(cure.nodes), validation, None)
            return made, replace(report, cure=cure)
    made, report = _attempt(
        model, sink, Options(Level.O0, dtype=options.dtype), replace(validation, layers=False), None
    )
    return made, replace(report, cure=replace(cure, confirmed=False))


def tuned_limits(tolerance: float, dtype: str) -> Limits:
    """The limits of a model that was tuned: what was asked for, or what is usual if that is more."""
    return Limits(tolerance=max(tolerance, TOLERANCES[dtype]))


def _looking(seconds: float) -> str:
    return f"looking for a fix (at most {seconds:.0f} s)"


def _attempt(
    model: Model, sink: Sink, options: Options, validation: Validation, plan: Plan | None
) -> tuple[Conversion, DiffReport]:
    """Convert, and put the result in its place if it passes or cannot be compared.

    Raises:
        _RefusedError: it fails.
    """
    reports: list[DiffReport] = []

    def approve(written: Path) -> None:
        report = validation.comparison.compare(
            Model.read(written, model),
            layers=validation.layers,
            progress=lambda done, total: validation.progress("validating", done, total),
        )
        reports.append(replace(report, result=str(sink.target)))
        if not report.passed and not report.skipped:
            raise _RefusedError(reports[0])

    made = convert_to_file(model, replace(sink, approve=approve), options, plan)
    return made, reports[0]
