"""``onnxamp tune`` for a manifest of models that work together."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import click
from click.core import ParameterSource

from onnxamp._cli.common import (
    IN_FOLDER,
    check_outputs,
    files_of,
    given_files,
    show,
    tell,
    write_page,
)
from onnxamp._cli.options import provider_of
from onnxamp._errors import ArgumentError
from onnxamp._job.writing import Sink
from onnxamp._options.options import COMMAND_LINE
from onnxamp._paths.paths import made_folder
from onnxamp._pipeline.manifest import Pipeline, Settings, make_pipeline
from onnxamp._pipeline.results import TunedPipeline
from onnxamp._pipeline.search import SECONDS
from onnxamp._pipeline.tune import PipelineArguments, run_tuning
from onnxamp._report.pipeline import pipeline_json, pipeline_report
from onnxamp._report.progress import progress_bar
from onnxamp._tuning.arguments import TIMES

_OF_MODELS: Final = {
    "inputs": "its function brings them",
    "samples": "its function brings them",
    "seed": "its function brings them",
    "dims": "its function brings them",
    "accept": "its function judges",
    "pick": "choices are of each model",
    "jobs": "its function runs all models in this process",
    "cluster": "its function runs all models in this process",
    "in_place": "results go to a folder",
    "rescale": "exponents are found where they are needed",
    "rounding": "weights are rounded to nearest",
}
"""Options for a single model, and why a pipeline does not take them."""


def tune_manifest(manifest: Path, options: dict[str, Any]) -> None:
    """Tune a pipeline as the options of ``onnxamp tune`` say, write all models, and report.

    Raises:
        ArgumentError: an option does not apply to a pipeline, or is wrong. Others as
            :func:`onnxamp._pipeline.tune.tune_pipeline`.
    """
    given = _given()
    for name in _OF_MODELS.keys() & given:
        flag = f"--{'dim' if name == 'dims' else name.replace('_', '-')}"
        raise ArgumentError(
            f"{flag} is for a single model, and {str(manifest)!r} is a pipeline: {_OF_MODELS[name]}."
        )
    if options["times"] != TIMES[0]:
        raise ArgumentError(
            f"--times is for a single model: those of a pipeline are {TIMES[0]} estimates."
        )
    pipeline = make_pipeline(manifest, _settings(options, given))
    folder = _folder(manifest, options["output"])
    _check(pipeline, manifest, folder, options)
    seconds = options["search_time"] if "search_time" in given else SECONDS
    with progress_bar(quiet=options["quiet"]) as progress:
        asked = PipelineArguments(
            device=options["device"],
            provider=provider_of(options),
            runs=options["runs"],
            seconds=seconds,
            state=options["state"],
            progress=progress,
            budget=options["budget"] << 20,
            allow_slower=options["allow_slower"],
        )
        base = Sink(
            folder / "model.onnx",
            options["external_data"],
            options["shard_size"],
            data_names=options["data_names"] or "onnx",
        )
        tuned = run_tuning(pipeline, asked, folder, lambda target: replace(base, target=target))
    if options["save_plan"]:
        _save_plans(tuned, options["save_plan"])
    if options["html"]:
        from onnxamp._report.html.page import Page  # noqa: PLC0415 - only pages need jinja2

        write_page(Page(pipeline_report(tuned, state=options["state"])), options["html"])
    tell(tuned.warnings)
    show(
        options,
        partial(pipeline_report, tuned, state=options["state"]),
        partial(pipeline_json, tuned),
    )
    if not tuned.held:
        raise click.ClickException(
            f"The models are in {folder}, but exceed the tolerance together."
        )


def _given() -> frozenset[str]:
    """Names of the options that the command line spells."""
    context = click.get_current_context()
    return frozenset(
        name
        for name in context.params
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    )


def _settings(options: dict[str, Any], given: frozenset[str]) -> Settings:
    """What the command line says in place of the manifest."""
    keywords = {
        name: spelled.meaning(options[name])
        for name, spelled in COMMAND_LINE.items()
        if name in given and name != "dtype"
    }
    return Settings(
        tolerance=options["tolerance"] if "tolerance" in given else None,
        metric=options["metric"] if "metric" in given else None,
        dtypes=(options["dtype"],) if "dtype" in given else None,
        options=keywords | {"strict_options": True},
    )


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


def _check(pipeline: Pipeline, manifest: Path, folder: Path, options: dict[str, Any]) -> None:
    """Before anything runs, check that all can be written, and that nothing that is read is replaced."""
    targets = [folder / member.file for member in pipeline.members]
    plans = options["save_plan"]
    if plans is not None and plans.exists() and not plans.is_dir():
        raise ArgumentError(
            f"--save-plan {str(plans)!r} is a file: the plans of a pipeline go to a folder."
        )
    saved = [] if plans is None else [_plan_file(plans, member.name) for member in pipeline.members]
    models = [file for member in pipeline.members for file in files_of(member.model)]
    check_outputs(
        [manifest, *models, *given_files(options)],
        [*targets, *saved, options["html"], options["state"]],
    )


def _save_plans(tuned: TunedPipeline, folder: Path) -> None:
    made_folder(folder)
    for model in tuned.models:
        model.plan.save(_plan_file(folder, model.name))


def _plan_file(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"
