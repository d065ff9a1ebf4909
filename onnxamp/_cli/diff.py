"""``onnxamp diff``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from onnxamp._audit.audit import audit_model
from onnxamp._cli.common import (
    FILE,
    Target,
    check_outputs,
    files_of,
    given_files,
    new_command,
    show,
    write_page,
)
from onnxamp._cli.options import (
    accept_option,
    cure_time_option,
    custom_ops_option,
    metric_option,
    option_group,
    place_of,
    place_options,
    provider_of,
    report_options,
    run_options,
    samples_of,
    sampling_arguments,
    state_option,
    target_of_engine,
)
from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._model.storage import write_file
from onnxamp._numerics.cure import Recipe, Trial, cure_conversion, other_ways
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.limits import Limits, apply_limits, make_limits
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._options.options import COMMAND_LINE, Options
from onnxamp._report.comparison import diff_report
from onnxamp._report.html.page import diff_page
from onnxamp._report.machine import diff_json, load_diff
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.run import Run
from onnxamp._runtime.session import choose_provider
from onnxamp._state.state import opened

_LIMITS: Final = {
    "tolerance": (
        "rel_l2",
        "Largest relative L2 error [float32 1e-5, float16 1e-2, bfloat16 5e-2].",
    ),
    "atol": ("max_abs", "Largest absolute error of an element."),
    "rtol": ("max_rel", "Largest relative error of an element (floor: 0.001 of the largest)."),
    "required": (
        "required_tolerance",
        "Largest t that is needed for abs(a - b) <= t + t abs(a) in every element.",
    ),
    "snr": ("snr_db", "Smallest signal-to-noise ratio in dB."),
    "cosine": ("cosine", "Smallest cosine similarity."),
    "top1": ("argmax_agreement", "Smallest share of rows with the same largest element."),
    "top5": ("top5_agreement", "Smallest share of the five largest elements per row that agree."),
    "differing": ("differing", "Largest share of elements that differ [integers: the tolerance]."),
    "detections": (
        "detections",
        "Largest error of a detection, relative to the largest score [the tolerance].",
    ),
}
"""Option -> the metric that it limits, and its help."""


@new_command("diff")
@click.argument("reference", type=FILE)
@click.argument("result", type=FILE, required=False)
@custom_ops_option
@run_options(judges=True)
@place_options
@metric_option
@accept_option
@click.option(
    "--layers", is_flag=True, help="Also compare every intermediate value that both models share."
)
@option_group(
    *(
        click.option(f"--{name}", metavar="[OUTPUT=]X", multiple=True, help=f"{text} Repeatable.")
        for name, (_, text) in _LIMITS.items()
    )
)
@click.option(
    "--target",
    type=Target(),
    default="cuda",
    show_default=True,
    metavar=COMMAND_LINE["target"].metavar,
    help="Whose arithmetic is emulated: webgpu sums up float16 in float16, others in float32.",
)
@click.option(
    "--budget",
    metavar="MB",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Memory for values and weights that are held at a time, besides the models.",
)
@state_option
@click.option("--save", type=FILE, help="Write the comparison as JSON.")
@click.option("--no-cure", is_flag=True, help="Do not search for options that fix a failure.")
@cure_time_option
@report_options(
    "comparison", "layer and metric", silent="Print nothing; use the exit code.", html=True
)
def command(reference: Path, result: Path | None, **options: Any) -> None:
    """Compare what two models compute: REFERENCE (the original) and RESULT (the converted model).

    REFERENCE may be a comparison written with --save: it is then judged by new limits without running anything.

    Exit codes: 0 all outputs are within their limits; 1 they are not; 2 nothing was compared: wrong usage, or a model
    that cannot be read or does not run. So are those of diff(1).
    """
    limits = make_limits({metric: options[name] for name, (metric, _) in _LIMITS.items()})
    limits = replace(limits, accept=options["accept"])
    models = () if result is None else (Model.of(reference), Model.of(result))
    read = [
        reference,
        *(file for model in models for file in files_of(model)),
        *given_files(options),
    ]
    check_outputs(read, [options["save"], options["html"], options["state"]])
    report = _run(*models, limits, options) if models else _judged_again(reference, limits, options)
    confirm_sources()
    if options["save"]:
        write_file(options["save"], (diff_json(report) + "\n").encode())
    if options["html"]:
        write_page(diff_page(report, audit_model(models[-1]) if models else None), options["html"])
    show(options, partial(diff_report, report), partial(diff_json, report))
    if not report.passed:
        raise click.exceptions.Exit(1 if report.was_compared else 2)


def _judged_again(saved: Path, limits: Limits, options: dict[str, Any]) -> DiffReport:
    """A saved comparison with other limits.

    Raises:
        ArgumentError: the file is no comparison, or an option asks for a run.
    """
    if saved.suffix != ".json":
        raise ArgumentError(
            "Name two models, or one comparison that was written with --save (.json)."
        )
    if (
        options["layers"]
        or options["accept"]
        or options["state"]
        or provider_of(options)
        or sampling_arguments(options)
    ):
        raise ArgumentError(
            "Nothing runs for a saved comparison: only limits and output options apply to it."
        )
    return apply_limits(load_diff(saved), limits)


def _run(original: Model, result: Model, limits: Limits, options: dict[str, Any]) -> DiffReport:
    layers = options["layers"] or bool(options["html"])
    provider = choose_provider(provider_of(options), whole=not layers)
    comparison = Comparison.of(
        original,
        Run(provider=provider, budget=options["budget"] * 2**20),
        limits,
        metric=options["metric"],
        target=options["target"],
        draw=partial(samples_of, original, options, options["target"]),
    )
    run = comparison.run
    with (
        progress_bar(quiet=options["quiet"]) as progress,
        opened(options["state"]) as state,
        place_of(options).sharing(len(run.samples), gpus=comparison.engine.gpus) as workers,
    ):
        comparison.run = replace(run, workers=workers, state=state, report=progress)
        report = comparison.compare(result, layers=layers or None, seconds=options["cure_time"])
        comparison.run = replace(comparison.run, state=None)
        is_shown = not options["quiet"] or options["html"] or options["save"]
        if is_shown and not options["no_cure"] and not report.passed and not report.skipped:
            report = replace(report, cure=_cure(original, result, report, comparison, options))
    return report


def _cure(
    original: Model,
    result: Model,
    report: DiffReport,
    comparison: Comparison,
    options: dict[str, Any],
) -> Cure | None:
    """A conversion of the original that would pass; None if it is not in float32, or nothing is low precision."""
    if report.reference_lowest != "float32" or report.lowest == "float32":
        return None
    target = target_of_engine(options, options["target"])
    advice = (
        "" if target == options["target"] else f"--target {target} converts for what {target} has. "
    )
    advice += other_ways(target, report.lowest)
    if not comparison.engine.runs_pieces:  # cures are found by layers
        return Cure(
            "", (), f"Nothing was tried in the browser. {advice}", confirmed=False, trials=0
        )
    recipe = Recipe(Options(dtype=report.lowest, target=target), sampling_arguments(options))
    assert result.path is not None
    output = result.path.with_name(f"{result.path.stem}_cured.onnx")
    trial = Trial(
        run=comparison.run,
        limits=comparison.limits,
        metric=options["metric"],
        seconds=options["cure_time"],
    )
    command = (str(original.path), str(output))
    return cure_conversion(
        original, command, recipe, trial, tried=False, comparison=comparison, advice=advice
    )
