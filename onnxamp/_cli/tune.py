"""``onnxamp tune``."""

from dataclasses import replace
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
    provider_of,
    run_options,
    samples_of,
    state_option,
    target_option,
    unlike_target,
)
from onnxamp._cli.presets import preset_options
from onnxamp._cli.workers import place_of, place_options
from onnxamp._convert.convert import Sink, convert_to_file
from onnxamp._convert.misspelt import early_warnings
from onnxamp._model.model import Model
from onnxamp._model.sources import release_sources
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.results import LayerDiff
from onnxamp._numerics.rounding import rounder_of
from onnxamp._options.levels import Level
from onnxamp._report.progress import progress_bar
from onnxamp._report.tuning import tuning_json, tuning_report
from onnxamp._runtime.engines import Progress
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.side import BUDGET
from onnxamp._target.roofline import devices
from onnxamp._target.versions import AUTO
from onnxamp._tuning.arguments import Search
from onnxamp._tuning.job import TIMES
from onnxamp._tuning.metric import METRICS
from onnxamp._tuning.search import CANDIDATE_RUNS, SECONDS, SENSITIVITY_RUNS
from onnxamp._tuning.tune import tune


@new_command("tune")
@model_argument
@target_option
@in_place_option
@click.option("--tolerance", type=float, default=1e-2, show_default=True,
              help="Largest error to accept; for snr, the smallest ratio in dB.")  # fmt: skip
@click.option("--metric", default="auto", show_default=True, metavar="NAME",
              help=f"How to measure the error: {', '.join(METRICS)}, package:function, or auto: detections where an op"
              " selected them, and else rel-l2.")  # fmt: skip
@accept_option
@run_options(count=4)
@place_options
@conversion_options
@click.option("--device", type=click.Choice([AUTO, *devices()]), default=AUTO, show_default=True,
              help="The device to estimate times for: auto is the target's, the GPU here, or an A100.")  # fmt: skip
@click.option("--runs", type=click.IntRange(1), default=SENSITIVITY_RUNS, show_default=True,
              help="Runs that may measure how sensitive the outputs are to each op; candidates take up to"
              f" {CANDIDATE_RUNS + 2} more.")  # fmt: skip
@state_option
@click.option(
    "--pick",
    type=click.IntRange(0),
    metavar="K",
    help="Write candidate K instead of the best one; with the --state of an earlier run, without searching again.",
)
@click.option("--times", type=click.Choice(TIMES), default=TIMES[0], show_default=True,
              help="Op times: estimated for the device, or measured with ONNX Runtime's profiler. On CUDA and plugin"
                   " providers whole models are then timed, and decide what is written.")  # fmt: skip
@click.option("--search-time", metavar="SECONDS", type=click.FloatRange(0), default=SECONDS, show_default=True,
              help="Begin no further run after so long, and choose among what was found.")  # fmt: skip
@click.option("--budget", metavar="MB", type=click.IntRange(1), default=BUDGET >> 20, show_default=True,
              help="Memory for values and weights at a time.")  # fmt: skip
@click.option("--allow-slower", is_flag=True,
              help="Choose as much low precision as possible, even if it is slower than float32.")  # fmt: skip
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


def _tune(model: Path, options: dict[str, Any]) -> None:
    asked, opened = options_of(options, Level.AUTO), Model.of(model)
    target = target_of(opened, options, asked.dtype)
    early, samples = early_warnings(opened, asked), samples_of(opened, options)
    tell([*early, *unlike_target(options, asked.target)])
    with progress_bar(quiet=options["quiet"]) as progress:
        search = Search(
            options["tolerance"], options["metric"], samples, device=options["device"],
            times=options["times"], provider=provider_of(options), runs=options["runs"], state=options["state"],
            pick=options["pick"], progress=progress, budget=options["budget"] << 20,
            seconds=options["search_time"], allow_slower=options["allow_slower"], accept=options["accept"],
            place=place_of(options),
        )  # fmt: skip
        sink = Sink(target, options["external_data"], options["shard_size"], partial(progress, "writing"),
                    data_names=options["data_names"] or "onnx")  # fmt: skip
        rounder = rounder_of(asked, samples, search.provider, partial(progress, "rounding weights"))
        tuned = tune(opened, asked, search, rounder)
        layers: list[LayerDiff] = []

        def compare(written: Path) -> None:
            told = partial(progress, "comparing values")
            layers.extend(_layers(opened, written, samples, search, told))

        sink = replace(sink, approve=compare if options["html"] else None)  # it may replace the original
        made = convert_to_file(opened, sink, tuned.plan.options, tuned.plan, rounder=rounder)
        release_sources()  # the result is in its place
    made = replace(made, plan=tuned.plan)  # its reasons are the measured ones
    if options["save_plan"]:
        tuned.plan.save(options["save_plan"])
    if options["html"]:
        write_conversion_page(made, Model.read(target), None, tuned, options["html"], layers, samples)
    tell(text for text in tuned.plan.warnings if text not in early)
    show(options, partial(tuning_report, made, tuned, state=options["state"]), partial(tuning_json, made, tuned))
    if not tuned.held:
        raise click.ClickException(f"{target} was written, but exceeds the tolerance.")


def _layers(model: Model, written: Path, samples: Samples, search: Search, progress: Progress) -> tuple[LayerDiff, ...]:
    """Every value of the result next to the original's, for the page."""
    result = Model.read(written, model)
    comparison = Comparison.of(model, samples, None, search.provider, budget=search.budget)
    return comparison.compare(result, layers=True, progress=progress).layers
