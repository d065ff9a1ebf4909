"""Handles one model of a folder in a worker process: converts it, compares it with its original, and cures failures.

The state of a results folder lets a later run skip the models that are up to date. A result is up to date if its entry
in ``.onnxamp.json`` was made by this version of onnxamp with the same options, and every file that was read for it (the
model, its data files, its inputs) and every file that was written still has the same size and modification time.
Comparing times alone, as make does, would miss other options and older files that were moved here.

Failures are remembered in the same way if the same files would fail again. They are not retried until a file that was
read, an option, or the version of onnxamp or ONNX Runtime changes. Cures are remembered, too: if a result must be
converted again under the same options, because it is gone or its weights go elsewhere, its cure is reused.
"""

import json
import os
import re
import time
import traceback
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from onnx import ModelProto

from onnxamp._base import state
from onnxamp._base.errors import (
    ExternalDataError,
    OnnxAmpError,
    OutputError,
    SourceChangedError,
)
from onnxamp._base.paths import as_path, is_remote, made_folder
from onnxamp._base.state import Part, from_data
from onnxamp._convert.misspelled import misspelled
from onnxamp._convert.plan import Plan
from onnxamp._decide.kinds import kinds
from onnxamp._decide.overrides import Unmatched
from onnxamp._fleet.kinds import Package
from onnxamp._fleet.outcome import ModelOutcome
from onnxamp._job import Request, Validation, search_metric, validation_metric
from onnxamp._job.pipeline import convert_to_file
from onnxamp._job.writing import Conversion, Sink
from onnxamp._model.data_files import data_files_of
from onnxamp._model.model import Model
from onnxamp._model.sources import stamp_now, watched_sources
from onnxamp._numerics.limits import Accept
from onnxamp._options.options import Options
from onnxamp._options.values import TOLERANCE, Level
from onnxamp._runtime.inputs import Sizes
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.samples import Samples, SampleSource
from onnxamp._runtime.starting import custom_ops, disabled_sentence
from onnxamp._text.decoder import Prompts, built_in_prompts, tokens_input
from onnxamp._tuning.results import Search

NAME: Final = ".onnxamp.json"
"""Name of the state file in the folder of the results."""

Stamp = tuple[int, int]
"""Size in bytes, and modification time in nanoseconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The outcome for a model.

    Attributes:
        row: the outcome in readable form.
        read: stamps of the files that were read, by path relative to :attr:`Job.home`.
        written: stamps of the files that were written, by their final paths; empty if it failed.
        cured: the options that passed, as JSON, if those of the call did not; None if those passed, or none did.
        may_pass: whether a retry may succeed, because the failure is due to the machine or to a missing file.
        made_with: a hash of everything that determines the result.
        searched_with: a hash of everything that determines its cure.
    """

    row: ModelOutcome
    read: Mapping[str, Stamp] = field(default_factory=dict)
    written: Mapping[str, Stamp] = field(default_factory=dict)
    cured: Mapping[str, Any] | None = None
    may_pass: bool = False
    made_with: str = ""
    searched_with: str = ""

    def is_current(self, job: "Job", fingerprint: str) -> bool:
        """Return whether nothing has changed since the job was done."""
        return (
            self.made_with == fingerprint
            and self._is_read(job)
            and all(
                _stamp(job.found(name)) == self.written[name] for name in self.written
            )
        )

    def is_cure(self, job: "Job", fingerprint: str) -> bool:
        """Return whether the options that passed are known and would pass again."""
        return (
            self.cured is not None
            and self.searched_with == fingerprint
            and self._is_read(job)
        )

    @property
    def stays_float32(self) -> bool:
        """Whether the model stays in float32 because no conversion passed."""
        return self.cured is not None and self.cured["level"] == "O0"

    def data_of(self, job: "Job") -> set[Path]:
        """Return the data files of the model that was read."""
        others = read_before(job).keys()
        return {_place(name, job.home) for name in self.read.keys() - others}

    def _is_read(self, job: "Job") -> bool:
        """Return whether all files that the job reads were read then, and have not changed since."""
        needed = (path for path in (job.source, job.inputs) if path is not None)
        return {
            _relative(path, job.home) for path in needed
        } <= self.read.keys() and all(
            _stamp(_place(name, job.home)) == stamp
            for name, stamp in self.read.items()
        )


def remembered(part: Part) -> dict[str, Entry]:
    """Return the remembered entries by model name, without those in another version's format."""
    entries = {}
    for name in part:
        with suppress(KeyError, TypeError, ValueError):
            entries[name] = from_data(Entry, part[name])
    return entries


def _place(path: str, folder: Path) -> Path:
    """Return the path for a name that :func:`_relative` made."""
    named = as_path(path)
    return named if is_remote(named) else folder / named


def stamps(paths: Iterable[Path], folder: Path) -> dict[str, Stamp]:
    """Return the stamp of each file that exists, by path relative to ``folder``."""
    every = {_relative(path, folder): _stamp(path) for path in paths}
    return {path: stamp for path, stamp in every.items() if stamp is not None}


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return a hash of plain data, paths, sets and regular expressions, regardless of the order of keys and sets."""

    def plain(item: Any) -> Any:
        if isinstance(item, Path):
            return str(item)
        return item.pattern if isinstance(item, re.Pattern) else sorted(item)

    return state.fingerprint(json.dumps(facts, sort_keys=True, default=plain))


def _relative(path: Path, folder: Path) -> str:
    try:
        if is_remote(path) or is_remote(folder):
            inside = path.is_relative_to(folder)
            return (
                path.relative_to(folder).as_posix()
                if inside
                else path.absolute().as_posix()
            )
        return Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix()
    except ValueError:  # on another drive
        return path.absolute().as_posix()


def _stamp(path: Path) -> Stamp | None:
    now = stamp_now(path)
    return None if now is None else (now.size, now.modified)


_TRANSIENT: Final = (
    OutputError,
    ExternalDataError,
    SourceChangedError,
    OSError,
    MemoryError,
)
"""Errors that need not recur with the same files."""


@dataclass(frozen=True, slots=True)
class FolderOptions:
    """Options for every model of a folder; see :func:`onnxamp.convert_folder`.

    Attributes:
        conversion: the options of each conversion.
        external_data, shard_bytes: as for :class:`Sink`.
        validation: how results are validated, if ``validate``; each model adds its own limits, paths and judge.
        metric: how the validation compares outputs, and level auto measures errors.
        validate: compare results with their originals.
        run: how models run; each model adds its inputs, and leaves out the sizes of dimensions that it lacks.
        libraries: custom op libraries for all sessions.
        accept: the importable name of the function that judges outputs.
        prompts: texts for the decoders of the folder.
        given: the names of the conversion options that the user chose, which kinds of folders do not change.
    """

    conversion: Options = field(default_factory=Options)
    external_data: str = "auto"
    shard_bytes: int | None = None
    validation: Validation = field(default_factory=Validation)
    metric: str = "auto"
    validate: bool = True
    run: RunOptions = field(default_factory=lambda: RunOptions(count=None))
    libraries: tuple[str, ...] = ()
    accept: str | None = None
    prompts: Path | None = None
    given: frozenset[str] = frozenset()

    @property
    def judge(self) -> Accept | None:
        """The imported function that judges outputs."""
        return None if self.accept is None else Accept.of(self.accept)

    @property
    def files(self) -> tuple[Path, ...]:
        """Files that all models depend on: the file of the judging function, if one is named, and the texts."""
        file = (self.accept or "").rpartition(":")[0]
        code = (as_path(file),) if file.endswith(".py") else ()
        return code if self.prompts is None else (*code, self.prompts)


@dataclass(frozen=True, slots=True)
class Job:
    """One model: its name, its file, the path of the result or the failure, its inputs, and its folder of results.

    With ``stage``, a hidden folder in ``home``, results wait there until all results of the ``package`` are there (see
    :mod:`onnxamp._fleet.package`). ``cure`` has the options that passed in an earlier run; None if none are known.
    ``page`` is the path of its report, ``search`` the path of level auto's measurements, and ``shared`` are files that
    all models depend on. ``package`` is the folder that it is part of, if its kind is known.
    """

    name: str
    source: Path
    target: Path
    failed: Path
    inputs: Path | None
    home: Path
    stage: Path | None = None
    cure: Entry | None = None
    page: Path | None = None
    search: Path | None = None
    shared: tuple[Path, ...] = ()
    package: Package | None = None

    @property
    def output(self) -> Path:
        """The path to which the result is written."""
        return self.staged(self.target)

    @property
    def result(self) -> Path:
        """The current path of the result."""
        return self.output if self.output.exists() else self.target

    def staged(self, path: Path) -> Path:
        """Return the path at which a file of the result waits."""
        return path if self.stage is None else self.stage / path.relative_to(self.home)

    def found(self, name: str) -> Path:
        """Return the current path of a file of the result, given the name of its final path."""
        place = _place(name, self.home)
        waiting = self.staged(place)
        return waiting if waiting.exists() else place

    @property
    def is_paged(self) -> bool:
        """Whether no page is requested, or the page of the existing result exists."""
        page = self.page
        return page is None or (
            page.exists() and page.stat().st_mtime_ns >= self.result.stat().st_mtime_ns
        )


def run_job(options: FolderOptions, job: Job) -> Entry:
    """Run a job, and write its page if requested. All errors end up in the row.

    Raises:
        MemoryError: there is not enough memory.
    """
    start = time.perf_counter()
    read = read_before(job)
    try:
        with (
            watched_sources(apart=True),
            custom_ops(options.conversion.custom_ops, library=options.libraries),
        ):
            result = _run(options, job)
    except MemoryError:  # another machine may have more memory
        raise
    except Exception as error:  # noqa: BLE001 - no model may break the others
        result = failed(job, error, read)
    return replace(
        result, row=replace(result.row, seconds=time.perf_counter() - start)
    )


def failed(job: Job, error: Exception, read: Mapping[str, Stamp]) -> Entry:
    """Return the outcome of a job that ended with an error; ``read`` are the stamps from before it.

    The data files of a model that cannot be read are unknown.
    """
    row = ModelOutcome(job.name, message=str(error))
    if not isinstance(error, OnnxAmpError):
        trace = "".join(traceback.format_exception(error))
        row = replace(row, message=f"{type(error).__name__}: {error}", trace=trace)
    data = frozenset[Path]()
    with suppress(OnnxAmpError, OSError):
        data = Model.read(job.source).stock.files
    read = {**stamps(data, job.home), **read}
    return Entry(row=row, read=read, may_pass=isinstance(error, _TRANSIENT))


def read_before(job: Job) -> Mapping[str, Stamp]:
    """Return the stamps of those files of a job that are known without reading the model."""
    return stamps({job.source, *_files(job.inputs), *job.shared}, job.home)


def _run(options: FolderOptions, job: Job) -> Entry:
    model = Model.of(job.source)
    read = {**stamps(model.stock.files, job.home), **read_before(job)}
    dims = _dims(options, model.proto)
    unmatched = (
        *misspelled(model, options.conversion),
        *(
            Unmatched("dims", name, f"The inputs have no dimension {name!r}.")
            for name in sorted(options.run.dims.keys() - dims.keys())
        ),
    )
    made_folder(job.output.parent)
    if job.search is not None:
        made_folder(job.search.parent)
    outcome = convert_to_file(_request(options, job, model), sink_of(options, job))
    conversion = outcome.conversion
    row = _row(job, conversion, outcome.samples)
    texts = {one.text for one in unmatched}  # they may match in other models
    warnings = tuple(text for text in row.warnings if text not in texts)
    row = replace(row, warnings=warnings, unmatched=unmatched)
    if job.page is not None:
        from onnxamp._report.html.render import write_conversion  # noqa: PLC0415 - only pages need it

        written = conversion.target
        result = job.result if written == job.target else written
        write_conversion(conversion, outcome.tuned, result, job.page)
    if row.has_failed:
        return Entry(row=row, read=read)
    is_cured = bool(row.healed) and conversion.plan.level != Level.AUTO
    cured = conversion.plan.options.as_json() if is_cured else None
    return Entry(row=row, read=read, written=written_by(job), cured=cured)


def sink_of(options: FolderOptions, job: Job) -> Sink:
    """Return the destination and the form of a job's result."""
    return Sink(
        target=job.target,
        external_data=options.external_data,
        shard_bytes=options.shard_bytes,
        data_names="onnx" if job.package is None else job.package.kind.data_names,
        stage=None if job.stage is None else job.output,
    )


def written_by(job: Job) -> Mapping[str, Stamp]:
    """Return the stamps of the files that make up the result of a job."""
    result = job.result
    files = (result, *(result.parent / name for name in data_files_of(result)))
    home = job.home if job.stage is None or result == job.target else job.stage
    return stamps(files, home)


def _request(options: FolderOptions, job: Job, model: Model) -> Request:
    """Return the request for one model: all options of the folder, or those that passed in an earlier run."""
    cured = None if job.cure is None else job.cure.cured
    asked = options.conversion if cured is None else Options.from_json(cured)
    if job.package is not None and cured is None:
        asked = job.package.kind.adapted(asked, options.given, model)
    judge = options.judge
    tolerance = options.validation.tolerance
    inputs = _inputs(options, job, model)
    validation = replace(
        options.validation,
        limits={} if job.package is None else job.package.kind.limits_of(model),
        accept=judge,
        metric=validation_metric(options.metric),
        layers=bool(job.page) or None,
        failed=job.failed,
        sampling=_sampling(options, inputs, model),
    )
    return Request(
        model=model,
        explains=job.page is not None,
        asked=replace(
            asked, strict_options=False
        ),  # names are checked once all models are known
        run=replace(
            options.run,
            samples=inputs,
            dims=_dims(options, model.proto),
            state=job.search,
            renews=True,
        ),
        search=Search(
            tolerance=TOLERANCE if tolerance is None else tolerance,
            metric=search_metric(options.metric),
            accept=judge,
        ),
        validation=validation if options.validate else None,
        warn=lambda _: None,  # the row holds them
    )


def _inputs(
    options: FolderOptions, job: Job, model: Model
) -> Path | SampleSource | None:
    """Return the inputs of a model, or texts if it is a decoder; None for random inputs."""
    if job.inputs is not None or tokens_input(model.proto) is None:
        return job.inputs
    if options.prompts is not None:
        return Prompts(options.prompts)
    is_asked = options.run.count is not None or options.run.dims
    return None if job.package is None or is_asked else built_in_prompts(model)


def _files(inputs: Path | None) -> list[Path]:
    """Return the files from which inputs are read."""
    if inputs is None:
        return []
    return (
        [path for path in inputs.iterdir() if path.is_file()]
        if inputs.is_dir()
        else [inputs]
    )


def _dims(options: FolderOptions, model: ModelProto) -> dict[str, int]:
    """Return the given sizes of the dimensions that the model has."""
    named = Sizes.of(model.graph.input).formulas
    return {name: size for name, size in options.run.dims.items() if name in named}


def _sampling(
    options: FolderOptions, inputs: Path | SampleSource | None, model: Model
) -> tuple[str, ...]:
    """Return command-line arguments that run the model on the same inputs."""
    judge = [] if options.accept is None else ["--accept", options.accept]
    for path in options.libraries:
        judge += "--custom-ops-library", path
    if isinstance(inputs, Path):
        return "--inputs", str(inputs), *judge
    if inputs is not None and options.prompts is not None:
        judge = ["--prompts", str(options.prompts), *judge]
    words = list[str]()
    if options.run.count is not None:
        words += "--samples", str(options.run.count)
    if options.run.seed:
        words += "--seed", str(options.run.seed)
    for name, size in _dims(options, model.proto).items():
        words += "--dim", f"{name}={size}"
    return *words, *judge


def _hazards(plan: Plan) -> Counter[str]:
    """Return how many nodes stay float32 for each hazard."""
    reasons = {row.node: row.reason for row in plan.rows if not row.low}
    known = {kind.value for kind in kinds()}
    return Counter(reason for reason in reasons.values() if reason in known)


def _row(job: Job, conversion: Conversion, samples: Samples | None) -> ModelOutcome:
    """Return the outcome for a model that was converted."""
    nodes = conversion.summary.nodes
    diff = conversion.validation
    row = ModelOutcome(
        job.name,
        "converted",
        low=nodes.get("low", 0) + nodes.get("mixed", 0),
        nodes=sum(nodes.values()),
        casts=conversion.summary.casts_added,
        hazards=_hazards(conversion.plan),
        bytes_before=conversion.bytes_before,
        bytes_after=conversion.bytes_after,
        inputs="" if samples is None else samples.description,
        warnings=conversion.plan.warnings,
    )
    if diff is None:
        return row
    worst = max(
        (output.rel_l2 for output in diff.outputs if output.is_float), default=None
    )
    opening = disabled_sentence(diff.disabled, "opens it")
    row = replace(
        row,
        error=worst,
        message=diff.skipped or diff.unopened or opening,
        outputs=tuple(one for one in diff.outputs if one.kl_divergence is not None),
        tokens=diff.tokens,
        perplexity=diff.perplexity,
    )
    if diff.cure is not None:
        cure = diff.cure
        healed = f"{cure.outcome} The first result failed: {cure.failure}"
        return replace(row, healed=healed, kept=cure.nodes, cure=cure.command)
    if job.cure is not None:
        known = job.cure.row
        return replace(row, healed=known.healed, kept=known.kept, cure=known.cure)
    if not diff.passed and not diff.skipped:
        why = diff.failure or next(iter(diff.warnings), "it exceeds its limits.")
        message = f"It failed validation and was written to {conversion.target}: {why}"
        return replace(row, outcome="failed", message=message)
    return row
