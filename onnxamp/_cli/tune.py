"""``onnxamp tune``."""

from functools import partial

import click

from onnxamp._cli.common import (
    Given,
    in_its_folder,
    keep_outcome,
    options_of,
    run_options_of,
    show,
    sink_of,
    tell,
    unlike_target,
)
from onnxamp._cli.outputs import output_path
from onnxamp._job import Request
from onnxamp._job.pipeline import convert_to_file
from onnxamp._model.model import Model
from onnxamp._options.values import Level
from onnxamp._report.progress import progress_bar
from onnxamp._report.tuning import (
    tuning_facts,
    tuning_report,
)
from onnxamp._tuning.results import Search


def run(given: Given) -> None:
    """Run ``onnxamp tune``."""
    model = Model.of(given.model)
    asked = in_its_folder(given, options_of(given, Level.AUTO), model)
    target = output_path(model, given, asked.dtype)
    tell(unlike_target(given, asked.target))
    search = Search(
        tolerance=given.tolerance,
        metric=given.metric,
        device=given.device,
        times=given.times,
        runs=given.runs,
        pick=given.pick,
        seconds=given.seconds,
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
