"""``onnxamp extract``."""

from functools import partial

import click

from onnxamp._cli.common import FILE, Given, check_outputs, new_command, option, show
from onnxamp._cli.options import (
    custom_arguments,
    custom_ops_option,
    model_argument,
    report_options,
    run_options,
)
from onnxamp._extract.around import extract_region
from onnxamp._extract.region import region_files, save_region
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._report.extract import region_json, region_report
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.samples import load_samples


@new_command("extract")
@model_argument
@option(
    "--around",
    metavar="NODE",
    multiple=True,
    required=True,
    help="Name of a node or of one of its outputs, or a regular expression that matches whole names."
    " Repeatable.",
)
@option(
    "-o", "--output", type=FILE, help="Where to write the region [MODEL_region.onnx]."
)
@option(
    "--before",
    type=click.IntRange(0),
    default=2,
    help="Number of nodes to include before it, not counting Casts and constants.",
)
@option(
    "--after",
    type=click.IntRange(0),
    default=1,
    help="Number of nodes to include after it.",
)
@custom_ops_option
@run_options()
@report_options("region", "node and value")
def command(given: Given) -> None:
    """Cut the region around a node out of MODEL, with inputs that reproduce what happens there.

    Runs MODEL as far as the region and writes OUTPUT.onnx (the region), OUTPUT.npz (its inputs) and OUTPUT.expected
    (its outputs). Of several samples it records the first that makes a value of the region infinite or NaN, else the
    first of all.

    Exit codes: 0 the region was written; 1 it could not be extracted; 2 wrong usage.
    """
    opened = Model.of(given.model)
    output = given.output or given.model.with_name(f"{given.model.stem}_region.onnx")
    files = region_files(output)
    check_outputs(given, files, *opened.files)
    with progress_bar(quiet=given.quiet) as progress:
        region = extract_region(
            opened,
            given.around,
            before=given.before,
            after=given.after,
            samples=load_samples(given.inputs) if given.inputs else None,
            seed=given.seed,
            count=given.samples,
            dims=given.dims,
            provider=given.provider,
            progress=partial(progress, "recording"),
        )
    confirm_sources()
    save_region(region, files[0])
    report = partial(region_report, region, files, custom_arguments(given))
    show(given, report, partial(region_json, region, files))
