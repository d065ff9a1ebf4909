"""``onnxamp extract``."""

from functools import partial

from onnxamp._cli.common import Given, check_outputs, custom_arguments, show
from onnxamp._extract import region_files, save_region
from onnxamp._extract.around import extract_region
from onnxamp._model.model import Model
from onnxamp._model.sources import confirm_sources
from onnxamp._report.inspect import region_facts, region_report
from onnxamp._report.progress import progress_bar
from onnxamp._runtime.samples import load_samples


def run(given: Given) -> None:
    """Run ``onnxamp extract``."""
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
    show(given, report, "extract", partial(region_facts, region, files))
