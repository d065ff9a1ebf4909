"""Every exact op really commutes with rounding: f(round(x)) == round(f(x)), for the whole range of the low type.

The sign of a zero is free: no op of the list looks at it, and kernels differ in it.
"""

from functools import cache

import ml_dtypes
import numpy as np
import pytest
from graphs.case import parse
from onnx import NodeProto
from onnx.defs import onnx_opset_version
from onnx.reference import ReferenceEvaluator

from onnxamp.ops import is_exact, op_facts

SHAPES = {"A": (4, 6), "B": (4, 6), "D": (1, 4, 4, 4), "lo": (), "hi": ()}
"""The float inputs that the nodes below may use."""
HEAD = """({T}[4,6] A, {T}[4,6] B, {T}[1,4,4,4] D, {T} lo, {T} hi) => (OUTPUTS)
<int64[2] rows = {2, 0}, int64[2] whole = {4, 6}, int64[2] wide = {2, 3}, int64 one = {1}, int64[1] axis = {1},
 int64[1] end = {5}, int64[4] lens = {4, 2, 1, 3}, int64[4] pads = {1, 0, 2, 1}, int64[2] less = {3, 8},
 int64[2,2] pairs = {0, 1, 3, 5}, int64[4] four = {0, 2, 1, 3}, int64 depth = {5}, float[4] scales = {1, 1, 2, 1.5},
 bool[4,1] keep = {1, 0, 1, 0}, bool[6] some = {1, 1, 0, 0, 1, 0}, int64[1,4,2,2] where = {0, 3, 9, 15,
 17, 18, 25, 31, 32, 39, 40, 47, 63, 50, 51, 60}, int64[4,6] perm = {0, 1, 2, 3, 0, 1, 1, 2, 3, 0, 1, 2,
 2, 3, 0, 1, 2, 3, 3, 0, 1, 2, 3, 0}, int64[5] small = {1, 2, 3, 1, 1}, int64[2] position = {0, 1}>
{ NODES }"""

NODES = {
    "Abs": ["Y = Abs (A)"],
    "CenterCropPad": ["Y = CenterCropPad (A, less)"],
    "Clip": ["Y = Clip (A, lo, hi)", "Y = Clip (A)", "Y = Clip (A, , hi)"],
    "Compress": ["Y = Compress <axis = 1> (A, some)"],
    "Concat": ["Y = Concat <axis = 0> (A, B)"],
    "DepthToSpace": ["Y = DepthToSpace <blocksize = 2> (D)"],
    "Dropout": ["Y = Dropout (A)"],
    "Expand": ["Y = Expand (lo, whole)"],
    "Flatten": ["Y = Flatten <axis = 2> (D)"],
    "Gather": ["Y = Gather (A, rows)"],
    "GatherElements": ["Y = GatherElements (A, perm)"],
    "GatherND": ["Y = GatherND (A, pairs)"],
    "GlobalMaxPool": ["Y = GlobalMaxPool (D)"],
    "Identity": ["Y = Identity (A)"],
    "Max": ["Y = Max (A, B)", "Y = Max (A, B, lo)"],
    "MaxPool": ["Y = MaxPool <kernel_shape = [2, 2], pads = [1, 0, 0, 1], strides = [2, 1]> (D)"],
    "MaxUnpool": ["P = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (D) "
                  "Y = MaxUnpool <kernel_shape = [2, 2], strides = [2, 2]> (P, where)"],
    "Min": ["Y = Min (A, B)"],
    "Neg": ["Y = Neg (A)"],
    "OneHot": ["V = Concat <axis = 0> (L, H) Y = OneHot (four, depth, V)"],
    "Pad": ["Y = Pad (A, pads, lo)", 'Y = Pad <mode = "reflect"> (A, pads)', "Y = Pad (A, pads)"],
    "ReduceMax": ["Y = ReduceMax (A, axis)"],
    "ReduceMin": ["Y = ReduceMin <keepdims = 0> (A)"],
    "Relu": ["Y = Relu (A)"],
    "Reshape": ["Y = Reshape (A, less)"],
    "Resize": ['Y = Resize <mode = "nearest"> (D, , scales)'],
    "ReverseSequence": ["Y = ReverseSequence <batch_axis = 0, time_axis = 1> (A, lens)"],
    "ScatterElements": ["Y = ScatterElements (A, perm, B)"],
    "ScatterND": ["S = Split <axis = 0, num_outputs = 2> (B) Y = ScatterND (A, rows2, S)"],
    "Slice": ["Y = Slice (A, axis, end, axis)"],
    "SpaceToDepth": ["Y = SpaceToDepth <blocksize = 2> (D)"],
    "Split": ["Y, Z = Split <axis = 1, num_outputs = 2> (A)"],
    "Squeeze": ["Y = Squeeze (D)"],
    "TensorScatter": ["U = Unsqueeze (A, end0) V = Slice (U, end0, axis, axis) Y = TensorScatter (U, V, start)"],
    "Tile": ["Y = Tile (A, wide)"],
    "Transpose": ["Y = Transpose (A)"],
    "Trilu": ["Y = Trilu <upper = 0> (A, one)"],
    "Unsqueeze": ["Y = Unsqueeze (A, axis)"],
    "Where": ["Y = Where (keep, A, B)"],
}  # fmt: skip
"""Op type -> nodes that exercise it; further ops in them are exact, too."""
OLD = {
    "Scatter": (10, ["Y = Scatter (A, perm, B)"]),
    "Upsample": (9, ['Y = Upsample <mode = "nearest"> (D, scales)']),
}
"""Ops that newer opsets do not have, with the last opset that does."""
CONTAINERS = {
    "SequenceConstruct": "S = SequenceConstruct (A, B) Y = SequenceAt (S, one)",
    "SequenceAt": "S = SequenceConstruct (A, B) Y = SequenceAt (S, one)",
    "SequenceEmpty": "E = SequenceEmpty <dtype = {elem}> () S = SequenceInsert (E, A) Y = SequenceAt (S, zero)",
    "SequenceInsert": "S = SequenceConstruct (A) T = SequenceInsert (S, B, zero) Y = SequenceAt (T, zero)",
    "SequenceErase": "S = SequenceConstruct (A, B) T = SequenceErase (S, zero) Y = SequenceAt (T, zero)",
    "ConcatFromSequence": "S = SequenceConstruct (A, B) Y = ConcatFromSequence <axis = 1> (S)",
    "SplitToSequence": "S = SplitToSequence <axis = 1> (A, one) Y = SequenceAt (S, one)",
    "Optional": "O = Optional (A) Y = OptionalGetElement (O)",
    "OptionalGetElement": "O = Optional (A) Y = OptionalGetElement (O)",
}
NO_FLOATS_OUT = frozenset({"OptionalHasElement", "SequenceLength", "Shape", "Size"})
"""What these answer does not depend on the numbers at all."""
