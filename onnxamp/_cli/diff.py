"""``onnxamp diff``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxamp._audit.audit import audit_model
from onnxamp._cli.common import (
    check_outputs,
    errors_end_here,
    files_of,
    given_inputs,
    provider_of,
    provider_option,
    samples_of,
    sampling,
    sampling_text,
)
from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model
from onnxamp._model.storage import write_file
from onnxamp._numerics.cure import Recipe, Trial, cure_conversion
from onnxamp._numerics.diff import diff_models
from onnxamp._numerics.limits import Limits, apply_limits, make_limits
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._options.options import Options
from onnxamp._report.comparison import diff_report
from onnxamp._report.machine import diff_json, load_diff
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import print_report
from onnxamp._runtime.samples import Samples

_LIMITS = {
    "tolerance": ("rel_l2", "Largest relative L2 error [float32 1e-5, float16 1e-2, bfloat16 5e-2]."),
    "atol": ("max_abs", "Largest absolute error of an element."),
    "rtol": ("max_rel", "Largest relative error of an element (floor: 0.001 of the largest)."),
    "required": ("required_tolerance", "Largest accepted value of the least t with abs(a - b) <= t + t abs(a)."),
    "snr": ("snr_db", "Least signal-to-noise ratio in dB."),
    "cosine": ("cosine", "Least cosine similarity."),
    "top1": ("argmax_agreement", "Least share of rows with the same largest element."),
    "top5": ("top5_agreement", "Least share of the five largest elements of rows that agree."),
    "differing": ("differing", "Largest share of elements that differ [integers: the tolerance]."),
}
"""Option -> the metric that it limits, and its help."""


def _limits(function: Any) -> Any:
    for name, (_, text) in reversed(_LIMITS.items()):
        option = click.option(f"--{name}", metavar="[OUTPUT=]X", multiple=True, help=f"{text} Repeatable.")
        function = option(function)
    return function


@click.command("diff")
@click.argument("reference", type=click.Path(path_type=Path))
@click.argument("result", type=click.Path(path_type=Path), required=False)
@sampling
@click.option("--layers", is_flag=True, help="Compare every value that both models share, too.")
@provider_option
@_limits
@click.option("--budget", metavar="MB", type=click.IntRange(1), default=128, show_default=True,
              help="Memory for values and weights at a time, besides the models.")  # fmt: skip
@click.option("--save", type=click.Path(path_type=Path), help="Write the comparison as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the comparison as one HTML page.")
@click.option("--no-cure", is_flag=True, help="Do not look for options that would cure a failure.")
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
@click.option("-v", "--verbose", is_flag=True, help="Print every layer and metric; show tracebacks.")
def command(reference: Path, result: Path | None, **options: Any) -> None:
    """Compare what two models compute: REFERENCE (the original) and RESULT (what came of it).

    REFERENCE may be a comparison saved with --save: then its limits are judged anew, and nothing runs.

    Exit codes: 0 all outputs are within their limits; 1 they are not, or a model does not run; 2 wrong usage.
    """
    with errors_end_here(verbose=options["verbose"]):
        _diff(reference, result, options)


def _diff(reference: Path, result: Path | None, options: dict[str, Any]) -> None:
    limits = make_limits({metric: options[name] for name, (metric, _) in _LIMITS.items()})
    written = [options["save"], options["html"]]
    models = () if result is None else (Model.read(reference), Model.read(result))
    read = [reference, *(file for model in models for file in files_of(model)), *given_inputs(options)]
    check_outputs(read, written)
    if not models:
        if reference.suffix != ".json":
            raise ArgumentError("Name two models, or one comparison that was saved with --save (.json).")
        if options["layers"] or provider_of(options) or sampling_text(options):
            raise ArgumentError(
                "A saved comparison is judged anew, nothing runs: only limits and outputs can be given."
            )
        found = apply_limits(load_diff(reference), limits)
    else:
        found = _run(*models, limits, options)
    _show(found, models[-1] if models else None, options)
    if not found.passed:
        raise click.exceptions.Exit(1)


def _run(original: Model, result: Model, limits: Limits, options: dict[str, Any]) -> DiffReport:
    samples = samples_of(original, options)
    with progress_bar(quiet=options["quiet"]) as told:
        found = diff_models(
            original, result, samples, layers=options["layers"] or bool(options["html"]), limits=limits,
            provider=provider_of(options), budget=options["budget"] * 2**20, progress=partial(told, "comparing"),
        )  # fmt: skip
    seen = not options["quiet"] or options["html"] or options["save"]
    if seen and not options["no_cure"] and not found.passed and not found.skipped:
        found = replace(found, cure=_cure(original, result, found, samples, limits, options))
    return found


def _cure(
    reference: Model, result: Model, found: DiffReport, samples: Samples, limits: Limits, options: dict[str, Any]
) -> Cure | None:
    """A conversion of the reference that would hold; None where that is no float32 model, or nothing is low."""
    if found.reference_lowest != "float32" or found.lowest == "float32":
        return None
    recipe = Recipe(Options(dtype=found.lowest), sampling_text(options))
    assert result.path is not None
    target = result.path.with_name(f"{result.path.stem}_cured.onnx")
    with progress_bar(quiet=options["quiet"]) as told:
        trial = Trial(samples, limits, provider_of(options), options["budget"] * 2**20,
                      partial(told, "looking for a fix"))  # fmt: skip
        return cure_conversion(reference, (str(reference.path), str(target)), recipe, trial, tried=False)


def _show(found: DiffReport, result: Model | None, options: dict[str, Any]) -> None:
    if options["save"]:
        write_file(options["save"], (diff_json(found) + "\n").encode())
    if options["html"]:
        from onnxamp._report.html.page import diff_page  # noqa: PLC0415 - jinja2 is needed for nothing else
        from onnxamp._report.html.render import write  # noqa: PLC0415

        audit = None if result is None else audit_model(result)
        write(diff_page(found, audit), options["html"])
    if options["as_json"] and not options["quiet"]:
        click.echo(diff_json(found))
    elif not options["quiet"]:
        print_report(diff_report(found), verbose=options["verbose"])
