"""``onnxamp tune``."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from onnxamp.cli.common import (
    as_arguments,
    check_outputs,
    errors_end_here,
    files_of,
    given_inputs,
    provider_of,
    provider_option,
    samples_of,
    sampling,
    wishes,
)
from onnxamp.convert import Conversion, convert_file, load_any
from onnxamp.dtypes import low_type
from onnxamp.report.parts import make_console
from onnxamp.report.tune import tuning_json, tuning_report
from onnxamp.roofline import DEFAULT_DEVICE, devices
from onnxamp.runtime.session import choose_provider
from onnxamp.tuning.confirm import Confirmed, confirm
from onnxamp.tuning.hunt import PRICING, Told
from onnxamp.tuning.metric import METRICS, make_metric
from onnxamp.tuning.tune import Tuned, tune_model

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
@wishes
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
@click.option("--save-plan", type=click.Path(path_type=Path), help="Write every decision and its reason as JSON.")
@click.option(
    "--external-data",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Whether weights go to a data file beside the model.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("-v", "--verbose", is_flag=True, help="Print every verdict; show tracebacks.")
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


def _tune(model: Path, options: dict[str, Any]) -> None:
    target = options["output"] or model.parent / f"{model.stem}_{low_type(options['dtype']).suffix}.onnx"
    in_place = target.exists() and model.exists() and target.samefile(model)
    read = [file for file in files_of(model) if not (in_place and file == model)]
    check_outputs([*read, *given_inputs(options)], [target, options["save_plan"], options["state"]])
    provider, samples = choose_provider(provider_of(options)), samples_of(model, options)
    original = load_any(model) if in_place else model  # written over, it could not be run any more
    with _progress(quiet=options["quiet"]) as told:
        _, tuned = tune_model(
            model, options["tolerance"], metric=options["metric"], samples=samples,
            device=options["device"], runs=options["runs"], state=options["state"], pick=options["pick"], told=told,
            **as_arguments(options),
        )  # fmt: skip
        made = convert_file(
            model, target, plan=tuned.plan, external_data=options["external_data"],
            progress=lambda done, total: told("writing", done, total),
        )  # fmt: skip
        confirmed = None
        if provider == "cuda":
            told("running on CUDA", 0, 1)
            confirmed = confirm(original, target, samples, make_metric(options["metric"], options["tolerance"]))
    if options["save_plan"]:
        tuned.plan.save(options["save_plan"])
    _show(made, tuned, confirmed, options)
    if not tuned.held or (confirmed and not confirmed.held):
        raise click.ClickException(f"{target} was written, but does not hold the tolerance.")


def _show(made: Conversion, tuned: Tuned, confirmed: Confirmed | None, options: dict[str, Any]) -> None:
    if options["as_json"]:
        click.echo(tuning_json(made, tuned, confirmed))
    elif not options["quiet"]:
        make_console().print(tuning_report(made, tuned, options["state"], confirmed, verbose=options["verbose"]))


@contextmanager
def _progress(*, quiet: bool) -> Iterator[Told]:
    """What is being done, how far it is, and the time left, on standard error; nothing where that is no terminal."""
    console = make_console(stderr=True)
    columns = (
        SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        tasks = {"": bar.add_task("reading", total=None)}

        def told(text: str, done: int, total: int) -> None:
            if text not in tasks:  # a bar of its own: the time left is that of what is being done
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[text] = bar.add_task(text, total=total)
            bar.update(tasks[text], completed=done, total=total, visible=True)

        yield told
