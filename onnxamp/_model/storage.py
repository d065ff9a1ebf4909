"""Reading model files, and writing files whole or not at all. See :mod:`onnxamp._model.saving` for writing models.

Large weights are not read with the model: their place is noted, be it in the model file or in a data file, and their
data are read when they are needed. Files are written aside, flushed to disk and
renamed (:mod:`onnxamp._model.staging`).
"""

import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from mmap import ACCESS_READ, mmap
from operator import add
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import DecodeError
from onnx import AttributeProto, GraphProto, ModelProto, TensorProto

from onnxamp._dtypes import LowType
from onnxamp._errors import ModelError, OutputError
from onnxamp._model.blobs import Blob, Lowered
from onnxamp._model.staging import staging
from onnxamp._model.weights import (
    INSIDE,
    WAS_DEFAULT,
    ConversionCounts,
    convert,
    embed,
    external_of,
    lies_elsewhere,
    lies_inside,
    read_float32,
    stored_bytes,
)
from onnxamp._model.wellformed import check_wellformed
from onnxamp._model.wire import find_data, replaced

INLINE_LIMIT: Final = 1_900_000_000
"""Bytes of weights up to which a model stays one file; protobuf cannot hold 2 GiB."""
MESSAGE_LIMIT: Final = 2**31
"""Bytes that no message of protobuf reaches."""
EXTERNAL_MIN: Final = 1024
"""Tensors smaller than this stay in the model file even where the others go to a data file."""
_READ_WHOLE: Final = 16 << 20
"""Bytes; smaller model files are read with all their weights."""
_LEFT_BEHIND: Final = 64 << 10
"""Bytes from which on a weight of a larger file is not read with the model."""
PENDING: Final = f"{INSIDE}pending:"
"""What stands before the number in the location of a weight that is still to be converted."""


def folder_of(path: Path) -> Path:
    """The folder that a model's external data is looked for in: the one that the given path names."""
    return path.absolute().parent


def load_model(path: Path) -> ModelProto:
    """Parse a model file without its external data, and check that it is well formed.

    Large weights of a large file are external, too, from then on: what reads weights finds them where they lie.

    Raises:
        ModelError: the file is missing, unreadable, no ONNX model, or refused by :mod:`onnxamp._model.wellformed`.

    Complexity: linear in the graph; memory is that of the graph and its small weights.
    """
    try:
        data = _read_regular(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"Cannot read {str(path)!r}: {_reason(error)}.") from None
    return parse_model(data, repr(str(path)))


def _read_regular(path: Path) -> bytes:
    """What is in a file, but for large weights; pipes and devices are not waited for, nor more read than a message.

    Raises:
        OSError, ValueError: it cannot be read, is no regular file, or is too large for a message.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is a directory" if stat.S_ISDIR(found.st_mode) else "it is no regular file")
    if found.st_size >= MESSAGE_LIMIT:
        raise ValueError(f"it has {found.st_size} bytes, and protobuf ends at 2 GiB")
    return _without_weights(path) if found.st_size >= _READ_WHOLE else path.read_bytes()


def parse_model(data: bytes, label: str) -> ModelProto:
    """The model in the bytes of a file, checked; ``label`` says where they are from.

    Raises:
        ModelError: they hold no ONNX model, or one that :mod:`onnxamp._model.wellformed` refuses.
    """
    model = ModelProto()
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        if "depth" in str(error).lower():
            raise ModelError(f"{label} nests graphs deeper than protobuf, and so every runtime, reads.") from None
        raise ModelError(f"{label} is not an ONNX model, or is truncated: it cannot be parsed.") from None
    if not model.HasField("graph") or not (model.ir_version or model.opset_import):
        raise ModelError(f"{label} is not an ONNX model: it holds no graph.")
    for tensor in tensors_of(model) if INSIDE.encode() in data else ():
        if lies_inside(tensor):
            _settle(tensor)
    check_wellformed(model)
    return model


def _settle(tensor: TensorProto) -> None:
    """Let the last word on where a tensor's data lie be ours; what is of a wrong size or an unknown type is read."""
    tensor.data_location = TensorProto.EXTERNAL
    place = external_of(tensor, None)
    if place is not None and place.length != stored_bytes(tensor):
        embed(tensor, None)


def _without_weights(path: Path) -> bytes:
    """A model file's bytes with places in place of large weights; all of them where it is written in unusual ways."""
    with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        try:
            spans = find_data(data, lambda start, stop: stop - start >= _LEFT_BEHIND)
        except ValueError:
            return data[:]
        location = INSIDE + str(path.absolute())
        places = [
            place_of(location, span.data, span.end - span.data, default=span.default).SerializeToString()
            for span in spans
        ]
        pieces, _, _ = replaced(data, spans, [(place, 0) for place in places])
        joined = b"".join(piece for _, piece in pieces)
        for _, piece in pieces:
            piece.release()
        return joined


def place_of(location: str, offset: int, length: int, *, default: bool = False) -> TensorProto:
    """A tensor that says where its data lie, and nothing else.

    Args:
        default: note that it had said, though it need not, that it holds them itself.
    """
    tensor = TensorProto(data_location=TensorProto.EXTERNAL)
    entries = {"location": location, "offset": offset, "length": length} | ({WAS_DEFAULT: ""} if default else {})
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


@dataclass(slots=True)
class WeightConverter:
    """Makes low versions of float32 tensors for :func:`onnxamp._rewrite.apply.apply_edits`, and counts what was lost.

    With ``deferred`` large data that are not in memory are not touched: the result is a placeholder, and
    :func:`save_model` converts each tensor while it writes.
    """

    low: LowType
    base_dir: Path | None
    deferred: bool = False
    pending: list[Lowered] = field(default_factory=list)
    _counts: dict[str, ConversionCounts] = field(default_factory=dict)
    _names: dict[str, list[int]] = field(default_factory=dict)

    def __call__(self, tensor: TensorProto, saturate_at: float, name: str) -> TensorProto:
        made = TensorProto(name=tensor.name, doc_string=tensor.doc_string, data_type=self.low.elem, dims=tensor.dims)
        made.metadata_props.extend(tensor.metadata_props)
        place = external_of(tensor, self.base_dir) if self.deferred and stored_bytes(made) >= EXTERNAL_MIN else None
        if place is not None:
            made.data_location = TensorProto.EXTERNAL
            made.external_data.add(key="location", value=f"{PENDING}{len(self.pending)}")
            self._names.setdefault(name, []).append(len(self.pending))
            self.pending.append(Lowered(place, self.low, saturate_at))
        else:
            made.raw_data, lost = convert(read_float32(tensor, self.base_dir), self.low, saturate_at)
            self._counts[name] = self._counts.get(name, ConversionCounts()) + lost
        return made

    def share(self, known: Mapping[Blob, Blob]) -> None:
        """Note what stands for equal blobs: each is converted, and counted, once."""
        self.pending = [known.get(blob, blob) for blob in self.pending]  # type: ignore[misc]

    def counts(self) -> dict[str, ConversionCounts]:
        """What was lost, by the value's name; of weights that were pending once they are written."""
        found = dict(self._counts)
        for name, numbers in self._names.items():
            lost = (count for number in numbers for count in self.pending[number].lost)
            found[name] = reduce(add, lost, found.get(name, ConversionCounts()))
        return found


def tensors_of(model: ModelProto) -> Iterator[TensorProto]:
    """All initializers and Constant values, of every subgraph and function, each once. Iterative."""
    stack: list[Any] = [model.graph, *model.functions]
    while stack:
        graph = stack.pop()
        if isinstance(graph, GraphProto):
            yield from graph.initializer
        for node in graph.node:
            for item in node.attribute:
                kind = item.type
                if kind in _PLAIN:
                    continue
                if item.HasField("t"):
                    yield item.t
                yield from item.tensors
                if item.HasField("g"):
                    stack.append(item.g)
                stack.extend(item.graphs)


_PLAIN: Final = frozenset({
    AttributeProto.INT, AttributeProto.INTS, AttributeProto.FLOAT, AttributeProto.FLOATS, AttributeProto.STRING,
    AttributeProto.STRINGS,
})  # fmt: skip
"""Kinds of attributes without tensors and graphs."""


def weight_bytes(model: ModelProto) -> int:
    """Bytes of all weights, wherever they are stored."""
    return sum(stored_bytes(tensor) for tensor in tensors_of(model))


def has_external_data(model: ModelProto) -> bool:
    """Whether any weight's data lie in a file."""
    return any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors_of(model))


def data_files(model: ModelProto, base_dir: Path | None) -> frozenset[Path]:
    """The data files that the model refers to, resolved.

    Raises:
        ExternalDataError: one is missing, too short, or outside the model's folder, or no folder is given.
    """
    known: dict[str, tuple[Path, int]] = {}
    for tensor in tensors_of(model):
        if lies_elsewhere(tensor):
            external_of(tensor, base_dir, known)
    return frozenset(path for path, _ in known.values())


@dataclass(frozen=True, slots=True)
class Stock:
    """A model's weights: their bytes, and the data files that hold some of them, resolved."""

    size: int
    files: frozenset[Path]


def take_stock(model: ModelProto, base_dir: Path) -> Stock:
    """Look at all weights, once. ``model`` is changed: what lies in data files is found without a search afterwards.

    Raises:
        ExternalDataError: a data file is missing, too short, or outside the model's folder.
    """
    size, known = 0, dict[str, tuple[Path, int]]()
    for tensor in tensors_of(model):
        size += stored_bytes(tensor)
        place = external_of(tensor, base_dir, known) if lies_elsewhere(tensor) else None
        if place is not None:
            tensor.ClearField("external_data")
            tensor.MergeFrom(place_of(f"{INSIDE}{place.path}", place.offset, place.length, default=True))
    return Stock(size, frozenset(path for path, _ in known.values()))


def load_external_data(model: ModelProto, base_dir: Path) -> None:
    """Bring all external data into the model. ``model`` is changed.

    Raises:
        ExternalDataError: see :func:`onnxamp._model.weights.external_of`.
    """
    for tensor in tensors_of(model):
        embed(tensor, base_dir)


def unwritable(path: Path, error: Exception) -> OutputError:
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
        raise unwritable(path, error) from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).rstrip(".")
