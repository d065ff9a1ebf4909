"""``onnxamp extract``."""

from functools import partial
from pathlib import Path
from typing import Any

import click

from onnxamp._cli.common import errors_end_here, parse_dims, provider_of, provider_option, sampling
from onnxamp._errors import ArgumentError
from onnxamp._extract.around import extract_region
from onnxamp._extract.region import region_files, save_region
from onnxamp._report.extract import region_json, region_report
from onnxamp._report.progress import progress_bar
from onnxamp._report.terminal import print_report
from onnxamp._runtime.samples import load_samples


@click.command("extract")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--around",
    metavar="NODE",
    multiple=True,
    required=True,
    help="Name of a node or of one of its outputs, or a regular expression for whole names. Repeatable.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where the region goes [MODEL_region.onnx].")
@click.option(
    "--before",
    type=click.IntRange(0),
    default=2,
    show_default=True,
    help="Nodes to take along in front of it; Casts and constants do not count.",
)
@click.option("--after", type=click.IntRange(0), default=1, show_default=True, help="Nodes to take along behind it.")
@sampling
@provider_option
@click.option("--json", "as_json", is_flag=True, help="Print what was cut as JSON.")
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but errors.")
@click.option("-v", "--verbose", is_flag=True, help="Print every node and value; show tracebacks.")  # fmt: skip
def command(model: Path, **options: Any) -> None:
    """Cut the region around a node of MODEL into a small model, with the inputs that show what happens there.

    MODEL runs as far as the node. Written are OUTPUT.onnx (the region), OUTPUT.npz (what enters it) and OUTPUT.expected
    (what leaves it). Of several inputs the first counts that makes something infinite or NaN there, or else the first.

    Exit codes: 0 the region was written; 1 it could not be made; 2 wrong usage.
    """
    with errors_end_here(verbose=options["verbose"]):
        _extract(model, options)


def _extract(model: Path, options: dict[str, Any]) -> None:
    files = region_files(options["output"] or model.with_name(f"{model.stem}_region.onnx"))
    _check_targets(model, files, options["inputs"])
    with progress_bar(quiet=options["quiet"]) as told:
        region = extract_region(
            model, options["around"], before=options["before"], after=options["after"],
            samples=load_samples(options["inputs"]) if options["inputs"] else None, seed=options["seed"],
            count=options["samples"], dims=parse_dims(options["dims"]), provider=provider_of(options),
            progress=partial(told, "recording"),
        )  # fmt: skip
    save_region(region, files[0])
    if options["as_json"]:
        click.echo(region_json(region, files))
    elif not options["quiet"]:
        print_report(region_report(region, files), verbose=options["verbose"])


def _check_targets(model: Path, files: tuple[Path, ...], inputs: str | None) -> None:
    """Nothing that is read may be written over, and a folder that is missing is told before anything runs."""
    if not files[0].absolute().parent.is_dir():
        raise ArgumentError(f"The folder of {str(files[0])!r} does not exist; create it.")
    for source in (model, *([Path(inputs)] if inputs else [])):
        if source.resolve() in {file.resolve() for file in files}:
            raise ArgumentError(f"The region would be written over {str(source)!r}: choose another name with -o.")
