"""``onnxamp check``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxamp._audit.audit import audit_model
from onnxamp._cli.common import (
    Target,
    check_outputs,
    files_of,
    first_arrays,
    given_files,
    new_command,
    show,
    write_page,
)
from onnxamp._cli.options import (
    check_dims,
    cure_time_option,
    custom_ops_option,
    model_argument,
    place_of,
    place_options,
    provider_of,
    report_options,
    run_options,
    samples_of,
    state_option,
)
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._numerics.check import OpFilter, check_run
from onnxamp._numerics.cure import Trial, cure_run
from onnxamp._numerics.fits import check_whole, cure_whole, find_fit
from onnxamp._numerics.results import RunCheck
from onnxamp._ops.profiles import computes_low
from onnxamp._options.options import COMMAND_LINE
from onnxamp._report.check import check_json, check_report
from onnxamp._report.html.page import check_page
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.run import Run
from onnxamp._runtime.samples import Samples
from onnxamp._state.state import opened
from onnxamp._target.targets import target_of, targets


@new_command("check")
@model_argument
@click.option(
    "--target",
    type=Target(),
    default="cuda",
    show_default=True,
    metavar=COMMAND_LINE["target"].metavar,
    help="Where the model will run, as in cuda@1.24; checks that its ops have kernels there.",
)
@click.option("--static", is_flag=True, help="Check without running the model.")
@click.option(
    "--build",
    is_flag=True,
    help="Build an engine with TensorRT-RTX, which takes no GPU; with --target tensorrt.",
)
@custom_ops_option
@run_options()
@place_options
@click.option(
    "--op",
    "only",
    metavar="OP",
    multiple=True,
    help="Check outputs of this op type only. Repeatable.",
)
@click.option(
    "--skip-op",
    "skip",
    metavar="OP",
    multiple=True,
    help="Do not check outputs of this op type. Repeatable.",
)
@state_option
@click.option("--stop", is_flag=True, help="Stop at the first fault.")
@click.option("--no-cure", is_flag=True, help="Do not search for options that fix a fault.")
@cure_time_option
@report_options(
    "findings", "finding and value", silent="Print nothing; use the exit code.", html=True
)
def command(model: Path, **options: Any) -> None:
    """Check types, kernels, Casts and hazards; then run MODEL and name the first op that goes wrong.

    Exit codes: 0 no fault was found; 1 MODEL does not load, has a known fault, goes wrong on the inputs, does not run,
    or no engine can be built; 2 wrong usage.
    """
    if options["build"] and not target_of(options["target"]).builds:
        builders = [name for name, one in targets().items() if one.builds]
        raise click.UsageError(
            f"--build needs --target {' or '.join(builders)}: others build no engines."
        )
    opened = Model.of(model)
    check_outputs([*files_of(opened), *given_files(options)], [options["html"], options["state"]])
    check_dims(opened, options)
    samples = None if options["static"] and not options["build"] else samples_of(opened, options)
    feeds = first_arrays(samples)
    shapes = {name: feed.shape for name, feed in feeds.items()}
    audit = audit_model(
        opened, options["target"], shapes=shapes, build=feeds if options["build"] else None
    )
    run = None if options["static"] or samples is None else _run(opened, samples, options)
    confirm_sources()
    if options["html"]:
        write_page(check_page(audit, run, str(model)), options["html"])
    show(options, partial(check_report, audit, run, str(model)), partial(check_json, audit, run))
    breaks = any(finding.severity == "error" for finding in audit.findings)
    if breaks or (run is not None and (run.first_bad is not None or run.skipped is not None)):
        raise click.exceptions.Exit(1)


def _run(model: Model, samples: Samples, options: dict[str, Any]) -> RunCheck:
    ops, place = OpFilter(frozenset(options["only"]), frozenset(options["skip"])), place_of(options)
    with progress_bar(quiet=options["quiet"]) as progress, opened(options["state"]) as state:
        provider, islands = provider_of(options), not computes_low(options["target"])
        check = partial(
            check_run,
            samples=samples,
            provider=provider,
            ops=ops,
            stop=options["stop"],
            progress=partial(progress, "running"),
            jobs=place.jobs,
            cluster=place.cluster,
        )
        first = partial(check, state=state)
        run = first(model) if islands else check_whole(model, first)
        trial = Trial(
            run=Run(inputs=samples, provider=provider, report=progress),
            seconds=options["cure_time"],
        )
        curable = run.first_bad is not None and not options["no_cure"]
        if curable and not islands:
            run = replace(run, cure=cure_whole(model, check, trial))
        elif curable:
            run = replace(run, cure=cure_run(model, run, trial))
        if not options["stop"] and run.skipped is None:
            progress("looking for exponents", 0, 0)
            run = replace(run, fit=find_fit(model, run, replace(trial.run.bare, state=state)))
    return run
