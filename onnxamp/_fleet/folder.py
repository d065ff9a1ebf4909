"""Converts all models of a folder: finds them, skips those that are up to date, and hands the rest to workers."""

import logging
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple, Unpack

from onnxamp._base.errors import warn
from onnxamp._base.executor import Crash, Failed, Memory, run
from onnxamp._base.paths import as_path, is_remote, made_folder
from onnxamp._base.place import Place
from onnxamp._base.signals import cleaned_up
from onnxamp._base.state import Part, State, as_data, opened
from onnxamp._convert.misspelled import refuse_or_warn
from onnxamp._facts.providers import is_plugin
from onnxamp._fleet.entries import (
    NAME,
    Entry,
    ModelJob,
    fingerprint,
    read_before,
    remembered,
    written_by,
)
from onnxamp._fleet.index import write_index
from onnxamp._fleet.job import FolderOptions, failed, run_job
from onnxamp._fleet.models import check_options, find_jobs, index_of, size_of
from onnxamp._fleet.outcome import (
    FolderProgress,
    FolderReport,
    ModelOutcome,
    OutcomeName,
    Shipped,
    page_of,
)
from onnxamp._fleet.outputs import check_outputs
from onnxamp._fleet.package import PART, ship
from onnxamp._fleet.shared_weights import bytes_read_again, share_weights
from onnxamp._job import Validation
from onnxamp._model.staging import sweep
from onnxamp._options.options import OptionKeywords, Options
from onnxamp._options.values import Level, LevelName
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.sessions.session import Provider
from onnxamp._runtime.sessions.starting import active_libraries
from onnxamp._runtime.sessions.versions import own_version, runtime_version

_LOG: Final = logging.getLogger("onnxamp")
_RUN: Final = ("count", "seed", "dims", "provider")
"""Fields of :class:`RunOptions` that all models of a folder share."""
_OF_FILES: Final = ("external_data", "shard_bytes", "data_names")
"""Options that do not change any number."""
SEARCHES: Final = ".onnxamp"
"""Folder among the results for the measurements of level auto."""

Told = Callable[[FolderProgress], None]


def convert_folder(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    level: LevelName = "O2",
    *,
    jobs: int | None = None,
    cluster: str | None = None,
    external_data: str = "auto",
    shard_bytes: int | None = None,
    data_names: str | None = None,
    tolerance: float | None = None,
    metric: str = "auto",
    validate: bool = True,
    inputs: str | PathLike[str] | None = None,
    prompts: str | PathLike[str] | None = None,
    samples: int | None = None,
    seed: int = 0,
    dims: Mapping[str, int] | None = None,
    provider: Provider | None = None,
    retry: bool = False,
    accept: str | None = None,
    html: str | PathLike[str] | None = None,
    told: Told | None = None,
    **options: Unpack[OptionKeywords],
) -> FolderReport:
    """Convert every ``*.onnx`` file below a folder in worker processes, and compare each result with its original.

    A model that fails, even by crashing its process, does not affect the others. Results keep their relative path.
    A result that fails its validation is converted again with more nodes in float32; in the worst case, the whole model
    stays in float32. Models that are up to date, according to ``dst/.onnxamp.json``, are skipped. So are those that
    failed before and would fail again, because files, options, and the versions of onnxamp and ONNX Runtime are the
    same. onnxamp never searches for the same fix twice. Workers are spawned, so a script that calls this needs the
    usual ``if __name__ == "__main__":``.

    Args:
        src: the folder. Hidden files and folders are skipped, and so is ``dst`` if it lies inside.
        dst: the folder for the results; created if it is missing.
        level: see :func:`convert_file`, also for ``external_data``, ``shard_bytes``, ``metric`` and ``options``.
        jobs: worker processes, which share the processor's cores; by default one per core.
        cluster: the Ray cluster that they belong to: "local" for one on this machine, or an address. All its machines
            must be able to access the folders. None for processes on this machine, without Ray.
        external_data: "auto", "always" or "never".
        shard_bytes: bytes per data file.
        data_names: "onnx" (``NAME.data``) or "transformers.js" (``NAME_data``, ``NAME_data_1``, ...); None for the
            names that the software of each model's folder expects.
        tolerance: the largest error to accept. It is the limit of the validation (None for 1e-2 in float16, 5e-2 in
            bfloat16), and the target of level "auto" (1e-2).
        metric: how the validation compares outputs: "auto", "detections" or "elements", see :func:`diff_models`; and
            how level "auto" measures errors, see :func:`tune_model`.
        validate: run originals and results, and compare their outputs.
        inputs: folder with inputs of the models: NAME.npz, NAME.json or a folder NAME, where NAME is the path of the
            model below ``src`` without ".onnx". Models for which there are none run on random inputs.
        prompts: text file with one prompt per line for decoders, see :class:`Prompts`.
        samples: number of random inputs; None for 1, or for 4 to 16 if the target accumulates float16 in float16, as
            webgpu does.
        seed: seed of random inputs.
        dims: sizes of named dimensions of random inputs, for the models that have them.
        provider: where to run models to compare them, "cuda", "cpu" or a plugin provider; None for CUDA if there is a
            device.
        retry: retry models that failed before, or stayed in float32 because no conversion passed.
        accept: a function that judges outputs, see :func:`diff_models`; as "package:function" or "file.py:function",
            because workers import it.
        html: where to write pages: a folder for an index and one page per model, or a file for the index alone.
        told: progress callback, called when a model starts and when it is done.
        options: keyword arguments of :func:`convert_model`, except ``rule``.

    Returns:
        The outcome for each model.

    Raises:
        ArgumentError: an argument is wrong, there is no model, results could replace originals, or another run writes
            to ``dst``. With ``strict_options``, at the end: a name matches nothing in any model.
        ArgumentTypeError: ``accept`` is not a string.
        OutputError: ``dst`` cannot be created.
        RuntimeFailure: CUDA is requested, but cannot be used.

    Warns:
        OptionWarning: a name matches nothing in any model, or an option cannot be followed for a model.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from onnxamp import convert_folder
        >>> with TemporaryDirectory() as folder:
        ...     report = convert_folder("models", folder, jobs=1, validate=False)
        >>> report.count("failed")
        0
    """
    ops = options.get("custom_ops")
    asked = FolderOptions(
        conversion=Options.of(level, options),
        external_data=external_data,
        shard_bytes=shard_bytes,
        data_names=data_names,
        validation=Validation(tolerance=tolerance),
        metric=metric,
        validate=validate,
        run=RunOptions(
            count=samples, seed=seed, dims=dict(dims or {}), provider=provider
        ),
        declared=as_path(ops) if isinstance(ops, (str, PathLike)) else None,
        libraries=active_libraries(),
        accept=accept,
        prompts=None if prompts is None else as_path(prompts),
        given=frozenset(options),
    )
    report = run_folder(
        options=asked,
        source=as_path(src),
        target=as_path(dst),
        place=Place(jobs, cluster),
        inputs=None if inputs is None else as_path(inputs),
        told=told,
        retry=retry,
        html=None if html is None else as_path(html),
    )
    for row in report.rows:
        warn(f"{row.name}: {warning}" for warning in row.warnings)
    refuse_or_warn(report.unmatched, [asked.conversion])
    return report


def run_folder(
    options: FolderOptions,
    source: Path,
    target: Path,
    place: Place,
    inputs: Path | None,
    told: Told | None,
    *,
    retry: bool,
    html: Path | None,
) -> FolderReport:
    """Run :func:`convert_folder` with its options in one record; raise the same errors.

    A result without a requested page is converted again.
    """
    start = time.perf_counter()
    index = index_of(html)
    # A file is one page; a folder gets one for each model as well.
    pages = None if index is None or index == html else index.parent
    check_options(options)
    jobs = find_jobs(source, target, inputs)
    packages = {job.package.folder: job.package for job in jobs if job.package}
    for package in packages.values():
        package.check(options.conversion.dtype)
    prints = _fingerprints(options)
    jobs = _with_places(jobs, options, target, pages, prints)
    check_outputs(
        jobs,
        source,
        target,
        index=index,
        folders=() if inputs is None else (inputs,),
        files=(*options.files, *filter(None, (options.declared,))),
    )
    made_folder(target)
    with opened(target / NAME, renew=True, waits=False) as state:
        assert state is not None
        kept = state.part("folder", {})
        done, waiting = _known(jobs, remembered(kept), prints, retry=retry)
        if waiting:
            state.check_writable()
        used = 1
        with closing(_work(options, waiting, place, len(done), told)) as results:
            for result, used in results:  # noqa: B007 - the last one is reported
                row = result.row
                _LOG.info("%s: %s %s", row.name, row.outcome, row.message)
                entry = _with_prints(result, prints)
                done[row.name] = entry
                kept[row.name] = None if entry.may_pass else as_data(entry)
        _share(options, jobs, done, kept)
        shipped = tuple(_shipped(jobs, done, source, target, state))
    report = FolderReport(
        source=source,
        target=target,
        jobs=used,
        seconds=time.perf_counter() - start,
        rows=tuple(done[job.name].row for job in jobs),
        shipped=shipped,
        read_again=bytes_read_again(jobs, done),
    )
    if index is not None:
        write_index(report, index)
    return report


def _with_places(
    jobs: Iterable[ModelJob],
    options: FolderOptions,
    target: Path,
    pages: Path | None,
    prints: "_Prints",
) -> list[ModelJob]:
    """Return jobs that know where their pages and the measurements of level auto are."""
    searches = None
    if options.conversion.level == Level.AUTO and not is_remote(target):
        searches = target / SEARCHES
    return [
        replace(
            job,
            shared=options.files,
            page=pages and page_of(pages, job.name),
            search=searches and searches / f"{job.name}-{prints.search[:8]}.json",
        )
        for job in jobs
    ]


def _share(
    options: FolderOptions,
    jobs: Sequence[ModelJob],
    done: dict[str, Entry],
    kept: Part,
) -> None:
    """Let results share the weights that their models share, and remember the files that this leaves."""
    converted = [job for job in jobs if not done[job.name].row.has_failed]
    for job, size in share_weights(converted, done, options):
        entry = done[job.name]
        row = replace(entry.row, bytes_after=size)
        done[job.name] = replace(entry, row=row, written=written_by(job))
        kept[job.name] = as_data(done[job.name])


def _shipped(
    jobs: Sequence[ModelJob],
    done: Mapping[str, Entry],
    source: Path,
    target: Path,
    state: State,
) -> Iterator[Shipped]:
    """Complete the packages in which every model has a result, and report the others."""
    owned: dict[Path, list[ModelJob]] = {}
    for job in jobs:
        if job.package is not None:
            owned.setdefault(job.package.folder, []).append(job)
    for own in owned.values():
        package = own[0].package
        assert package is not None
        failed = tuple(job.name for job in own if done[job.name].row.has_failed)
        if failed:
            name = package.folder.relative_to(source).as_posix()
            yield Shipped(name=name, kind=package.kind.name, failed=failed)
        else:
            part = state.part(PART, {})
            others = owned.keys() - {package.folder}
            yield ship(package, own, done, source, target, part, others)


def _with_prints(result: Entry, prints: "_Prints") -> Entry:
    """Return an outcome with the hashes of what determines it."""
    made_with = prints.failure if result.row.has_failed else prints.result
    return replace(result, made_with=made_with, searched_with=prints.cure)


def _jobs_of(options: FolderOptions, _: Memory) -> Callable[[ModelJob], Entry]:
    """Return the function that handles each job of a folder in a worker."""
    return partial(run_job, options)


def _known(
    jobs: Sequence[ModelJob],
    state: Mapping[str, Entry],
    prints: "_Prints",
    *,
    retry: bool,
) -> tuple[dict[str, Entry], list[ModelJob]]:
    """Return the outcomes that are known, and the other jobs, with any known cures."""
    known = dict[str, Entry]()
    waiting = list[ModelJob]()
    for job in jobs:
        entry = state.get(job.name)
        if entry is None or (retry and (entry.row.has_failed or entry.stays_float32)):
            waiting.append(job)
            continue
        outcome: OutcomeName = "up to date"
        wanted = prints.result
        if entry.row.has_failed:
            outcome = "failed before"
            wanted = prints.failure
        if entry.is_current(job, wanted) and entry.is_paged(job):
            row = replace(entry.row, outcome=outcome, seconds=0.0)
            known[job.name] = replace(entry, row=row)
        else:
            cure = entry if entry.is_cure(job, prints.cure) else None
            waiting.append(replace(job, cure=cure))
    return known, waiting


class _Prints(NamedTuple):
    """Hashes of everything that determines a result, a failure, or a cure, independent of how it was requested.

    ``search`` covers what the measurements of level auto depend on, except models and inputs, which their file records.
    """

    result: str
    failure: str
    cure: str
    search: str


def _fingerprints(options: FolderOptions) -> _Prints:
    """Return the hashes for the options of a folder and the installed versions."""
    apart = ("conversion", "declared", "run", "validation")
    names = [item.name for item in fields(options) if item.name not in apart]
    facts = {name: getattr(options, name) for name in names}
    facts |= {name: getattr(options.run, name) for name in _RUN}
    facts["validation"] = asdict(options.validation)
    facts |= {"onnxamp": own_version(), "options": options.conversion.as_json()}
    # Another ONNX Runtime may run what failed here, but it would not change a result.
    here = facts | {"runtime": runtime_version()}
    searched = {name: value for name, value in here.items() if name not in _OF_FILES}
    versions = {name: here[name] for name in ("onnxamp", "runtime", "provider")}
    return _Prints(*map(fingerprint, (facts, here, searched, versions)))


def _work(
    options: FolderOptions,
    waiting: Iterable[ModelJob],
    place: Place,
    before: int,
    told: Told | None,
) -> Generator[tuple[Entry, int]]:
    """Yield the result of each job when it is done, and the number of workers. Files of dead workers are removed."""
    # Large models first, so that no worker starts one when the others are done.
    jobs = sorted(waiting, key=size_of, reverse=True)
    if not jobs:
        return
    # Plugins keep compiled kernels between models and may mix them up, so each of their workers does a single job.
    provider = options.run.provider
    once = provider is not None and is_plugin(provider)
    work = partial(_jobs_of, options)
    running: dict[int, str] = {}
    finished = before
    total = before + len(jobs)

    def tell(row: ModelOutcome | None = None) -> None:
        if told is not None:
            told(FolderProgress(finished, total, tuple(running.values()), row))

    def started(position: int) -> None:
        running[position] = jobs[position].name
        tell()

    def swept() -> None:
        for position in running:
            sweep(jobs[position].output)

    with (
        cleaned_up(swept),
        place.workers(len(jobs), once=once) as workers,
        closing(run(workers, work, jobs, started=started)) as results,
    ):
        for position, ending in results:
            del running[position]
            finished += 1
            result = _result(jobs[position], ending)
            yield result, workers.count
            tell(result.row)


def _result(job: ModelJob, ending: Entry | Failed | Crash) -> Entry:
    """Return the outcome of a job, regardless of how it ended."""
    if isinstance(ending, Failed):
        return failed(job, ending.error, read_before(job))
    if isinstance(ending, Crash):
        sweep(job.output)
        row = ModelOutcome(job.name, message=str(ending))
        return Entry(row=row, read=read_before(job), may_pass=ending.was_ended)
    return ending
