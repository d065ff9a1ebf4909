"""The models of a folder with what belongs to each, the places of pages, and options that are refused."""

from collections.abc import Iterator
from pathlib import Path

from onnxamp._batch.job import FolderOptions, Job
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._job.writing import EXTERNAL_DATA
from onnxamp._numerics.accept import Accept
from onnxamp._numerics.limits import make_limits
from onnxamp._options.auto import is_auto
from onnxamp._options.levels import Level
from onnxamp._paths.paths import walk
from onnxamp._runtime.session import choose_provider


def index_of(html: Path | None) -> Path | None:
    """The index of the pages that are asked for: index.html in a folder, or the file that is named.

    Raises:
        ArgumentError: it is no place for a page.
    """
    if html is None:
        return None
    path = html / "index.html" if html.is_dir() or html.suffix.lower() not in (".html", ".htm") else html
    if path.parent.exists() and not path.parent.is_dir():
        raise ArgumentError(f"The place for pages {str(path.parent)!r} is a file: pages of a folder go to a folder.")
    return path


def check_options(options: FolderOptions) -> None:
    """Refuse wrong options before the first model is read.

    Raises:
        ArgumentError: an option has an impossible value, or cannot be used for a folder.
        ArgumentTypeError: ``accept`` is no text. RuntimeFailure: CUDA is asked for, and cannot be used.
    """
    if options.external_data not in EXTERNAL_DATA:
        raise ArgumentError(f"external_data must be 'auto', 'always' or 'never', not {options.external_data!r}.")
    if options.conversion.rule is not None:
        raise ArgumentError("A rule is a function, and cannot be compared with that of an earlier run: use patterns.")
    if options.validate and options.provider is not None:
        choose_provider(options.provider)
    is_auto(options.conversion.level, options.tolerance, None, options.metric, validates=options.validate)
    if options.tolerance is not None:
        make_limits({"rel_l2": options.tolerance})  # checks it
    if options.accept is None:
        return
    if not isinstance(options.accept, str):
        raise ArgumentTypeError(
            "accept must be 'package:function' or 'file.py:function', which worker processes can import, not"
            f" {type(options.accept).__name__}."
        )
    if not options.validate and options.conversion.level != Level.AUTO:
        raise ArgumentError("accept judges the validation: leave validate as it is, or accept out.")
    Accept.of(options.accept)


def find_jobs(source: Path, target: Path, inputs: Path | None = None) -> list[Job]:
    """The models below a folder, sorted by name, without hidden ones and those below ``target``.

    Raises:
        ArgumentError: there is none, or results could replace originals.
    """
    if not source.is_dir():
        raise ArgumentError(f"{str(source)!r} is not a folder.")
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"The output {str(target)!r} is a file: results of a folder go to a folder.")
    if inputs is not None and not inputs.is_dir():
        raise ArgumentError(f"The inputs {str(inputs)!r} are not a folder: models of a folder need one.")
    home = target.resolve()
    if source.resolve() == home or source.resolve().is_relative_to(home):
        raise ArgumentError(
            f"Results in {str(target)!r} could replace originals in {str(source)!r}: use another folder."
        )
    jobs = []
    for path in _models(source, home):
        name = path.relative_to(source)
        jobs.append(
            Job(name.as_posix(), path, target / name, target / "failed" / name, _inputs_of(name, inputs), target)
        )
    if not jobs:
        raise ArgumentError(f"There is no *.onnx file below {str(source)!r}.")
    if inputs is not None and all(job.inputs is None for job in jobs):
        raise ArgumentError(
            f"{str(inputs)!r} holds inputs of none of the models: those of {jobs[0].name} would be in"
            f" {Path(jobs[0].name).with_suffix('.npz').as_posix()}."
        )
    return jobs


def _models(source: Path, without: Path) -> Iterator[Path]:
    for here, below, files in walk(source):
        below[:] = sorted(name for name in below if name[0] != "." and (here / name).resolve() != without)
        yield from (here / name for name in sorted(files) if name[0] != "." and name.lower().endswith(".onnx"))


def _inputs_of(name: Path, inputs: Path | None) -> Path | None:
    """The inputs of a model: an npz file, Polygraphy's JSON, or a folder of them."""
    if inputs is None:
        return None
    kinds = (inputs / name.with_suffix(suffix) for suffix in (".npz", ".json", ""))
    return next((path for path in kinds if path.exists()), None)


def size_of(job: Job) -> int:
    """Bytes of the model file."""
    return job.source.stat().st_size if job.source.is_file() else 0
