"""Conversion between arrays and ONNX Runtime's values, without needless copies, and their types."""

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from onnxamp._dtypes import ELEM_NUMBERS, tensor_type
from onnxamp._errors import RuntimeFailure
from onnxamp._graph.types import type_proto
from onnxamp._optional import require_runtime
from onnxamp._runtime.device import bytes_on_device

if TYPE_CHECKING:
    import onnxruntime as ort

Array: TypeAlias = npt.NDArray[Any]
Feed: TypeAlias = Array | Sequence[Any] | None
"""A tensor, a sequence of tensors, or None for an optional input that holds nothing."""

FOREIGN: Final = re.compile(r"\((bfloat16|float[48]\w*|u?int[24])\)")
"""Element types that ``session.run`` cannot exchange with NumPy."""
_PACKED: Final = re.compile(r"\((float4\w*|u?int[24])\)")
"""Those of which several share a byte."""


def is_array(item: Any) -> bool:
    """Whether it is an array, or a tensor of a framework."""
    return (
        isinstance(item, np.ndarray)
        or callable(getattr(item, "numpy", None))
        or hasattr(item, "__array__")
    )


def as_array(item: Any) -> Feed:
    """What users give for an input, with tensors of frameworks as arrays. bfloat16 of PyTorch becomes float32."""
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
    """Whether the array's element type comes from another package than NumPy (``ml_dtypes``)."""
    return isinstance(feed, np.ndarray) and feed.dtype.isbuiltin == 2


def to_value(feed: Feed, kind: str | None = None) -> "ort.OrtValue":
    """An OrtValue that shares the array's memory where it can.

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
    if (
        feed is None
    ):  # feeding such a value crashes ONNX Runtime: see :func:`onnxamp._runtime.branches.settled_flow`
        raise RuntimeFailure("An optional that holds nothing cannot be fed.")
    if not all(isinstance(item, np.ndarray) for item in feed) or (kind or "seq").startswith("map"):
        raise RuntimeFailure(f"A value of type {kind or type(feed).__name__} cannot be fed.")
    items = {f"x{number}": to_value(item) for number, item in enumerate(feed)}
    if not items:
        held = kind or "seq(tensor(float))"
        return _made("SequenceEmpty", {}, held, dtype=typed(_inner(held)).tensor_type.elem_type)
    return _made("SequenceConstruct", items, f"seq({items['x0'].data_type()})")


def as_typed(feed: Feed, kind: str | None) -> Feed:
    """A feed cast to the float type of an input ("seq(tensor(float16))"); as it is if the type is unknown (None)."""
    if kind is None or feed is None:
        return feed
    inner = _inner(kind)
    if kind.startswith("optional("):
        return as_typed(feed, inner)
    if not isinstance(feed, np.ndarray):
        return [as_typed(item, inner) for item in feed]
    elem = ELEM_NUMBERS.get(inner)
    wanted = helper.tensor_dtype_to_np_dtype(elem) if elem is not None else feed.dtype
    if feed.dtype == np.dtype(f"V{wanted.itemsize}"):
        return feed.view(wanted)  # numpy.savez drops dtypes of other packages
    floats = "float" in str(wanted) and "float" in str(feed.dtype)
    return feed.astype(wanted) if floats and wanted != feed.dtype else feed


def from_value(value: "ort.OrtValue") -> Any:
    """The array, list, dict or None that a value holds. Arrays of NumPy's own dtypes share its memory."""
    if not value.has_value():
        return None
    if value.is_sparse_tensor():
        raise RuntimeFailure(
            f"A value of type {value.data_type()} cannot be read: onnxamp reads dense tensors."
        )
    if not value.is_tensor() and not FOREIGN.search(value.data_type()):
        return _passed(value)
    if value.is_tensor_sequence():
        element = _inner(value.data_type())
        length = int(_made("SequenceLength", {"s": value}, "tensor(int64)").numpy())
        numbers = (to_value(np.array(number)) for number in range(length))
        return [
            from_value(_made("SequenceAt", {"s": value, "i": number}, element))
            for number in numbers
        ]
    if not value.is_tensor() or not FOREIGN.search(value.data_type()):
        return value.numpy()
    elem, size = value.element_type(), value.tensor_size_in_bytes()
    on_host = value.device_name().lower() == "cpu"
    raw = (
        ctypes.string_at(value.data_ptr(), size)
        if on_host
        else bytes_on_device(value.data_ptr(), size)
    )  # copies
    if _PACKED.search(value.data_type()):
        return numpy_helper.to_array(TensorProto(data_type=elem, dims=value.shape(), raw_data=raw))
    return np.frombuffer(bytearray(raw), helper.tensor_dtype_to_np_dtype(elem)).reshape(
        value.shape()
    )


def typed(kind: str) -> TypeProto:
    """:func:`~onnxamp._graph.types.type_proto` of a value that passes from one session to another.

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
    """The type of a map, or of a sequence of maps, as ONNX Runtime writes it ("seq(map(string,tensor(float)))")."""
    match = _MAP.fullmatch(kind)
    if match is None or match["key"] not in _KEY_TYPES:
        return None
    item = type_proto(match["item"])
    result = None if item is None else helper.make_map_type_proto(_KEY_TYPES[match["key"]], item)
    return (
        helper.make_sequence_type_proto(result) if match["seq"] and result is not None else result
    )


_MAP: Final = re.compile(r"(?P<seq>seq\()?map\((?P<key>\w+), ?(?P<item>tensor\(\w+\))\)(?(seq)\))")
_KEY_TYPES: Final = {"int64": TensorProto.INT64, "string": TensorProto.STRING}
"""What keys of maps are in ONNX Runtime (``data_types.cc``)."""


def _passed(value: "ort.OrtValue") -> Any:
    """What a sequence or a map holds. Only ``session.run`` reads these, so it goes through a model without nodes."""
    kind = str(value.data_type())
    entry = ValueInfoProto(name="y", type=typed(kind))
    graph = helper.make_graph([], "pass", [entry], [entry])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with _failures(kind):
        return _loaded(model).run(["y"], {"y": value})[0]


def _inner(kind: str) -> str:
    """The element type of a sequence or an optional."""
    return kind[kind.index("(") + 1 : -1]


def _made(
    op: str, inputs: "Mapping[str, ort.OrtValue]", kind: str, **attributes: Any
) -> "ort.OrtValue":
    """The output of a one-node model: ONNX Runtime's interface can construct only tensors of numbers."""
    with _failures(kind):
        session = _session(
            op, tuple((name, value.data_type()) for name, value in inputs.items()), kind, attributes
        )
        return session.run_with_ort_values(["y"], dict(inputs))[0]


@contextmanager
def _failures(kind: str) -> Iterator[None]:
    """Say that ONNX Runtime cannot hold a value; its exceptions have no common base."""
    try:
        yield
    except Exception as error:
        text = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise RuntimeFailure(f"ONNX Runtime cannot hold a value of type {kind}: {text}") from error


def _session(
    op: str, inputs: Sequence[tuple[str, str]], kind: str, attributes: Mapping[str, Any]
) -> "ort.InferenceSession":
    node = helper.make_node(op, [name for name, _ in inputs], ["y"], **attributes)
    entries = [ValueInfoProto(name=name, type=typed(held)) for name, held in inputs]
    graph = helper.make_graph([node], op, entries, [ValueInfoProto(name="y", type=typed(kind))])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return _loaded(model)


def _loaded(model: ModelProto) -> "ort.InferenceSession":
    require_runtime()
    import onnxruntime as ort  # noqa: PLC0415

    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
