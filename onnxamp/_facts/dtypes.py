"""The formats of numbers: limits of floats, grids of quantized types, and the lossless conversions between types.

Types are written as in ONNX schemas and kernel registries: ``"tensor(float)"``, ``"seq(tensor(float))"``,
``"optional(tensor(float))"``. Element types are the integers of ``onnx.TensorProto.DataType``.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from math import floor, inf, log2
from typing import Any, Final, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
from onnx import TensorProto

from onnxamp._base.errors import ArgumentError, ArgumentTypeError
from onnxamp._base.records import record
from onnxamp._facts.tables import read_table

DtypeName = Literal["float16", "bfloat16"]
"""The low-precision types by name."""

Range: TypeAlias = tuple[float, float]
"""The least and the largest number that an input may hold."""


class FrameworkDtype(Protocol):
    """An element type of PyTorch, such as ``torch.float16``, as type checkers see it."""

    @property
    def is_floating_point(self) -> bool:
        """Whether its numbers are floats."""

    @property
    def is_complex(self) -> bool:
        """Whether its numbers are complex."""


DtypeLike: TypeAlias = (
    DtypeName | type[np.generic] | np.dtype[Any] | int | FrameworkDtype
)
"""A low-precision type in any form that :func:`dtype_name` reads."""


@record(kw_only=True)
class Format:
    """A low-precision float format.

    The limits follow IEEE 754-2019 (binary16) and the bfloat16 definition (float32 without its lower 16 bits).
    """

    name: str
    elem: int
    """Its number in ``onnx.TensorProto.DataType``."""
    bytes: int
    """Bytes per number."""
    max_finite: float
    overflow: float
    """Smallest magnitude that rounds to infinity: half a step beyond ``max_finite``."""
    smallest_normal: float
    smallest_subnormal: float
    epsilon: float
    """Distance between 1 and the next larger number."""
    exact_integers: int
    """All integers up to this magnitude are represented exactly."""
    min_opset: int
    """First opset whose Cast knows the type."""
    tolerance: float
    """Default limit of the relative L2 error per output of a model in this format."""
    moved_by_order: str
    """The measured effect of the order of accumulation alone on outputs."""
    is_wrapped: bool
    """Whether ONNX Runtime puts Casts around nodes in this format for which the CPU has no kernel."""
    suffix: str
    """The suffix of the names of low values and files."""
    short: tuple[str, ...] = ()
    """Usual short names."""

    def __hash__(self) -> int:
        return hash(self.name)  # a cache key for every weight

    def __reduce__(self) -> tuple[Any, ...]:
        return low_type, (self.name,)  # other processes also have one object for each

    @property
    def tensor(self) -> str:
        """The type of a tensor of this format, as schemas write it."""
        return f"tensor({self.name})"

    @property
    def mantissa(self) -> int:
        """Bits of the mantissa that are stored."""
        return -round(log2(self.epsilon))

    @property
    def patterns(self) -> np.dtype[Any]:
        """The unsigned integers that hold its bit patterns."""
        return np.dtype(f"u{self.bytes}")

    @property
    def is_narrow(self) -> bool:
        """Whether its range is narrower than that of float32."""
        return self.max_finite < FLOAT32_MAX / 2


FLOAT32_MAX: Final = float(np.finfo(np.float32).max)
"""The largest finite number of float32."""

FLOAT16: Final = Format(
    name="float16",
    elem=TensorProto.FLOAT16,
    bytes=2,
    max_finite=65504.0,
    overflow=65520.0,
    smallest_normal=2.0**-14,
    smallest_subnormal=2.0**-24,
    epsilon=2.0**-10,
    exact_integers=2048,
    min_opset=6,
    tolerance=1e-2,
    moved_by_order="0.35 %",
    is_wrapped=True,
    suffix="fp16",
    short=("fp16", "half"),
)
BFLOAT16: Final = Format(
    name="bfloat16",
    elem=TensorProto.BFLOAT16,
    bytes=2,
    max_finite=float.fromhex("0x1.fep127"),
    overflow=float.fromhex("0x1.ffp127"),
    smallest_normal=2.0**-126,
    smallest_subnormal=2.0**-133,
    epsilon=2.0**-7,
    exact_integers=256,
    min_opset=13,
    tolerance=5e-2,
    moved_by_order="2 %",
    is_wrapped=False,
    suffix="bf16",
    short=("bf16",),
)
FORMATS: Final = {low.name: low for low in (FLOAT16, BFLOAT16)}
"""The low-precision formats by name; there is no other list of them."""
LOWEST_FIRST: Final = tuple(sorted(FORMATS, key=lambda name: FORMATS[name].mantissa))
"""Their names, with the fewest digits first."""
FLOAT32_BYTES: Final = 4
LOW_ELEMS: Final = {low.elem: low for low in FORMATS.values()}
"""The formats by the number of their element type."""
LOW_TENSORS: Final = {low.tensor: low for low in FORMATS.values()}
"""The formats by the type of their tensors."""

FLOAT_ELEMS: Final = LOW_ELEMS.keys() | {TensorProto.FLOAT, TensorProto.DOUBLE}
"""Element type numbers of all floats that models calculate with."""

FLOAT: Final = "tensor(float)"
FLOAT_TENSORS: Final = frozenset({FLOAT, *LOW_TENSORS})
"""Types of float32 and low-precision tensors."""
ANY_FLOAT_TENSORS: Final = FLOAT_TENSORS | {"tensor(double)"}
"""Types of tensors of all floats that models calculate with."""


def may_be_float(kind: str | None) -> bool:
    """Return whether a value of a type may hold floats: sequences, optionals and unknown types may."""
    return not kind or kind in ANY_FLOAT_TENSORS or not kind.startswith("tensor(")


ELEM_NAMES: Final[dict[int, str]] = {
    TensorProto.FLOAT: "float",
    TensorProto.UINT8: "uint8",
    TensorProto.INT8: "int8",
    TensorProto.UINT16: "uint16",
    TensorProto.INT16: "int16",
    TensorProto.INT32: "int32",
    TensorProto.INT64: "int64",
    TensorProto.STRING: "string",
    TensorProto.BOOL: "bool",
    TensorProto.FLOAT16: "float16",
    TensorProto.DOUBLE: "double",
    TensorProto.UINT32: "uint32",
    TensorProto.UINT64: "uint64",
    TensorProto.COMPLEX64: "complex64",
    TensorProto.COMPLEX128: "complex128",
    TensorProto.BFLOAT16: "bfloat16",
    TensorProto.FLOAT8E4M3FN: "float8e4m3fn",
    TensorProto.FLOAT8E4M3FNUZ: "float8e4m3fnuz",
    TensorProto.FLOAT8E5M2: "float8e5m2",
    TensorProto.FLOAT8E5M2FNUZ: "float8e5m2fnuz",
    TensorProto.UINT4: "uint4",
    TensorProto.INT4: "int4",
    TensorProto.FLOAT4E2M1: "float4e2m1",
    25: "uint2",
    26: "int2",
}
"""Element types by number; a missing number N is written ``elemN`` (see :func:`tensor_type`)."""

_TENSOR_TYPES: Final = {elem: f"tensor({name})" for elem, name in ELEM_NAMES.items()}

ELEM_NUMBERS: Final = {name: number for number, name in ELEM_NAMES.items()}

_TENSOR: Final = re.compile(r"\btensor\((\w+)\)")
_PLAIN: Final = {"float": "float32", "double": "float64"}
"""Element types whose ONNX names differ from the usual names."""

# Significand bits (with the hidden one), least and greatest exponent: enough to tell which type contains which.
_FLOATS: Final = {
    low.name: (
        low.mantissa + 1,
        round(log2(low.smallest_subnormal)),
        floor(log2(low.max_finite)),
    )
    for low in FORMATS.values()
} | {"float": (24, -149, 127), "double": (53, -1074, 1023)}
_INTS: Final = {  # magnitude bits, signed
    "bool": (1, False),
    "uint8": (8, False),
    "int8": (7, True),
    "uint16": (16, False),
    "int16": (15, True),
    "uint32": (32, False),
    "int32": (31, True),
    "uint64": (64, False),
    "int64": (63, True),
}


def _short_names() -> Iterator[tuple[str, str]]:
    """Yield the usual short names of types, each with NumPy's name."""
    yield "fp32", "float32"
    for low in FORMATS.values():
        for short in low.short:
            yield short, low.name


_SHORT: Final = dict(_short_names())
_KNOWN: Final = frozenset({*ELEM_NUMBERS, *_PLAIN.values()} - _PLAIN.keys())
"""NumPy's names of element types."""
_FRAMEWORKS: Final = frozenset({"mindspore", "paddle", "torch"})
"""Packages with types of their own, whose text is their name: "Float16", "paddle.float16", "torch.float16"."""
_DOTTED: Final = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*")


def dtype_name(dtype: object) -> str:
    """Return NumPy's name for an element type that is given in any form: "float16", "bfloat16", "float32".

    Args:
        dtype: a name in upper or lower case, also one with its module ("torch.float16"), a NumPy or ml_dtypes type
            (``numpy.float16``, ``ml_dtypes.bfloat16``), a ``numpy.dtype``, a type of PyTorch, Paddle or MindSpore
            (``torch.float16``), or a number of ``onnx.TensorProto.DataType``, including the values of
            ``onnx_ir.DataType``.

    Raises:
        ArgumentTypeError: it is none of these.
    """
    if isinstance(dtype, str):
        return _named(dtype)
    if isinstance(dtype, (int, np.integer)) and not isinstance(dtype, bool):
        name = ELEM_NAMES.get(int(dtype), str(int(dtype)))
        return _PLAIN.get(name, name)
    if isinstance(dtype, np.dtype):
        return dtype.name
    # NumPy takes any other class for a type of objects.
    if isinstance(dtype, type) and (known := np.dtype(dtype)) != np.dtype(object):
        return known.name
    # By name, so that no framework is imported.
    package = type(dtype).__module__.partition(".")[0]
    if package in _FRAMEWORKS and _DOTTED.fullmatch(str(dtype)):
        return _named(str(dtype))
    kind = dtype.__name__ if isinstance(dtype, type) else type(dtype).__name__
    raise ArgumentTypeError(
        "dtype must be a name such as 'float16', a type of NumPy, ml_dtypes, PyTorch, Paddle or MindSpore, or an ONNX"
        f" element type, not {kind}."
    )


def _named(text: str) -> str:
    """Return NumPy's name for the name of a type; a name that no type has stays as it is."""
    name = text.rpartition(".")[2].lower()
    name = _SHORT.get(name, name)
    return name if name in _KNOWN else text


def low_type(dtype: object) -> Format:
    """Return the low-precision format that ``dtype`` stands for; see :func:`dtype_name` for its possible forms.

    Raises:
        ArgumentTypeError: ``dtype`` does not stand for an element type.
        ArgumentError: the type is not a low-precision type.
    """
    name = dtype_name(dtype)
    if name not in FORMATS:
        raise ArgumentError(
            f"Unknown dtype {name!r}: choose one of {', '.join(FORMATS)}."
        )
    return FORMATS[name]


def tensor_type(elem: int) -> str:
    """Return the type of a tensor with element type number ``elem``, as schemas write it."""
    return _TENSOR_TYPES.get(elem) or f"tensor(elem{elem})"


def element_name(type_name: str | None) -> str:
    """Return ONNX's name for the element type of a tensor type: "float" for ``tensor(float)``; "" for other types."""
    head, _, name = (type_name or "").partition("tensor(")
    return "" if head else name[:-1]


def elem_of(type_name: str | None) -> int:
    """Return the number of a tensor type's element type; 0 if that is unknown, or the type is another one."""
    return ELEM_NUMBERS.get(element_name(type_name), 0)


def readable_types(text: str | None) -> str:
    """Return types in readable form: "float32" for ``tensor(float)``, "seq(float16)" for ``seq(tensor(float16))``.

    The rest of the text is unchanged; None becomes "unknown".
    """
    if text is None:
        return "unknown"
    return _TENSOR.sub(lambda match: _PLAIN.get(match[1], match[1]), text)


def retyped(type_name: str, low: Format) -> str:
    """Return ``type_name`` with float32 replaced by ``low``, at any depth: ``seq(tensor(float))`` and so on."""
    return type_name.replace(FLOAT, low.tensor)


def holds_float(type_name: str | None) -> bool:
    """Return whether values of the type carry float32 tensors that could be low instead."""
    # No op that has a low-precision kernel takes maps or sparse tensors.
    is_plain = type_name is not None and not type_name.startswith(("map", "sparse"))
    return is_plain and FLOAT in (type_name or "")


def lows_among(types: Iterable[str | None]) -> list[Format]:
    """Return the low-precision types among those of values, also of the tensors in their containers."""
    # The name of a container's type includes that of its tensors.
    names = " ".join({name for name in types if name is not None})
    return [low for low in FORMATS.values() if low.tensor in names]


def is_lossless(source: str, target: str) -> bool:
    """Return whether every value of element type ``source`` survives a Cast to ``target`` unchanged.

    Complexity: O(1). Unknown types are lossless only to themselves.
    """
    if source == target:
        return True
    if source in _FLOATS and target in _FLOATS:
        (bits, low, high), (bits2, low2, high2) = _FLOATS[source], _FLOATS[target]
        return bits <= bits2 and low >= low2 and high <= high2
    if source in _INTS and target in _FLOATS:
        magnitude, signed = _INTS[source]
        bits, _, high = _FLOATS[target]
        # The most negative integer is a power of two: only its exponent matters.
        return magnitude <= bits and magnitude + signed - 1 <= high
    if source in _INTS and target in _INTS:
        (magnitude, signed), (magnitude2, signed2) = _INTS[source], _INTS[target]
        return magnitude <= magnitude2 and (signed2 or not signed)
    return False


class Grid(NamedTuple):
    """The numbers of a quantized type; ``_data/grids.toml`` explains the fields."""

    end: float
    steps: int


@cache
def grids() -> Mapping[str, Grid]:
    """Return the grids by the name of their type."""
    return {name: Grid(**row) for name, row in read_table("grids").items()}


def ends(name: str) -> tuple[float, float]:
    """Return the first and the last number of a quantized type, between which nothing is saturated.

    Signed integers end at the last number of either sign. Other types have no ends.
    """
    grid = grids().get(name)
    if grid is None:
        return -inf, inf
    if name.startswith("uint"):
        return 0.0, grid.end
    last = grid.end - 1 if name.startswith("int") else grid.end
    return -last, last
