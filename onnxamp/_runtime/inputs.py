"""Checking inputs against the types that a model declares."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorShapeProto, TypeProto, helper

from onnxamp._dtypes import LOW_ELEMS
from onnxamp._errors import ArgumentError
from onnxamp._graph.types import declared_type
from onnxamp._runtime.values import Feed

Array: TypeAlias = npt.NDArray[Any]

_KINDS: Final = ("biu", "fV", "USO")
"""Groups of NumPy kinds that are never cast to each other: integers and booleans; floats ("V": bfloat16 and the like);
strings."""

_MOST_AXES: Final = 5
"""Rank up to which all orders of axes are tried."""


def check_inputs(model: ModelProto, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """The feeds in the types that the model takes.

    Arrays of another width (float64 for float32, int32 for int64, ...) are cast if that changes no number; floats for
    low-precision inputs are rounded as by a Cast in front of the model. Inputs with a default may be left out; optional
    inputs that are left out become None. Shapes are checked as ONNX Runtime checks them: the rank, and every dimension
    whose size the model fixes; where it declares a scalar, anything goes.

    Raises:
        ArgumentError: an input is missing, unknown, of another kind or shape, or would change by the cast. It names
            the file that the feeds were read from.
    """
    try:
        return _as_declared(model, feeds)
    except ArgumentError as error:
        if origin := getattr(feeds, "origin", ""):
            raise ArgumentError(f"{str(error).removesuffix('.')} (in {origin}).") from error
        raise


def _as_declared(model: ModelProto, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    defaults = {tensor.name for tensor in model.graph.initializer}
    defaults |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    types = {entry.name: entry.type for entry in model.graph.input}
    optional = {name for name, kind in types.items() if kind.WhichOneof("value") == "optional_type"}
    missing = [name for name in types if name not in feeds and name not in defaults | optional]
    if missing:
        noun, verb = ("input", "is") if len(missing) == 1 else ("inputs", "are")
        raise ArgumentError(
            f"The model's {noun} {_names(missing)} {verb} missing; given: {_names(feeds)}."
        )
    unknown = [name for name in feeds if name not in types]
    if unknown:
        known = [name for name in types if name not in defaults]
        raise ArgumentError(
            f"The model has no input {' or '.join(map(repr, unknown))}; it has {_names(known)}."
        )
    empty: dict[str, Feed] = dict.fromkeys(
        name for name in types if name in optional - feeds.keys()
    )
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
            raise ArgumentError(
                f"Input {name!r} is a sequence ({declared_type(kind)}): give a list of arrays."
            )
        return [
            _checked(f"{name}[{i}]", item, kind.sequence_type.elem_type)
            for i, item in enumerate(feed)
        ]
    if kind.WhichOneof("value") != "tensor_type" or not kind.tensor_type.elem_type:
        return feed
    array = np.asarray(feed)
    if kind.tensor_type.HasField("shape"):
        check_shape(name, array.shape, kind.tensor_type.shape)
    return _cast(name, array, helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type))


def check_shape(name: str, given: tuple[int, ...], declared: TensorShapeProto) -> None:
    """Check a shape as ONNX Runtime does.

    Raises:
        ArgumentError: it does not fit what is declared; the message says what does.
    """
    wanted = list(map(_declared_size, declared.dim))
    if not wanted or _fits(given, wanted):
        return
    text = f"Input {name!r} must have the shape [{', '.join(map(str, wanted))}], not {list(given)}"
    if len(given) + 1 == len(wanted) and _fits((1, *given), wanted):
        text += ": the batch axis is missing (numpy: x[None])"
    elif len(given) == len(wanted) <= _MOST_AXES:
        orders = (
            order
            for order in permutations(range(len(given)))
            if _fits([given[axis] for axis in order], wanted)
        )
        if order := min(orders, key=_displaced, default=None):
            text += f": its axes are in another order (numpy: x.transpose{order})"
    raise ArgumentError(f"{text}.")


def _declared_size(dim: TensorShapeProto.Dimension) -> int | str:
    """A fixed size, or else a name; some exporters write -1 for "dynamic"."""
    if dim.HasField("dim_value") and dim.dim_value >= 0:
        return dim.dim_value
    return dim.dim_param or "?"


def _fits(given: Sequence[int], wanted: Sequence[int | str]) -> bool:
    return len(given) == len(wanted) and all(
        isinstance(size, str) or size == found for found, size in zip(given, wanted, strict=True)
    )


def _displaced(order: tuple[int, ...]) -> tuple[int, int]:
    """Few moved axes are likelier than many, and one axis moved past others likelier than a shuffle."""
    moved = sum(place != axis for place, axis in enumerate(order))
    return order[0] != 0, sum(later != axis + 1 for axis, later in pairwise(order)) * 10 + moved


def _cast(name: str, feed: Array, wanted: "np.dtype[Any]") -> Array:
    if feed.dtype == wanted or (feed.dtype.kind in "USO" and wanted.kind == "O"):
        return feed
    if feed.dtype.names is None and feed.dtype == np.dtype(f"V{wanted.itemsize}"):
        return feed.view(wanted)  # numpy.savez drops dtypes of other packages
    same_kind = any(feed.dtype.kind in kinds and wanted.kind in kinds for kinds in _KINDS)
    if not same_kind:
        raise ArgumentError(f"Input {name!r} must be {wanted}, not {feed.dtype}.")
    with np.errstate(over="ignore", invalid="ignore"):
        result = feed.astype(wanted)
        back = result.astype(feed.dtype)
    rounds = helper.np_dtype_to_tensor_dtype(wanted) in LOW_ELEMS
    if rounds and bool(np.array_equal(np.isfinite(back), np.isfinite(feed))):
        return result
    if not np.array_equal(back, feed, equal_nan=feed.dtype.kind == "f"):
        raise ArgumentError(
            f"Input {name!r} must be {wanted}; the given {feed.dtype} array holds numbers that {wanted} cannot"
            " hold. Round it first if that is meant."
        )
    return result
