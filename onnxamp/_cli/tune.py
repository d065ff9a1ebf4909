"""``onnxamp tune``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from onnxamp._cli.common import (
    errors_end_here,
    provider_of,
    provider_option,
    samples_of,
    sampling,
    target_of,
    write_page,
    writing,
)
from onnxamp._cli.options import conversion_options, options_of
from onnxamp._convert.convert import Conversion, Sink, convert_to_file
from onnxamp._model.model import Model
from onnxamp._options.options import Level
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import print_report
from onnxamp._report.tuning import tuning_json, tuning_report
from onnxamp._target.roofline import DEFAULT_DEVICE, devices
from onnxamp._tuning.hunt import PRICING
from onnxamp._tuning.metric import METRICS
from onnxamp._tuning.results import Tuned
from onnxamp._tuning.timing import TIMES
from onnxamp._tuning.tune import Search, tune

_MADE_UP: Final = 4
"""Made-up inputs, unless a number is given."""


@click.command("tune")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the result goes [MODEL_fp16.onnx].")
@click.option(
    "--tolerance",
    type=float,
    default=1e-2,
    show_default=True,
    help="Largest error that is accepted; for snr, the least ratio in dB.",
)
@click.option(
    "--metric",
    default="rel-l2",
    show_default=True,
    metavar="NAME",
    help=f"What the error is: {', '.join(METRICS)}, or package:function.",
)
@sampling
@provider_option
@conversion_options
@click.option(
    "--device",
    type=click.Choice(list(devices())),
    default=DEFAULT_DEVICE,
    show_default=True,
    help="Whose speed times are estimated for.",
)
@click.option(
    "--runs",
    type=click.IntRange(1),
    default=PRICING,
    show_default=True,
    help="Runs that find out what ops do to the outputs; judging candidates takes up to 18 more.",
)
@click.option(
    "--state", type=click.Path(path_type=Path), help="Keep measurements in this file: nothing in it is measured again."
)
@click.option(
    "--pick", type=click.IntRange(0), metavar="K", help="Write candidate K instead of the one that is chosen."
)
@click.option(
    "--times",
    type=click.Choice(TIMES),
    default=TIMES[0],
    show_default=True,
    help="Times of ops: estimates for the device, or from a profile that ONNX Runtime makes here.",
)
@writing
@click.pass_context
def command(ctx: click.Context, /, model: Path, **options: Any) -> None:
    """Lower as much of MODEL as its accuracy allows: measured, not guessed.

    Exit codes: 0 the result was written and holds the tolerance; 1 it could not be made or does not hold it; 2 wrong
    usage.
    """
    if not options["inputs"] and ctx.get_parameter_source("samples") is ParameterSource.DEFAULT:
        options["samples"] = _MADE_UP
    with errors_end_here(verbose=options["verbose"]):
        _tune(model, options)


def _tune(path: Path, options: dict[str, Any]) -> None:
    asked, model = options_of(options, Level.AUTO), Model.read(path)
    target = target_of(model, options, asked.dtype, also=options["state"])
    sink = Sink(target, options["external_data"], options["shard_size"])
    with progress_bar(quiet=options["quiet"]) as told:
        search = Search(
            options["tolerance"], options["metric"], samples_of(model, options), device=options["device"],
            times=options["times"], provider=provider_of(options), runs=options["runs"], state=options["state"],
            pick=options["pick"], progress=told,
        )  # fmt: skip
        _, tuned = tune(model, asked, search)
        sink = replace(sink, progress=partial(told, "writing"))
        made = convert_to_file(model, sink, tuned.plan.options, tuned.plan)
    made = replace(made, plan=tuned.plan)  # which has the reasons
    if options["save_plan"]:
        tuned.plan.save(options["save_plan"])
    if options["html"]:
        write_page(made, Model.read(target), None, options["html"], tuned)
    _show(made, tuned, options)
    if not tuned.held:
        raise click.ClickException(f"{target} was written, but does not hold the tolerance.")


def _show(made: Conversion, tuned: Tuned, options: dict[str, Any]) -> None:
    if options["as_json"] and not options["quiet"]:
        click.echo(tuning_json(made, tuned))
    elif not options["quiet"]:
        print_report(tuning_report(made, tuned, state=options["state"]), verbose=options["verbose"])
