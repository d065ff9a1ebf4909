"""The small models that measure pairs of tensors, as text; see :mod:`onnxamp._runtime.measure` for what is measured.

Counts are sums of masks, so every output is one vector of floats. All ops have kernels on CPU and CUDA at opset 17.
"""

from functools import cache
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from onnx import parser

from onnxamp._dtypes import element_name
from onnxamp._errors import RuntimeFailure
from onnxamp._model.weights import SENTINEL
from onnxamp._runtime.session import Provider, make_session

if TYPE_CHECKING:
    import onnxruntime as ort

Kind: TypeAlias = Literal["quick", "measure", "vanished"]

_SUMS: Final = (
    "error_sum", "error_energy", "error_max", "reference_energy", "found_energy", "reference_max", "found_max",
    "reference_least",
)  # fmt: skip
"""Sums and maxima, in the order of the outputs."""

_HEAD: Final = """
<ir_version: 8, opset_import: ["": 17]>
measure ({reference} reference, {found} found, int64[1] start, int64[1] end{more}) => (double[n] measured)
{{
  zero = Constant <value = double {{0.0}}> ()
  all = Constant <value = int64[1] {{-1}}> ()
  flat_r = Reshape (reference, all)
  flat_f = Reshape (found, all)
  part_r = Slice (flat_r, start, end)
  part_f = Slice (flat_f, start, end)
  r = Cast <to = 11> (part_r)
  f = Cast <to = 11> (part_f)
  abs_r = Abs (r)
  abs_f = Abs (f)
  zero_r = Equal (r, zero)
  zero_f = Equal (f, zero)
"""

_MEASURE: Final = (
    _HEAD
    + """
  largest = Constant <value = double {{1.7976931348623157e308}}> ()
  sentinel = Constant <value = double {{{sentinel}}}> ()
  usual_r = Less (abs_r, sentinel)
  finite_f = LessOrEqual (abs_f, largest)
  common = And (usual_r, finite_f)
  number_r = Equal (r, r)
  number_f = Equal (f, f)
  nan_r = Not (number_r)
  nan_f = Not (number_f)
  endless_r = Greater (abs_r, largest)
  endless_f = Greater (abs_f, largest)
  new_nan = And (nan_f, number_r)
  new_endless = And (endless_f, usual_r)
  broken = Or (new_nan, new_endless)
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
  v_error_sum = ReduceSum <keepdims = 1> (abs_error)
  v_error_energy = ReduceSumSquare <keepdims = 1> (error)
  v_error_max = ReduceMax <keepdims = 1> (abs_error)
  v_reference_energy = ReduceSumSquare <keepdims = 1> (common_r)
  v_found_energy = ReduceSumSquare <keepdims = 1> (common_f)
  v_reference_max = ReduceMax <keepdims = 1> (top_r)
  v_found_max = ReduceMax <keepdims = 1> (top_f)
  v_reference_least = ReduceMin <keepdims = 1> (bottom_r)
"""
)

COUNTS: Final = {
    "reference_nan": "nan_r", "found_nan": "nan_f", "reference_inf": "endless_r", "found_inf": "endless_f",
    "reference_zero": "zero_r", "found_zero": "zero_f", "broken": "broken", "flushed": "flushed",
}  # fmt: skip
"""Count of a measurement -> the mask whose true elements it counts."""

_VANISHED: Final = (
    _HEAD
    + """
  above = Greater (abs_r, threshold)
  vanished = And (zero_f, above)
"""
)

_QUICK: Final = """
<ir_version: 8, opset_import: ["": 17]>
measure ({reference} reference, {found} found, int64[1] start, int64[1] end) => (float[n] measured)
{{
  zero = Constant <value = float {{0.0}}> ()
  most = Constant <value = float {{3.4028234663852886e38}}> ()
  all = Constant <value = int64[1] {{-1}}> ()
  flat_r = Reshape (reference, all)
  flat_f = Reshape (found, all)
  part_r = Slice (flat_r, start, end)
  part_f = Slice (flat_f, start, end)
  r = Cast <to = 1> (part_r)
  f = Cast <to = 1> (part_f)
  abs_r = Abs (r)
  abs_f = Abs (f)
  zero_r = Equal (r, zero)
  zero_f = Equal (f, zero)
  nonzero_r = Not (zero_r)
  flushed = And (zero_f, nonzero_r)
  error = Sub (f, r)
  abs_error = Abs (error)
  bottom_r = Where (zero_r, most, abs_r)
  v_error_sum = ReduceSum <keepdims = 1> (abs_error)
  v_error_energy = ReduceSumSquare <keepdims = 1> (error)
  v_error_max = ReduceMax <keepdims = 1> (abs_error)
  v_reference_energy = ReduceSumSquare <keepdims = 1> (r)
  v_found_energy = ReduceSumSquare <keepdims = 1> (f)
  v_reference_max = ReduceMax <keepdims = 1> (abs_r)
  v_found_max = ReduceMax <keepdims = 1> (abs_f)
  v_reference_least = ReduceMin <keepdims = 1> (bottom_r)
"""

MEASURED: Final = (*_SUMS, *COUNTS)
"""What "measure" gives, in order."""

QUICK: Final = (*_SUMS, "reference_zero", "found_zero", "flushed")
"""What "quick" gives, in order, of blocks without NaN, infinities and sentinels. Its sums are in float32."""

QUICK_TYPES: Final = frozenset({"tensor(float)", "tensor(float16)", "tensor(bfloat16)"})

MEASURABLE: Final = QUICK_TYPES | {
    f"tensor({name})"
    for name in ("double", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
}
"""Types of values that can be measured: those that Reshape, Slice and Cast take."""

NO_LEAST: Final = float(np.finfo(np.float32).max)
"""``reference_least`` from here on means that every element is zero (or none is ordinary)."""


@cache
def meter(kind: Kind, provider: Provider, reference: str, found: str) -> "ort.InferenceSession":
    """The session that measures tensors of two types ("tensor(float)", ...). "vanished" counts one thing alone.

    Raises:
        RuntimeFailure: the types are not of tensors of numbers.
    """
    text, names, elem = {
        "quick": (_QUICK, QUICK, 1),
        "measure": (_MEASURE, MEASURED, 11),
        "vanished": (_VANISHED, ("vanished",), 11),
    }[kind]
    more = ", double threshold" if kind == "vanished" else ""
    masks = {**COUNTS, "vanished": "vanished"}
    counted = [name for name in names if name in masks]
    lines = [f"c_{name} = Cast <to = {elem}> ({masks[name]})" for name in counted]
    lines += [f"v_{name} = ReduceSum <keepdims = 1> (c_{name})" for name in counted]
    lines.append(f"measured = Concat <axis = 0> ({', '.join(f'v_{name}' for name in names)})")
    model = parser.parse_model(
        text.format(reference=f"{_element(reference)}[]", found=f"{_element(found)}[]", sentinel=SENTINEL, more=more)
        + "\n".join(lines)
        + "\n}"
    )
    for entry in model.graph.input[:2]:
        entry.type.tensor_type.ClearField("shape")  # any rank
    return make_session(model, provider, optimize=False)


def _element(kind: str) -> str:
    """Element type in a type: "float16" in "tensor(float16)". Kinds without numbers cannot be measured."""
    if kind not in MEASURABLE:
        raise RuntimeFailure(f"Values of type {kind} cannot be measured: they are no tensors of numbers.")
    return element_name(kind)
