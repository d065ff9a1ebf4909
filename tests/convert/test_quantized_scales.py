"""Scales of quantized networks become low precision wherever no Cast and no error speaks against it."""

from collections.abc import Sequence

import numpy as np
import pytest
from conversions import count
from graphs.case import add_weights, parse
from judge_kernels import is_low, typed_nodes
from onnx import ModelProto, TensorProto, numpy_helper
from quantized import quantized

import onnxamp

SCALES = "<float s = {0.05}, float t = {0.04}, int8 z = {0}>"
TARGETS = pytest.mark.parametrize("target", ["cuda", "tensorrt", "webgpu"])


def converted(head: str, nodes: str, target: str, **options: object) -> ModelProto:
    """The result at O2 of a node per line, where "Q x" and "D x" quantize and dequantize ``x``."""
    lines = []
    for line in nodes.strip().splitlines():
        name, _, call = line.strip().partition(" = ")
        op, *values = call.split()
        ops = {"Q": f"QuantizeLinear ({''.join(values)}, s, z)", "D": f"DequantizeLinear ({''.join(values)}, s, z)"}
        lines.append(f"{name} = {ops.get(op, call)}")
    model = parse(f"{head} {SCALES} {{ {' '.join(lines)} }}", 21)
    random = np.random.default_rng(0)
    read = {name for node in model.graph.node for name in node.input}
    shapes = {"w": (4, 4), "scale": 4, "bias": 4, "mean": 4, "var": 4}
    weights = {name: random.uniform(0.5, 1, shapes[name]).astype(np.float32) for name in shapes.keys() & read}
    add_weights(model, weights)
    return onnxamp.convert_model(model, "O2", target=target, **options)


def high(model: ModelProto, *ops: str) -> list[str]:
    """Results of nodes that stay in float32: those of some ops, or all that quantize or dequantize."""
    among = ops or ("QuantizeLinear", "DequantizeLinear")
    nodes = [one for one in typed_nodes(model) if one.node.op_type in among]
    types = [one.inputs[1] if "Linear" in one.node.op_type else one.outputs[0] for one in nodes]
    return [one.node.output[0] for one, kind in zip(nodes, types, strict=True) if not is_low(kind)]


@TARGETS
def test_readers_that_disagree_get_a_scale_each(target: str) -> None:
    """The residual is float32 for the black-listed Exp, and low precision for the Add between integers."""
    result = converted(
        "(float[N,4] x) => (float[N,4] y)",
        """a = Q x
        b = D a
        c = MatMul (b, w)
        d = Q c
        e = D d
        y = Exp (e)
        f = Add (e, e)
        g = Mul (f, e)
        h = Q g
        i = D h
        k = MatMul (i, w)
        l = Q k
        m = D l
        n = Exp (m)""",
        target,
    )
    assert high(result, "Add", "Mul", "MatMul") == []
    assert count(result) == 0


@TARGETS
def test_a_result_that_products_read_as_well_has_a_scale_of_its_own(target: str) -> None:
    """As the states of a decoder, which are outputs and go into attention."""
    result = converted(
        "(float[N,4] x) => (float[N,4] y, float[N,4] state)",
        """a = Q x
        b = D a
        c = MatMul (b, w)
        d = Q c
        state = D d
        e = Transpose <perm = [0, 1]> (state)
        f = Mul (e, state)
        g = Q f
        h = D g
        y = Exp (h)""",
        target,
    )
    assert high(result, "Transpose", "Mul", "MatMul") == []
    assert count(result) == 0


@TARGETS
@pytest.mark.parametrize(
    "moved",
    [["n = Relu (m)"], ["k = Relu (m)", "n = Transpose <perm = [1, 0]> (k)"], ["n = Concat <axis = 0> (m, m)"]],
)
def test_exact_ops_between_a_norm_and_integers_add_no_error(moved: Sequence[str], target: str) -> None:
    norm = """a = Q x
        b = D a
        p = Neg (b)
        m = BatchNormalization (p, scale, bias, mean, var)"""
    rest = "q = Q n\ny = D q"
    result = converted("(float[N,4] x) => (float[N,M] y)", "\n".join([norm, *moved, rest]), target)
    assert high(result, "BatchNormalization", "Relu", "Transpose", "Concat") == []
    assert count(result) == 0


@TARGETS
def test_a_norm_whose_result_is_an_output_too_stays_black(target: str) -> None:
    nodes = """a = Q x
        b = D a
        m = BatchNormalization (b, scale, bias, mean, var)
        n = Relu (m)
        q = Q n
        y = D q"""
    result = converted("(float[N,4] x) => (float[N,4] y, float[N,4] n)", nodes, target)
    assert high(result, "BatchNormalization") == ["m"]


@TARGETS
def test_integers_that_are_scaled_anew_have_low_scales(target: str) -> None:
    nodes = """a = Q x
        b = D a
        c = QuantizeLinear (b, t, z)
        d = DequantizeLinear (c, t, z)
        y = MatMul (d, w)"""
    result = converted("(float[N,4] x) => (float[N,4] y)", nodes, target)
    assert len(high(result)) == 1  # the input's


@pytest.mark.parametrize("target", ["cuda", "tensorrt"])
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_a_concat_of_integers_has_low_scales_at_any_opset(opset: int, target: str) -> None:
    """An upgrade brings the low scales, by which the inputs of the Concat are quantized."""
    text = f"""(float[N,4] x) => (float[N,4] y) {SCALES} {{
        a = QuantizeLinear (x, s, z) b = DequantizeLinear (a, s, z) c = MatMul (b, w) d = QuantizeLinear (c, t, z)
        e = DequantizeLinear (d, t, z) f = Concat <axis = 1> (b, e) g = QuantizeLinear (f, t, z)
        h = DequantizeLinear (g, t, z) y = MatMul (h, v) }}"""
    model = add_weights(parse(text, opset), {"w": (4, 4), "v": (8, 4)})
    result = onnxamp.convert_model(model, "O2", target=target)
    assert high(result) == ["a"]  # the input's
    assert count(result) == 1
    assert onnxamp.convert_model(result, "O2", target=target) == result
    assert onnxamp.diff_models(model, result).passed


def listed(weights: int, added: int = 0, quantizer: bool = True) -> ModelProto:
    """A chain of products whose weights are inputs as well, but for some that a tool added, and maybe a scale."""
    names = [f"w{number}" for number in range(weights + added)]
    given = ", ".join(f"float[4,4] {name}" for name in names[:weights])
    nodes = [f"x{number + 1} = MatMul (x{number}, {name})" for number, name in enumerate(names)]
    last = f"x{len(names)}"
    grid = "<float s = {0.05}, int8 z = {0}>" if quantizer else ""
    ends = [f"q = QuantizeLinear ({last}, s, z)", "y = DequantizeLinear (q, s, z)"]
    nodes += ends if quantizer else [f"y = Relu ({last})"]
    model = parse(f"(float[N,4] x0, {given}) => (float[N,4] y) {grid} {{ {' '.join(nodes)} }}", 21)
    return add_weights(model, dict.fromkeys(names, (4, 4)))


@pytest.mark.parametrize(
    ("model", "frozen"),
    [
        (listed(10), True),
        (listed(10, added=1), True),
        (listed(10, added=1, quantizer=False), True),
        (listed(10, added=2), False),
        (listed(7), False),  # it may be settings
        (listed(1, added=9), False),
    ],
)
def test_weights_that_are_inputs_are_a_habit_though_a_quantizer_added_scales(model: ModelProto, frozen: bool) -> None:
    result = onnxamp.convert_model(model, "O2", target="cuda")
    assert (len(result.graph.input) == 1) is frozen
    kept = onnxamp.convert_model(model, "O2", target="cuda", freeze_defaults=False)
    assert [one.name for one in kept.graph.input] == [one.name for one in model.graph.input]


@pytest.mark.parametrize("tool", ["qdq", "qdq with biases", "nncf", "modelopt int8", "torchao"])
def test_scales_are_low_but_for_those_of_inputs_and_outputs(tool: str) -> None:
    result = onnxamp.convert_model(quantized(tool), "O2", target="cuda")
    inputs = {one.name for one in result.graph.input}
    outputs = {one.name for one in result.graph.output}
    for name in high(result):
        (node,) = [node for node in result.graph.node if name in node.output]
        assert inputs.intersection(node.input) or name in outputs


def test_a_node_that_states_its_type_dequantizes_twice_with_one_scale() -> None:
    text = """(float[4,8] x) => (float[4,5] y, float[8,5] z) {
        w = DequantizeLinear <output_dtype = 1> (q, s) y = MatMul (x, w) z = Tan (w) }"""
    model = parse(text, 23, ir=11)
    scale = np.float16(0.01)
    integers = np.arange(40, dtype=np.int8).reshape(8, 5)
    model.graph.initializer.extend([numpy_helper.from_array(scale, "s"), numpy_helper.from_array(integers, "q")])
    result = onnxamp.convert_model(model)
    made = [node for node in result.graph.node if node.op_type == "DequantizeLinear"]
    assert sorted(node.attribute[0].i for node in made) == [TensorProto.FLOAT, TensorProto.FLOAT16]
    assert {node.input[1] for node in made} == {"s"}
    assert onnxamp.diff_models(model, result, provider="cpu").passed
