"""Conversion between arrays and ONNX Runtime's values, without needless copies, and their types."""

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise, permutations
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import (
    ModelProto,
    TensorProto,
    TensorShapeProto,
    TypeProto,
    ValueInfoProto,
    helper,
    numpy_helper,
)

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.optional import require_runtime
from onnxamp._facts.dtypes import ELEM_NUMBERS, LOW_ELEMS, tensor_type
from onnxamp._graph.types import declared_type, type_proto
from onnxamp._model.protos import small_model
from onnxamp._runtime.sessions.plugins import bytes_on_device
from onnxamp._runtime.sizes import is_open

if TYPE_CHECKING:
    import onnxruntime as ort

Array: TypeAlias = npt.NDArray[Any]
Feed: TypeAlias = Array | Sequence[Any] | None
"""A tensor, a sequence of tensors, or None for an empty optional input."""
Feeds: TypeAlias = Mapping[str, Feed]
"""The inputs of a run by name."""

FOREIGN: Final = re.compile(r"\((bfloat16|float[48]\w*|u?int[24])\)")
"""Element types that ``session.run`` cannot exchange with NumPy."""
_PACKED: Final = re.compile(r"\((float4\w*|u?int[24])\)")
"""Types whose elements share a byte."""


def is_array(item: Any) -> bool:
    """Return whether this is an array, or a tensor of a framework."""
    return (
        isinstance(item, np.ndarray)
        or callable(getattr(item, "numpy", None))
        or hasattr(item, "__array__")
    )


def as_array(item: Any) -> Feed:
    """Return a user's value for an input, with tensors of frameworks as arrays. bfloat16 of PyTorch becomes float32."""
    if isinstance(item, np.ndarray) or item is None:
        return item
    if isinstance(item, (list, tuple)):
        return [as_array(part) for part in item] if any(map(is_array, item)) else item
    if not callable(getattr(item, "numpy", None)):
        return np.asarray(item) if is_array(item) else item
    item = item.detach().cpu() if hasattr(item, "detach") else item
    try:
        return np.asarray(item.numpy())
    except TypeError:
        return np.asarray(item.float().numpy())


def is_foreign(feed: Feed) -> bool:
    """Return whether the array's element type is not NumPy's own but that of ``ml_dtypes``."""
    return isinstance(feed, np.ndarray) and feed.dtype.isbuiltin == 2


def shapes_of(feeds: Feeds) -> dict[str, tuple[int, ...]]:
    """Return the shapes of those that are tensors."""
    return {
        name: feed.shape
        for name, feed in feeds.items()
        if isinstance(feed, np.ndarray)
    }


def to_value(feed: Feed, kind: str | None = None) -> "ort.OrtValue":
    """Return an OrtValue that shares the array's memory if possible.

    Args:
        feed: an array of any shape and type, or a list of arrays.
        kind: the type as schemas write it ("seq(tensor(float))"); needed if ``feed`` is an empty list.

    Raises:
        RuntimeFailure: the value is of a kind that cannot be fed (maps, nested sequences, empty optionals).
        MissingPackageError: ONNX Runtime is not installed.
    """
    require_runtime()
    import onnxruntime as ort  # noqa: PLC0415

    if isinstance(feed, np.ndarray) and feed.dtype.kind in "USO":
        tensor = numpy_helper.from_array(feed.astype(object))
        return _made("Constant", {}, "tensor(string)", value=tensor)
    if isinstance(feed, np.ndarray):
        feed = np.asarray(feed, order="C")
        if not is_foreign(feed):
            return ort.OrtValue.ortvalue_from_numpy(feed)
        elem = helper.np_dtype_to_tensor_dtype(feed.dtype)
        if _PACKED.search(held := tensor_type(elem)):
            return _made("Constant", {}, held, value=numpy_helper.from_array(feed))
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(
            feed.view(f"u{feed.dtype.itemsize}"), elem
        )
    # Feeding such a value crashes ONNX Runtime: see :func:`onnxamp._runtime.piecewise.branches.settled_flow`.
    if feed is None:
        raise RuntimeFailure("An optional that holds nothing cannot be fed.")
    is_sequence = all(isinstance(item, np.ndarray) for item in feed)
    if not is_sequence or (kind or "seq").startswith("map"):
        raise RuntimeFailure(
            f"A value of type {kind or type(feed).__name__} cannot be fed."
        )
    items = {f"x{number}": to_value(item) for number, item in enumerate(feed)}
    if not items:
        held = kind or "seq(tensor(float))"
        return _made(
            "SequenceEmpty", {}, held, dtype=typed(_inner(held)).tensor_type.elem_type
        )
    return _made("SequenceConstruct", items, f"seq({items['x0'].data_type()})")


def _as_text(name: str, feed: Array) -> Array:
    """Return an array of strings as str objects: ONNX Runtime reads the memory of others as something else.

    Raises:
        ArgumentError: it holds something else, or bytes that are no UTF-8.
    """
    if feed.dtype.kind == "U":
        return feed
    items = feed.astype(object).ravel()
    try:
        texts = [item.decode() if isinstance(item, bytes) else item for item in items]
    except UnicodeDecodeError as error:
        raise ArgumentError(
            f"Input {name!r} holds bytes that are no UTF-8: {error}."
        ) from None
    wrong = next((text for text in texts if not isinstance(text, str)), None)
    if wrong is not None:
        raise ArgumentError(
            f"Input {name!r} must hold strings, not {type(wrong).__name__}."
        )
    return np.array(texts, object).reshape(feed.shape)


def _lost_type(feed: Array, wanted: "np.dtype[Any]") -> bool:
    """Return whether an array has lost the wanted type: numpy.savez drops those of other packages."""
    is_foreign = wanted.kind == "V" or wanted.isbuiltin != 1
    is_raw = feed.dtype.names is None and feed.dtype == np.dtype(f"V{wanted.itemsize}")
    return is_foreign and is_raw


def as_typed(feed: Feed, kind: str | None) -> Feed:
    """Return a feed cast to the float type of an input ("seq(tensor(float16))"); as it is if the type is unknown
    (None).
    """
    if kind is None or feed is None:
        return feed
    inner = _inner(kind)
    if kind.startswith("optional("):
        return as_typed(feed, inner)
    if not isinstance(feed, np.ndarray):
        return [as_typed(item, inner) for item in feed]
    elem = ELEM_NUMBERS.get(inner)
    wanted = helper.tensor_dtype_to_np_dtype(elem) if elem is not None else feed.dtype
    if _lost_type(feed, wanted):
        return feed.view(wanted)
    floats = "float" in str(wanted) and "float" in str(feed.dtype)
    return feed.astype(wanted) if floats and wanted != feed.dtype else feed


def from_value(value: "ort.OrtValue") -> Any:
    """Return the array, list, dict or None that a value holds. Arrays of NumPy's own dtypes share its memory."""
    if not value.has_value():
        return None
    if value.is_sparse_tensor():
        raise RuntimeFailure(
            f"A value of type {value.data_type()} cannot be read: onnxamp reads dense tensors."
        )
    kind = value.data_type()
    has_foreign = FOREIGN.search(kind) is not None
    if not value.is_tensor() and not has_foreign:
        return _passed(value)
    if value.is_tensor_sequence():
        length = int(_made("SequenceLength", {"s": value}, "tensor(int64)").numpy())
        numbers = (to_value(np.array(number)) for number in range(length))
        return [
            from_value(_made("SequenceAt", {"s": value, "i": number}, _inner(kind)))
            for number in numbers
        ]
    if not has_foreign:
        return value.numpy()
    elem = value.element_type()
    size = value.tensor_size_in_bytes()
    on_host = value.device_name().lower() == "cpu"
    # ONNX Runtime makes no arrays of these types, so that their bytes are copied.
    read = ctypes.string_at if on_host else bytes_on_device
    raw = read(value.data_ptr(), size)
    if _PACKED.search(kind):
        return numpy_helper.to_array(
            TensorProto(data_type=elem, dims=value.shape(), raw_data=raw)
        )
    return np.frombuffer(
        bytearray(raw), helper.tensor_dtype_to_np_dtype(elem)
    ).reshape(value.shape())


def typed(kind: str) -> TypeProto:
    """Return the type of a value that passes from one session to another.

    Raises:
        RuntimeFailure: the string names a kind that cannot (a sparse tensor).
    """
    proto = type_proto(kind) or _map_proto(kind)
    if proto is None:
        raise RuntimeFailure(
            f"A value of type {kind} cannot pass from one piece of a model to the next."
        )
    return proto


def _map_proto(kind: str) -> TypeProto | None:
    """Return the type of a map, or of a sequence of maps, as ONNX Runtime writes it
    ("seq(map(string,tensor(float)))").
    """
    match = _MAP.fullmatch(kind)
    item = None if match is None else type_proto(match["item"])
    if match is None or item is None or match["key"] not in _KEY_TYPES:
        return None
    result = helper.make_map_type_proto(_KEY_TYPES[match["key"]], item)
    return helper.make_sequence_type_proto(result) if match["seq"] else result


_MAP: Final = re.compile(
    r"(?P<seq>seq\()?map\((?P<key>\w+), ?(?P<item>tensor\(\w+\))\)(?(seq)\))"
)
_KEY_TYPES: Final = {"int64": TensorProto.INT64, "string": TensorProto.STRING}
"""Types of map keys in ONNX Runtime (``data_types.cc``)."""


def _passed(value: "ort.OrtValue") -> Any:
    """Return the contents of a sequence or map. Only ``session.run`` reads these, so they pass through a model without
    nodes.
    """
    kind = str(value.data_type())
    entry = ValueInfoProto(name="y", type=typed(kind))
    with _failures(kind):
        passing = _loaded(small_model([], [entry], [entry]))
        return passing.run(["y"], {"y": value})[0]


def _inner(kind: str) -> str:
    """Return the element type of a sequence or an optional."""
    return kind[kind.index("(") + 1 : -1]


def _made(
    op: str, inputs: "Mapping[str, ort.OrtValue]", kind: str, **attributes: Any
) -> "ort.OrtValue":
    """Return the output of a one-node model: ONNX Runtime's interface can construct only tensors of numbers."""
    node = helper.make_node(op, list(inputs), ["y"], **attributes)
    kinds = {name: value.data_type() for name, value in inputs.items()} | {"y": kind}
    *entries, result = (
        ValueInfoProto(name=name, type=typed(held)) for name, held in kinds.items()
    )
    with _failures(kind):
        session = _loaded(small_model([node], entries, [result]))
        return session.run_with_ort_values(["y"], dict(inputs))[0]


@contextmanager
def _failures(kind: str) -> Iterator[None]:
    """Raise an error if ONNX Runtime cannot hold a value; its exceptions have no common base."""
    try:
        yield
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RuntimeFailure(
            f"ONNX Runtime cannot hold a value of type {kind}: {text}"
        ) from error


def _loaded(model: ModelProto) -> "ort.InferenceSession":
    require_runtime()
    import onnxruntime as ort  # noqa: PLC0415

    return ort.InferenceSession(
        model.SerializeToString(), providers=["CPUExecutionProvider"]
    )


_KINDS: Final = ("biu", "fV", "USO")
"""Groups of NumPy kinds that are never cast to each other: integers and booleans; floats ("V": bfloat16 and the like);
strings."""

_MOST_AXES: Final = 5
"""Rank up to which all orders of axes are tried."""


def check_inputs(model: ModelProto, feeds: Feeds) -> dict[str, Feed]:
    """Return the feeds in the types of the model's inputs.

    Arrays of another width (float64 for float32, int32 for int64, ...) are cast if that changes no number; floats for
    low-precision inputs are rounded as by a Cast in front of the model. Inputs with a default may be left out; optional
    inputs that are left out become None. Shapes are checked as ONNX Runtime checks them: the rank, and every dimension
    with a fixed size. A declared scalar accepts any shape.

    Raises:
        ArgumentError: an input is missing, unknown, of another kind or shape, or would change by the cast. It names
            the file that the feeds were read from.
    """
    try:
        return _as_declared(model, feeds)
    except ArgumentError as error:
        if origin := getattr(feeds, "origin", ""):
            raise ArgumentError(
                f"{str(error).removesuffix('.')} (in {origin})."
            ) from error
        raise


def _as_declared(model: ModelProto, feeds: Feeds) -> dict[str, Feed]:
    defaults = {tensor.name for tensor in model.graph.initializer}
    defaults |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    types = {entry.name: entry.type for entry in model.graph.input}
    optional = {
        name
        for name, kind in types.items()
        if kind.WhichOneof("value") == "optional_type"
    }
    missing = [
        name for name in types if name not in feeds and name not in defaults | optional
    ]
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
    return {
        name: _checked(name, feed, types[name]) for name, feed in feeds.items()
    } | empty


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
    array = np.asanyarray(feed)
    if kind.tensor_type.HasField("shape"):
        check_shape(name, array.shape, kind.tensor_type.shape)
    wanted = helper.tensor_dtype_to_np_dtype(kind.tensor_type.elem_type)
    return np.asarray(_cast(name, array, wanted))


def check_shape(name: str, given: tuple[int, ...], declared: TensorShapeProto) -> None:
    """Check a shape as ONNX Runtime does.

    Raises:
        ArgumentError: it does not fit the declared input; the message says which shapes do.
    """
    wanted = [
        dim.dim_param or "?" if is_open(dim) else dim.dim_value for dim in declared.dim
    ]
    if not wanted or _fits(given, wanted):
        return
    text = f"Input {name!r} must have the shape [{', '.join(map(str, wanted))}], not {list(given)}"
    if len(given) + 1 == len(wanted) and _fits((1, *given), wanted):
        text += ": the batch axis is missing (numpy: x[None])"
    elif len(given) == len(wanted) <= _MOST_AXES:
        orders = _fitting_orders(given, wanted)
        if order := min(orders, key=_displaced, default=None):
            text += f": its axes are in another order (numpy: x.transpose{order})"
    raise ArgumentError(f"{text}.")


def _fitting_orders(
    given: Sequence[int], wanted: Sequence[int | str]
) -> Iterator[tuple[int, ...]]:
    """Yield the orders of axes in which a shape fits."""
    for order in permutations(range(len(given))):
        if _fits([given[axis] for axis in order], wanted):
            yield order


def _fits(given: Sequence[int], wanted: Sequence[int | str]) -> bool:
    return len(given) == len(wanted) and all(
        isinstance(size, str) or size == actual
        for actual, size in zip(given, wanted, strict=True)
    )


def _displaced(order: tuple[int, ...]) -> tuple[int, int]:
    """Return a key that sorts likely orders first. Few moved axes are likelier than many, and one axis moved past
    others likelier than a shuffle.
    """
    moved = sum(place != axis for place, axis in enumerate(order))
    torn = sum(later != axis + 1 for axis, later in pairwise(order))
    return order[0] != 0, 10 * torn + moved


class WholeNumbers(np.ndarray[Any, Any]):
    """Numbers without fractions from a text, which does not say whether they are integers."""


class Fractions(np.ndarray[Any, Any]):
    """Numbers of a text in float32. The text does not say whether they are doubles.

    Attributes:
        doubles: the same numbers with all digits; views have none.
    """

    doubles: Array


def _cast(name: str, feed: Array, wanted: "np.dtype[Any]") -> Array:
    if wanted == np.float64:
        feed = getattr(feed, "doubles", feed)
    if feed.dtype.kind in "USO" and wanted.kind == "O":
        return _as_text(name, feed)
    if feed.dtype == wanted:
        return feed
    if isinstance(feed, WholeNumbers) and not feed.size:
        return feed.astype(wanted)  # an empty list, of any type
    if _lost_type(feed, wanted):
        return feed.view(wanted)
    if feed.dtype == np.dtype(f"V{feed.dtype.itemsize}"):
        raise ArgumentError(
            f"Input {name!r} must be {wanted}, and the given array lost its type when it was saved: save it as float32."
        )
    same_kind = any(
        feed.dtype.kind in kinds and wanted.kind in kinds for kinds in _KINDS
    )
    is_either = isinstance(feed, WholeNumbers) and wanted.kind in "fV"
    if not (same_kind or is_either):
        raise ArgumentError(f"Input {name!r} must be {wanted}, not {feed.dtype}.")
    with np.errstate(over="ignore", invalid="ignore"):
        result = feed.astype(wanted)
        back = result.astype(feed.dtype)
    rounds = helper.np_dtype_to_tensor_dtype(wanted) in LOW_ELEMS
    if rounds:
        are_finite = np.isfinite(result.astype(np.float32))
        if bool(np.array_equal(are_finite, np.isfinite(feed))):
            return result
    # Integers that wrap around come back as they were, but with the other sign in between.
    is_wrapped = feed.dtype.kind in "iu" and np.any((result < 0) != (feed < 0))
    # Low-precision floats of ml_dtypes are of NumPy's kind V.
    is_float = feed.dtype.kind in "fV"
    if is_wrapped or not np.array_equal(back, feed, equal_nan=is_float):
        raise ArgumentError(
            f"Input {name!r} must be {wanted}; the given {feed.dtype} array holds numbers that {wanted} cannot"
            " hold. Round it first if that is intended."
        )
    return result
