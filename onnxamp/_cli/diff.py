"""``onnxamp diff``."""

from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import click

from onnxamp._audit.audit import audit_model
from onnxamp._base.errors import ArgumentError, printable
from onnxamp._base.state import opened
from onnxamp._cli.common import (
    Given,
    place_of,
    run_options_of,
    sampling_arguments,
    show,
    target_of_engine,
    typed_flags,
    typed_options,
)
from onnxamp._cli.outputs import check_outputs
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._model.staging import write_file
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.judging import apply_limits
from onnxamp._numerics.limits import Limits, make_limits
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._options.command_line import option_rows
from onnxamp._options.options import Options
from onnxamp._report.comparison import diff_report
from onnxamp._report.formats import diff_facts, diff_json, load_diff
from onnxamp._report.html import diff_page
from onnxamp._report.html.render import write_page
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.session import choose_provider
from onnxamp._tuning.cure import Recipe, cure_conversion, other_ways


def run(given: Given) -> None:
    """Run ``onnxamp diff``."""
    metrics = [row.name for row in option_rows() if row.type == "limit"]
    limits = make_limits({metric: getattr(given, metric) for metric in metrics})
    limits = replace(limits, accept=given.accept)
    result = given.result
    models = () if result is None else (Model.of(given.reference), Model.of(result))
    original = [] if given.original is None else [Model.of(given.original)]
    read = chain.from_iterable(model.files for model in (*models, *original))
    check_outputs(given, [given.save, given.html, given.state], given.reference, *read)
    report = _run(*models, limits, given) if models else _judged_again(limits, given)
    confirm_sources()
    if given.save:
        write_file(given.save, f"{diff_json(report)}\n".encode())
    if given.html:
        write_page(
            diff_page(
                report, audit_model(models[-1], given.target) if models else None
            ),
            given.html,
        )
    show(given, partial(diff_report, report), "diff", partial(diff_facts, report))
    if report.passed:
        return
    if given.quiet and not report.was_compared:
        why = report.skipped or report.failure or ""
        click.echo(f"Not compared: {printable(why)}", err=True)
    raise click.exceptions.Exit(1 if report.was_compared else 2)


def _judged_again(limits: Limits, given: Given) -> DiffReport:
    """Return a saved comparison with other limits.

    Raises:
        ArgumentError: the file is no comparison, an option asks for a run, or a limit names no output.
    """
    saved: Path = given.reference
    if saved.suffix != ".json":
        raise ArgumentError(
            "Name two models, or one comparison that --save has written (.json)."
        )
    if typed_flags(*_RUNNING) or typed_options() & {"layers", "original"}:
        raise ArgumentError(
            "A saved comparison is judged without running anything: only limits and output options apply to it."
        )
    report = load_diff(saved)
    limits.check(output.name for output in report.outputs)
    return apply_limits(report, replace(limits, coarse=report.coarse))


_RUNNING: Final = ("Inputs and runs", "Validation", "Precision")
"""Groups of options that have no effect on a saved comparison."""


def _run(original: Model, result: Model, limits: Limits, given: Given) -> DiffReport:
    """Compare two models, and look for a conversion that passes if they differ."""
    layers = given.layers or bool(given.html)
    provider = choose_provider(given.provider)
    comparison = Comparison.of(
        original,
        Run(provider=provider, budget=given.budget),
        limits,
        metric=given.metric,
        target=given.target,
        draw=partial(requested_samples, run_options_of(given), original, given.target),
        beyond="named",
    )
    run = comparison.run
    with (
        progress_bar(quiet=given.quiet) as progress,
        opened(given.state) as state,
        place_of(given).sharing(
            len(run.samples), gpus=comparison.engine.gpus
        ) as workers,
    ):
        comparison.run = replace(run, workers=workers, state=state, report=progress)
        report = comparison.compare(
            result, layers=layers or None, seconds=given.cure_time
        )
        # The state belongs to this comparison; what follows would overwrite it.
        comparison.run = replace(comparison.run, state=None)
        if given.original:
            source = Model.of(given.original)
            report = comparison.with_original(report, source, result)
        is_shown = not given.quiet or given.html or given.save
        if is_shown and not given.no_cure and not report.passed and not report.skipped:
            report = replace(
                report, cure=_cure(original, result, report, comparison, given)
            )
    return report


def _cure(
    original: Model,
    result: Model,
    report: DiffReport,
    comparison: Comparison,
    given: Given,
) -> Cure | None:
    """Return a conversion of the original that would pass; None if it is not in float32, or nothing is low
    precision.
    """
    if report.reference_lowest != "float32" or report.lowest == "float32":
        return None
    target = target_of_engine(given, given.target)
    advice = other_ways(target, report.lowest)
    if target != given.target:
        advice = f"--target {target} converts for its kernels and arithmetic. {advice}"
    recipe = Recipe(
        Options(dtype=report.lowest, target=target), sampling_arguments(given)
    )
    assert result.path is not None
    output = result.path.with_name(f"{result.path.stem}_cured.onnx")
    command = (str(original.path), str(output))
    return cure_conversion(
        original,
        command,
        recipe,
        comparison,
        tried=False,
        seconds=given.cure_time,
        advice=advice,
    )
