"""``onnxamp convert``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import click

from onnxamp._cli.common import (
    errors_end_here,
    is_same_file,
    provider_of,
    provider_option,
    samples_of,
    sampling,
    sampling_text,
    target_of,
    write_page,
    writing,
)
from onnxamp._cli.options import conversion_options, options_of
from onnxamp._convert.convert import Sink, convert_to_file
from onnxamp._convert.plan import load_plan
from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model, ModelSource
from onnxamp._numerics.diff import diff_models
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._options.options import Level, LevelName, Options, is_auto
from onnxamp._report.conversion import conversion_json, conversion_report
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import print_report
from onnxamp._report.text import printable
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.session import choose_provider


@click.command("convert")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the result goes [MODEL_fp16.onnx].")
@click.option("--level", type=click.Choice(get_args(LevelName)), default="O2", show_default=True,
              help="How much becomes low precision.")  # fmt: skip
@click.option(
    "--tolerance",
    type=float,
    default=1e-2,
    show_default=True,
    help="At level auto, the largest relative L2 error; 'onnxamp tune' has more to choose.",
)
@conversion_options
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
            from onnxamp._cli.batch import convert_all  # noqa: PLC0415 - most conversions are of one model

            convert_all(model, options)
        else:
            _convert(model, options)


def _convert(path: Path, given: dict[str, Any]) -> None:
    if given["jobs"] is not None:
        raise ArgumentError("--jobs is for a folder of models.")
    is_auto(given["level"], given["tolerance"], None, "rel-l2")
    validates = not given["no_validate"]
    plan = load_plan(given["plan_file"]) if given["plan_file"] else None
    options = plan.options if plan else options_of(given)
    # What cannot be used is said before anything is written.
    provider = choose_provider(provider_of(given)) if validates else None
    model = Model.read(path)
    samples = samples_of(model, given) if validates or options.level == Level.AUTO else None
    target = target_of(model, given, options.dtype, given["plan_file"])
    in_place = is_same_file(path, target)
    sink = Sink(target, given["external_data"], given["shard_size"])
    # Written over, the original could not be compared any more.
    original: ModelSource = model.embedded() if in_place and samples is not None else model
    tuned = None
    with progress_bar(quiet=given["quiet"]) as told:
        if options.level == Level.AUTO and plan is None:
            from onnxamp._tuning.tune import Search, tune  # noqa: PLC0415 - other levels need none of it

            search = Search(given["tolerance"], samples=samples, provider=provider_of(given), progress=told)
            tuned = tune(model, options, search)[1]
            plan = tuned.plan
        told("converting", 0, 0)
        made = convert_to_file(model, replace(sink, progress=partial(told, "writing")), options, plan)
        if tuned is not None:
            made = replace(made, plan=tuned.plan)  # which has the reasons
        if given["save_plan"]:
            made.plan.save(given["save_plan"])
        validation, result = None, Model.read(target, model) if validates or given["html"] else None
        if samples is not None and validates:
            told("validating", 0, 0)
            validation = diff_models(original, result, samples, layers=bool(given["html"]), provider=provider,
                                     progress=partial(told, "validating"))  # fmt: skip
            if _fails(validation) and not given["plan_file"] and not in_place and not given["no_cure"]:
                told("looking for a fix", 0, 0)
                validation = replace(validation, cure=_cure(model, target, samples, options, given))
    if given["html"] and result is not None:
        write_page(made, result, validation, given["html"], tuned)
    if given["as_json"] and not given["quiet"]:
        click.echo(conversion_json(made, validation))
    elif not given["quiet"]:
        print_report(conversion_report(made, validation), verbose=given["verbose"])
    _finish(validation, target, quiet=given["quiet"])


def _fails(validation: DiffReport) -> bool:
    """Whether the result was compared and is not within the limits."""
    return not validation.passed and not validation.skipped


def _cure(model: Model, target: Path, samples: Samples, options: Options, given: dict[str, Any]) -> Cure:
    """What would have been better: the same options with the hazards heeded and, if need be, more nodes in float32."""
    from onnxamp._numerics.cure import Recipe, Trial, cure_conversion  # noqa: PLC0415 - most results need none

    recipe = Recipe(replace(options, hazards=True), sampling_text(given))
    trial = Trial(samples, provider=provider_of(given))
    return cure_conversion(model, (str(model.path), str(target)), recipe, trial, tried=options.hazards)


def _finish(validation: DiffReport | None, target: Path, *, quiet: bool) -> None:
    if validation is not None and _fails(validation):
        why = printable(validation.failure or next(iter(validation.warnings), ""))
        raise click.ClickException(f"{printable(str(target))} was written, but failed its validation: {why}")
    if quiet and validation is not None and validation.skipped:
        click.echo(f"Not validated: {validation.skipped}", err=True)
