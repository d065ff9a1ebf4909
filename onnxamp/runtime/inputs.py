"""Inputs of a model: read from a file, checked against the model, or made up so that the model accepts them."""

import zipfile
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TypeProto, helper

from onnxamp.errors import ArgumentError
from onnxamp.infer import declared_type
from onnxamp.runtime.random_inputs import random_inputs
from onnxamp.runtime.session import Feed

__all__ = ["check_inputs", "load_inputs", "random_inputs"]

Array: TypeAlias = npt.NDArray[Any]

_KINDS: Final = ("biu", "fV", "USO")
"""NumPy kinds that stay among themselves: integers and booleans; floats ("V": bfloat16 and its like); strings."""


_UNREADABLE: Final = (OSError, EOFError, ValueError, zipfile.BadZipFile)


def load_inputs(path: str | PathLike[str]) -> dict[str, Array]:
    """Read the arrays of an ``.npz`` file (numpy.savez), by name. Pickled objects are not read.

    Raises:
        ArgumentError: the file is missing or no ``.npz`` file, or one of its arrays cannot be read.
    """
    name = fspath(path)
    try:
        with Path(path).open("rb") as stream:
            return _arrays(name, np.load(stream, allow_pickle=False))
    except ArgumentError:  # a ValueError too
        raise
    except FileNotFoundError as error:
        raise ArgumentError(f"Cannot read inputs from {name}: there is no such file.") from error
    except OSError as error:
        raise ArgumentError(f"Cannot read inputs from {name}: {error.strerror or error}.") from error
    except _UNREADABLE as error:
        raise ArgumentError(f"Cannot read inputs from {name}: it is not an .npz file of plain arrays.") from error


def _arrays(name: str, loaded: "Array | np.lib.npyio.NpzFile") -> dict[str, Array]:
    if isinstance(loaded, np.ndarray):
        raise ArgumentError(f"{name} holds one array without a name: save inputs with numpy.savez(path, name=array).")
    arrays = {}
    for key in loaded.files:
        try:
            arrays[key] = loaded[key]
        except _UNREADABLE as error:
            raise ArgumentError(f"Cannot read the array {key!r} of {name}: {error}.") from error
    return arrays


def check_inputs(model: ModelProto, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """The feeds as the model takes them.

    Arrays of another width (float64 for float32, int32 for int64, ...) are cast if that changes no number. Inputs
    with a default may be left out; optional inputs that are left out become None. Shapes are not checked.

    Raises:
        ArgumentError: an input is missing, unknown, of another kind, or loses numbers by the cast.
    """
    defaults = {tensor.name for tensor in model.graph.initializer}
    defaults |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    types = {entry.name: entry.type for entry in model.graph.input}
    optional = {name for name, kind in types.items() if kind.WhichOneof("value") == "optional_type"}
    missing = [name for name in types if name not in feeds and name not in defaults | optional]
    if missing:
        raise ArgumentError(f"The model's input {_names(missing)} is missing; given: {_names(feeds)}.")
    unknown = [name for name in feeds if name not in types]
    if unknown:
        known = [name for name in types if name not in defaults]
        raise ArgumentError(f"The model has no input {_names(unknown)}; it has {_names(known)}.")
    empty: dict[str, Feed] = dict.fromkeys(name for name in types if name in optional - feeds.keys())
    return {name: _checked(name, feed, types[name]) for name, feed in feeds.items()} | empty


def _names(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _checked(name: str, feed: Feed, kind: TypeProto) -> Feed:
    if kind.WhichOneof("value") == "optional_type":
        if feed is None:
            return None
        kind = kind.optional_type.elem_type
    if kind.WhichOneof("value") == "sequence_type":
        if isinstance(feed, np.ndarray) or not isinstance(feed, Sequence):
            raise ArgumentError(f"Input {name!r} is a sequence ({declared_type(kind)}): give a list of arrays.")
        return [_checked(f"{name}[{i}]", item, kind.sequence_type.elem_type) for i, item in enumerate(feed)]
    if kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.elem_type:
        return feed
    return _cast(name, np.asarray(feed), helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


def _cast(name: str, feed: Array, wanted: "np.dtype[Any]") -> Array:
    if feed.dtype == wanted or (feed.dtype.kind in "USO" and wanted.kind == "O"):
        return feed
    if feed.dtype.names is None and feed.dtype == np.dtype(f"V{wanted.itemsize}"):
        return feed.view(wanted)  # numpy.savez forgets which type of another package the bytes are
    same_kind = any(feed.dtype.kind in kinds and wanted.kind in kinds for kinds in _KINDS)
    if not same_kind:
        raise ArgumentError(f"Input {name!r} must be {wanted}, not {feed.dtype}.")
    with np.errstate(over="ignore", invalid="ignore"):
        result = feed.astype(wanted)
        back = result.astype(feed.dtype)
    if not np.array_equal(back, feed, equal_nan=feed.dtype.kind == "f"):
        raise ArgumentError(
            f"Input {name!r} must be {wanted}; the given {feed.dtype} array holds numbers that {wanted} cannot"
            " hold. Round it first if that is meant."
        )
    return result
