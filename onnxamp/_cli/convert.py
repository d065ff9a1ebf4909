"""``onnxamp convert``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click
from click.core import ParameterSource

from onnxamp._cli.common import failed_name, new_command, show, target_of, tell, write_conversion_page
from onnxamp._cli.options import (
    accept_option,
    check_dims,
    conversion_options,
    in_place_option,
    metric_option,
    model_argument,
    options_of,
    output_options,
    provider_of,
    run_options,
    samples_of,
    sampling_arguments,
    state_option,
    target_option,
    unlike_target,
)
from onnxamp._cli.presets import preset_options
from onnxamp._cli.types import FILE, LevelChoice
from onnxamp._cli.workers import place_of, place_options
from onnxamp._convert.convert import CONVERSION, Conversion, Sink, begun, convert_to_file
from onnxamp._convert.misspelt import early_warnings
from onnxamp._convert.plan import Plan, load_plan, strict
from onnxamp._convert.raising import reference_of
from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model
from onnxamp._model.sources import release_sources
from onnxamp._numerics.cure import SECONDS
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.heal import convert_validated
from onnxamp._numerics.ranges import RangeRun, with_ranges
from onnxamp._numerics.results import DiffReport
from onnxamp._numerics.rounding import WeightRounder, rounder_of
from onnxamp._numerics.validation import Validation, conversion_limits
from onnxamp._options.auto import TOLERANCE, is_auto
from onnxamp._options.levels import Level, LevelName
from onnxamp._options.options import COMMAND_LINE, Options
from onnxamp._printable import printable
from onnxamp._report.conversion import conversion_json, conversion_report
from onnxamp._report.progress import Told, progress_bar
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.session import choose_provider
from onnxamp._state.state import State, opened

if TYPE_CHECKING:
    from onnxamp._tuning.arguments import Search
    from onnxamp._tuning.results import Tuned


@new_command("convert")
@model_argument
@target_option
@in_place_option
@click.option("--level", type=LevelChoice(get_args(LevelName)), default="O2", show_default=True,
              help="How much to convert to low precision.")  # fmt: skip
@click.option("--tolerance", type=float,
              help="Largest relative L2 error: the limit of the validation [float16 1e-2, bfloat16 5e-2] and, at level"
              " auto, what is tuned to [1e-2]; 'onnxamp tune' has more options.")  # fmt: skip
@conversion_options
@click.option("--plan", "plan_file", type=FILE, help="Repeat the decisions of a saved plan.")
@metric_option
@accept_option
@click.option("--no-validate", is_flag=True, help="Do not run the original and the result to compare them.")
@run_options(judges=True)
@place_options
@state_option
@click.option("--retry", is_flag=True, help="A folder of models: try again what failed before for the same reason.")
@click.option("--no-cure", is_flag=True, help="If the result fails its validation, write it as NAME.failed.onnx"
              " instead of keeping more nodes in float32.")  # fmt: skip
@click.option("--cure-time", metavar="SECONDS", type=click.FloatRange(0), default=SECONDS, show_default=True,
              help="Time in which nodes are looked for that must stay float32 to pass, or measured.")  # fmt: skip
@output_options
@preset_options
def command(model: Path, **options: Any) -> None:
    """Convert MODEL to mixed precision, validate the result, and report.

    If the result fails its validation, nodes are looked for that must stay float32 or, if errors add up and none is at
    fault, what may be low is measured. Level O1 is tried, too, and what passes is written: at last the float32 model.

    If MODEL is a folder, all models in it and below are converted to the folder OUTPUT, except those that are up to
    date there, and those that failed before and would fail again. --inputs is then a folder that may hold a NAME.npz
    for each NAME.onnx, and --html a folder, for a page per model and an index.

    Exit codes: 0 the result was written and, if the original runs here, agrees with it; 1 it could not be made, or
    failed its validation under --no-cure or --plan; 2 wrong usage.
    """
    if model.is_dir():
        if options["state"] is not None:
            raise ArgumentError("A folder of models keeps its own state, in the folder of the results: drop --state.")
        from onnxamp._cli.batch import convert_all  # noqa: PLC0415 - only folders need worker processes

        convert_all(model, options)
    else:
        _convert(model, options)


def _convert(path: Path, given: dict[str, Any]) -> None:
    if given["retry"]:
        raise ArgumentError("--retry is for a folder of models.")
    validates = not given["no_validate"]
    if given["accept"] is not None and not validates and given["level"] != Level.AUTO:
        raise ArgumentError("--accept judges the validation, which --no-validate leaves out: drop one of the two.")
    plan = strict(load_plan(given["plan_file"])) if given["plan_file"] else None
    if plan is None:
        is_auto(given["level"], given["tolerance"], None, "auto", validates=validates)
    options = plan.options if plan else options_of(given)
    provider = choose_provider(provider_of(given)) if validates else None  # fails before anything is written
    model = Model.of(path)
    check_dims(model, given)
    early = early_warnings(model, options) if plan is None else _overridden()
    tell([*early, *(unlike_target(given, options.target) if validates and plan is None else ())])
    needs_samples = options.level == Level.AUTO or options.lacks_ranges or options.compensates
    draw, comparison, samples = partial(samples_of, model, given, options.target), None, None
    if validates:
        is_tuned = _is_tuned(options, plan)
        limits = conversion_limits(options.dtype, given["tolerance"], given["accept"], is_tuned=is_tuned)
        comparison = Comparison.of(
            reference_of(model, options), draw, limits, provider,
            metric=given["metric"], target=options.target,
        )  # fmt: skip
        samples = comparison.samples
    elif needs_samples:
        samples = draw()
    target = target_of(model, given, options.dtype, may_fail=validates)
    sink = Sink(target, given["external_data"], given["shard_size"])
    with (
        progress_bar(quiet=given["quiet"]) as progress,
        opened(given["state"]) as state,
        place_of(given).sharing(gpus=provider == "cuda") as workers,
    ):
        names = given["data_names"] or "onnx"
        sink = replace(sink, progress=partial(progress, "writing"), workers=workers, data_names=names)
        sink = begun(state, model, sink, options, plan)
        if comparison is not None and len(comparison.samples) > 1:
            comparison.workers = workers
        made, validation, tuned = _made(model, sink, options, plan, samples, comparison, given, progress, state)
        release_sources()  # the result is in its place
        if state is not None:
            state.drop(CONVERSION)
    if given["html"]:
        write_conversion_page(made, Model.read(made.target, model), validation, tuned, given["html"], samples=samples)
    tell(text for text in made.plan.warnings if plan is None and text not in early)
    show(given, partial(conversion_report, made, validation), partial(conversion_json, made, validation))
    _finish(validation, made.target, quiet=given["quiet"])


def _made(
    model: Model, sink: Sink, options: Options, plan: Plan | None, samples: Samples | None,
    comparison: Comparison | None, given: dict[str, Any], progress: Told,
    state: State | None,
) -> tuple[Conversion, DiffReport | None, "Tuned | None"]:  # fmt: skip
    """What was written, its validation, and what level auto found."""
    tuned = validation = None
    provider = comparison.provider if comparison is not None else None
    rounder = None
    if samples is not None:
        rounder = rounder_of(options, samples, provider, partial(progress, "rounding weights"))
    if _is_tuned(options, plan):
        tuned = _tune(model, options, samples, given, progress, state, rounder)
        plan, options = tuned.plan, tuned.plan.options  # exponents and rounding among them
    if comparison is not None:
        comparison.try_reference(partial(progress, "running the original"))
    if samples is not None and plan is None:
        told, shared = partial(progress, "measuring ranges"), comparison.workers if comparison is not None else None
        options = with_ranges(model, options, RangeRun(samples, provider, told, shared, state))
    progress("converting", 0, 0)
    if comparison is None:
        made = convert_to_file(model, sink, options, plan, rounder=rounder)
    else:
        how = Validation(
            comparison, failed_name(sink.target), bool(given["html"]) or None, heals=not given["no_cure"],
            sampling=sampling_arguments(given), seconds=given["cure_time"], progress=progress, rounder=rounder,
            tune=partial(_measured, model, samples, given, progress, rounder),
        )  # fmt: skip
        made, validation = convert_validated(model, sink, options, how, plan)
    if tuned is not None:
        made = replace(made, plan=tuned.plan)  # its reasons are the measured ones
    if given["save_plan"]:
        made.plan.save(given["save_plan"])
    return made, validation, tuned


def _tune(
    model: Model, options: Options, samples: Samples | None, given: dict[str, Any], progress: Told,
    state: State | None, rounder: WeightRounder | None,
) -> "Tuned":  # fmt: skip
    """What level auto finds."""
    from onnxamp._tuning.tune import tune  # noqa: PLC0415 - only level auto needs it

    return tune(model, options, _search(samples, given, progress, state), rounder)


def _measured(
    model: Model, samples: Samples | None, given: dict[str, Any], progress: Told, rounder: WeightRounder | None,
    options: Options, tolerance: float, seconds: float,
) -> Plan | None:  # fmt: skip
    """What level auto finds where nothing else passes."""
    from onnxamp._tuning.fallback import measured_plan  # noqa: PLC0415 - few conversions need it

    return measured_plan(model, _search(samples, given, progress, None), rounder, options, tolerance, seconds)


def _search(samples: Samples | None, given: dict[str, Any], progress: Told, state: State | None) -> "Search":
    """How level auto measures."""
    from onnxamp._tuning.arguments import Search  # noqa: PLC0415 - few conversions need it

    metric = "rel-l2" if given["metric"] == "elements" else given["metric"]
    return Search(
        TOLERANCE if given["tolerance"] is None else given["tolerance"], metric, samples, provider=provider_of(given),
        progress=progress, accept=given["accept"], state=state, place=place_of(given),
    )  # fmt: skip


def _overridden() -> list[str]:
    """A warning about options that a plan replaces."""
    context = click.get_current_context()
    given = [
        parameter.opts[0] for parameter in context.command.params
        if parameter.name in (*COMMAND_LINE, "level")
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]  # fmt: skip
    return [f"The plan replaces {', '.join(given)}: it repeats its decisions."] if given else []


def _is_tuned(options: Options, plan: Plan | None) -> bool:
    """Whether measurements decide."""
    return options.level == Level.AUTO and plan is None


def _finish(validation: DiffReport | None, target: Path, *, quiet: bool) -> None:
    if validation is not None and not validation.passed and not validation.skipped:
        why = printable(validation.failure or next(iter(validation.warnings), ""))
        raise click.ClickException(f"The result failed its validation, and is in {printable(str(target))}: {why}")
    if quiet and validation is not None and validation.skipped:
        click.echo(f"Not validated: {printable(validation.skipped)}", err=True)
