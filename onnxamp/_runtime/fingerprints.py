"""Fingerprints of everything that measurements depend on: models, samples, functions of the user, and versions."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from onnx import ModelProto, TensorProto

from onnxamp._base.state import file_print, fingerprint
from onnxamp._model.model import Model
from onnxamp._model.protos import (
    copied,
    copy_without,
    has_external_data,
    is_packed,
    tensors_of,
)
from onnxamp._model.sources import INSIDE, FileStamp, check_same
from onnxamp._model.weights import blocks_of, embed, read_array
from onnxamp._runtime.inputs.sample_files import read_json, read_npz, read_one
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.sessions.starting import is_large
from onnxamp._runtime.sessions.versions import versions

IN_FILES: Final = frozenset({read_npz, read_json, read_one})
"""Functions that read a sample from a file, wherever they run."""


def model_print(model: Model) -> str:
    """Return the fingerprint of a model with all its weights, wherever they are. Complexity: linear in bytes."""
    proto = model.proto
    if not (is_large(proto) or has_external_data(proto)):
        return fingerprint(proto.SerializeToString(deterministic=True))
    shell = copy_without(proto, "initializer")
    weights = []
    for tensor in (*proto.graph.initializer, *tensors_of(shell)):
        if tensor.data_location != TensorProto.EXTERNAL:
            weights.append(fingerprint(tensor.SerializeToString(deterministic=True)))
            continue
        blocks = _data_of(tensor, model.folder)
        weights.append(
            fingerprint(f"{tensor.name} {tensor.data_type} {tensor.dims}", *blocks)
        )
    # Where data lie does not matter: their contents are in the fingerprints of weights.
    for tensor in tensors_of(shell):
        tensor.ClearField("external_data")
    return fingerprint(shell.SerializeToString(deterministic=True), *weights)


def _data_of(tensor: TensorProto, folder: Path | None) -> Iterator[bytes]:
    """Yield the data of a weight in a file, in blocks."""
    if is_packed(tensor.data_type):  # NumPy has no array over such a file
        held = copied(tensor)
        embed(held, folder)
        yield held.raw_data
        return
    for block in blocks_of(read_array(tensor, folder)):
        yield block.tobytes()


def sample_print(samples: Samples, number: int) -> str:
    """Return the fingerprint of a sample: of its numbers, or of the name, size and time of the file that they are
    in.
    """
    reader = samples.readers[number]
    if getattr(reader, "func", None) in IN_FILES:
        path, *where = reader.args  # type: ignore[attr-defined] # a partial
        with suppress(OSError):
            return fingerprint(file_print(path), repr(where))
    return fingerprint(*_contents(samples, number))


def samples_print(samples: Samples) -> str:
    """Return the fingerprint of all samples in order."""
    return fingerprint(
        *(sample_print(samples, number) for number in range(len(samples)))
    )


def _contents(samples: Samples, number: int) -> Iterator[str | bytes]:
    for name, feed in samples[number].items():
        yield name
        for array in feed if isinstance(feed, list) else [feed]:
            if not isinstance(array, np.ndarray):
                yield repr(array)
                continue
            yield f"{array.dtype} {array.shape}"
            yield repr(array.tolist()) if array.dtype == object else array.tobytes()


def print_facts(
    models: Mapping[str, Model], samples: Samples, *options: object
) -> dict[str, str]:
    """Return the fingerprints that measurements depend on: those of named models, samples, options and versions."""
    return {
        **{what: model_print(model) for what, model in models.items()},
        "the first input": sample_print(samples, 0),
        "the options": fingerprint(repr(options)),
        "the version of onnxamp or ONNX Runtime": versions(),
    }


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

    def opened(self) -> Model:
        """Return the model, in whichever process.

        Raises:
            SourceChangedError: its files are not those that were read where it comes from.
        """
        if self._model is not None:
            return self._model
        if self.path is not None:
            model = Model.read(self.path)
            check_same(self.stamps, model.stamps)
            return model
        proto = ModelProto.FromString(self.data)
        for tensor in tensors_of(proto):
            for item in tensor.external_data:
                if item.key == "location" and item.value.startswith(self.inside):
                    item.value = INSIDE + item.value.removeprefix(self.inside)
        return Model(proto, self.folder)
