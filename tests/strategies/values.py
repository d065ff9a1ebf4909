"""Values of a random model, and numbers for them that both low types hold exactly."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
from judge_kernels import type_name
from onnx import TensorProto, TypeProto, helper, numpy_helper

Shape = tuple[int | None, ...]
ELEMS = {f"tensor({name.lower()})": number for name, number in TensorProto.DataType.items()}
"""Type as schemas spell it -> element type."""
FLOATS = frozenset({"tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)"})
USUAL = (
    "tensor(double)", "tensor(float16)", "tensor(bfloat16)", "tensor(int64)", "tensor(int32)", "tensor(bool)",
    "tensor(uint8)", "tensor(int8)",
)  # fmt: skip
"""Types besides float32 that values take."""


@dataclass(frozen=True)
class Value:
    """A named value; ``data`` are its numbers where the model holds them."""

    name: str
    type: TypeProto
    data: TensorProto | None = None

    @property
    def kind(self) -> str:
        """The type as schemas spell it: "tensor(float)", "seq(tensor(int64))"."""
        return type_name(self.type)

    @property
    def shape(self) -> Shape | None:
        """Dimensions of a tensor, or of a sequence's elements; None where even the rank is unknown."""
        return shape_of(self.type)

    @property
    def static(self) -> bool:
        """Whether all dimensions are known."""
        return self.shape is not None and None not in self.shape

    @property
    def size(self) -> int:
        """Number of elements of a static tensor."""
        return math.prod(dim or 0 for dim in self.shape or ())


def shape_of(proto: TypeProto) -> Shape | None:
    """As :attr:`Value.shape`."""
    while (kind := proto.WhichOneof("value")) in ("sequence_type", "optional_type"):
        proto = getattr(proto, kind).elem_type
    if not proto.tensor_type.HasField("shape"):
        return None
    return tuple(dim.dim_value if dim.HasField("dim_value") else None for dim in proto.tensor_type.shape.dim)


def tensor_type(kind: str, shape: Sequence[int | None] | None) -> TypeProto:
    return helper.make_tensor_type_proto(ELEMS[kind], shape)


def numbers(rng: Random, kind: str, shape: Sequence[int], low: float = -2, high: float = 2) -> np.ndarray:
    """Small numbers with at most four significant bits: eighths for floats; integers from 1 to 3; or strings."""
    count = math.prod(shape)
    if kind == "tensor(string)":
        return np.array([rng.choice(("a", "b,c", "ab")) for _ in range(count)], object).reshape(shape)
    if kind == "tensor(bool)":
        return np.array([rng.random() < 0.5 for _ in range(count)]).reshape(shape)
    dtype = helper.tensor_dtype_to_np_dtype(ELEMS[kind])
    if kind not in FLOATS:
        return np.array([rng.randint(1, 3) for _ in range(count)]).reshape(shape).astype(dtype)
    if low < 0 and rng.random() < 0.6:
        low = 0.5  # logarithms and roots shall have something to work on
    drawn = [rng.randint(round(low * 8), round(high * 8)) / 8 for _ in range(count)]
    return np.array(drawn).reshape(shape).astype(dtype)


def tensor(name: str, kind: str, data: Any, rng: Random | None = None) -> TensorProto:
    """The numbers as a tensor of any element type, in raw or (where ``rng`` says so) in typed fields."""
    array = np.asarray(data)
    if kind != "tensor(string)":
        array = array.astype(helper.tensor_dtype_to_np_dtype(ELEMS[kind]))
    if rng is not None and kind == "tensor(float)" and rng.random() < 0.3:
        return helper.make_tensor(name, TensorProto.FLOAT, array.shape, array.ravel().tolist())
    return numpy_helper.from_array(array, name)
