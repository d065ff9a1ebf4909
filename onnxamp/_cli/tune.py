"""``onnxamp tune``."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxamp._cli.common import new_command, show, target_of, tell, write_conversion_page
from onnxamp._cli.options import (
    accept_option,
    conversion_options,
    in_place_option,
    model_argument,
    options_of,
    output_options,
    place_options,
    preset_options,
    run_options,
    run_options_of,
    state_option,
    target_option,
    unlike_target,
)
from onnxamp._job.pipeline import convert_to_file
from onnxamp._job.request import Request
from onnxamp._job.writing import Sink
from onnxamp._model.model import Model
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.results import LayerDiff
from onnxamp._options.levels import Level
from onnxamp._report.progress import progress_bar
from onnxamp._report.tuning import tuning_json, tuning_report
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.run import Run, RunOptions
from onnxamp._target.roofline import devices
from onnxamp._target.versions import AUTO
from onnxamp._tuning.arguments import SECONDS, SENSITIVITY_RUNS, TIMES, Search
from onnxamp._tuning.metric import METRICS
from onnxamp._tuning.search import CANDIDATE_RUNS


@new_command("tune")
@model_argument
@target_option
@in_place_option
@click.option(
    "--tolerance",
    type=float,
    default=1e-2,
    show_default=True,
    help="Largest error to accept; for snr, the smallest ratio in dB.",
)
@click.option(
    "--metric",
    default="auto",
    show_default=True,
    metavar="NAME",
    help=f"How to measure the error: {', '.join(METRICS)}, package:function, or auto: detections where an op"
    " selected them, and else rel-l2.",
)
@accept_option
@run_options(count=4)
@place_options
@conversion_options
@click.option(
    "--device",
    type=click.Choice([AUTO, *devices()]),
    default=AUTO,
    show_default=True,
    help="The device to estimate times for: auto is the target's, the GPU here, or an A100.",
)
@click.option(
    "--runs",
    type=click.IntRange(1),
    default=SENSITIVITY_RUNS,
    show_default=True,
    help="Runs that may measure how sensitive the outputs are to each op; candidates take up to"
    f" {CANDIDATE_RUNS + 2} more.",
)
@state_option
@click.option(
    "--pick",
    type=click.IntRange(0),
    metavar="K",
    help="Write candidate K instead of the best one; with the --state of an earlier run, without searching again.",
)
@click.option(
    "--times",
    type=click.Choice(TIMES),
    default=TIMES[0],
    show_default=True,
    help="Op times: estimated for the device, or measured with ONNX Runtime's profiler. On CUDA and plugin"
    " providers whole models are then timed, and decide what is written.",
)
@click.option(
    "--search-time",
    metavar="SECONDS",
    type=click.FloatRange(0),
    default=SECONDS,
    show_default=True,
    help="Begin no further run after so long, and choose among what was found.",
)
@click.option(
    "--budget",
    metavar="MB",
    type=click.IntRange(1),
    default=BUDGET >> 20,
    show_default=True,
    help="Memory for values and weights at a time.",
)
@click.option(
    "--allow-slower",
    is_flag=True,
    help="Choose as much low precision as possible, even if it is slower than float32.",
)
@output_options
@preset_options
def command(model: Path, **options: Any) -> None:
    """Convert as much of MODEL to low precision as its measured accuracy allows.

    If MODEL is a manifest (NAME.toml) of models that work together, and of a function that runs them, all are converted
    to the folder OUTPUT, under one tolerance. --save-plan is then a folder, too. The code that a manifest names runs as
    you: tune only manifests that you trust.

    Exit codes: 0 the result was written and meets the tolerance; 1 it could not be made or exceeds the tolerance;
    2 wrong usage.
    """
    if model.suffix.lower() == ".toml":
        from onnxamp._cli.pipeline import tune_manifest  # noqa: PLC0415 - only pipelines need it

        tune_manifest(model, options)
    else:
        _tune(model, options)


def _tune(path: Path, given: dict[str, Any]) -> None:
    asked, model = options_of(given, Level.AUTO), Model.of(path)
    target = target_of(model, given, asked.dtype)
    tell(unlike_target(given, asked.target))
    search = Search(
        tolerance=given["tolerance"],
        metric=given["metric"],
        device=given["device"],
        times=given["times"],
        runs=given["runs"],
        pick=given["pick"],
        seconds=given["search_time"],
        allow_slower=given["allow_slower"],
        accept=given["accept"],
    )
    with progress_bar(quiet=given["quiet"]) as progress:
        run = run_options_of(given, report=progress)
        layers: list[LayerDiff] = []

        def compare(written: Path) -> None:
            layers.extend(_layers(model, written, run))

        sink = Sink(
            target,
            given["external_data"],
            given["shard_size"],
            given["data_names"] or "onnx",
            approve=compare if given["html"] else None,  # the result may replace the original
        )
        outcome = convert_to_file(
            Request(model=model, asked=asked, run=run, search=search, warn=tell), sink
        )
    conversion, tuned = outcome.conversion, outcome.tuned
    assert tuned is not None
    if given["save_plan"]:
        tuned.plan.save(given["save_plan"])
    if given["html"]:
        result = Model.read(target)
        write_conversion_page(
            made=conversion,
            result=result,
            tuned=tuned,
            path=given["html"],
            layers=layers,
            samples=outcome.samples,
        )
    report = partial(tuning_report, conversion, tuned, state=given["state"])
    show(given, report, partial(tuning_json, conversion, tuned))
    if not tuned.held:
        raise click.ClickException(f"{target} was written, but exceeds the tolerance.")


def _layers(model: Model, written: Path, run: RunOptions) -> tuple[LayerDiff, ...]:
    """Compare every value of the result with the original's, for the page."""
    result = Model.read(written, model)
    compared = Run(
        inputs=run.draw(model), provider=run.provider, report=run.report, budget=run.budget
    )
    return (
        Comparison.of(model, compared)
        .compare(result, layers=True, activity="comparing values")
        .layers
    )
