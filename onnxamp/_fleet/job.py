"""Handles one model of a folder in a worker process: converts it, compares it with its original, and cures failures."""

import time
import traceback
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from pathlib import Path
from typing import Final

from onnx import ModelProto

from onnxamp._base.errors import (
    ExternalDataError,
    OnnxAmpError,
    OutputError,
    SourceChangedError,
)
from onnxamp._base.paths import as_path, made_folder
from onnxamp._base.records import record
from onnxamp._convert.misspelled import misspelled
from onnxamp._convert.plan import Plan
from onnxamp._decide.kinds import kinds
from onnxamp._decide.unmatched import Unmatched
from onnxamp._facts.dtypes import Range
from onnxamp._fleet.entries import (
    Entry,
    ModelJob,
    Stamp,
    read_before,
    stamp_of,
    stamps,
    written_by,
)
from onnxamp._fleet.outcome import ModelOutcome
from onnxamp._job import Request, Validation, say_nothing, search_of, validation_metric
from onnxamp._job.pipeline import convert_to_file
from onnxamp._job.writing import Conversion, Sink
from onnxamp._model.model import Model
from onnxamp._model.sources import watched_sources
from onnxamp._numerics.user_functions import Accept
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._runtime.inputs.samples import Samples, SampleSource
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.sessions.starting import custom_ops, disabled_sentence
from onnxamp._runtime.sizes import Sizes
from onnxamp._text.decoder import Prompts, built_in_prompts, tokens_input

_TRANSIENT: Final = (
    OutputError,
    ExternalDataError,
    SourceChangedError,
    OSError,
    MemoryError,
)
"""Errors that may not recur with the same files."""


@record
class FolderOptions:
    """Options for every model of a folder; see :func:`onnxamp.convert_folder`.

    Attributes:
        conversion: the options of each conversion.
        external_data, shard_bytes: as for :class:`Sink`.
        data_names: as for :class:`Sink`; None for the names that the software of each model's folder expects.
        validation: how results are validated, if ``validate``; each model adds its own limits, paths and judge.
        metric: how the validation compares outputs, and level auto measures errors.
        validate: compare results with their originals.
        run: how models run; each model adds its inputs, and leaves out the sizes of dimensions that it lacks.
        declared: the file that declares custom ops, for commands; the conversion has read it.
        libraries: custom op libraries for all sessions.
        accept: the importable name of the function that judges outputs.
        prompts: texts for the decoders of the folder.
        given: the names of the conversion options that the user chose, which kinds of folders do not change.
    """

    conversion: Options = field(default_factory=Options)
    external_data: str = "auto"
    shard_bytes: int | None = None
    data_names: str | None = None
    validation: Validation = field(default_factory=Validation)
    metric: str = "auto"
    validate: bool = True
    run: RunOptions = field(default_factory=lambda: RunOptions(count=None))
    declared: Path | None = None
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
        """Files that all models depend on: libraries, the file of the judging function, if one is named, and texts."""
        file = (self.accept or "").rpartition(":")[0]
        code = (as_path(file),) if file.endswith(".py") else ()
        texts = () if self.prompts is None else (self.prompts,)
        return (*map(as_path, self.libraries), *code, *texts)


def run_job(options: FolderOptions, job: ModelJob) -> Entry:
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


def failed(job: ModelJob, error: Exception, read: Mapping[str, Stamp]) -> Entry:
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


def _run(options: FolderOptions, job: ModelJob) -> Entry:
    """Convert the model of a job, and write its page.

    Raises:
        OnnxAmpError: the model cannot be read or converted, or the result cannot be written.
    """
    # The stamps are from before the conversion, so that a file that changes meanwhile is read again by the next run.
    model = Model.of(job.source)
    read = {**stamps(model.stock.files, job.home), **read_before(job)}
    dims = _dims(options, model.proto)
    unmatched = list(misspelled(model, options.conversion))
    for name in sorted(options.run.dims.keys() - dims.keys()):
        text = f"The inputs have no dimension {name!r}."
        unmatched.append(Unmatched("dims", name, text))
    named = {entry.name for entry in model.proto.graph.input}
    for name, _ in options.conversion.input_ranges:
        if name not in named:
            text = f"The model has no input {name!r}."
            unmatched.append(Unmatched("input_ranges", name, text))
    made_folder(job.output.parent)
    if job.search is not None:
        made_folder(job.search.parent)
    outcome = convert_to_file(_request(options, job, model), sink_of(options, job))
    conversion = outcome.conversion
    row = _row(job, conversion, outcome.samples, options.conversion.level)
    texts = {one.text for one in unmatched}  # they may match in other models
    warnings = tuple(text for text in row.warnings if text not in texts)
    row = replace(row, warnings=warnings, unmatched=tuple(unmatched))
    page = None
    if job.page is not None:
        from onnxamp._report.html.conversion import write_conversion  # noqa: PLC0415 - few folders get pages

        written = conversion.target
        result = job.result if written == job.target else written
        write_conversion(conversion, outcome.tuned, result, job.page)
        page = stamp_of(job.page)
    if row.has_failed:
        return Entry(row=row, read=read, page=page)
    is_cured = bool(row.healed) and conversion.plan.level != Level.AUTO
    cured = conversion.plan.options.as_json() if is_cured else None
    written_files = written_by(job)
    return Entry(row=row, read=read, written=written_files, page=page, cured=cured)


def naming_of(options: FolderOptions, job: ModelJob) -> str:
    """Return whose names the data files of a job's result get."""
    usual = "onnx" if job.package is None else job.package.kind.data_names
    return options.data_names or usual


def sink_of(options: FolderOptions, job: ModelJob) -> Sink:
    """Return the destination and the form of a job's result."""
    return Sink(
        target=job.target,
        external_data=options.external_data,
        shard_bytes=options.shard_bytes,
        data_names=naming_of(options, job),
        stage=None if job.stage is None else job.output,
    )


def _request(options: FolderOptions, job: ModelJob, model: Model) -> Request:
    """Return the request for one model: all options of the folder, or those that passed in an earlier run."""
    cured = None if job.cure is None else job.cure.cured
    asked = options.conversion if cured is None else Options.from_json(cured)
    if job.package is not None and cured is None:
        asked = job.package.kind.adapted(asked, options.given, model)
    judge = options.judge
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
        # A name may match in another model, so names are checked once all models are known.
        asked=replace(
            asked, strict_options=False, input_ranges=_ranges(asked, model.proto)
        ),
        run=replace(
            options.run,
            samples=inputs,
            dims=_dims(options, model.proto),
            state=job.search,
            renews=True,
        ),
        search=search_of(options.validation.tolerance, options.metric, judge),
        validation=validation if options.validate else None,
        warn=say_nothing,  # the row holds them
    )


def _inputs(
    options: FolderOptions, job: ModelJob, model: Model
) -> Path | SampleSource | None:
    """Return the inputs of a model, or texts if it is a decoder; None for random inputs."""
    if job.inputs is not None or tokens_input(model.proto) is None:
        return job.inputs
    if options.prompts is not None:
        return Prompts(options.prompts)
    # Random tokens say little about a decoder; a request for random inputs still overrides the built-in texts.
    is_asked = options.run.count is not None or options.run.dims
    return None if job.package is None or is_asked else built_in_prompts(model)


def _dims(options: FolderOptions, model: ModelProto) -> dict[str, int]:
    """Return the given sizes of the dimensions that the model has."""
    named = Sizes.of(model.graph.input).formulas
    return {name: size for name, size in options.run.dims.items() if name in named}


def _ranges(asked: Options, model: ModelProto) -> tuple[tuple[str, Range], ...]:
    """Return the stated ranges of the inputs that the model has."""
    named = {entry.name for entry in model.graph.input}
    return tuple(stated for stated in asked.input_ranges if stated[0] in named)


def _sampling(
    options: FolderOptions, inputs: Path | SampleSource | None, model: Model
) -> tuple[str, ...]:
    """Return command-line arguments that run the model on the same inputs."""
    judge = [] if options.accept is None else ["--accept", options.accept]
    if options.declared is not None:
        judge += "--custom-ops", str(options.declared)
    for path in options.libraries:
        judge += "--custom-ops-library", path
    if isinstance(inputs, Path):
        return "--inputs", str(inputs), *judge
    words = list[str]()
    if options.run.seed:
        words += "--seed", str(options.run.seed)
    if inputs is not None and options.prompts is not None:
        return "--prompts", str(options.prompts), *words, *judge
    if options.run.count is not None:
        words += "--samples", str(options.run.count)
    for name, size in _dims(options, model.proto).items():
        words += "--dim", f"{name}={size}"
    return *words, *judge


def _hazards(plan: Plan) -> Counter[str]:
    """Return how many nodes stay in float32 for each hazard."""
    reasons = {row.node: row.reason for row in plan.rows if not row.low}
    known = {kind.value for kind in kinds()}
    return Counter(reason for reason in reasons.values() if reason in known)


def _row(
    job: ModelJob, conversion: Conversion, samples: Samples | None, level: str
) -> ModelOutcome:
    """Return the outcome for a model that was converted; ``level`` is the one that was asked for."""
    nodes = conversion.summary.nodes
    plan = conversion.plan
    diff = conversion.validation
    row = ModelOutcome(
        job.name,
        "converted",
        gains_nothing=level != Level.O0 and conversion.is_float32,
        low=nodes.get("low", 0) + nodes.get("mixed", 0),
        nodes=sum(nodes.values()) - nodes.get("no floats", 0),
        casts=conversion.summary.casts_added,
        hazards=_hazards(plan),
        bytes_before=conversion.bytes_before,
        bytes_after=conversion.bytes_after,
        inputs="" if samples is None else samples.description,
        warnings=plan.warnings,
        notes=conversion.notes,
        drawback=conversion.drawback,
    )
    if diff is None:
        return replace(row, message="The result was not compared with the original.")
    errors = [
        output.rel_l2
        for output in diff.outputs
        if output.is_float
        and output.size > output.reference_nan + output.reference_inf
    ]
    opening = disabled_sentence(diff.disabled, "opens it")
    row = replace(
        row,
        error=max(errors, default=None),
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
    if conversion.fault:
        message = f"It failed validation and was written to {conversion.target}: {conversion.fault}"
        return replace(row, outcome="failed", message=message)
    return row
