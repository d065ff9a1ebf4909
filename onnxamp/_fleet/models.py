"""The models of a folder with their results, and checks of options, before the first model is read."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from onnxamp._base.errors import ArgumentError, ArgumentTypeError
from onnxamp._base.identity import is_within, resolved
from onnxamp._base.paths import is_remote
from onnxamp._fleet.entries import ModelJob
from onnxamp._fleet.job import FolderOptions
from onnxamp._fleet.kinds import SAME, Packages, files_below
from onnxamp._fleet.package import STAGE
from onnxamp._job.writing import check_form
from onnxamp._numerics.limits import make_limits
from onnxamp._numerics.user_functions import Accept
from onnxamp._options.values import Level, is_auto
from onnxamp._runtime.sessions.session import choose_provider
from onnxamp._text.decoder import Prompts

FAILED: Final = "failed"
"""The folder of results that failed their validation, below that of the results."""


def index_of(html: Path | None) -> Path | None:
    """Return the index of the requested pages: index.html in a folder, or the named file.

    Raises:
        ArgumentError: no page can be written there.
    """
    if html is None:
        return None
    is_page = html.suffix.lower() in (".html", ".htm") and not html.is_dir()
    path = html if is_page else html / "index.html"
    if path.parent.exists() and not path.parent.is_dir():
        raise ArgumentError(
            f"The page folder {str(path.parent)!r} is a file: name a folder for the pages."
        )
    return path


def check_options(options: FolderOptions) -> None:
    """Reject wrong options before the first model is read.

    Raises:
        ArgumentError: an option has an impossible value, or cannot be used for a folder.
        ArgumentTypeError: ``accept`` is not a string. RuntimeFailure: CUDA is requested, but cannot be used.
    """
    check_form(
        options.external_data, options.shard_bytes, options.data_names or "onnx"
    )
    if options.conversion.rule is not None:
        raise ArgumentError(
            "A rule is a function, which cannot be compared with the rule of an earlier run: use patterns instead."
        )
    tolerance = options.validation.tolerance
    provider = options.run.provider
    if options.validate and provider is not None:
        choose_provider(provider)
    is_auto(
        options.conversion.level,
        tolerance,
        None,
        options.metric,
        validates=options.validate,
    )
    if tolerance is not None:
        make_limits({"rel_l2": tolerance})  # checks it
    if options.prompts is not None:
        Prompts(options.prompts).lines()  # checks that there are some
    if options.accept is None:
        return
    if not isinstance(options.accept, str):
        raise ArgumentTypeError(
            "accept must be 'package:function' or 'file.py:function', which worker processes can import, not"
            f" {type(options.accept).__name__}."
        )
    if not options.validate and options.conversion.level != Level.AUTO:
        raise ArgumentError(
            "accept judges the validation, which validate=False skips: drop one of the two."
        )
    Accept.of(options.accept)


def find_jobs(source: Path, target: Path, inputs: Path | None) -> list[ModelJob]:
    """Return the models below a folder, sorted by name, except hidden ones and those below ``target``.

    Raises:
        ArgumentError: there are no models, or results could replace originals.
    """
    home = _checked(source, target, inputs)
    jobs = list[ModelJob]()
    left_out = list[str]()
    packages = Packages(source)
    # Results of an earlier run may lie below the originals.
    for path in files_below(source, {home}):
        if path.suffix.lower() != ".onnx":
            continue
        name = path.relative_to(source)
        package = packages.of(path)
        called = SAME if package is None else package.kind.name_of(path)
        if called.is_left_out:
            left_out.append(name.as_posix())
            continue
        result = name.with_stem(called.becomes.format(stem=path.stem))
        home = target
        if package is not None:
            home /= package.folder.relative_to(source)
        jobs.append(
            ModelJob(
                name=name.as_posix(),
                source=path,
                target=target / result,
                failed=target / FAILED / result,
                inputs=_inputs_of(name, inputs),
                home=home,
                stage=None if package is None or is_remote(home) else home / STAGE,
                package=package,
            )
        )
    if left_out and not jobs:
        raise ArgumentError(
            f"By their names, none of the models below {str(source)!r} is float32 ({', '.join(left_out)}):"
            " convert the files that they were made from."
        )
    if not jobs:
        raise ArgumentError(f"There is no *.onnx file below {str(source)!r}.")
    if inputs is not None and all(job.inputs is None for job in jobs):
        raise ArgumentError(
            f"{str(inputs)!r} holds inputs for none of the models: inputs for {jobs[0].name} belong in"
            f" {Path(jobs[0].name).with_suffix('.npz').as_posix()}."
        )
    return _failing_elsewhere(jobs, target)


def _failing_elsewhere(jobs: Sequence[ModelJob], target: Path) -> list[ModelJob]:
    """Return the jobs with the folder of failed results renamed if a folder of models has its name."""
    failed = target / FAILED
    while any(job.target.is_relative_to(failed) for job in jobs):
        failed = failed.with_name(f"{failed.name}_results")
    own = target / FAILED
    return [replace(job, failed=failed / job.failed.relative_to(own)) for job in jobs]


def _checked(source: Path, target: Path, inputs: Path | None) -> Path:
    """Check the folders of a run, and return that of the results without links.

    Raises:
        ArgumentError: one of them is no folder, or results could replace originals.
    """
    if not source.is_dir():
        raise ArgumentError(f"{str(source)!r} is not a folder.")
    if target.exists() and not target.is_dir():
        raise ArgumentError(
            f"The output {str(target)!r} is a file: name a folder for the results."
        )
    if inputs is not None and not inputs.is_dir():
        raise ArgumentError(
            f"The inputs {str(inputs)!r} are not a folder: name a folder that holds a NAME.npz for each NAME.onnx."
        )
    try:
        home = resolved(target)
    except OSError:
        raise ArgumentError(
            f"The output {str(target)!r} is a link that leads back to itself: remove it, or name another folder."
        ) from None
    if is_within(source, target):
        raise ArgumentError(
            f"Results in {str(target)!r} could replace originals in {str(source)!r}: use another folder."
        )
    return home


def _inputs_of(name: Path, inputs: Path | None) -> Path | None:
    """Return the inputs of a model: an npz file, Polygraphy's JSON, or a folder of them."""
    if inputs is None:
        return None
    candidates = (inputs / name.with_suffix(end) for end in (".npz", ".json", ""))
    return next((path for path in candidates if path.exists()), None)


def size_of(job: ModelJob) -> int:
    """Return the size of the model file in bytes; 0 for one that is gone, which its job reports."""
    return job.source.stat().st_size if job.source.is_file() else 0
