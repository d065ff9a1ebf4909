"""Writing the models of a pipeline: all are written beside their targets and judged there, and then all are renamed.

If a result is rejected, nothing changes. Files are renamed model by model, so each is complete at all times.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from onnxamp._dtypes import FLOAT16
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._job.request import Job
from onnxamp._job.validation import load_result
from onnxamp._job.writing import Sink, StagedConversion, staged_conversion
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._model.saving import save_model
from onnxamp._model.sources import release_sources
from onnxamp._model.storage import INLINE_LIMIT, weight_bytes
from onnxamp._ops.targets import device_of
from onnxamp._paths.paths import made_folder
from onnxamp._pipeline.choices import Choice
from onnxamp._pipeline.manifest import Member
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.session import Provider


class StagedMember(NamedTuple):
    """A model that is written: its file until that is in its place, and the conversion."""

    file: Path
    conversion: StagedConversion


def check_targets(members: Sequence[Member], folder: Path) -> None:
    """Check, before anything runs, that no result replaces a model.

    Raises:
        ArgumentError: a result would replace a model.
    """
    read = {path.resolve() for member in members for path in member.model.files}
    for member in members:
        if (folder / member.file).resolve() in read:
            text = f"{str(folder / member.file)!r} is a model of the pipeline: name another folder for the results."
            raise ArgumentError(text)


@contextmanager
def staged_pipeline(
    members: Sequence[Member],
    chosen: Mapping[str, Choice],
    folder: Path,
    sink: Callable[[Path], Sink],
    provider: Provider,
    scratch: Path,
) -> Iterator[dict[str, StagedMember]]:
    """Write all models of a pipeline, and put them into a folder at the end of the block, unless that raises.

    Args:
        members: the models.
        chosen: the choice for each model.
        folder: the folder to write to; each model keeps its own name.
        sink: how to write a file.
        provider: where models ran.
        scratch: a folder for models that do not come from a file.

    Raises:
        RuntimeFailure: ONNX Runtime does not load a result. OutputError: something cannot be written. Others as
            :func:`onnxamp._convert.convert.convert`.
    """
    staged: dict[str, StagedMember] = {}
    with ExitStack() as stack:
        for member in members:
            choice, target = chosen[member.name], folder / member.file
            made_folder(target.parent)
            job = Job(
                model=member.model
                if member.model.path is not None
                else _in_file(member.model, scratch / member.file),
                options=choice.plan.options,
                plan=None if choice.is_float32 else choice.plan,
            )
            made = stack.enter_context(staged_conversion(job, sink(target)))
            file = stack.enter_context(made.saved.stage.shown())
            _check_loads(member, choice, file, provider)
            staged[member.name] = StagedMember(file, made)
        yield staged
    release_sources()  # the results are in their places


def _in_file(model: Model, path: Path) -> Model:
    """Return the model, written to a file and read from there."""
    made_folder(path.parent)
    proto = copied(model.proto)
    save_model(
        proto,
        path,
        WeightConverter(FLOAT16, model.folder),
        external=weight_bytes(proto) > INLINE_LIMIT,
    )
    return Model.read(path)


def _check_loads(
    member: Member, choice: Choice, path: Path, provider: Provider
) -> None:
    """Load a file with ONNX Runtime, in a separate process."""
    options = choice.plan.options
    is_meant = (
        provider == device_of(options.target) and engine_on(provider).is_reference
    )
    place = provider if is_meant else None
    loaded = load_result(Model.read(path, member.model), member.model, place)
    if loaded.fault:
        raise RuntimeFailure(
            f"{loaded.by} does not load the model {member.name!r} at {choice.label}: {loaded.fault}. Nothing was"
            " written; leave that choice out with levels or dtypes of the model in the manifest."
        )
