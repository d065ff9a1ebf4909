"""The last step of a conversion: the result is written to a file, whole or not at all."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from onnx import ModelProto
from onnx.serialization import registry

from onnxamp._base.errors import ArgumentError, ArgumentTypeError
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._base.paths import is_remote
from onnxamp._base.public import Shown, no_collections
from onnxamp._base.records import record
from onnxamp._base.state import Part, file_print, fingerprint
from onnxamp._convert.causes import Cause, find_causes
from onnxamp._convert.convert import Converted, Proof, convert
from onnxamp._convert.estimate import SpeedUp, expected_speed_up
from onnxamp._convert.hints import batch_norm_hint, fold_hint, opset_hint
from onnxamp._convert.plan import Plan, make_plan, plan_json
from onnxamp._convert.raising import low_note
from onnxamp._convert.summary import Summary, summarize
from onnxamp._facts.tables import read_table
from onnxamp._graph.graph import Graph
from onnxamp._job import Job
from onnxamp._job.worth import Proposal, Worth, better_choices
from onnxamp._model.data_files import measured, referring_models
from onnxamp._model.model import (
    INLINE_LIMIT,
    Model,
    StoredWeights,
    is_text,
    weight_bytes,
)
from onnxamp._model.saving import Saved, completely, copying, saving
from onnxamp._model.staging import unwritable
from onnxamp._model.weights import ConversionCounts
from onnxamp._options.options import Options
from onnxamp._runtime.sessions.versions import versions

if TYPE_CHECKING:
    from onnxamp._numerics.results import DiffReport

_LOG: Final = logging.getLogger("onnxamp")
_EXTERNAL_DATA: Final = ("auto", "always", "never")
"""The choices for data files beside the model: if they are needed, always, or never."""


@dataclass(frozen=True, slots=True, repr=False)
class Conversion(Shown):
    """The outcome of :func:`onnxamp.convert_file`.

    Attributes:
        source: the path of the original.
        target: the path of the result.
        plan: the decisions, with reasons.
        summary: nodes and Casts of the result by precision.
        notes: sentences about other changes, options that would save Casts, and listed op types
            that do not occur.
        weights: name of a weight -> numbers of elements that overflowed, underflowed or were flushed.
        bytes_before: size of all weights of the source in bytes.
        bytes_after: size of all weights of the target in bytes.
        causes: the reasons that keep nodes in float32, the Casts that they cost, and the options that would lower the
            nodes.
        speed_up: the estimated speed-up; None if it cannot be estimated.
        validation: the comparison of the result with the original; None if it was not validated.
        not_worth: why the conversion is not worth it, in a sentence: the file is larger, or a run is slower by the
            estimate; "" if it is.
        drawback: the same in a clause, such as "but larger (125 %)".
        better: options that give a better result, with what they give.
        kept_original: whether the original was written for that reason, in place of a conversion that passes validation
            only with more nodes in float32.

    Example:
        >>> import onnxamp, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     conversion = onnxamp.convert_file("models/encoder.onnx", f"{folder}/low.onnx")
        >>> conversion.source.name, conversion.target.name, conversion.plan.level
        ('encoder.onnx', 'low.onnx', 'O2')
    """

    source: Path
    target: Path
    plan: Plan
    summary: Summary
    notes: tuple[str, ...]
    weights: Mapping[str, ConversionCounts]
    bytes_before: int
    bytes_after: int
    causes: tuple[Cause, ...] = ()
    speed_up: SpeedUp | None = None
    validation: "DiffReport | None" = None
    not_worth: str = ""
    drawback: str = ""
    better: tuple[Proposal, ...] = ()
    kept_original: bool = False

    @property
    def is_float32(self) -> bool:
        """Whether no node and no weight is low precision, in the original either."""
        is_low = any(row.low for row in self.plan.rows)
        return not is_low and not self.summary.nodes_before.get("low")

    @property
    def fault(self) -> str:
        """Why the result failed its validation and was written under another name; "" if it did not."""
        diff = self.validation
        if diff is None or diff.passed or diff.skipped:
            return ""
        return diff.failure or next(iter(diff.warnings), "it exceeds its limits.")


def check_form(external_data: str, shard_bytes: int | None, data_names: str) -> None:
    """Check the options for the files of a result, which :class:`Sink` describes.

    Raises:
        ArgumentError: a value is unknown. ArgumentTypeError: it is of another type.
    """
    if not isinstance(data_names, str):
        raise ArgumentTypeError(
            f"data_names must be a string, not {data_names!r:.80}."
        )
    if data_names not in (styles := read_table("presets")):
        raise ArgumentError(
            f"Unknown data_names {data_names!r}: choose one of {', '.join(styles)}."
        )
    if external_data not in _EXTERNAL_DATA:
        raise ArgumentError(
            f"external_data must be 'auto', 'always' or 'never', not {external_data!r}."
        )
    if shard_bytes is not None:
        what = "a positive whole number"
        checked_number("shard_bytes", shard_bytes, what, lambda n: n > 0, WHOLE)
    if shard_bytes is not None and external_data == "never":
        raise ArgumentError(
            "shard_bytes splits external data, which external_data='never' rules out: drop one of the two."
        )


@record
class Sink:
    """Where and how to write a converted model.

    Attributes:
        target: the file.
        external_data: whether weights go to a data file: "auto", "always" or "never".
        shard_bytes: size in bytes at which the data file is split; None for one file.
        data_names: whose names data files get: "onnx" or "transformers.js".
        stage: where the result is written if the caller puts it in its place later.

    Raises:
        ArgumentError: a value is unknown, or the target is a folder. OutputError: its folder does not exist.
    """

    target: Path
    external_data: str = "auto"
    shard_bytes: int | None = None
    data_names: str = "onnx"
    stage: Path | None = None

    def __post_init__(self) -> None:
        check_form(self.external_data, self.shard_bytes, self.data_names)
        if self.target.is_dir():
            raise ArgumentError(
                f"The output {str(self.target)!r} is a folder: name a file."
            )
        form = registry.get_format_from_file_extension(self.target.suffix)
        if form not in (None, "protobuf"):
            raise ArgumentError(
                f"{str(self.target)!r} is the name of a model in text ({form}), and results are binary: name it"
                f" {self.target.stem}.onnx."
            )
        written = self.stage or self.target
        if not is_remote(written) and not written.parent.is_dir():
            raise unwritable(written, FileNotFoundError())

    def destination(self, stored: StoredWeights) -> Path:
        """Return the file to write: the stage, or the target with a symbolic link resolved.

        Raises:
            ArgumentError: the original stores weights there, or another model beside the target does.
        """
        target = self.target.resolve() if self.target.is_symlink() else self.target
        if target.resolve() in stored.files:
            raise ArgumentError(
                f"{str(target)!r} holds weights of the model: give the output another name."
            )
        others = referring_models(
            target.parent, [target.name] if target.exists() else [], target
        )
        if others:
            user = str(others[target.name])
            raise ArgumentError(
                f"{str(target)!r} holds weights of {user!r}: give the output another name."
            )
        return self.stage or target

    def is_external(self, stored: StoredWeights, low_bytes: int) -> bool:
        """Return whether the result's weights go to a data file.

        Args:
            stored: the weights of the original.
            low_bytes: how many of their bytes the conversion halves.

        Raises:
            ArgumentError: external_data is "never", but one file cannot hold the weights.
        """
        size = stored.size - low_bytes // 2
        if self.external_data == "never" and size > INLINE_LIMIT:
            raise ArgumentError(
                f"{size} bytes of weights do not fit into one file, because protobuf is limited to 2 GiB: use"
                " external_data='auto' or 'always'."
            )
        is_needed = size > INLINE_LIMIT or bool(stored.files)
        return self.external_data == "always" or (
            self.external_data == "auto" and is_needed
        )


CONVERSION: Final = "conversion"
"""The part of a state file that holds the work of an interrupted conversion."""


def unfinished(job: Job, sink: Sink) -> Part | None:
    """Return the work of an interrupted run of the same conversion; None if nothing is stored.

    Raises:
        ArgumentError: the state belongs to another conversion.
    """
    state = job.run.state
    depends_on_samples = job.options.compensates
    # Rounding depends on samples, which are not among the facts below.
    if state is None or job.run.renews or depends_on_samples:
        return None
    model = job.model
    assert model.path is not None
    files = sorted({model.path.resolve(), *model.stock.files})
    form = sink.external_data, sink.shard_bytes, sink.data_names
    options = json.dumps(job.options.as_json(), sort_keys=True)
    plan = ""
    if job.plan is not None:
        plan = fingerprint(json.dumps(plan_json(job.plan), sort_keys=True))
    facts = {
        "the model": fingerprint(*map(file_print, files)),
        "the options": fingerprint(options, repr(form)),
        "the plan": plan,
        "the output": str(sink.target),
        "the version of onnxamp or ONNX Runtime": versions(),
    }
    return state.part(CONVERSION, facts)


@record
class StagedConversion:
    """A conversion that is written beside its place.

    Attributes:
        job: the conversion.
        target: where the result will be.
        converted: the result.
        summary: its nodes and Casts.
        saved: the written file.
    """

    job: Job
    target: Path
    converted: Converted
    summary: Summary
    saved: Saved

    @no_collections()
    def outcome(
        self,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
        speed_up: SpeedUp | None = None,
    ) -> Conversion:
        """Return the outcome, once the result is in its place.

        Args:
            shapes: shapes of the inputs by name, for which the speed-up is estimated.
            speed_up: the speed-up, if it is known.
        """
        return _conversion(
            self.job.model,
            self.target,
            self.converted,
            self.job.plan,
            explains=self.job.explains,
            summary=self.summary,
            notes=self.saved.notes,
            size=self.saved.size,
            shapes=shapes,
            speed_up=speed_up,
        )

    def worth(
        self, result: Model, shapes: Mapping[str, tuple[int, ...]] | None
    ) -> Worth:
        """Return the gain of the conversion.

        Args:
            result: the written model, whose file is still there.
            shapes: as for :meth:`outcome`.
        """
        speed_up = None
        if self.converted.changed and not self.job.options.weights_only:
            speed_up = expected_speed_up(self.converted.analysis, shapes)
        before, after = map(_file_bytes, (self.job.model, result))
        return Worth(before, after, speed_up)

    def judged(
        self,
        worth: Worth | None = None,
        shapes: Mapping[str, tuple[int, ...]] | None = None,
    ) -> Conversion:
        """Return the outcome, with what is worse than in the original, and what would be better.

        Args:
            worth: what the conversion gains; if None, weights stand for files.
            shapes: as for :meth:`outcome`.
        """
        speed_up = None if worth is None else worth.speed_up
        outcome = self.outcome(shapes, speed_up)
        if worth is None:
            worth = Worth(self.job.model.stock.size, self.saved.size, outcome.speed_up)
        if not self.converted.changed or not worth.drawback:
            return outcome
        better: tuple[Proposal, ...] = ()
        if self.job.explains and self.job.plan is None:
            better = better_choices(self.converted.analysis, worth, shapes)
        return replace(
            outcome,
            not_worth=worth.sentence(),
            drawback=worth.drawback,
            better=better,
        )


def _file_bytes(model: Model) -> int:
    """Return the bytes of the files of a model."""
    assert model.path is not None
    return sum(file.stat().st_size for file in (model.path, *model.stock.files))


def _conversion(
    model: Model,
    target: Path,
    converted: Converted,
    plan: Plan | None,
    *,
    explains: bool,
    summary: Summary,
    notes: Iterable[str],
    size: int,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    speed_up: SpeedUp | None = None,
) -> Conversion:
    """Return the outcome for a converted model.

    Args:
        explains: find out what keeps nodes in float32, which solves the problem again for each reason.
        size: the bytes of its weights.
        shapes: shapes of the inputs by name, for which the speed-up is estimated.
        speed_up: the speed-up, if it is known.
    """
    assert model.path is not None
    # Everything computes in float32 if only weights are stored low, so nothing is faster, and no Cast is saved.
    computes_low = not converted.analysis.options.weights_only
    explains = explains and plan is None
    causes: tuple[Cause, ...] = ()
    if explains and computes_low:
        causes = find_causes(converted.analysis)
    if computes_low and speed_up is None:
        speed_up = expected_speed_up(converted.analysis, shapes)
    return Conversion(
        source=model.path,
        target=target,
        plan=make_plan(converted.analysis),
        summary=summary,
        notes=(*_notes(converted, explains=explains), *notes),
        weights=converted.weights.counts(),
        bytes_before=model.stock.size,
        bytes_after=size,
        causes=causes,
        speed_up=speed_up,
    )


@contextmanager
def staged_conversion(
    job: Job, sink: Sink, *, kept: Part | None = None, proof: Proof | None = None
) -> Iterator[StagedConversion]:
    """Convert a model that was read from a file, and write the result beside its place.

    The result takes its place at the end of the block. If the block raises, nothing changes. An unchanged model is
    copied byte by byte if its weights may stay in their files.

    Args:
        job: the conversion.
        sink: where the result goes.
        kept: the work of an interrupted run, from :func:`unfinished`.
        proof: judges an upgrade to a newer opset that was not requested.

    Raises:
        ArgumentError: the target holds weights of the model.
        OutputError: the target cannot be written. Others as :func:`onnxamp._convert.convert.convert`.
    """
    model = job.model
    with no_collections():
        target = sink.destination(model.stock)
        with measured(model, job.run.workers, kept):
            converted = convert(
                model,
                job.options,
                job.plan,
                deferred=True,
                proof=proof,
                rounder=job.rounder,
            )
        summary = summarize(converted.prepared, converted.analysis, job.plan)
        low_bytes = summary.low_weight_bytes - 2 * converted.prepared.widened
        external = sink.is_external(model.stock, low_bytes)
        with _written(job, sink, target, converted, external, kept) as saved:
            yield StagedConversion(
                job=job,
                target=sink.target if sink.stage else saved.stage.path,
                converted=converted,
                summary=summary,
                saved=saved,
            )
    _LOG.info("wrote %s: %d bytes of weights", saved.stage.path, saved.size)


write_conversion = completely(staged_conversion)
"""Write a converted model whole or not at all; arguments and errors as :func:`staged_conversion`."""


def _written(
    job: Job,
    sink: Sink,
    target: Path,
    converted: Converted,
    external: bool,
    kept: Part | None,
) -> AbstractContextManager[Saved]:
    """Return the context that writes a converted model to its target, with its weights in a data file or not."""
    source = job.model.path
    stored = job.model.stock
    assert source is not None
    in_place = target.exists() and target.samefile(source)
    protected = frozenset() if in_place else stored.files
    stays = _weights_stay(sink, source, target, stored, external=external)
    # A text file is written anew, because results are binary.
    if stays and not converted.changed and not is_text(source):
        return copying(source, target, protected | stored.files, stored.size)
    return saving(
        converted.proto,
        target,
        converted.weights,
        external=external,
        shard_bytes=sink.shard_bytes,
        data_names=sink.data_names,
        keep=protected,
        progress=job.run.progress("writing"),
        workers=job.run.workers,
        kept=kept,
    )


def _weights_stay(
    sink: Sink, source: Path, target: Path, stored: StoredWeights, *, external: bool
) -> bool:
    """Return whether the weights of an unchanged model may stay in the files that hold them."""
    if bool(stored.files) != external or sink.shard_bytes is not None:
        return False
    is_beside = source.absolute().parent.resolve() == target.resolve().parent
    return not external or (is_beside and sink.data_names == "onnx")


@no_collections()
def preview(
    model: Model, target: Path, options: Options, plan: Plan | None = None
) -> tuple[Conversion, ModelProto]:
    """Return the outcome of :func:`write_conversion`, and the model that it would write to ``target``.

    Nothing is written, and no model runs.

    Raises:
        As :func:`onnxamp._convert.convert.convert`.
    """
    trusted: list[int] = []

    def trust(graph: Graph) -> None:
        """Accept an upgrade without running it, and note its opset."""
        trusted.append(graph.book.opsets[""])

    # Compensated rounding needs samples, and changes neither the decisions nor the size.
    converted = convert(model, replace(options, rounding="nearest"), plan, proof=trust)
    notes = []
    opset = converted.analysis.graph.book.opsets[""]
    if opset in trusted:
        notes.append(
            f"Nothing ran, so the upgrade to opset {opset} was not verified: onnxamp convert first verifies that the"
            " float32 model computes the same at that opset."
        )
    conversion = _conversion(
        model,
        target,
        converted,
        plan,
        explains=True,
        summary=summarize(converted.prepared, converted.analysis, plan),
        notes=notes,
        size=weight_bytes(converted.proto),
    )
    return conversion, converted.proto


def _notes(converted: Converted, *, explains: bool) -> Iterator[str]:
    """Yield other changes, and options that would save Casts."""
    analysis = converted.analysis
    prepared = converted.prepared
    if converted.changed:
        yield from prepared.notes
    if explains:
        hints = (opset_hint(analysis), fold_hint(analysis), batch_norm_hint(analysis))
        yield from filter(None, hints)
    yield from (*prepared.unfolded, *prepared.refused)
    if converted.rounded is not None:
        yield converted.rounded.note()
    yield from filter(None, [low_note(analysis.graph, analysis.options)])
    yield from analysis.problem.overrides.notes
