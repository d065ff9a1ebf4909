"""``onnxamp convert``."""

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import click

from onnxamp._base.errors import ArgumentError, printable
from onnxamp._base.extensions import extensions
from onnxamp._base.optional import has_runtime
from onnxamp._cli.common import (
    Given,
    check_dims,
    in_its_folder,
    keep_outcome,
    limits_in_its_folder,
    options_of,
    overridden_by_plan,
    refuse_idle_options,
    run_options_of,
    sampling_arguments,
    show,
    sink_of,
    tell,
    unlike_target,
    validation_options,
)
from onnxamp._cli.outputs import output_path
from onnxamp._convert.plan import load_plan, strict
from onnxamp._job import Request, Validation, search_of
from onnxamp._job.pipeline import convert_to_file
from onnxamp._model.model import Model
from onnxamp._report.progress import progress_bar

if TYPE_CHECKING:
    from onnxamp._job.writing import Conversion


def run(given: Given) -> None:
    """Run ``onnxamp convert``."""
    if given.model.is_dir():
        extensions("commands")["convert folder"].load().run(given)
        return
    if given.retry:
        raise ArgumentError("--retry is for a folder of models.")
    plan = strict(load_plan(given.plan_file)) if given.plan_file else None
    options = plan.options if plan else options_of(given)
    refuse_idle_options(given, plan, options)
    if given.validate and has_runtime():
        from onnxamp._runtime.sessions.session import choose_provider  # noqa: PLC0415 - only what validates runs models

        choose_provider(given.provider)  # may fail, before a model is read
    model = Model.of(given.model)
    if plan is None:
        options = in_its_folder(given, options, model)
    check_dims(model, given)
    if plan is not None:
        tell(overridden_by_plan())
    elif given.validate:
        tell(unlike_target(given, options.target))
    target = output_path(model, given, options.dtype, may_fail=given.validate)
    with progress_bar(quiet=given.quiet) as progress:
        request = Request(
            model=model,
            asked=options,
            plan=plan,
            run=run_options_of(given, report=progress),
            search=search_of(given.tolerance, given.metric, given.accept),
            validation=_validation(given, model) if given.validate else None,
            expects=given.expected_error,
            explains=not given.quiet or bool(given.html),
            warn=tell,
        )
        outcome = convert_to_file(request, sink_of(given, target))
    conversion = outcome.conversion
    keep_outcome(given, outcome)
    if not given.quiet:
        from onnxamp._report.conversion import conversion_facts, conversion_report  # noqa: PLC0415

        report = partial(conversion_report, conversion)
        show(given, report, "convert", partial(conversion_facts, conversion))
    _finish(conversion, quiet=given.quiet)


def _validation(given: Given, model: Model) -> Validation:
    """Return how the result is validated."""
    return replace(
        validation_options(given),
        limits=limits_in_its_folder(model),
        accept=given.accept,
        metric=given.metric,
        layers=bool(given.html) or None,
        sampling=sampling_arguments(given),
    )


def _finish(conversion: "Conversion", *, quiet: bool) -> None:
    """Say what even a quiet command says.

    Raises:
        click.ClickException: the result failed its validation.
    """
    if conversion.fault:
        target = printable(str(conversion.target))
        raise click.ClickException(
            f"The result failed validation and was written to {target}: {printable(conversion.fault)}"
        )
    validation = conversion.validation
    unknown = validation and (validation.skipped or validation.unopened)
    if quiet and unknown:
        click.echo(f"Not validated: {printable(unknown)}", err=True)
