"""Models that come in: read and checked once, then handed to everything that looks at them.

Files that are no ONNX model in protobuf's binary form are read if they are one in text, and else named. Large weights
are not read together with the model. Their location is noted, in the model file or in a data file, and their bytes are
read when somebody needs them.
"""

import logging
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from mmap import ACCESS_READ, mmap
from os import PathLike
from pathlib import Path
from typing import (
    Any,
    BinaryIO,
    Concatenate,
    Final,
    NamedTuple,
    ParamSpec,
    Self,
    TypeAlias,
    TypeVar,
)

from google.protobuf import json_format, text_format
from google.protobuf.message import DecodeError
from onnx import ModelProto, TensorProto, parser

from onnxamp._base.errors import (
    ArgumentTypeError,
    ExternalDataError,
    MissingModelError,
    ModelError,
)
from onnxamp._base.paths import as_path, is_remote, near_file, read_range, reason_of
from onnxamp._facts.tables import read_table
from onnxamp._model.protos import (
    RemoteBytes,
    copied,
    find_data,
    has_external_data,
    replaced,
    stored_bytes,
    tensors_of,
)
from onnxamp._model.repair import tidied
from onnxamp._model.sources import (
    INSIDE,
    DataFile,
    DataLocation,
    FileStamp,
    check_opened,
    data_location,
    has_data_file,
    inside_tensor,
    lies_inside,
    note_sources,
)
from onnxamp._model.weights import embed

_HEAD: Final = 4096
"""Bytes in which a format shows."""

_COMMENTS: Final = re.compile(rb"\A(?:\s*#[^\n]*\n)*\s*")
"""Comments and blanks before a model in text."""
_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")
INLINE_LIMIT: Final = 1_900_000_000
"""Bytes of weights up to which a model is saved as one file; a protobuf message cannot hold 2 GiB."""
MESSAGE_LIMIT: Final = 2**31
"""Bytes that every protobuf message stays below."""
_READ_WHOLE: Final = 16 << 20
"""Bytes; smaller model files are read with all their weights."""
_LEFT_BEHIND: Final = 64 << 10
"""Bytes from which on a weight of a larger file stays in the file."""


def is_graphsurgeon(model: object) -> bool:
    """Return whether ``model`` is a graphsurgeon Graph. Does not import graphsurgeon: if it was never imported, the
    model is not one.
    """
    module = sys.modules.get("onnx_graphsurgeon")
    return module is not None and isinstance(model, module.Graph)


def from_graphsurgeon(graph: Any) -> ModelProto:
    """Return the ModelProto of a Graph.

    Raises:
        ModelError: graphsurgeon cannot export it.
    """
    import onnx_graphsurgeon as gs  # noqa: PLC0415 - the caller has imported it

    try:
        return gs.export_onnx(graph)  # type: ignore[no-any-return]
    except Exception as error:
        raise ModelError(
            f"onnx-graphsurgeon cannot export the graph {graph.name!r}: {error}"
        ) from error


def to_graphsurgeon(model: ModelProto) -> Any:
    """Return the Graph of a ModelProto."""
    import onnx_graphsurgeon as gs  # noqa: PLC0415

    return gs.import_onnx(model)


class ModelHolder:
    """An object that functions accept in place of the model that it holds."""

    __slots__ = ()
    model: ModelProto


P = ParamSpec("P")
Answer = TypeVar("Answer")


@dataclass(frozen=True, eq=False)
class Asked:
    """An immutable object that caches the results of analyses, like MLIR's analysis manager."""

    _answers: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    def ask(
        self,
        analysis: Callable[Concatenate[Self, P], Answer],
        *args: P.args,
        **keywords: P.kwargs,
    ) -> Answer:
        """Return ``analysis(self, ...)``, which runs once for each set of further arguments. These must be hashable."""
        key = analysis, args, tuple(sorted(keywords.items())) if keywords else ()
        if key not in self._answers:
            self._answers[key] = analysis(self, *args, **keywords)
        answer: Answer = self._answers[key]
        return answer


_LOG: Final = logging.getLogger("onnxamp")


def name_format(data: bytes) -> str | None:
    """Return the kind of a file that is not an ONNX model, with advice, as the end of a sentence; None if unknown."""
    for row in read_table("formats")["format"]:
        pattern = re.compile(row.get("starts", "").encode(), re.DOTALL)
        held = [text.encode("latin-1") for text in row.get("holds", [""])]
        if pattern.match(data[:_HEAD]) and any(text in data for text in held):
            return f"is {row['what']}: {row['remedy']}."
    return None


def is_text(path: Path) -> bool:
    """Return whether a model file is in text. Lengths and tags of the binary form are control characters."""
    with path.open("rb") as file:
        return _holds_text(file.read(_HEAD))


def _holds_text(data: bytes) -> bool:
    return not _CONTROL.search(data[:_HEAD])


def parse_text(data: bytes) -> ModelProto | None:
    """Return the model in a text file: protobuf's text format, protobuf's JSON, or ONNX's own syntax.

    Returns:
        The model; None if it is in none of these, or has a mistake.
    """
    head = _COMMENTS.sub(b"", data[:_HEAD])
    if _CONTROL.search(head):
        return None
    try:
        if head.startswith(b"{"):
            return json_format.Parse(data, ModelProto())
        if head.startswith(b"<"):
            return parser.parse_model(data.decode())
        if b":" in head or b"{" in head:
            return text_format.Parse(data, ModelProto())
    except (
        json_format.ParseError,
        text_format.ParseError,
        parser.ParseError,
        ValueError,
        RecursionError,
    ):
        pass
    return None


def folder_of(path: Path) -> Path:
    """Return the folder where a model's data files are: that of the path as given, even if the path is a symbolic
    link.
    """
    return path.absolute().parent


def read_graph(path: Path) -> tuple[bytes, FileStamp]:
    """Return the bytes of a model file without its large weights, and its stamp. Never waits for pipes or devices.

    Raises:
        OSError, ValueError: the file cannot be read, is not a regular file, or is too large for a message.
        SourceChangedError: it was written to meanwhile.
    """
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        raise ValueError("it is a folder: name a model in it")
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("it is not a regular file: save the model to one")
    if status.st_size >= MESSAGE_LIMIT:
        raise ValueError(
            f"it has {status.st_size} bytes, and protobuf is limited to 2 GiB"
        )
    with nullcontext() if is_remote(path) else path.open("rb") as file:
        stamp = FileStamp.of(status if file is None else os.fstat(file.fileno()))
        if stamp.size >= _READ_WHOLE:
            data = _without_weights(path, file, stamp)
        else:
            data = path.read_bytes() if file is None else file.read()
        if file is not None:
            check_opened(file, path, stamp)
    return data, stamp


def parse_model(data: bytes, label: str) -> tuple[ModelProto, tuple[str, ...]]:
    """Parse, repair and check the bytes of a model file; messages call it ``label``.

    Returns:
        The model, and sentences about its repairs.

    Raises:
        ModelError: the bytes are not an ONNX model, or :mod:`onnxamp._model.wellformed` refuses it.
    """
    model = ModelProto()
    fault = ""
    try:
        model.ParseFromString(data)
    except DecodeError as error:
        if "depth" in str(error).lower():
            raise ModelError(
                f"{label} nests graphs more deeply than protobuf can read, and therefore any runtime."
            ) from None
        fault = "is not an ONNX model, or is incomplete: it cannot be parsed. Download or export it again."
    # Arbitrary bytes may parse: unknown fields are no mistake to protobuf.
    has_version = model.ir_version or model.opset_import
    if not fault and not (model.HasField("graph") and has_version):
        fault = "is not an ONNX model: it has no graph."
        if not data:
            fault = "is empty: download or export it again."
    if fault:
        model = _in_text(data, f"{label} {name_format(data) or fault}")
    if INSIDE.encode() in data:
        for tensor in tensors_of(model):
            if lies_inside(tensor):
                _settle(tensor)
    return tidied(model)


def _in_text(data: bytes, fault: str) -> ModelProto:
    """Return the model in a text file.

    Raises:
        ModelError: it holds none, which ``fault`` says.
    """
    model = parse_text(data)
    if model is None or not model.HasField("graph"):
        raise ModelError(fault)
    return model


def _settle(tensor: TensorProto) -> None:
    """Let our location override the tensor's own; read the data if their size is wrong or unknown."""
    tensor.data_location = TensorProto.EXTERNAL
    place = data_location(tensor, None)
    if place is not None and place.length != stored_bytes(tensor):
        embed(tensor, None)


def _without_weights(path: Path, file: BinaryIO | None, stamp: FileStamp) -> bytes:
    """Return the bytes of a model file with locations in place of large weights; the whole file if its encoding is
    unusual.

    At a URL, where no file is open, the bytes of these weights are not fetched.
    """
    with _seen(path, file, stamp.size) as data:
        try:
            spans = find_data(data, lambda start, stop: stop - start >= _LEFT_BEHIND)
        except ValueError:
            return path.read_bytes() if file is None else file.read()
        where = path.absolute()
        fields = []
        for span in spans:
            place = DataLocation(where, span.data, span.end - span.data, stamp=stamp)
            tensor = inside_tensor(place, was_default=span.default)
            fields.append((tensor.SerializeToString(), 0))
        # There are no holes, so that all pieces are bytes.
        parts = (piece for _, piece in replaced(data, spans, fields))
        pieces = [piece for piece in parts if isinstance(piece, memoryview)]
        joined = b"".join(pieces)
        for piece in pieces:  # a map that is still looked at cannot be closed
            piece.release()
        return joined


@contextmanager
def _seen(
    path: Path, file: BinaryIO | None, size: int
) -> Iterator[mmap | RemoteBytes]:
    """Yield the bytes of a file, read on demand."""
    if file is None:
        yield RemoteBytes(size, partial(read_range, path))
        return
    with mmap(file.fileno(), 0, access=ACCESS_READ) as data:
        yield data


def weight_bytes(model: ModelProto) -> int:
    """Return the bytes of all weights, wherever they are stored."""
    return sum(stored_bytes(tensor) for tensor in tensors_of(model))


def find_data_files(
    model: ModelProto, base_dir: Path | None, *ignored: type[Exception]
) -> dict[str, DataFile]:
    """Look up the data files that a model refers to, by their names in the model.

    Raises:
        ExternalDataError: one is missing, too short, or outside the model's folder, or no folder is given. If that is
            ``ignored``, files that cannot be found are left out.
    """
    known: dict[str, DataFile] = {}
    for tensor in tensors_of(model):
        if has_data_file(tensor):
            with suppress(*ignored):
                data_location(tensor, base_dir, known)
    return known


def _locate_linked(model: ModelProto, base_dir: Path, real: Path) -> None:
    """Locate data files beside the file that a model's path leads to, which a link beside the path leads to as well.

    Caches keep models so: all files in one folder, under the hashes of their contents, and links with their names.

    Args:
        model: a model; its data in such files are found without a search from then on.
        base_dir: the folder of the model's path.
        real: the folder of the model file.
    """
    known = dict[str, DataFile]()
    for tensor in tensors_of(model):
        if not has_data_file(tensor):
            continue
        with suppress(ExternalDataError):
            place = data_location(tensor, base_dir, known, linked=real)
            if place is not None and place.path.parent == real:
                tensor.ClearField("external_data")
                tensor.MergeFrom(inside_tensor(place, was_default=True))


class StoredWeights(NamedTuple):
    """A model's weights: bytes of all of them, and the data files that hold some of them, resolved."""

    size: int
    files: frozenset[Path]


def locate_weights(
    model: ModelProto, base_dir: Path, files: Mapping[str, DataFile]
) -> StoredWeights:
    """Look up all weights once. ``model`` is changed: data in data files are found without a search from then on.

    Args:
        model: a model.
        base_dir: the folder of its data files.
        files: data files that were looked up when the model was read.

    Raises:
        ExternalDataError: a data file is missing, too short, or outside the model's folder.
    """
    size = 0
    known = dict(files)
    for tensor in tensors_of(model):
        size += stored_bytes(tensor)
        place = (
            data_location(tensor, base_dir, known) if has_data_file(tensor) else None
        )
        if place is not None:
            tensor.ClearField("external_data")
            tensor.MergeFrom(inside_tensor(place, was_default=True))
    return StoredWeights(size, frozenset(file.path for file in known.values()))


def load_external_data(model: ModelProto, base_dir: Path) -> None:
    """Read all external data into the model, in place.

    Raises:
        ExternalDataError: see :func:`onnxamp._model.sources.data_location`.
    """
    for tensor in tensors_of(model):
        if tensor.data_location == TensorProto.EXTERNAL:
            embed(tensor, base_dir)


@dataclass(frozen=True, eq=False)
class Model(Asked):
    """A well-formed model.

    ``proto`` is never changed. Its external data are in ``folder`` (None: there are none). Those of a large file stay
    there until they are read. ``path`` is the file that it was read from.
    """

    proto: ModelProto
    folder: Path | None = None
    path: Path | None = None
    repairs: tuple[str, ...] = ()
    """Sentences about the repairs in ``proto`` (:mod:`onnxamp._model.repair`)."""
    given: ModelProto | None = None
    """The proto that was given, if ``proto`` is a repaired copy of it."""
    stamp: FileStamp | None = None
    """The fingerprint of the contents of ``path`` that were read."""
    data: Mapping[str, DataFile] = field(default_factory=dict)
    """The data files that were found when it was read, by their names in the model."""
    in_text: bool = False
    """Whether ``path`` is in text (:func:`is_text`)."""

    @classmethod
    def of(cls, source: "ModelSource") -> "Model":
        """Return the model of an argument; its files are watched from then on (:mod:`onnxamp._model.sources`).

        Raises:
            ArgumentTypeError: it is no model. ModelError: the file cannot be read, or the model is broken.
        """
        if isinstance(source, Model):
            return source
        if isinstance(source, ModelProto):
            proto, repairs = tidied(source)
            return cls(proto, repairs=repairs, given=source if repairs else None)
        if isinstance(source, (str, PathLike)):
            model = cls.read(as_path(source))
            note_sources(model.stamps)
            return model
        if isinstance(source, ModelHolder):
            return cls.of(source.model)
        if is_graphsurgeon(source):
            return cls.of(from_graphsurgeon(source))
        raise ArgumentTypeError(
            f"model must be an onnx.ModelProto, a path or an onnx-graphsurgeon Graph, not {type(source).__name__}."
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Parse a model file without its external data, repair it, and check that it is well formed.

        Large weights of a large file stay in the file; in the proto they are external data from then on, which every
        function that reads weights finds.

        Raises:
            ModelError: the file is missing, unreadable or not an ONNX model, or :mod:`onnxamp._model.wellformed`
                refuses it. SourceChangedError: it was written to meanwhile.

        Complexity: linear in the graph; memory is that of the graph and its small weights.
        """
        try:
            data, stamp = read_graph(path)
        except FileNotFoundError as error:
            raise MissingModelError(
                f"Cannot read {str(path)!r}: {reason_of(error)}.{near_file(path)}"
            ) from None
        except (OSError, ValueError) as error:
            raise ModelError(
                f"Cannot read {str(path)!r}: {reason_of(error)}."
            ) from None
        proto, repairs = parse_model(data, repr(str(path)))
        _LOG.info("read %s: %d nodes", path, len(proto.graph.node))
        folder = folder_of(path)
        if path.is_symlink():
            _locate_linked(proto, folder, path.resolve().parent)
        return cls(
            proto,
            folder,
            path,
            repairs=repairs,
            stamp=stamp,
            data=find_data_files(proto, folder, ExternalDataError),
            in_text=_holds_text(data),
        )

    @property
    def label(self) -> str:
        """Its name in reports: the path, or the name of the graph."""
        if self.path is not None:
            return str(self.path)
        return self.proto.graph.name or "model"

    @property
    def stamps(self) -> dict[Path, FileStamp]:
        """The fingerprints of the contents of its files that were read."""
        if self.path is None or self.folder is None or self.stamp is None:
            return {}
        data = {self.folder / name: file.stamp for name, file in self.data.items()}
        return {self.path.absolute(): self.stamp, **data}

    @cached_property
    def stock(self) -> StoredWeights:
        """Its weights: bytes, and the files that contain them."""
        if self.folder is None:
            return StoredWeights(weight_bytes(self.proto), frozenset())
        return locate_weights(self.proto, self.folder, self.data)

    @property
    def files(self) -> list[Path]:
        """Its file and those of its weights; none if it came as a proto."""
        return [] if self.path is None else [self.path, *self.stock.files]

    def embedded(self) -> ModelProto:
        """Return the proto with all weights inside: itself if they are, otherwise a copy."""
        if not has_external_data(self.proto) or self.folder is None:
            return self.proto
        copy = copied(self.proto)
        load_external_data(copy, self.folder)
        return copy


ModelSource: TypeAlias = Model | ModelProto | str | PathLike[str] | Any
"""The forms of a model that public functions accept: a ModelProto, a path, an onnx-graphsurgeon Graph (which has no
types), what ``onnxamp.amp.decorate`` made of one, or a :class:`Model`, which is read and checked already.
"""


def load_model(path: Path) -> ModelProto:
    """Return the proto that :meth:`Model.read` reads."""
    return Model.read(path).proto
