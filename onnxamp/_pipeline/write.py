"""Writing the models of a pipeline: all are written beside their targets and judged there, and then all are renamed.

If a result is rejected, nothing changes. Files are renamed model by model, so each is complete at all times.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from onnxamp._dtypes import FLOAT16
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._job.pipeline import convert_to_file
from onnxamp._job.request import Request
from onnxamp._job.validation import load_result
from onnxamp._job.writing import Conversion, Sink
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._model.saving import save_model
from onnxamp._model.storage import INLINE_LIMIT, weight_bytes
from onnxamp._ops.targets import device_of
from onnxamp._paths.paths import made_folder
from onnxamp._pipeline.choices import Choice
from onnxamp._pipeline.manifest import Member
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.session import Provider

Approve = Callable[[Mapping[str, Path]], None]
"""A function that judges the files of all models before they are put in place, and raises if they are rejected."""


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


def write_pipeline(
    members: Sequence[Member],
    chosen: Mapping[str, Choice],
    folder: Path,
    sink: Callable[[Path], Sink],
    provider: Provider,
    approve: Approve,
    scratch: Path,
) -> dict[str, Conversion]:
    """Write all models of a pipeline into a folder.

    Args:
        members: the models.
        chosen: the choice for each model.
        folder: the folder to write to; each model keeps its own name.
        sink: how to write a file.
        provider: where models ran.
        approve: the function that judges the files.
        scratch: a folder for models that do not come from a file.

    Raises:
        RuntimeFailure: ONNX Runtime does not load a result. OutputError: something cannot be written. Others as
            :func:`onnxamp._convert.convert.convert_to_file`, and exceptions of ``approve``.
    """
    made: dict[str, Conversion] = {}

    def written(left: Sequence[Member], shown: Mapping[str, Path]) -> None:
        """Write the remaining models; ``shown`` has the files of the others."""
        if not left:
            approve(shown)
            return
        member, choice = left[0], chosen[left[0].name]
        target = folder / member.file
        made_folder(target.parent)

        def go_on(path: Path) -> None:
            _check_loads(member, choice, path, provider)
            written(left[1:], {**shown, member.name: path})

        how = replace(sink(target), approve=go_on)
        plan = None if choice.is_float32 else choice.plan
        model = (
            member.model
            if member.model.path is not None
            else _in_file(member.model, scratch / member.file)
        )
        request = Request(
            model=model, asked=choice.plan.options, plan=plan, warn=lambda _: None
        )
        made[member.name] = convert_to_file(request, how).conversion

    written(members, {})
    return made


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
