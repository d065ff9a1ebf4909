"""A model that came in: read and checked once, then handed to everything that looks at it."""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeAlias, TypeVar

from onnx import ModelProto

from onnxamp._errors import ArgumentTypeError, ExternalDataError, ModelError
from onnxamp._model.protos import copied, has_external_data
from onnxamp._model.repair import tidied
from onnxamp._model.sources import DataFile, FileStamp, note_sources
from onnxamp._model.storage import (
    StoredWeights,
    find_data_files,
    folder_of,
    load_external_data,
    locate_weights,
    read_model,
    weight_bytes,
)
from onnxamp._paths import as_path


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
        key = analysis, args, tuple(sorted(keywords.items()))
        if key not in self._answers:
            self._answers[key] = analysis(self, *args, **keywords)
        answer: Answer = self._answers[key]
        return answer


_LOG: Final = logging.getLogger("onnxamp")


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
            return cls(from_graphsurgeon(source))
        raise ArgumentTypeError(
            f"model must be an onnx.ModelProto, a path or an onnx-graphsurgeon Graph, not {type(source).__name__}."
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read and check a file.

        Raises:
            ModelError: see :func:`onnxamp._model.storage.read_model`.
        """
        proto, repairs, stamp = read_model(path)
        _LOG.info("read %s: %d nodes", path, len(proto.graph.node))
        folder = folder_of(path)
        return cls(
            proto,
            folder,
            path,
            repairs=repairs,
            stamp=stamp,
            data=find_data_files(proto, folder, ExternalDataError),
        )

    @property
    def label(self) -> str:
        """Its name in reports: the path, or the name of the graph."""
        return (
            str(self.path)
            if self.path is not None
            else self.proto.graph.name or "model"
        )

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
