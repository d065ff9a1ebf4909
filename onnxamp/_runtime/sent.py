"""A model that travels to other processes."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxamp._model.external_data import INSIDE
from onnxamp._model.model import Model
from onnxamp._model.protos import tensors_of
from onnxamp._model.sources import FileStamp, check_same


@dataclass(slots=True)
class SentModel:
    """A model that is pickled as its path, or as it is in memory; weights that were left in files are read from there.

    Attributes:
        path: the file of the model; None if it is in no file.
        data: the model that is in no file, once it is pickled.
        folder: where its weights lie.
        inside: what marks a weight that was left in a model file; another process has another mark.
        stamps: what identifies the contents of the files that were read.
    """

    path: Path | None
    data: bytes
    folder: Path | None
    inside: str
    stamps: Mapping[Path, FileStamp]
    _model: Model | None = None
    """The model itself, in the process that it comes from."""

    @classmethod
    def of(cls, model: Model) -> "SentModel":
        """Return a model to send."""
        return cls(
            path=model.path,
            data=b"",
            folder=model.folder,
            inside=INSIDE,
            stamps=model.stamps,
            _model=model,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it without the model that was read from a file."""
        data = self.data
        if self._model is not None and self.path is None:
            data = self._model.proto.SerializeToString()
        return SentModel, (self.path, data, self.folder, self.inside, self.stamps)

    def opened(self, origin: Model | None = None) -> Model:
        """Return the model, in whichever process.

        Args:
            origin: what it was converted from, in another process.

        Raises:
            SourceChangedError: its files are not those that were read where it comes from.
        """
        if self._model is not None:
            return self._model
        if self.path is not None:
            model = Model.read(self.path, origin)
            check_same(self.stamps, model.stamps)
            return model
        proto = ModelProto.FromString(self.data)
        for tensor in tensors_of(proto):
            for item in tensor.external_data:
                if item.key == "location" and item.value.startswith(self.inside):
                    item.value = INSIDE + item.value.removeprefix(self.inside)
        return Model(proto, self.folder, origin=origin)
