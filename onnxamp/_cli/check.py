"""``onnxamp check``."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from onnxamp._audit.audit import audit_model
from onnxamp._audit.findings import Audit
from onnxamp._cli.common import (
    check_outputs,
    errors_end_here,
    files_of,
    given_inputs,
    provider_of,
    provider_option,
    samples_of,
    sampling,
)
from onnxamp._errors import OnnxAmpError
from onnxamp._model.model import Model
from onnxamp._numerics.check import OpFilter, check_run
from onnxamp._numerics.cure import Trial, cure_run
from onnxamp._numerics.results import RunCheck
from onnxamp._report.check import check_json, check_report
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import print_report
from onnxamp._runtime.samples import Samples
from onnxamp._target.kernels import TARGETS


@click.command("check")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--target", type=click.Choice(TARGETS), default="cuda", show_default=True,
              help="Where the model will run: its kernels are asked.")  # fmt: skip
@click.option("--static", is_flag=True, help="Only say what is known without running the model.")
@sampling
@provider_option
@click.option("--op", "only", metavar="OP", multiple=True, help="Look at this op type only. Repeatable.")
@click.option("--skip-op", "skip", metavar="OP", multiple=True, help="Do not look at this op type. Repeatable.")
@click.option("--stop", is_flag=True, help="Stop at the first fault.")
@click.option("--html", type=click.Path(path_type=Path), help="Write the findings as one HTML page.")
@click.option("--no-cure", is_flag=True, help="Do not look for options that would cure a fault.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit code tells.")
@click.option("-v", "--verbose", is_flag=True, help="Print every finding and value; show tracebacks.")
def command(model: Path, **options: Any) -> None:
    """Check MODEL: types, kernels, Casts and hazards; then run it and name the first op that goes wrong.

    Exit codes: 0 nothing is wrong; 1 it will not load, is known to break, goes wrong on the inputs, or does not run; 2
    wrong usage.
    """
    with errors_end_here(verbose=options["verbose"]):
        _check(model, options)


def _check(path: Path, options: dict[str, Any]) -> None:
    model = Model.read(path)
    check_outputs([*files_of(model), *given_inputs(options)], [options["html"]])
    samples = None if options["static"] else samples_of(model, options)
    shapes = _shapes(samples) if samples is not None else {}
    audit = audit_model(model, options["target"], shapes=shapes)
    run = None if samples is None else _run(model, samples, options)
    if options["html"]:
        from onnxamp._report.html.page import check_page  # noqa: PLC0415 - jinja2 is needed for nothing else
        from onnxamp._report.html.render import write  # noqa: PLC0415

        write(check_page(audit, run, str(path)), options["html"])
    if options["as_json"] and not options["quiet"]:
        click.echo(check_json(audit, run))
    elif not options["quiet"]:
        print_report(check_report(audit, run, str(path)), verbose=options["verbose"])
    if _is_wrong(audit, run):
        raise click.exceptions.Exit(1)


def _run(model: Model, samples: Samples, options: dict[str, Any]) -> RunCheck:
    ops = OpFilter(frozenset(options["only"]), frozenset(options["skip"]))
    with progress_bar(quiet=options["quiet"]) as told:
        run = check_run(model, samples, provider=provider_of(options), ops=ops, stop=options["stop"],
                        progress=partial(told, "running"))  # fmt: skip
        if run.first_bad is not None and not options["no_cure"]:
            trial = Trial(samples, provider=provider_of(options), progress=partial(told, "looking for a fix"))
            run = replace(run, cure=cure_run(model, run, trial))
    return run


def _is_wrong(audit: Audit, run: RunCheck | None) -> bool:
    breaks = any(finding.severity == "error" for finding in audit.findings)
    return breaks or (run is not None and (run.first_bad is not None or run.skipped is not None))


def _shapes(samples: Samples) -> dict[str, tuple[int, ...]]:
    """Shapes of the first sample: what is estimated is then of such a run."""
    try:
        feeds = samples[0]
    except OnnxAmpError:  # what is wrong with it will be said when it is to be run
        return {}
    return {name: feed.shape for name, feed in feeds.items() if isinstance(feed, np.ndarray)}
