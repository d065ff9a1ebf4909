"""``onnxamp check``."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import click

from onnxamp._audit import Audit, ordered
from onnxamp._audit.audit import audit_model
from onnxamp._audit.opening import opening_faults
from onnxamp._base.state import opened
from onnxamp._cli.common import (
    Given,
    check_dims,
    first_arrays,
    place_of,
    run_options_of,
    show,
    typed_flags,
)
from onnxamp._cli.outputs import check_outputs
from onnxamp._facts.providers import computes_low
from onnxamp._facts.targets import target_of, targets
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._numerics.check import OpFilter, check_run
from onnxamp._numerics.results import RunCheck
from onnxamp._report.check import check_facts, check_report, check_status
from onnxamp._report.html import check_page
from onnxamp._report.html.render import write_page
from onnxamp._report.parts import Status
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import Run
from onnxamp._tuning.cure_check import check_whole, cure_run, cure_whole, find_fit


def run(given: Given) -> None:
    """Run ``onnxamp check``."""
    if given.build and not target_of(given.target).builds:
        builders = [name for name, one in targets().items() if one.builds]
        raise click.UsageError(
            f"--build needs --target {' or '.join(builders)}: no other target builds engines."
        )
    running = typed_flags("Inputs and runs", "Validation", "Checks")
    unused = [flag for flag in running if flag not in ("--static", "--target")]
    if given.static and unused and not given.build:  # an engine is built for inputs
        raise click.UsageError(
            f"--static runs nothing, so {', '.join(unused)} would have no effect: drop one or the other."
        )
    if len(given.models) > 1 and (given.html or given.state):
        raise click.UsageError(
            "--html and --state write files for a single model: check the models one by one, or drop these options."
        )
    models = dict.fromkeys(given.models)
    checks = {}
    for path in models:
        audit, checked = checks[str(path)] = _checked(path, given)
        # JSON is one document about all models, so it is printed after the last one.
        if given.format != "json" or len(checks) == len(models):
            report = partial(check_report, audit, checked, str(path))
            show(given, report, "check", partial(check_facts, checks))
    for audit, checked in checks.values():
        is_skipped = checked is not None and checked.skipped is not None
        if is_skipped or check_status(audit, checked) is Status.FAILED:
            raise click.exceptions.Exit(1)


def _checked(path: Path, given: Given) -> tuple[Audit, RunCheck | None]:
    """Check one of the models, and write its page."""
    model = Model.of(path)
    check_outputs(given, [given.html, given.state], *model.files)
    check_dims(model, given)
    samples = None
    if given.build or not given.static:  # an engine is built for their shapes
        samples = requested_samples(run_options_of(given), model)
    feeds = first_arrays(samples)
    shapes = {name: feed.shape for name, feed in feeds.items()}
    audit = audit_model(
        model, given.target, shapes=shapes, build=feeds if given.build else None
    )
    if not given.static:
        faults = tuple(opening_faults(model))
        is_refused = any(fault.severity == "error" for fault in faults)
        audit = replace(
            audit,
            findings=ordered((*audit.findings, *faults)),
            loads_from=None if is_refused else audit.loads_from,
        )
    run = None if given.static or samples is None else _run(model, samples, given)
    confirm_sources()
    if given.html:
        write_page(check_page(audit, run, str(path)), given.html)
    return audit, run


def _run(model: Model, samples: Samples, given: Given) -> RunCheck:
    """Run a model, and look for options that fix a fault."""
    ops = OpFilter(frozenset(given.only), frozenset(given.skip))
    place = place_of(given)
    with progress_bar(quiet=given.quiet) as progress, opened(given.state) as state:
        provider = given.provider
        islands = not computes_low(given.target)
        check = partial(
            check_run,
            samples=samples,
            provider=provider,
            ops=ops,
            stop=given.stop,
            progress=partial(progress, "running"),
            jobs=place.jobs,
            cluster=place.cluster,
        )
        first = partial(check, state=state)
        run = first(model) if islands else check_whole(model, first)
        job = Run(inputs=samples, provider=provider, report=progress)
        curable = run.first_bad is not None and not given.no_cure
        if curable and not islands:
            cure = cure_whole(model, check, job, given.cure_time)
            run = replace(run, cure=cure)
        elif curable:
            run = replace(run, cure=cure_run(model, run, job, given.cure_time))
        if not (given.stop or given.no_cure) and run.skipped is None:
            progress("looking for exponents", 0, 0)
            fit = find_fit(model, run, replace(job.bare, state=state))
            run = replace(run, fit=fit)
    return run
