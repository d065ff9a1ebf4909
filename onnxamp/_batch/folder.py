"""Convert all models of a folder: find them, leave out what is up to date, hand the rest to workers, and remember."""

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Final, Unpack

from onnxamp._api import is_auto
from onnxamp._batch.job import Done, Job, Order, run_job
from onnxamp._batch.pool import Crash, run_jobs
from onnxamp._batch.state import Entry, Row, fingerprint, load_state, save_state
from onnxamp._convert.convert import EXTERNAL_DATA
from onnxamp._errors import ArgumentError, OutputError
from onnxamp._model.staging import sweep
from onnxamp._model.threads import core_count
from onnxamp._options.keywords import OptionKeywords
from onnxamp._options.options import LevelName, Options
from onnxamp._runtime.session import Provider, choose_provider

_SAVE_EVERY: Final = 5.0
"""Seconds between two writes of the state: what a killed run loses."""


@dataclass(frozen=True, slots=True)
class FolderReport:
    """What became of all models of a folder, in the order of their names."""

    source: Path
    target: Path
    jobs: int
    seconds: float
    rows: tuple[Row, ...]

    def count(self, outcome: str) -> int:
        """Number of models with that outcome: "converted", "up to date" or "failed"."""
        return sum(row.outcome == outcome for row in self.rows)


@dataclass(frozen=True, slots=True)
class Moment:
    """How far a run is: told when a model is begun (``row`` is None then) and when it is done."""

    done: int
    total: int
    running: tuple[str, ...]
    row: Row | None


Told = Callable[[Moment], None]


def convert_folder(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    level: LevelName = "O2",
    *,
    jobs: int | None = None,
    external_data: str = "auto",
    shard_bytes: int | None = None,
    tolerance: float = 1e-2,
    metric: str = "rel-l2",
    validate: bool = True,
    inputs: str | PathLike[str] | None = None,
    samples: int = 1,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    provider: Provider | None = None,
    told: Told | None = None,
    **options: Unpack[OptionKeywords],
) -> FolderReport:
    """Convert every ``*.onnx`` file below a folder, in worker processes, and compare each with its original.

    What breaks one model, be it a crash of its process, breaks no other. Results keep their place below ``dst``; what
    is up to date there (``dst/.onnxamp.json`` knows) is left alone. Workers are spawned: a script that calls this needs
    the usual ``if __name__ == "__main__":``.

    Args:
        src: the folder; hidden files and folders are left out, and so is ``dst`` where it lies inside.
        dst: made where it is missing.
        level, external_data, shard_bytes, tolerance, metric, options: see :func:`convert_file`; no ``rule``.
        jobs: worker processes, which share the cores among them; as many as there are cores by default.
        validate: run originals and results to compare them.
        inputs: a folder with inputs of the models: NAME.npz, NAME.json or a folder NAME, where NAME is the model's path
            below ``src`` without ".onnx". Models without any run on made-up inputs.
        samples, seed, dims: how many inputs are made up, their seed, and sizes of named dimensions, which count for
            the models that have them.
        provider: where models run to be compared, "cuda" or "cpu"; None for CUDA where there is one.
        told: called whenever a model is begun or done.

    Raises:
        ArgumentError: an argument is wrong, there is no model, or one folder holds the other in a way that results
            could replace originals. OutputError: ``dst`` cannot be made. RuntimeFailure: CUDA is wanted, and cannot be
            used.
    """
    order = Order(
        Options.of(level, options), external_data, shard_bytes, tolerance, metric, validate, samples, seed,
        dict(dims or {}), provider,
    )  # fmt: skip
    return run_folder(order, Path(src), Path(dst), jobs, Path(inputs) if inputs is not None else None, told)


def run_folder(
    order: Order, source: Path, target: Path, jobs: int | None, inputs: Path | None, told: Told | None
) -> FolderReport:
    """:func:`convert_folder` with an order that is made already; raises the same."""
    start = time.perf_counter()
    check_order(order, jobs)
    found = find_jobs(source, target, inputs)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"Cannot make the folder {str(target)!r}: {error.strerror}.") from None
    mark, state = _fingerprint(order), load_state(target)
    rows: dict[str, Row] = {}
    for job in found:
        entry = state.get(job.name)
        if entry is not None and entry.is_current(target, mark, filter(None, (job.source, job.inputs))):
            rows[job.name] = replace(entry.row, outcome="up to date", seconds=0.0)
    waiting = sorted((job for job in found if job.name not in rows), key=_size, reverse=True)  # the last ones are short
    workers = max(1, min(jobs or core_count(), len(waiting)))
    saved = time.monotonic()
    try:
        with closing(_work(order, waiting, workers, len(rows), told)) as finished:
            for done in finished:
                rows[done.row.name] = done.row
                state.pop(done.row.name, None)
                if done.row.outcome == "converted":
                    state[done.row.name] = Entry(mark, done.read, done.written, done.row)
                if time.monotonic() - saved > _SAVE_EVERY:
                    save_state(target, state)
                    saved = time.monotonic()
    finally:
        if waiting:
            save_state(target, state)
    return FolderReport(source, target, workers, time.perf_counter() - start, tuple(rows[job.name] for job in found))


def check_order(order: Order, jobs: int | None) -> None:
    """Find what cannot be done before the first model is read.

    Raises:
        ArgumentError: an option has an impossible value, or cannot be used for a folder. RuntimeFailure: CUDA is
            wanted, and cannot be used.
    """
    if jobs is not None and jobs < 1:
        raise ArgumentError(f"jobs must be at least 1, but is {jobs}.")
    if order.external_data not in EXTERNAL_DATA:
        raise ArgumentError(f"external_data must be 'auto', 'always' or 'never', not {order.external_data!r}.")
    if order.options.rule is not None:
        raise ArgumentError("A rule is a function, and cannot be told apart from another one: give patterns instead.")
    if order.validate and order.provider is not None:
        choose_provider(order.provider)
    is_auto(order.options.level, order.tolerance, None, order.metric)


def find_jobs(source: Path, target: Path, inputs: Path | None = None) -> list[Job]:
    """The models below a folder, by name; hidden ones, and what lies below ``target``, are left out.

    Raises:
        ArgumentError: there is none, or results could replace originals.
    """
    if not source.is_dir():
        raise ArgumentError(f"{str(source)!r} is no folder.")
    if target.exists() and not target.is_dir():
        raise ArgumentError(f"The output {str(target)!r} is a file: results of a folder go to a folder.")
    if inputs is not None and not inputs.is_dir():
        raise ArgumentError(f"The inputs {str(inputs)!r} are no folder: for a folder of models, one is needed.")
    home = target.resolve()
    if source.resolve() == home or source.resolve().is_relative_to(home):
        raise ArgumentError(
            f"Results in {str(target)!r} could replace originals in {str(source)!r}: use another folder."
        )
    found = []
    for path in _models(source, home):
        name = path.relative_to(source)
        found.append(Job(name.as_posix(), path, target / name, _inputs_of(name, inputs), target))
    if not found:
        raise ArgumentError(f"There is no *.onnx file below {str(source)!r}.")
    if inputs is not None and all(job.inputs is None for job in found):
        raise ArgumentError(
            f"{str(inputs)!r} holds inputs of none of the models: {found[0].name} would have"
            f" {Path(found[0].name).with_suffix('.npz').as_posix()} there."
        )
    return found


def _models(source: Path, without: Path) -> Iterator[Path]:
    for folder, below, files in os.walk(source):
        here = Path(folder)
        below[:] = sorted(name for name in below if name[0] != "." and (here / name).resolve() != without)
        yield from (here / name for name in sorted(files) if name[0] != "." and name.lower().endswith(".onnx"))


def _inputs_of(name: Path, inputs: Path | None) -> Path | None:
    """A model's inputs: an npz file, Polygraphy's JSON, or a folder of them."""
    if inputs is None:
        return None
    kinds = (inputs / name.with_suffix(suffix) for suffix in (".npz", ".json", ""))
    return next((path for path in kinds if path.exists()), None)


def _size(job: Job) -> int:
    return job.source.stat().st_size if job.source.is_file() else 0


def _fingerprint(order: Order) -> str:
    """What makes a result, however it was asked for. Whether a failure would be cured does not count."""
    rest = {
        name: value
        for name, value in ((item.name, getattr(order, item.name)) for item in fields(order))
        if name not in ("options", "cures")
    }
    return fingerprint({"onnxamp": version("onnxamp"), "options": order.options.as_json(), **rest})


def _work(order: Order, jobs: Sequence[Job], workers: int, before: int, told: Told | None) -> Generator[Done]:
    """Each job's result when it is done; what a worker that dies leaves behind is removed."""
    running: dict[int, str] = {}
    finished, total = before, before + len(jobs)

    def tell(row: Row | None = None) -> None:
        if told is not None:
            told(Moment(finished, total, tuple(running.values()), row))

    def started(position: int) -> None:
        running[position] = jobs[position].name
        tell()

    function, threads = partial(run_job, order), max(1, core_count() // workers)
    try:
        with closing(run_jobs(function, jobs, workers, threads, started)) as results:
            for position, result in results:
                del running[position]
                finished += 1
                job = jobs[position]
                done = Done(Row(job.name, message=str(result))) if isinstance(result, Crash) else result
                if isinstance(result, Crash):
                    sweep(job.target)
                yield done
                tell(done.row)
    finally:
        for position in running:
            sweep(jobs[position].target)
