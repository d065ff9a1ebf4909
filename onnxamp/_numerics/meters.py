"""The small models that measure pairs of tensors; :mod:`onnxamp._numerics.measure` says what is measured.

Counts are sums of masks, so that the output is one vector of floats. All ops have kernels on CPU and CUDA at opset 17.
"""

from functools import cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from onnx import TensorProto, parser

from onnxamp._dtypes import FLOAT, LOW_TENSORS, element_name
from onnxamp._errors import RuntimeFailure
from onnxamp._model.statistics import SENTINEL
from onnxamp._runtime.session import Provider, make_session, memory_of, run_values
from onnxamp._runtime.values import to_value

if TYPE_CHECKING:
    import onnxruntime as ort

Kind: TypeAlias = Literal["quick", "measure", "vanished"]

_HEAD: Final = """
<ir_version: 8, opset_import: ["": 17]>
measure ({reference}[] reference, {found}[] found, int64[1] start, int64[1] end{more}) => ({sums}[n] measured)
{{
  zero = Constant <value = {sums} {{0.0}}> ()
  largest = Constant <value = {sums} {{{largest!r}}}> ()
  all = Constant <value = int64[1] {{-1}}> ()
  flat_r = Reshape (reference, all)
  flat_f = Reshape (found, all)
  part_r = Slice (flat_r, start, end)
  part_f = Slice (flat_f, start, end)
  r = Cast <to = {elem}> (part_r)
  f = Cast <to = {elem}> (part_f)
  abs_r = Abs (r)
  abs_f = Abs (f)
  zero_r = Equal (r, zero)
  zero_f = Equal (f, zero)
"""

_BODY: Final = {
    "quick": """
  nonzero_r = Not (zero_r)
  flushed = And (zero_f, nonzero_r)
  error = Sub (f, r)
  abs_error = Abs (error)
  bottom_r = Where (zero_r, largest, abs_r)
""",
    "measure": """
  sentinel = Constant <value = double {{{sentinel}}}> ()
  usual_r = Less (abs_r, sentinel)
  finite_f = LessOrEqual (abs_f, largest)
  common = And (usual_r, finite_f)
  number_r = Equal (r, r)
  number_f = Equal (f, f)
  nan_r = Not (number_r)
  nan_f = Not (number_f)
  infinite_r = Greater (abs_r, largest)
  infinite_f = Greater (abs_f, largest)
  new_nan = And (nan_f, number_r)
  new_infinite = And (infinite_f, usual_r)
  broken = Or (new_nan, new_infinite)
  nonzero_r = Greater (abs_r, zero)
  flushed = And (zero_f, nonzero_r)
  difference = Sub (f, r)
  error = Where (common, difference, zero)
  abs_error = Abs (error)
  common_r = Where (common, r, zero)
  common_f = Where (common, f, zero)
  top_r = Where (usual_r, abs_r, zero)
  top_f = Where (finite_f, abs_f, zero)
  some_r = And (usual_r, nonzero_r)
  bottom_r = Where (some_r, abs_r, largest)
""",
    "vanished": """
  above = Greater (abs_r, threshold)
  vanished = And (zero_f, above)
""",
}

_SUMS: Final = {
    "error_sum": ("ReduceSum", "abs_error"),
    "error_energy": ("ReduceSumSquare", "error"),
    "error_max": ("ReduceMax", "abs_error"),
    "reference_energy": ("ReduceSumSquare", "common_r"),
    "found_energy": ("ReduceSumSquare", "common_f"),
    "reference_max": ("ReduceMax", "top_r"),
    "found_max": ("ReduceMax", "top_f"),
    "reference_least": ("ReduceMin", "bottom_r"),
}
"""Field of a measurement -> how it is reduced, and from what."""

_UNMASKED: Final = {"common_r": "r", "common_f": "f", "top_r": "abs_r", "top_f": "abs_f"}
"""What "quick" reduces instead: where all is finite there is nothing to mask."""

COUNTS: Final = {
    "reference_nan": "nan_r",
    "found_nan": "nan_f",
    "reference_inf": "infinite_r",
    "found_inf": "infinite_f",
    "reference_zero": "zero_r",
    "found_zero": "zero_f",
    "broken": "broken",
    "flushed": "flushed",
    "vanished": "vanished",
}
"""Count of a measurement -> the mask whose true elements it counts."""

FIELDS: Final[dict[Kind, tuple[str, ...]]] = {
    "quick": (*_SUMS, "reference_zero", "found_zero", "flushed"),
    "measure": (*_SUMS, *(name for name in COUNTS if name != "vanished")),
    "vanished": ("vanished",),
}
"""What each kind gives, in order. "quick" is for blocks without NaN, infinities and sentinels, and sums in float32."""

FLOATS: Final = LOW_TENSORS | {FLOAT}

MEASURABLE: Final = FLOATS | {
    f"tensor({name})"
    for name in (
        "double",
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    )
}
"""Types of values that can be measured: those that Reshape, Slice and Cast take."""

NO_LEAST: Final = float(np.finfo(np.float32).max)
"""``reference_least`` from here on means that every element is zero, or none is ordinary."""


@cache
def meter(kind: Kind, provider: Provider, reference: str, found: str) -> "ort.InferenceSession":
    """The session that measures tensors of two types ("tensor(float)", ...).

    Raises:
        RuntimeFailure: the types are not of tensors of numbers.
    """
    is_quick = kind == "quick"
    text = (_HEAD + _BODY[kind]).format(
        reference=_element(reference),
        found=_element(found),
        sentinel=SENTINEL,
        more=", double threshold" if kind == "vanished" else "",
        sums="float" if is_quick else "double",
        elem=TensorProto.FLOAT if is_quick else TensorProto.DOUBLE,
        largest=float(np.finfo(np.float32 if is_quick else np.float64).max),
    )
    model = parser.parse_model(text + "\n".join(_reductions(kind)) + "\n}")
    for entry in model.graph.input[:2]:
        entry.type.tensor_type.ClearField("shape")  # any rank
    return make_session(model, provider, optimize=False)


def _reductions(kind: Kind) -> list[str]:
    """The nodes that reduce to one element each, and join them."""
    elem = TensorProto.FLOAT if kind == "quick" else TensorProto.DOUBLE
    lines = []
    for name in FIELDS[kind]:
        op, operand = _SUMS.get(name, ("ReduceSum", f"count_{name}"))
        if name in COUNTS:
            lines.append(f"{operand} = Cast <to = {elem}> ({COUNTS[name]})")
        elif kind == "quick":
            operand = _UNMASKED.get(operand, operand)
        lines.append(f"v_{name} = {op} <keepdims = 1> ({operand})")
    joined = ", ".join(f"v_{name}" for name in FIELDS[kind])
    return [*lines, f"measured = Concat <axis = 0> ({joined})"]


def _element(kind: str) -> str:
    """Element type of a tensor type: "float16" of "tensor(float16)"."""
    if kind not in MEASURABLE:
        raise RuntimeFailure(
            f"Values of type {kind} cannot be measured: they are not tensors of numbers."
        )
    return element_name(kind)


def multiplied(value: "ort.OrtValue", factor: float, provider: Provider) -> "ort.OrtValue":
    """A tensor of one of the :data:`FLOATS`, multiplied in float32 where it is."""
    session = _multiplier(memory_of(provider), str(value.data_type()))
    return run_values(
        session, {"value": value, "factor": to_value(np.array(factor, np.float32))}, ["product"]
    )["product"]


@cache
def _multiplier(provider: Provider, kind: str) -> "ort.InferenceSession":
    elem = _element(kind)
    model = parser.parse_model(f"""
<ir_version: 8, opset_import: ["": 17]>
multiply ({elem}[] value, float factor) => ({elem}[] product)
{{
  exact = Cast <to = {TensorProto.FLOAT}> (value)
  scaled = Mul (exact, factor)
  product = CastLike (scaled, value)
}}""")
    for entry in (*model.graph.input[:1], *model.graph.output):
        entry.type.tensor_type.ClearField("shape")  # any rank
    return make_session(model, provider, optimize=False)
