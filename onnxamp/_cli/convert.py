"""``onnxamp convert``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

from onnxamp._cli.batch import convert_all
from onnxamp._cli.common import (
    LEVELS,
    as_arguments,
    as_options,
    errors_end_here,
    is_same_file,
    provider_of,
    provider_option,
    samples_of,
    sampling,
    sampling_text,
    show,
    shown,
    target_of,
    wishes,
    write_page,
    writing,
)
from onnxamp._convert.convert import load_any
from onnxamp._convert.front import convert_file
from onnxamp._convert.plan import load_plan
from onnxamp._errors import ArgumentError
from onnxamp._numerics.beside import Model
from onnxamp._numerics.cure import Recipe, Trial, cure_conversion
from onnxamp._numerics.diff import diff_models
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._report.machine import conversion_json
from onnxamp._report.parts import make_console, printable
from onnxamp._report.terminal import conversion_report
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.session import choose_provider
from onnxamp._tuning.tune import tune_model


@click.command("convert")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the result goes [MODEL_fp16.onnx].")
@click.option("--level", type=click.Choice(LEVELS), default="O2", show_default=True, help="How much becomes low.")
@click.option(
    "--tolerance",
    type=float,
    default=1e-2,
    show_default=True,
    help="At level auto, the largest relative L2 error; 'onnxamp tune' has more to choose.",
)
@wishes
@click.option("--plan", "plan_file", type=click.Path(path_type=Path), help="Repeat the decisions of a saved plan.")
@click.option("--no-validate", is_flag=True, help="Do not run the original and the result to compare them.")
@sampling
@provider_option
@click.option("--jobs", type=click.IntRange(1), help="Worker processes for a folder of models [one per core].")
@click.option("--no-cure", is_flag=True, help="Do not look for options that would cure a failed validation.")
@writing
def command(model: Path, **options: Any) -> None:
    """Convert MODEL to mixed precision, validate the result, and report.

    Where MODEL is a folder, all models below it are converted to the folder OUTPUT, but for those that are up to date
    there. INPUTS is then a folder with a NAME.npz for each model NAME.onnx that has real inputs.

    Exit codes: 0 the result was written and, where the original runs here, agrees with it; 1 it could not be made or
    failed its validation; 2 wrong usage.
    """
    with errors_end_here(verbose=options["verbose"]):
        if model.is_dir():
            convert_all(model, options)
        else:
            _convert(model, options)


def _convert(model: Path, options: dict[str, Any]) -> None:
    if options["jobs"] is not None:
        raise ArgumentError("--jobs is for a folder of models.")
    samples = samples_of(model, options) if options["level"] == "auto" or not options["no_validate"] else None
    # What cannot be used is said before anything is written.
    provider = None if options["no_validate"] else choose_provider(provider_of(options))
    plan = load_plan(options["plan_file"]) if options["plan_file"] else None
    dtype = plan.dtype if plan else options["dtype"]
    target = target_of(model, options, dtype, options["plan_file"])
    in_place = is_same_file(model, target)
    # Written over, the original could not be compared any more.
    original: Model = load_any(model) if in_place and samples is not None else model
    tuned = None
    with _progress(quiet=options["quiet"]) as (phase, progress):
        if options["level"] == "auto" and not plan:
            phase("measuring")
            _, tuned = tune_model(model, options["tolerance"], samples=samples, provider=provider_of(options),
                                  **as_arguments(options))  # fmt: skip
            plan = tuned.plan
        phase("converting")
        data = {} if plan else {"tolerance": options["tolerance"]}
        made = convert_file(model, target, options["level"], plan=plan, progress=progress,
                            external_data=options["external_data"], shard_bytes=options["shard_size"],
                            **data, **as_arguments(options))  # fmt: skip
        if tuned is not None:
            made = replace(made, plan=tuned.plan)  # which has the reasons
        if options["save_plan"]:
            made.plan.save(options["save_plan"])
        validation = None
        if samples is not None and not options["no_validate"]:
            phase("validating")
            validation = diff_models(original, target, samples, layers=bool(options["html"]), provider=provider)
            if _fails(validation) and not options["plan_file"] and not in_place and not options["no_cure"]:
                phase("looking for a cure")
                validation = replace(validation, cure=_cure(model, target, samples, options))
    if options["html"]:
        write_page(made, validation, options["html"], tuned)
    if options["as_json"] and not options["quiet"]:
        click.echo(conversion_json(made, validation))
    elif not options["quiet"]:
        report = conversion_report(made, validation, verbose=options["verbose"])
        show(report, validation.cure if validation else None)
    _finish(validation, target, quiet=options["quiet"])


def _fails(validation: DiffReport) -> bool:
    """Whether the result was compared and is not within the limits."""
    return not validation.passed and not validation.skipped


def _cure(model: Path, target: Path, samples: Samples, options: dict[str, Any]) -> Cure:
    """What would have been better: the same wishes with the hazards heeded and, if need be, more nodes in float32."""
    heeding = options | {"no_hazards": False}
    recipe = Recipe(options["level"], as_arguments(heeding), (*as_options(heeding), *sampling_text(options)))
    command = str(model), str(target)
    return cure_conversion(
        model, command, recipe, Trial(samples, provider=provider_of(options)), tried=not options["no_hazards"]
    )


def _finish(validation: DiffReport | None, target: Path, *, quiet: bool) -> None:
    if validation is not None and _fails(validation):
        why = printable(validation.failure or next(iter(validation.warnings), ""))
        raise click.ClickException(f"{printable(str(target))} was written, but failed its validation: {why}")
    if quiet and validation is not None and validation.skipped:
        click.echo(f"Not validated: {validation.skipped}", err=True)


@contextmanager
def _progress(*, quiet: bool) -> Iterator[tuple[Callable[[str], None], Callable[[int, int], None]]]:
    """What is being done, and how far it is, on standard error; nothing where that is no terminal."""
    console = make_console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with shown(Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal)) as bar:
        task = bar.add_task("", total=None)

        def phase(text: str) -> None:
            bar.update(task, description=text, total=None, completed=0)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield phase, progress
