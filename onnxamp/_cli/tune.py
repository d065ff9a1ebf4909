"""``onnxamp tune``."""

from functools import partial
from pathlib import Path
from typing import Any, Final

import click

from onnxamp._cli.common import (
    Given,
    check_outputs,
    flag_of,
    in_its_folder,
    keep_outcome,
    options_of,
    run_options_of,
    show,
    sink_of,
    target_of,
    tell,
    typed_options,
    unlike_target,
    write_page,
)
from onnxamp._cli.options import IN_FOLDER
from onnxamp._errors import ArgumentError
from onnxamp._job import Request
from onnxamp._job.pipeline import convert_to_file
from onnxamp._model.model import Model
from onnxamp._options.command_line import spelled_fields
from onnxamp._options.values import Level
from onnxamp._paths import made_folder
from onnxamp._pipeline.manifest import Pipeline, make_pipeline
from onnxamp._pipeline.search import PIPELINE_SECONDS
from onnxamp._pipeline.tune import run_tuning
from onnxamp._report.progress import progress_bar
from onnxamp._report.tuning import (
    pipeline_facts,
    pipeline_report,
    tuning_facts,
    tuning_report,
)
from onnxamp._runtime.run import RunOptions
from onnxamp._tuning.results import TIMES, Search


def run(given: Given) -> None:
    """Run ``onnxamp tune``."""
    if given.model.suffix.lower() == ".toml":
        tune_manifest(given)
    else:
        _tune(given)


def _tune(given: Given) -> None:
    model = Model.of(given.model)
    asked = in_its_folder(given, options_of(given, Level.AUTO), model)
    target = target_of(model, given, asked.dtype)
    tell(unlike_target(given, asked.target))
    search = Search(
        tolerance=given.tolerance,
        metric=given.metric,
        device=given.device,
        times=given.times,
        runs=given.runs,
        pick=given.pick,
        seconds=given.search_time,
        allow_slower=given.allow_slower,
        accept=given.accept,
    )
    is_compared = given.html or given.prompts  # for all values, or figures of texts
    with progress_bar(quiet=given.quiet) as progress:
        request = Request(
            model=model,
            asked=asked,
            run=run_options_of(given, report=progress),
            search=search,
            compares=bool(given.html) if is_compared else None,
            warn=tell,
        )
        outcome = convert_to_file(request, sink_of(given, target))
    conversion = outcome.conversion
    tuned = outcome.tuned
    compared = outcome.compared
    assert tuned is not None
    keep_outcome(given, outcome)
    report = partial(
        tuning_report, conversion, tuned, state=given.state, compared=compared
    )
    show(given, report, "tune", partial(tuning_facts, conversion, tuned, compared))
    if not tuned.held:
        raise click.ClickException(f"{target} was written, but exceeds the tolerance.")


_OF_MODELS: Final = {
    "inputs": "its function supplies them",
    "samples": "its function supplies them",
    "seed": "its function supplies them",
    "dims": "its function supplies them",
    "accept": "its function judges",
    "pick": "each model has its own candidates",
    "jobs": "its function runs all models in this process",
    "cluster": "its function runs all models in this process",
    "in_place": "results go to a folder",
    "rescale": "a pipeline finds exponents where it needs them",
    "rounding": "weights are rounded to nearest",
}
"""Options for a single model, and why a pipeline does not accept them."""


def tune_manifest(given: Given) -> None:
    """Tune a pipeline with the options of ``onnxamp tune``, write all models, and report.

    Raises:
        ArgumentError: an option does not apply to a pipeline, or is wrong. Others as
            :func:`onnxamp._pipeline.tune.tune_pipeline`.
    """
    typed = typed_options()
    manifest = given.model
    for name in _OF_MODELS.keys() & typed:
        raise ArgumentError(
            f"{flag_of(name)} is for a single model, and {str(manifest)!r} is a pipeline: {_OF_MODELS[name]}."
        )
    if given.times != TIMES[0]:
        raise ArgumentError(
            f"--times is for a single model: times of a pipeline are {TIMES[0]} estimates."
        )
    pipeline = make_pipeline(manifest, _settings(given, typed))
    folder = _folder(manifest, given.output)
    _check(pipeline, folder, given)
    seconds = given.search_time if "search_time" in typed else PIPELINE_SECONDS
    with progress_bar(quiet=given.quiet) as progress:
        search = Search(
            device=given.device,
            runs=given.runs,
            seconds=seconds,
            allow_slower=given.allow_slower,
        )
        run = RunOptions(
            provider=given.provider,
            state=given.state,
            report=progress,
            budget=given.budget,
        )
        tuned = run_tuning(pipeline, search, run, folder, partial(sink_of, given))
    if given.save_plan:
        made_folder(given.save_plan)
        for model in tuned.models:
            model.plan.save(_plan_file(given.save_plan, model.name))
    if given.html:
        from onnxamp._report.html import Page  # noqa: PLC0415 - only pages need jinja2

        write_page(Page(pipeline_report(tuned, state=given.state)), given.html)
    tell(tuned.warnings)
    show(
        given,
        partial(pipeline_report, tuned, state=given.state),
        "tune pipeline",
        partial(pipeline_facts, tuned),
    )
    if not tuned.held:
        raise click.ClickException(
            f"The models are in {folder}, but together they exceed the tolerance."
        )


def _settings(given: Given, typed: frozenset[str]) -> dict[str, Any]:
    """Return the options that override the manifest."""
    keywords = {
        name: spelled.meaning(getattr(given, name))
        for name, spelled in spelled_fields().items()
        if name in typed and name != "dtype"
    }
    said: dict[str, Any] = {
        name: getattr(given, name) for name in ("tolerance", "metric") if name in typed
    }
    if "dtype" in typed:
        said["dtypes"] = (given.dtype,)
    return {**said, "options": keywords | {"strict_options": True}}


def _folder(manifest: Path, output: Path | None) -> Path:
    """Where results go."""
    if output is None:
        return manifest.parent / f"{manifest.stem}_low"
    folder = output.parent if output.name == IN_FOLDER else output
    if folder.exists() and not folder.is_dir():
        raise ArgumentError(
            f"{str(folder)!r} is a file, and the results of a pipeline go to a folder: name one."
        )
    return folder


def _check(pipeline: Pipeline, folder: Path, given: Given) -> None:
    """Before anything runs, check that all can be written, and that nothing that is read is replaced."""
    targets = [folder / member.file for member in pipeline.members]
    plans = given.save_plan
    if plans is not None and plans.exists() and not plans.is_dir():
        raise ArgumentError(
            f"--save-plan {str(plans)!r} is a file: the plans of a pipeline go to a folder."
        )
    saved = (
        []
        if plans is None
        else [_plan_file(plans, member.name) for member in pipeline.members]
    )
    models = [file for member in pipeline.members for file in member.model.files]
    outputs = [*targets, *saved, given.html, given.state]
    check_outputs(given, outputs, given.model, *models)


def _plan_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"
