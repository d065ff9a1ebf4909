"""Reading and writing model files: external data by memory map, output whole or not at all.

A model is written aside, flushed to disk and renamed (:mod:`onnxamp.staging`). Where weights go to a data file beside
it, that file gets a name that no existing file has, and is complete before the model that refers to it takes its place.
"""

import contextlib
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from onnx import GraphProto, ModelProto, TensorProto

from onnxamp.dtypes import LowType
from onnxamp.errors import ModelError, OutputError
from onnxamp.staging import Stage, staging
from onnxamp.weights import ConversionCounts, convert, embed, external_of, read_float32, stored_bytes
from onnxamp.wellformed import check_wellformed

INLINE_LIMIT = 1_900_000_000
"""Bytes of weights up to which a model stays one file; protobuf cannot hold 2 GiB."""
MESSAGE_LIMIT = 2**31
"""Bytes that no message of protobuf reaches."""
EXTERNAL_MIN = 1024
"""Tensors smaller than this stay in the model file even where the others go to a data file."""
_PENDING = "onnxamp:pending:"
_IN_FLIGHT = 256 << 20
_WORKERS = 4


def folder_of(path: Path) -> Path:
    """The folder that a model's external data is looked for in: the one that the given path names."""
    return path.absolute().parent


def load_model(path: Path) -> ModelProto:
    """Parse a model file without its external data, and check that it is well formed.

    Raises:
        ModelError: the file is missing, unreadable, no ONNX model, or one that :mod:`onnxamp.wellformed` refuses.
    """
    try:
        data = _read_regular(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {str(path)!r}: {_reason(error)}.") from None
    return parse_model(data, repr(str(path)))


def _read_regular(path: Path) -> bytes:
    """What is in a file; pipes and devices are not waited for, and what cannot be one message is not read.

    Raises:
        OSError, ValueError: it cannot be read, is no regular file, or is too large for a message.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is a directory" if stat.S_ISDIR(found.st_mode) else "it is no regular file")
    if found.st_size >= MESSAGE_LIMIT:
        raise ValueError(f"it has {found.st_size} bytes, and protobuf ends at 2 GiB")
    return path.read_bytes()


def parse_model(data: bytes, label: str) -> ModelProto:
    """The model in the bytes of a file, checked; ``label`` says where they are from.

    Raises:
        ModelError: they hold no ONNX model, or one that :mod:`onnxamp.wellformed` refuses.
    """
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError:
        raise ModelError(f"{label} is not an ONNX model, or is truncated: it cannot be parsed.") from None
    if not model.HasField("graph") or not (model.ir_version or model.opset_import):
        raise ModelError(f"{label} is not an ONNX model: it holds no graph.")
    check_wellformed(model)
    return model


@dataclass(slots=True)
class WeightConverter:
    """Makes low versions of float32 tensors for :func:`onnxamp.rewrite.apply_edits`, and counts what was lost.

    With ``deferred`` the data is not touched: the result is a placeholder, and :func:`save_model` converts each tensor
    while it writes.
    """

    low: LowType
    base_dir: Path | None
    deferred: bool = False
    counts: dict[str, ConversionCounts] = field(default_factory=dict)
    pending: list[tuple[TensorProto, float]] = field(default_factory=list)

    def __call__(self, tensor: TensorProto, saturate_at: float) -> TensorProto:
        made = TensorProto(name=tensor.name, doc_string=tensor.doc_string, data_type=self.low.elem, dims=tensor.dims)
        made.metadata_props.extend(tensor.metadata_props)
        if self.deferred and stored_bytes(made) >= EXTERNAL_MIN:
            made.data_location = TensorProto.EXTERNAL
            made.external_data.add(key="location", value=f"{_PENDING}{len(self.pending)}")
            source = TensorProto()
            source.CopyFrom(tensor)
            self.pending.append((source, saturate_at))
        else:
            made.raw_data = self.data(tensor, saturate_at)
        return made

    def data(self, tensor: TensorProto, saturate_at: float) -> bytes:
        """The tensor's elements in low precision, as raw bytes."""
        raw, counts = convert(read_float32(tensor, self.base_dir), self.low, saturate_at)
        self.counts[tensor.name] = counts
        return raw


def tensors_of(model: ModelProto) -> Iterator[TensorProto]:
    """All initializers and Constant values, of every subgraph and function, each once. Iterative."""
    stack: list[Any] = [model.graph, *model.functions]
    while stack:
        graph = stack.pop()
        if isinstance(graph, GraphProto):
            yield from graph.initializer
        for node in graph.node:
            for item in node.attribute:
                if item.HasField("t"):
                    yield item.t
                yield from item.tensors
                if item.HasField("g"):
                    stack.append(item.g)
                stack.extend(item.graphs)


def weight_bytes(model: ModelProto) -> int:
    """Bytes of all weights, wherever they are stored."""
    return sum(stored_bytes(tensor) for tensor in tensors_of(model))


def has_external_data(model: ModelProto) -> bool:
    """Whether any weight lies outside the model file."""
    return any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors_of(model))


def load_external_data(model: ModelProto, base_dir: Path) -> None:
    """Bring all external data into the model. ``model`` is changed.

    Raises:
        ExternalDataError: see :func:`onnxamp.weights.external_of`.
    """
    for tensor in tensors_of(model):
        embed(tensor, base_dir)


def save_model(
    model: ModelProto,
    path: Path,
    converter: WeightConverter,
    *,
    external: bool,
    keep: frozenset[Path] = frozenset(),
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write a model whole or not at all. ``model`` is changed: it then refers to what was written.

    Args:
        converter: holds the weights that are still to be converted.
        external: put weights of at least EXTERNAL_MIN bytes into a data file beside the model.
        keep: data files that somebody else needs; the one of an earlier result is removed otherwise.
        progress: called with the number of bytes of each weight that was written.

    Raises:
        OutputError: the folder is missing or read-only, or the disk is full. Nothing was changed then.
    """
    try:
        with staging(path) as stage:
            if external:
                _write_data(model, stage, converter, progress)
            elif converter.base_dir is not None:
                load_external_data(model, converter.base_dir)
            stage.main.write_bytes(model.SerializeToString())
            stage.commit(lambda: _own_data_files(path, keep))
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from None


def copy_file(source: Path, target: Path, keep: frozenset[Path]) -> None:
    """Copy an unchanged model file, whole or not at all; ``keep`` as in :func:`save_model`.

    Raises:
        OutputError: the target cannot be written.
    """
    try:
        with staging(target) as stage:
            shutil.copyfile(source, stage.main)
            stage.commit(lambda: _own_data_files(target, keep))
    except OSError as error:
        raise _unwritable(target, error) from None


def data_files(model: ModelProto, base_dir: Path | None) -> frozenset[Path]:
    """The data files that the model refers to, resolved.

    Raises:
        ExternalDataError: one is missing, too short, or outside the model's folder, or no folder is given.
    """
    found = (external_of(tensor, base_dir) for tensor in tensors_of(model))
    return frozenset(external.path for external in found if external is not None)


def _unwritable(path: Path, error: Exception) -> OutputError:
    if not path.parent.is_dir():
        return OutputError(f"Cannot write {str(path)!r}: the folder {str(path.parent)!r} does not exist; create it.")
    return OutputError(f"Cannot write {str(path)!r}: {_reason(error)}. What was there before is untouched.")


def write_file(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; where a link is, what it leads to is replaced.

    Raises:
        OutputError: it cannot be written; what was there before is untouched.
    """
    try:
        with staging(path.resolve() if path.is_symlink() else path) as stage:
            stage.main.write_bytes(data)
            stage.commit()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error


def _write_data(
    model: ModelProto, stage: Stage, converter: WeightConverter, progress: Callable[[int], None] | None
) -> None:
    """Write all large weights to a new data file, converting on the way, and point the model to it.

    Nothing is written where there are none.
    """
    import onnx_ir as ir  # noqa: PLC0415 - costs 0.4 s, and most models are one file
    from onnx_ir import external_data  # noqa: PLC0415

    protos, sources = [], []
    for tensor in tensors_of(model):
        if stored_bytes(tensor) >= EXTERNAL_MIN and tensor.data_type != TensorProto.STRING:
            protos.append(tensor)
            sources.append(_source(tensor, converter, ir))

    if not protos:
        return

    def written(tensor: Any, _: Any) -> None:
        if progress is not None:
            progress(tensor.nbytes)

    wanted = f"{stage.path.name}.data"
    found = external_data.convert_tensors_to_external(
        sources, stage.data, wanted, written, max_workers=_WORKERS, max_in_flight_bytes=_IN_FLIGHT, alignment=4096
    )
    (name,) = stage.publish([wanted])
    for tensor, stored in zip(protos, found, strict=True):
        tensor.ClearField("raw_data")
        tensor.ClearField("float_data")
        tensor.ClearField("int32_data")
        tensor.ClearField("int64_data")
        tensor.ClearField("double_data")
        tensor.ClearField("uint64_data")
        del tensor.external_data[:]
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", name), ("offset", stored.offset), ("length", stored.length)):
            tensor.external_data.add(key=key, value=str(value))


def _source(tensor: TensorProto, converter: WeightConverter, ir: Any) -> Any:
    """The tensor as onnx-ir writes it: converted while it is written, streamed from its file, or from memory."""
    location = next((item.value for item in tensor.external_data if item.key == "location"), "")
    if location.startswith(_PENDING):
        source, saturate_at = converter.pending[int(location.removeprefix(_PENDING))]
        dtype = ir.DataType(tensor.data_type)

        def load() -> Any:
            raw = converter.data(source, saturate_at)
            return ir.Tensor(np.frombuffer(raw, dtype.numpy()).reshape(tuple(tensor.dims)), dtype=dtype)

        return ir.LazyTensor(load, dtype=dtype, shape=ir.Shape(list(tensor.dims)), name=tensor.name)
    external = external_of(tensor, converter.base_dir)
    if external is not None:
        return ir.ExternalTensor(
            external.path.name, external.offset, external.length, ir.DataType(tensor.data_type),
            shape=ir.Shape(list(tensor.dims)), name=tensor.name, base_dir=str(external.path.parent),
        )  # fmt: skip
    return ir.serde.deserialize_tensor(tensor)


def _own_data_files(path: Path, keep: frozenset[Path]) -> list[Path]:
    """Data files that an earlier save of this very output wrote: nobody needs them once it is replaced."""
    found = {}
    with contextlib.suppress(OSError, ModelError):
        for tensor in tensors_of(load_model(path)):
            for item in tensor.external_data:
                name = item.value
                if item.key == "location" and name.startswith(f"{path.name}.") and name.endswith(".data"):
                    found[name] = path.parent / name
    return [
        data
        for name, data in found.items()
        if Path(name).name == name and data.is_file() and data.resolve() not in keep
    ]


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).rstrip(".")
