"""Graphs of one op of an old opset, for the tests of upgrades."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

Array = NDArray[Any]
RNG = np.random.default_rng(17)


@dataclass(frozen=True, eq=False)
class Case:
    """A node of an opset with its inputs, of which those in ``constant`` are initializers and None is left out."""

    op: str
    opset: int
    inputs: tuple[Array | None, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    outputs: int = 1
    constant: tuple[int, ...] = ()
    ranks: bool = True
    """Whether the numbers of dimensions of inputs are declared."""
    expected: Array | None = None
    stops: int = 0
    """The opset that it cannot reach."""

    @property
    def name(self) -> str:
        given = ", ".join(f"{key}={value}" for key, value in self.attributes.items())
        return f"{self.op}-{self.opset}({given}) of {[None if a is None else a.shape for a in self.inputs]}"

    @property
    def feeds(self) -> dict[str, Array]:
        return {f"x{i}": np.asarray(a) for i, a in enumerate(self.inputs) if a is not None and i not in self.constant}

    def model(self, ir: int = 7) -> ModelProto:
        names = ["" if a is None else f"x{i}" for i, a in enumerate(self.inputs)]
        node = helper.make_node(self.op, names, [f"y{i}" for i in range(self.outputs)], "node", **self.attributes)
        fixed = [numpy_helper.from_array(self.inputs[i], f"x{i}") for i in self.constant]
        given = [value_info(name, array, known=self.ranks) for name, array in self.feeds.items()]
        listed = [value_info(tensor.name, numpy_helper.to_array(tensor)) for tensor in fixed] if ir < 4 else []
        results = [helper.make_empty_tensor_value_info(name) for name in node.output]
        graph = helper.make_graph([node], "case", [*given, *listed], results, fixed)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=ir)
        for entry, typed in zip(graph.output, onnx.shape_inference.infer_shapes(model).graph.output, strict=True):
            model.graph.output.remove(entry)
            kind = typed.type.tensor_type.elem_type or TensorProto.FLOAT
            model.graph.output.append(helper.make_tensor_value_info(entry.name, kind, None))
        return model


def value_info(name: str, array: Array, *, known: bool = True) -> Any:
    return helper.make_tensor_value_info(name, elem(array), [*array.shape] if known else None)


def elem(array: Array) -> int:
    return TensorProto.STRING if array.dtype.kind == "O" else helper.np_dtype_to_tensor_dtype(array.dtype)


def n(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def positive(*shape: int) -> Array:
    return RNG.uniform(0.2, 0.9, shape).astype(np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int64)


def one(op: str, opset: int, *inputs: Array | None, outputs: int = 1, constant: tuple[int, ...] = (),
        ranks: bool = True, expected: Array | None = None, stops: int = 0, **attributes: Any) -> Case:  # fmt: skip
    return Case(op, opset, inputs, attributes, outputs, constant, ranks, expected, stops)


UNARY = {
    6: ("Abs", "Ceil", "Elu", "Exp", "Floor", "HardSigmoid", "LeakyRelu", "Neg", "Relu", "Selu", "Sigmoid", "Tanh"),
    1: ("Identity", "Softplus", "Softsign", "GlobalAveragePool", "GlobalMaxPool", "LpNormalization", "Shape", "Size"),
    7: ("Atan", "Cos", "Sin"),
    9: ("Asinh", "Cosh", "Erf", "IsNaN", "MeanVarianceNormalization", "NonZero", "Sign", "Sinh"),
    10: ("IsInf", "ThresholdedRelu"), 11: ("Round",), 12: ("Celu",), 14: ("HardSwish",), 18: ("Mish",),
}  # fmt: skip
ON_POSITIVE = {6: ("Log", "Reciprocal", "Sqrt"), 7: ("Acos", "Asin", "Tan"), 9: ("Atanh",)}
BINARY = ("Add", "Div", "Mul", "Sub", "Pow", "Less", "Greater")
REDUCTIONS = ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "Sum", "SumSquare")

IMAGE, WEIGHT = n(2, 3, 9, 10), n(4, 3, 3, 3)
SEQUENCE, GATES = n(4, 2, 3), {"RNN": 1, "GRU": 3, "LSTM": 4}

CASES: tuple[Case, ...] = (
    *(one(op, max(opset, 7), n(2, 3, 4, 5)) for opset, ops in UNARY.items() for op in ops),
    *(one(op, max(opset, 7), positive(2, 3, 4)) for opset, ops in ON_POSITIVE.items() for op in ops),
    *(one(op, 7, positive(2, 3, 4), positive(3, 1)) for op in BINARY),
    *(one(op, 7, n(3, 4) > 0, n(4) > 0) for op in ("And", "Or", "Xor")),
    *(one(op, 7, n(2, 3), n(2, 3), n(2, 3)) for op in ("Max", "Mean", "Min", "Sum")),
    *(
        one(f"Reduce{kind}", 7, positive(2, 3, 4, 5), **way)
        for kind in REDUCTIONS
        for way in ({}, {"axes": [1]}, {"axes": [-1, 1], "keepdims": 0}, {"axes": [3, 0]})
        if "axes" not in way or min(way["axes"]) >= 0
    ),
    *(one(f"Reduce{kind}", 11, positive(2, 3, 4, 5), axes=[-1, 1], keepdims=0) for kind in REDUCTIONS),
    *(
        one(op, 7, n(2, 3, 4), axis=axis, keepdims=keep)
        for op in ("ArgMax", "ArgMin")
        for axis in (0, 2)
        for keep in (0, 1)
    ),
    *(one(op, 11, np.float32([[1, 3, 3], [2, 2, 0]]), axis=-1) for op in ("ArgMax", "ArgMin")),
    # Softmax: along the last axis, along more, along one beside axes of size 1, and where the shape is unknown
    *(
        one(op, 7, array, **way)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for array, way in (
            (n(2, 5), {}),
            (n(2, 3, 4), {}),
            (n(2, 3, 4), {"axis": 2}),
            (n(2, 3, 4), {"axis": 0}),
            (n(2, 6, 1, 1), {"axis": 1}),
            (n(1, 1, 6, 5), {"axis": 3}),
            (n(3, 1), {"axis": 1}),
        )
    ),
    *(
        one(op, 11, n(2, 3, 4), axis=axis, ranks=ranks)
        for op in ("Softmax", "LogSoftmax", "Hardmax")
        for axis in (-1, -2, 1)
        for ranks in (False, True)
    ),
    # Activations and their constants
    *(one("Clip", 7, n(3, 4), **way) for way in ({}, {"min": -0.5}, {"max": 0.25}, {"min": 0.0, "max": 6.0})),
    one("Clip", 7, np.float32([np.inf, -np.inf, np.nan, 3e38]), min=-1.0),
    one("Clip", 11, n(3, 4), np.float32(-0.5), None),
    one("Clip", 12, n(3, 4), None, np.float32(0.5)),
    one("PRelu", 7, n(2, 3, 4), n(3, 1)),
    one("PRelu", 9, n(2, 3), n(1)),
    one("Dropout", 7, n(3, 4), ratio=0.3),
    one("Dropout", 10, n(3, 4)),
    one("Dropout", 12, n(3, 4), np.float32(0.1)),
    # Convolutions and pools
    one("Conv", 7, IMAGE, WEIGHT, pads=[1, 1, 1, 1]),
    one("Conv", 7, IMAGE, WEIGHT, auto_pad="SAME_UPPER", strides=[2, 2]),
    one("ConvTranspose", 7, n(1, 3, 5, 5), n(3, 2, 3, 3), strides=[2, 2]),
    *(
        one("ConvTranspose", 7, n(1, 3, 5, 5), n(3, 2, 3, 3), strides=[2, 2], auto_pad=way)
        for way in ("SAME_UPPER", "SAME_LOWER", "VALID")
    ),
    one("ConvTranspose", 7, n(1, 3, 5, 5), n(3, 2, 3, 3), strides=[2, 2], output_shape=[10, 10]),
    *(
        one(op, 7, IMAGE, kernel_shape=[3, 2], strides=[2, 2], **way)
        for op in ("AveragePool", "MaxPool", "LpPool")
        for way in (
            {},
            {"pads": [1, 0, 1, 1]},
            {"auto_pad": "SAME_UPPER"},
            {"auto_pad": "SAME_LOWER"},
            {"auto_pad": "VALID"},
        )
    ),
    *(
        one("AveragePool", 7, IMAGE, kernel_shape=[3, 2], pads=[1, 0, 1, 1], count_include_pad=count)
        for count in (0, 1)
    ),
    one("MaxPool", 8, IMAGE, kernel_shape=[2, 2], outputs=2),
    one("MaxPool", 10, IMAGE, kernel_shape=[2, 2], dilations=[2, 2]),
    *(
        one(op, 10, IMAGE, kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, **way)
        for op in ("AveragePool", "MaxPool")
        for way in ({}, {"pads": [1, 1, 1, 1]}, {"pads": [1, 0, 0, 1]})
    ),
    one("LRN", 7, IMAGE, size=3, alpha=0.01),
    one(
        "RoiAlign",
        10,
        IMAGE,
        np.float32([[1, 1, 5, 6], [0, 2, 8, 8]]),
        ints(0, 1),
        output_height=3,
        output_width=2,
        sampling_ratio=2,
        spatial_scale=0.7,
    ),
    *(
        one("BatchNormalization", opset, IMAGE, n(3), n(3), n(3), positive(3), constant=(1, 2, 3, 4), epsilon=1e-3)
        for opset in (7, 9, 14)
    ),
    one("InstanceNormalization", 7, IMAGE, n(3), n(3)),
    one("GroupNormalization", 18, n(2, 6, 4), n(3), n(3), num_groups=3),
    one("GroupNormalization", 18, n(2, 6, 4), n(6), n(6), num_groups=6),
    # Products and recurrence
    one("Gemm", 7, n(2, 3), n(3, 4), n(4), alpha=0.5),
    one("Gemm", 9, n(3, 2), n(3, 4), n(2, 4), transA=1, beta=2.0),
    one("MatMul", 7, n(2, 3, 4), n(4, 5)),
    one("Einsum", 12, n(2, 3), n(3, 4), equation="ij,jk->ik"),
    *(
        one(op, 7, SEQUENCE, n(1, gates * 5, 3), n(1, gates * 5, 5), n(1, gates * 10), hidden_size=5, outputs=2)
        for op, gates in GATES.items()
    ),
    one("GRU", 7, SEQUENCE, n(2, 15, 3), n(2, 15, 5), hidden_size=5, direction="bidirectional", linear_before_reset=1),
    # Shapes, movement and selection
    one("Reshape", 7, n(2, 6), ints(0, -1, 3), constant=(1,)),
    one("Expand", 8, n(3, 1), ints(2, 3, 4), constant=(1,)),
    one("Transpose", 7, n(2, 3, 4), perm=[2, 0, 1]),
    one("Flatten", 7, n(2, 3, 4), axis=2),
    one("Flatten", 11, n(2, 3, 4), axis=-1),
    one("Concat", 7, n(2, 3), n(2, 1), axis=1),
    one("Squeeze", 7, n(1, 3, 1)),
    one("Squeeze", 7, n(1, 3, 1), axes=[2]),
    one("Unsqueeze", 7, n(3, 4), axes=[0, 3]),
    one("Unsqueeze", 11, n(3, 4), axes=[-1]),
    one("Split", 7, n(6, 4), outputs=3),
    one("Split", 7, n(5, 4), outputs=2, split=[2, 3]),
    one("Split", 11, n(2, 6), outputs=2, axis=-1),
    one("Split", 13, n(2, 6), outputs=2, axis=1),
    one("Split", 13, n(2, 6), ints(2, 4), outputs=2, axis=1),
    one("Slice", 7, n(5, 6), starts=[1], ends=[-1]),
    one("Slice", 7, n(5, 6), starts=[0, 2], ends=[1000, 4], axes=[1, 0]),
    one("Slice", 10, n(5, 6), ints(4), ints(0), ints(0), ints(-2)),
    one("Pad", 7, n(2, 3), pads=[0, 1, 2, 0]),
    one("Pad", 7, n(2, 3), pads=[0, 1, 2, 0], value=0.5),
    *(one("Pad", 7, n(4, 5), pads=[1, 2, 0, 1], mode=mode) for mode in ("reflect", "edge")),
    one("Pad", 7, n(4, 5), pads=[-1, 2, 0, -1]),
    one("Pad", 11, n(2, 3), ints(0, 1, 2, 0), np.float32(1.5)),
    one("Tile", 7, n(2, 3), ints(2, 1)),
    one("Gather", 7, n(5, 2), ints(4, 0, 2)),
    one("Gather", 11, n(5, 2), ints(-1, 0)),
    one("GatherND", 11, n(3, 4), np.array([[0, 1], [2, 3]], np.int64)),
    one("GatherElements", 11, n(3, 4), np.array([[0, 1], [2, 3]], np.int64), axis=1),
    one("Scatter", 9, n(3, 3), np.array([[1, 0], [0, 2]], np.int64), n(2, 2), axis=0),
    one("ScatterElements", 11, n(3, 3), np.array([[1, -1]], np.int64), n(1, 2), axis=1),
    one("ScatterND", 11, n(4, 2), np.array([[1], [3]], np.int64), n(2, 2)),
    one("TopK", 7, n(3, 6), k=2, outputs=2),
    one("TopK", 7, n(6, 3), k=4, axis=0, outputs=2),
    one("TopK", 10, n(3, 6), ints(2), outputs=2, axis=1),
    one("TopK", 11, n(3, 6), ints(2), outputs=2, largest=0),
    one("Where", 9, n(2, 3) > 0, n(2, 3), n(3)),
    one("OneHot", 9, ints(1, 0, -2, 7), ints(4), np.float32([0, 1])),
    one("Compress", 9, n(4, 3), np.array([True, False, True]), axis=0),
    one("ReverseSequence", 10, n(4, 2), ints(3, 2)),
    one("DepthToSpace", 7, n(1, 8, 2, 3), blocksize=2),
    one("SpaceToDepth", 7, n(1, 2, 4, 6), blocksize=2),
    one("DepthToSpace", 11, n(1, 8, 2, 3), blocksize=2, mode="CRD"),
    one("CumSum", 11, n(3, 4), np.array(1, np.int64)),
    one("EyeLike", 9, n(3, 4)),
    one("ConstantOfShape", 9, ints(2, 3)),
    one("Range", 11, np.float32(0), np.float32(5), np.float32(0.5)),
    one("Range", 11, np.array(0), np.array(7), np.array(2)),
    one("Unique", 11, np.float32([2, 1, 2, 3]), outputs=2),
    one(
        "NonMaxSuppression",
        10,
        np.float32([[[0, 0, 1, 1], [0, 0, 1, 0.9], [2, 2, 3, 3]]]),
        np.float32([[[0.9, 0.8, 0.7]]]),
        ints(3),
        np.float32([0.5]),
        np.float32([0.1]),
    ),
    one("Mod", 10, n(3, 4), positive(3, 4), fmod=1),
    one("BitShift", 11, np.uint8([1, 4]), np.uint8([1, 2]), direction="LEFT"),
    one("Cast", 7, n(3) * 10, to=7),
    one("Cast", 9, n(3), to=11),
    one("Equal", 7, ints(1, 2), ints(1, 3)),
    one("Equal", 11, n(3), n(3)),
    one("Not", 7, n(3) > 0),
    one("Det", 11, n(3, 3)),
    one("QuantizeLinear", 10, n(3, 4), np.float32(0.1), np.uint8(7)),
    one("DequantizeLinear", 10, np.uint8([1, 9]), np.float32(0.1), np.uint8(7)),
    one(
        "QLinearMatMul",
        10,
        np.uint8([[1, 9]]),
        np.float32(0.1),
        np.uint8(7),
        np.uint8([[3], [4]]),
        np.float32(0.1),
        np.uint8(2),
        np.float32(0.2),
        np.uint8(1),
    ),
    # Resizing: nearest and linear, up and down, by whole numbers and others
    *(
        one(
            "Upsample",
            opset,
            array,
            *((np.float32(scales),) if opset == 9 else ()),
            constant=(1,) if opset == 9 else (),
            mode=mode,
            **({} if opset == 9 else {"scales": scales}),
        )
        for opset in (7, 9)
        for array in (n(1, 2, 5, 7), n(1, 1, 4, 4))
        for mode in ("nearest", "linear")
        for scales in ([1.0, 1.0, 2.0, 2.0], [1.0, 1.0, 1.7, 2.3], [1.0, 1.0, 3.0, 1.0])
    ),
    *(
        one("Resize", 10, n(1, 2, 6, 7), np.float32(scales), mode=mode, constant=(1,))
        for mode in ("nearest", "linear")
        for scales in ([1, 1, 2, 2], [1, 1, 0.6, 0.4], [1, 1, 0.5, 1])
    ),
    one("Resize", 10, n(1, 2, 6, 7), np.float32([1, 1, 1.3, 0.5]), mode="linear"),
    *(
        one(
            "Resize",
            11,
            n(1, 2, 6, 7),
            np.zeros(0, np.float32),
            np.float32([1, 1, 1.5, 2]),
            mode=mode,
            coordinate_transformation_mode=way,
        )
        for mode in ("nearest", "linear", "cubic")
        for way in ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")
    ),
    one(
        "Resize",
        11,
        n(1, 2, 6, 7),
        np.zeros(0, np.float32),
        np.zeros(0, np.float32),
        ints(1, 2, 9, 9),
        constant=(1, 2, 3),
        mode="linear",
    ),
    one("Resize", 13, n(1, 2, 6, 7), None, None, ints(1, 2, 9, 9), mode="nearest", nearest_mode="floor"),
    *(
        one("GridSample", 16, n(1, 2, 4, 4), positive(1, 3, 3, 2), mode=mode, align_corners=1)
        for mode in ("bilinear", "bicubic", "nearest")
    ),
    one("GridSample", 16, n(1, 2, 4, 4), positive(1, 3, 3, 2)),
    one("DFT", 17, n(1, 8, 1)),
    one("DFT", 17, n(2, 3, 8, 1), axis=2, onesided=1),
    one("Attention", 23, n(1, 2, 3, 4), n(1, 2, 5, 4), n(1, 2, 5, 4)),
    one("Attention", 23, n(1, 2, 3, 4), n(1, 2, 5, 4), n(1, 2, 5, 4), is_causal=1),
)

X, CHANNELS, SCALE = n(2, 3, 4, 5), n(3), positive(3)

OLD: tuple[Case, ...] = (
    *(one(op, 1, X, expected=made, consumed_inputs=[0]) for op, made in (
        ("Abs", np.abs(X)), ("Ceil", np.ceil(X)), ("Exp", np.exp(X)), ("Floor", np.floor(X)), ("Neg", -X),
        ("Relu", np.maximum(X, 0)), ("Sigmoid", 1 / (1 + np.exp(-X))), ("Tanh", np.tanh(X)),
        ("Elu", np.where(X < 0, np.exp(X) - 1, X)), ("LeakyRelu", np.where(X < 0, np.float32(0.01) * X, X)),
        ("Selu", (np.float32(1.0507) * np.where(X < 0, 1.6732 * (np.exp(X) - 1), X)).astype(np.float32)),
        ("HardSigmoid", np.clip(np.float32(0.2) * X + np.float32(0.5), 0, 1)), ("Clip", X),
    )),
    *(one(op, 1, SCALE, expected=made) for op, made in (
        ("Log", np.log(SCALE)), ("Reciprocal", 1 / SCALE), ("Sqrt", np.sqrt(SCALE)),
    )),
    one("Clip", 1, X, expected=np.clip(X, -0.5, 0.25), min=-0.5, max=0.25),
    *(one(op, opset, X, CHANNELS, expected=made(X, CHANNELS[:, None, None]), axis=1, broadcast=1)
      for opset in (1, 6) for op, made in (
        ("Add", np.add), ("Sub", np.subtract), ("Mul", np.multiply), ("Div", np.divide),
    )),
    one("Add", 6, X, X, expected=X + X), one("Mul", 6, X, np.float32([2]), broadcast=1, expected=X * 2),
    one("Add", 6, X, X[:, 0, 0, 0], axis=-4, broadcast=1, expected=X + X[:, :1, :1, :1]),
    one("Pow", 1, np.abs(X), SCALE, expected=np.abs(X) ** SCALE[:, None, None], axis=1, broadcast=1),
    *(one(op, 1, X, CHANNELS, expected=made(X, CHANNELS[:, None, None]), axis=1, broadcast=1)
      for op, made in (("Less", np.less), ("Greater", np.greater))),
    one("Equal", 1, ints(1, 2), ints(2), broadcast=1, expected=np.array([False, True])),
    *(one(op, 1, X > 0, CHANNELS > 0, expected=made(X > 0, CHANNELS[:, None, None] > 0), axis=1, broadcast=1)
      for op, made in (("And", np.logical_and), ("Or", np.logical_or), ("Xor", np.logical_xor))),
    *(one(op, 1, X, X / 2, expected=made, consumed_inputs=[0, 0]) for op, made in (
        ("Max", np.maximum(X, X / 2)), ("Min", np.minimum(X, X / 2)), ("Mean", X * 0.75), ("Sum", X * 1.5),
    )),
    one("PRelu", 1, X, CHANNELS, expected=np.where(X < 0, X * CHANNELS[:, None, None], X)),
    one("PRelu", 6, X, CHANNELS[:1], expected=np.where(X < 0, X * CHANNELS[0], X)),
    one("Gemm", 6, X[0, 0], X[0, 1].T.copy(), CHANNELS[:1], broadcast=1, expected=X[0, 0] @ X[0, 1].T + CHANNELS[0]),
    *(one("BatchNormalization", opset, X, CHANNELS, CHANNELS, CHANNELS, SCALE, is_test=1, epsilon=0.0,
          expected=((X - (c := CHANNELS[:, None, None])) / np.sqrt(SCALE[:, None, None]) * c + c),
          **({"consumed_inputs": [0] * 5} if opset == 1 else {})) for opset in (1, 6)),
    one("InstanceNormalization", 1, X, CHANNELS, CHANNELS, epsilon=0.0, expected=(
        (X - X.mean((2, 3), keepdims=True)) / X.std((2, 3), keepdims=True) + 1) * CHANNELS[:, None, None]),
    *(one("Dropout", opset, X, is_test=1, expected=X) for opset in (1, 6)),
    one("Cast", 1, np.float32([1.5, -2.5]), to="INT64", expected=ints(1, -2)),
    one("Concat", 1, X, X, expected=np.concatenate([X, X], 1)),
    one("Pad", 1, X[0, 0], paddings=[1, 0, 0, 2], value=0.5,
        expected=np.pad(X[0, 0], ((1, 0), (0, 2)), constant_values=0.5)),
    one("Split", 1, X, axis=1, split=[1, 2], outputs=2, expected=X[:, :1]),
    one("Reshape", 1, X, shape=[2, -1], expected=X.reshape(2, -1)),
    one("LpPool", 1, X, kernel_shape=[4, 5], p=1.0, expected=np.abs(X).sum((2, 3), keepdims=True)),
    one("GlobalLpPool", 1, X, p=1.0, expected=np.abs(X).sum((2, 3), keepdims=True)),
    one("Upsample", 1, X, height_scale=2.0, width_scale=3.0, mode="nearest", expected=X.repeat(2, 2).repeat(3, 3)),
    one("MaxPool", 1, X, kernel_shape=[4, 5], expected=X.max((2, 3), keepdims=True)),
    one("AveragePool", 1, X, kernel_shape=[4, 5], expected=X.mean((2, 3), keepdims=True)),
)  # fmt: skip
"""By formulas of their own: ONNX Runtime loads nothing so old."""

REFUSED: tuple[Case, ...] = (
    one("Tile", 1, n(2, 3), np.float32(2), np.float32(1), stops=6),
    one("Dropout", 6, X, stops=7), one("Dropout", 7, X, outputs=2, stops=10),
    one("Split", 1, X, np.float32([1, 2]), axis=1, outputs=2, stops=2),
    one("LpPool", 1, X, kernel_shape=[2, 2], p=1.5, stops=2),
    one("BatchNormalization", 7, X, n(3, 4, 5), n(3, 4, 5), n(3, 4, 5), positive(3, 4, 5), spatial=0, stops=9),
    one("BatchNormalization", 9, X, CHANNELS, CHANNELS, CHANNELS, SCALE, outputs=5, stops=14),
    one("Add", 6, X, CHANNELS, axis=1, broadcast=1, ranks=False, stops=7),
    one("Resize", 10, n(1, 2, 6, 7), np.float32([1, 1, 1.3, 0.5]), constant=(1,), mode="nearest", stops=11),
    one("Resize", 10, n(1, 2, 6, 7), np.float32([1, 1, 2, 2]), mode="nearest", stops=11),
    one("Resize", 11, n(1, 2, 6, 7), np.zeros(0, np.float32), np.float32([1, 1, 2, 2]), mode="linear",
        coordinate_transformation_mode="tf_half_pixel_for_nn", stops=13),
    one("Erf", 9, np.int32([1, 2]), stops=13),
    one("MaxPool", 10, X, kernel_shape=[1, 1], strides=[2, 2], ceil_mode=1, stops=22),
    one("GroupNormalization", 18, n(2, 6, 4), n(3), n(3), num_groups=3, ranks=False, stops=21),
)  # fmt: skip
