"""The models of a folder, and what belongs to each."""

from collections.abc import Iterator
from pathlib import Path

from onnxamp._batch.job import Job
from onnxamp._errors import ArgumentError
from onnxamp._paths import walk


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
