"""Emulation judged op by op: one rounding of the exact result, which is what "float32 accumulation" promises.

Two oracles, both onnx's reference evaluator:

* The evaluator on the low-precision model itself. NumPy and ml_dtypes compute +, -, *, /, square roots, comparisons and
  selections of low numbers in float32 and round once, and float32 is wide enough (24 bits >= 2 * 11 + 2) that this is
  the correctly rounded exact result. Emulation must agree to the last bit, over chains of ops, too.
* For all other ops the evaluator's own low arithmetic is worse than one rounding: it rounds between the steps of an op
  (Softmax, LayerNormalization), and adds float16 numbers one by one. There, the evaluator runs in float64 (or float32,
  where its code insists on it) on the same rounded inputs, and its result is rounded once. Emulation must be within one
  step of the low type: before rounding the two differ in their last bits, so they may lie on two sides of a tie.

Sums may cancel, and then an error of float32 that is tiny beside the terms is large beside the sum. For ops that add,
the allowance is one step plus 2^-24 * terms * (the same op on absolute values), the textbook bound of a float32 sum.
"""

import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
import pytest
from graphs.case import parse
from judge_numbers import LOW_DTYPES, LOW_ELEMS, emulated, session
from onnx import ModelProto, NodeProto, TensorProto, defs, helper, numpy_helper
from onnx.backend.test.loader import load_model_tests
from onnx.reference import ReferenceEvaluator

from onnxamp._facts.dtypes import FORMATS
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._runtime.emulate import emulate

OPSET = 22
low_types = pytest.mark.parametrize("low", ["float16", "bfloat16"])


def low_parameters(schema: defs.OpSchema, low: str) -> set[str]:
    return {
        constraint.type_param_str
        for constraint in schema.type_constraints
        if {f"tensor({low})", "tensor(float)"} <= set(constraint.allowed_type_strs)
    }


def admitted(table: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(op type, low type) of all that the schemas admit."""
    pairs = [(op, low) for op in table for low in LOW_DTYPES]
    return [(op, low) for op, low in pairs if low_parameters(defs.get_schema(op, OPSET, ""), low)]


def oracle(model: ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        return ReferenceEvaluator(model).run(None, dict(feeds))


def exact(model: ModelProto, feeds: Mapping[str, Any]) -> list[Any]:
    """Outputs of a float32 model in float64 where the evaluator can, before any rounding."""
    wide = {name: array.astype(np.float64) if array.dtype == np.float32 else array for name, array in feeds.items()}
    try:
        return oracle(model, wide)
    except Exception:  # noqa: BLE001 - the evaluator raises untyped errors
        return oracle(model, feeds)


def narrowed(array: Any, low: str) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.asarray(array).astype(LOW_DTYPES[low])


def steps(found: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How many numbers of the low type lie between; one NaN is as good as another, and -0 as 0."""
    ranks = []
    for array in (found, wanted):
        bits = array.view(np.int16).astype(np.int64)
        ranks.append(np.where(bits < 0, -(bits & 0x7FFF), bits))
    nan = [np.isnan(array.astype(np.float32)) for array in (found, wanted)]
    return np.where(nan[0] & nan[1], 0, np.where(nan[0] | nan[1], 2**16, np.abs(ranks[0] - ranks[1])))


def assert_rounded(found: np.ndarray, low: str) -> None:
    np.testing.assert_array_equal(narrowed(found, low).astype(np.float32), found)


def awkward(low: str, *, widest: float = np.inf) -> np.ndarray:
    """Zeros of both signs, subnormals, borders of the range, neighbors of 1 whose sums are ties, and a spread."""
    info = ml_dtypes.finfo(LOW_DTYPES[low])
    tiny, least, eps = float(info.smallest_normal), float(info.smallest_subnormal), float(info.eps)
    top = min(float(info.max), widest)
    edges = [0, least, 2 * least, 3 * least, tiny - least, tiny, 3 * tiny, eps / 4, eps / 2, 1.5 * eps, eps, 0.5]
    edges += [
        1 - eps / 2,
        1,
        1 + eps,
        1 + 2 * eps,
        1.5,
        2,
        3,
        1 / eps,
        2 / eps + 2,
        top**0.5,
        top / 2,
        top * (1 - eps),
        top,
    ]
    rng = np.random.default_rng(1)
    spread = 2.0 ** rng.uniform(np.log2(least), np.log2(top), 30) * rng.uniform(1, 2, 30)
    numbers = np.concatenate([edges, spread / 2, np.linspace(0, 110, 56)])
    return narrowed(np.concatenate([numbers, -numbers]), low)


def pairs(low: str) -> dict[str, np.ndarray]:
    """Every awkward number, infinities and NaN included, against every other."""
    numbers = np.concatenate([awkward(low), narrowed([np.inf, -np.inf, np.nan], low)])
    a, b = np.meshgrid(numbers, numbers, indexing="ij")
    return {"A": a, "B": b, "H": narrowed(1.5, low)}


def fed(model: ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    return {entry.name: feeds[entry.name] for entry in model.graph.input}


def valid(model: ModelProto) -> ModelProto:
    """The model itself, whose types agree with the schemas. Its output is of unknown shape."""
    for entry in model.graph.output:
        entry.type.tensor_type.ClearField("shape")
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)
    return model


def pair_model(kind: str, body: str, outputs: str = "KIND[M, N] Y") -> ModelProto:
    inputs = "KIND[M, N] A, KIND[M, N] B" + (", KIND H" if "H)" in body else "")
    text = f"({inputs}) => ({outputs}) {{ {body} }}"
    return valid(parse(text.replace("KIND", kind), OPSET, 10))


CORRECTLY_ROUNDED = {
    "Abs": "Y = Abs (A)",
    "Add": "Y = Add (A, B)",
    "Ceil": "Y = Ceil (A)",
    "Clip": "Y = Clip (A, , H)",
    "Div": "Y = Div (A, B)",
    "Floor": "Y = Floor (A)",
    "Identity": "Y = Identity (A)",
    "Max": "Y = Max (A, B)",
    "Min": "Y = Min (A, B)",
    "Mod": "Y = Mod <fmod = 1> (A, B)",
    "Mul": "Y = Mul (A, B)",
    "Neg": "Y = Neg (A)",
    "Reciprocal": "Y = Reciprocal (A)",
    "Relu": "Y = Relu (A)",
    "Round": "Y = Round (A)",
    "Sign": "Y = Sign (A)",
    "Sqrt": "Y = Sqrt (A)",
    "Sub": "Y = Sub (A, B)",
    "Sum": "Y = Sum (A, B)",
    "Where": "C = Less (A, B) Y = Where (C, B, A)",
}
"""Ops that the evaluator itself computes with one rounding."""

ANY_ZERO = frozenset({"Max", "Min", "Relu", "Sign", "Sum", "Where"})
"""Ops that leave the sign of a zero open: kernels differ in it, and so do NumPy's own types (Max, Min, Sign)."""


@pytest.mark.parametrize(("op", "low"), admitted(CORRECTLY_ROUNDED))
def test_every_bit_of_exact_ops(op, low):
    model = pair_model(low, CORRECTLY_ROUNDED[op])
    feeds = fed(model, pairs(low))
    (wanted,), (found,) = oracle(model, feeds), emulated(model, feeds)
    assert wanted.dtype == LOW_DTYPES[low]
    if op == "Clip":  # kernels end at the largest numbers of the type
        end = np.asarray(FORMATS[low].max_finite, wanted.dtype)
        wanted = np.where(np.isinf(wanted), np.copysign(end, wanted), wanted)
    differ = steps(narrowed(found, low), wanted) > 0
    at = [(float(feeds["A"][i, j]), float(feeds["B"][i, j]), found[i, j], wanted[i, j]) for i, j in np.argwhere(differ)]
    assert not at, at[:5]
    zero = wanted == 0
    same_sign = np.array_equal(np.signbit(found[zero]), np.signbit(wanted[zero]))
    assert same_sign or op in ANY_ZERO
    assert_rounded(found, low)


@pytest.mark.parametrize("op", ["Relu", "Sum", "Where"])
def test_the_signs_of_these_zeros_are_the_kernels_own(op):
    """In float32, with nothing emulated, they differ from the evaluator's as well."""
    model = pair_model("float", CORRECTLY_ROUNDED[op])
    feeds = fed(model, {name: array.astype(np.float32) for name, array in pairs("float16").items()})
    (wanted,), (found,) = oracle(model, feeds), session(model).run(None, feeds)
    np.testing.assert_array_equal(found, wanted)
    zero = wanted == 0
    assert not np.array_equal(np.signbit(found[zero]), np.signbit(wanted[zero]))


COMPARISONS = ("Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual")


@low_types
@pytest.mark.parametrize("op", COMPARISONS)
def test_comparisons(op, low):
    model, feeds = pair_model(low, f"Y = {op} (A, B)", "bool[M, N] Y"), pairs(low)
    np.testing.assert_array_equal(emulated(model, fed(model, feeds))[0], oracle(model, fed(model, feeds))[0])


CHAINED = [*("Add", "Sub", "Mul", "Div"), *("Abs", "Neg", "Sqrt", "Floor", "Reciprocal", "Min", "Max", "Mul", "Add")]


@low_types
@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_every_bit_of_chains(seed, optimized, low):
    """Fifteen ops, each reading what any of the others made; all values are outputs."""
    rng = np.random.default_rng(seed)
    body, made = "", ["A", "B"]
    for index in range(15):
        op = str(rng.choice(CHAINED))
        reads = rng.choice(made, 1 if op in ("Abs", "Neg", "Sqrt", "Floor", "Reciprocal") else 2)
        body += f" v{index} = {op} ({', '.join(reads)})"
        made.append(f"v{index}")
    model = pair_model(low, body, ", ".join(f"KIND[M, N] {name}" for name in made[2:]))
    numbers = pairs(low)
    pick = rng.permutation(numbers["A"].size)[:4000]
    feeds = {"A": numbers["A"].reshape(1, -1)[:, pick], "B": numbers["B"].reshape(1, -1)[:, pick]}
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    outputs = session(emulate(model), optimized=optimized).run(None, single)
    for name, found, wanted in zip(made[2:], outputs, oracle(model, feeds), strict=True):
        assert steps(narrowed(found, low), wanted).max() == 0, name
        assert_rounded(found, low)


@low_types
def test_the_inputs_are_as_awkward_as_they_should_be(low):
    """Sums and products of the pairs overflow, flush, become subnormal, and meet ties that round down and up."""
    feeds = {name: array.astype(np.float64) for name, array in pairs(low).items()}
    info = ml_dtypes.finfo(LOW_DTYPES[low])
    with np.errstate(all="ignore"):
        for result in (feeds["A"] + feeds["B"], feeds["A"] * feeds["B"]):
            rounded = narrowed(result, low).astype(np.float64)
            below, above = (np.nextafter(narrowed(result, low), narrowed(x, low)) for x in (-np.inf, np.inf))
            half = [np.abs(result - rounded) * 2 == np.abs(side.astype(float) - rounded) for side in (below, above)]
            inexact = np.isfinite(rounded) & (rounded != result)
            assert (np.isinf(rounded) & np.isfinite(result)).sum() > 10
            assert (inexact & half[0]).sum() > 10
            assert (inexact & half[1]).sum() > 10
        assert ((rounded == 0) & (result != 0)).sum() > 10
        assert ((np.abs(rounded) < float(info.smallest_normal)) & (rounded != 0)).sum() > 10
        assert (np.signbit(rounded) & (rounded == 0)).sum() > 10


WITHIN_A_STEP = {
    "Acos": "Y = Acos (A)",
    "Acosh": "Y = Acosh (A)",
    "Asin": "Y = Asin (A)",
    "Asinh": "Y = Asinh (A)",
    "Atan": "Y = Atan (A)",
    "Atanh": "Y = Atanh (A)",
    "Cosh": "Y = Cosh (A)",
    "Elu": "Y = Elu <alpha = 1.3> (A)",
    "Erf": "Y = Erf (A)",
    "Exp": "Y = Exp (A)",
    "HardSigmoid": "Y = HardSigmoid (A)",
    "LeakyRelu": "Y = LeakyRelu <alpha = 0.3> (A)",
    "Log": "Y = Log (A)",
    "PRelu": "Y = PRelu (A, H)",
    "Pow": "Y = Pow (A, B)",
    "Selu": "Y = Selu (A)",
    "Sigmoid": "Y = Sigmoid (A)",
    "Sinh": "Y = Sinh (A)",
    "Softplus": "Y = Softplus (A)",
    "Softsign": "Y = Softsign (A)",
    "Tanh": "Y = Tanh (A)",
    "ThresholdedRelu": "Y = ThresholdedRelu <alpha = 0.3> (A)",
    "Gelu": "Y = Gelu (A)",
    "HardSwish": "Y = HardSwish (A)",
    "Mish": "Y = Mish (A)",
    "Cos": "Y = Cos (A)",
    "Sin": "Y = Sin (A)",
    "Tan": "Y = Tan (A)",
}
"""Elementwise ops that round once, from a float32 result whose own last bits differ."""

KERNEL_ERROR = {
    "Elu": (2.0**-23, "the kernel subtracts 1 from exp(x), and loses what is small beside 1"),
    "Sigmoid": (1e-7, "the kernel's approximation is 7 % off at -14, and 0 from -18 on"),
    "Selu": (2.0**-23, "the kernel subtracts 1 from exp(x), and loses what is small beside 1"),
}
"""Absolute errors of ONNX Runtime's float32 kernels, which bfloat16, with float32's range, is fine enough to show."""


@pytest.mark.parametrize(("op", "low"), admitted(WITHIN_A_STEP))
def test_one_step_of_other_elementwise_ops(op, low):
    if op in ("Softplus", "Mish") and onnx.defs.onnx_opset_version() < 25:
        pytest.skip("this onnx computes log(1 + exp(x)) as it is written, and overflows")
    model = pair_model(low, WITHIN_A_STEP[op])
    feeds = fed(model, pairs(low))
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    (wanted,) = exact(pair_model("float", WITHIN_A_STEP[op]), single)
    (found,) = emulated(model, feeds)
    away = steps(narrowed(found, low), narrowed(wanted, low))
    with np.errstate(invalid="ignore"):
        tolerated = np.abs(found - wanted) <= KERNEL_ERROR.get(op, (0, ""))[0]
    at = [(float(feeds["A"][i, j]), found[i, j], wanted[i, j]) for i, j in np.argwhere((away > 1) & ~tolerated)]
    assert not at, (len(at), at[:: max(1, len(at) // 8)])
    assert_rounded(found, low)


SUMS = {
    "AveragePool": (4, "Y = AveragePool <kernel_shape = [2, 2]> (I)"),
    "Conv": (36, "Y = Conv <pads = [1, 1, 1, 1]> (I, K)"),
    "ConvTranspose": (36, "Y = ConvTranspose (I, K)"),
    "CumSum": (24, "Y = CumSum (X, axis)"),
    "Einsum": (24, 'Y = Einsum <equation = "ij,jk->ik"> (X, W)'),
    "Gemm": (25, "Y = Gemm (X, W, C)"),
    "GlobalAveragePool": (24, "Y = GlobalAveragePool (I)"),
    "MatMul": (24, "Y = MatMul (X, W)"),
    "Mean": (3, "Y = Mean (X, X, Z)"),
    "ReduceL1": (24, "Y = ReduceL1 (X, axes)"),
    "ReduceMean": (24, "Y = ReduceMean (X, axes)"),
    "ReduceSum": (24, "Y = ReduceSum (X, axes)"),
    "ReduceSumSquare": (24, "Y = ReduceSumSquare (X, axes)"),
}
"""Op type -> how many terms are added, and a node. Of absolute values these ops give the sum of magnitudes."""

SUM_INPUTS = {"X": (16, 24), "Z": (16, 24), "W": (24, 8), "C": (8,), "I": (2, 4, 6, 6), "K": (4, 4, 3, 3)}


def sum_model(kind: str, body: str) -> ModelProto:
    inputs = ", ".join(f"{kind}[{', '.join(map(str, shape))}] {name}" for name, shape in SUM_INPUTS.items())
    constants = "<int64 axis = {1}, int64[1] axes = {1}>"
    return valid(parse(f"({inputs}) => ({kind} Y) {constants} {{ {body} }}", OPSET, 10))


@pytest.mark.parametrize(("op", "low"), admitted(SUMS))
def test_sums_within_one_step_and_float32_accumulation(op, low):
    """Terms span the whole range: they overflow, cancel and vanish beside each other.

    bfloat16 numbers stay below 2^56, so that the float32 sum itself, a sum of squares included, does not overflow.
    """
    terms, body = SUMS[op]
    rng = np.random.default_rng(2)
    numbers = awkward(low, widest=2.0**56)
    modest = numbers[np.abs(numbers.astype(np.float32)) < 64]
    feeds = {name: rng.choice(modest, shape) for name, shape in SUM_INPUTS.items()}
    for array in feeds.values():
        array[rng.random(array.shape) < 0.02] = rng.choice(numbers)
    feeds["Z"][::2] = -feeds["X"][::2]
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    (wanted,) = exact(sum_model("float", body), single)
    (size,) = exact(sum_model("float", body), {name: np.abs(array) for name, array in single.items()})
    (found,) = emulated(sum_model(low, body), feeds)
    assert_rounded(found, low)
    noise = terms * 2.0**-24 * np.asarray(size)
    lowest, highest = narrowed(wanted - noise, low), narrowed(wanted + noise, low)
    away = np.minimum(steps(narrowed(found, low), lowest), steps(narrowed(found, low), highest))
    inside = (lowest.astype(np.float32) <= found) & (found <= highest.astype(np.float32))
    assert np.all(inside | (away <= 1))
    assert np.isfinite(found).mean() > 0.2, "there is something to judge"


MIXED_INPUTS = {"A": (4, 6), "D": (1, 4, 4, 4), "H": ()}
MIXED = {
    "Compress": "Y = Compress <axis = 1> (A, some)",
    "DepthToSpace": "Y = DepthToSpace <blocksize = 2> (D)",
    "OneHot": "P = Reshape (H, axis) V = Concat <axis = 0> (P, P) Y = OneHot (classes, depth, V)",
    "Pad": "Y = Pad (A, pads, H)",
    "ReduceLogSum": "P = Abs (A) Y = ReduceLogSum (P, axis)",
    "ReduceLogSumExp": "Y = ReduceLogSumExp (A, axis)",
    "ReverseSequence": "Y = ReverseSequence <batch_axis = 0, time_axis = 1> (A, lengths)",
    "SpaceToDepth": "Y = SpaceToDepth <blocksize = 2> (D)",
    "Trilu": "Y = Trilu (A)",
    "Unique": "Y = Unique (A)",
}
"""Ops without a node test that ONNX Runtime can run."""


@pytest.mark.parametrize(("op", "low"), admitted(MIXED))
def test_one_step_of_further_ops(op, low):
    inputs = ", ".join(f"KIND[{', '.join(map(str, shape))}] {name}" for name, shape in MIXED_INPUTS.items())
    text = f"""({inputs}) => (KIND Y) <int64[1] axis = {{1}}, int64[4] pads = {{1, 0, 2, 1}}, int64 depth = {{5}},
        int64[4] lengths = {{4, 2, 1, 3}}, int64[4] classes = {{0, 2, 1, 3}}, bool[6] some = {{1, 1, 0, 0, 1, 0}}>
        {{ {MIXED[op]} }}"""
    rng = np.random.default_rng(3)
    feeds = {name: narrowed(rng.standard_normal(shape) * 3, low) for name, shape in MIXED_INPUTS.items()}
    single = {name: array.astype(np.float32) for name, array in feeds.items()}
    (wanted,) = exact(valid(parse(text.replace("KIND", "float"), OPSET, 10)), single)
    (found,) = emulated(valid(parse(text.replace("KIND", low), OPSET, 10)), feeds)
    assert steps(narrowed(found, low), narrowed(wanted, low)).max() <= 1
    assert_rounded(found, low)


NETWORK = """(KIND[16, 24] X, KIND[24, 24] W, KIND[24] C) => (KIND[16, 24] Y) <int64[1] axes = {1}> {
    a = MatMul (X, W)  b = Add (a, C)  s = Softmax (b)  g = Gelu (b)  m = Mul (s, g)
    n = LayerNormalization (m, C)  t = Tanh (n)  e = Exp (t)  r = ReduceSum (e, axes)  Y = Div (e, r)
}"""


@low_types
def test_every_node_of_a_network_rounds_once(low):
    """Each node against the exact result for what the emulation fed it: rounding that is lost on the way would show.

    The one sum that cancels is the MatMul: its 24 terms may leave 24 * 2^-24 of their magnitudes.
    """
    rng = np.random.default_rng(4)
    model = valid(parse(NETWORK.replace("KIND", low), OPSET, 10))
    feeds = {name: rng.standard_normal(shape) * scale for name, shape, scale in NETWORK_INPUTS}
    feeds = {name: narrowed(array, low).astype(np.float32) for name, array in feeds.items()}
    nodes = list(model.graph.node)
    del model.graph.output[:]
    model.graph.output.extend(helper.make_tensor_value_info(node.output[0], LOW_ELEMS[low], None) for node in nodes)
    found = dict(zip((node.output[0] for node in nodes), emulated(model, feeds), strict=True))
    values = feeds | found | {"axes": np.array([1])}
    for node in nodes:
        one = one_node_model(node, values)
        (wanted,) = exact(one, {name: values[name] for name in node.input})
        left = 0.0
        if node.op_type == "MatMul":
            left = 24 * 2.0**-24 * (np.abs(feeds["X"]) @ np.abs(feeds["W"]))
        result = found[node.output[0]]
        assert_rounded(result, low)
        away = steps(narrowed(result, low), narrowed(wanted, low))
        assert np.all((away <= 1) | (np.abs(result - wanted) <= left)), node.op_type


NETWORK_INPUTS = (("X", (16, 24), 1.0), ("W", (24, 24), 0.5), ("C", (24,), 1.0))


def one_node_model(node: NodeProto, values: Mapping[str, np.ndarray]) -> ModelProto:
    """The node in float32."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values[name].dtype), values[name].shape)
        for name in node.input
    ]
    output = helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, None)
    graph = helper.make_graph([node], "one", inputs, [output])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


HIGHEST = 25
"""Opset up to which ONNX Runtime has kernels: cases of a newer one are tried here, where their types are as old."""

DISAGREE = frozenset(
    {
        "test_maxunpool_export_with_output_shape",
        "test_resize_downsample_scales_cubic_align_corners",
        "test_resize_downsample_scales_linear_align_corners",
    }
)
"""Node tests on which ONNX Runtime's float32 kernels do not give what the test expects; the evaluator does."""

CANCELLING = frozenset({"DFT", "GRU", "STFT"})
"""Op types whose sums may cancel to zero. Float32 leaves 2^-20 of the largest output there, beside the one step."""

NOT_RUN = {
    "AffineGrid": "coordinates stay in float32",
    "Bernoulli": "random",
    "BlackmanWindow": "no float input",
    "Cast": "an attribute names the types: test_emulate.py",
    "CastLike": "an input of any type names the types: test_emulate.py",
    "ConcatFromSequence": "sequences: test_emulate.py",
    "Constant": "no input: test_emulate.py",
    "DequantizeLinear": "integers are the point: test_emulate.py",
    "GlobalLpPool": "the evaluator lacks it",
    "HammingWindow": "no float input",
    "HannWindow": "no float input",
    "If": "bodies: test_emulate.py",
    "Loop": "bodies: test_emulate.py",
    "MaxRoiPool": "the evaluator lacks it",
    "MeanVarianceNormalization": "stays in float32",
    "MelWeightMatrix": "no float input",
    "Multinomial": "random",
    "NonZero": "its output is indices",
    "Optional": "optionals: test_emulate.py",
    "OptionalGetElement": "optionals: test_emulate.py",
    "OptionalHasElement": "its output is a truth value",
    "QuantizeLinear": "integers are the point: test_emulate.py",
    "RandomNormal": "random",
    "RandomNormalLike": "random",
    "RandomUniform": "random",
    "RandomUniformLike": "random",
    "RoiAlign": "coordinates stay in float32",
    "Scan": "bodies: test_emulate.py",
    "SequenceAt": "sequences: test_emulate.py",
    "SequenceConstruct": "sequences: test_emulate.py",
    "SequenceInsert": "sequences: test_emulate.py",
    "SequenceMap": "bodies",
    "SplitToSequence": "sequences: test_emulate.py",
}
"""Op types with a low-precision type parameter that nothing here judges, and why."""


POOLS = frozenset({"AveragePool", "LpPool", "MaxPool"})


class Judged(NamedTuple):
    name: str
    op: str
    original: ModelProto
    feeds: dict[str, np.ndarray]


def ports(node: NodeProto, schema: defs.OpSchema) -> Iterator[tuple[str, str]]:
    """(value, type parameter) of every input and output."""
    for names, formal in ((node.input, schema.inputs), (node.output, schema.outputs)):
        yield from ((name, formal[min(port, len(formal) - 1)].type_str) for port, name in enumerate(names) if name)


def schema_of(model: ModelProto) -> defs.OpSchema:
    (node,) = model.graph.node
    versions = {entry.domain: entry.version for entry in model.opset_import}
    return defs.get_schema(node.op_type, versions[node.domain], node.domain)


def lowered(model: ModelProto, low: str) -> ModelProto | None:
    """The model with every float32 port low that may be; None if there is none."""
    schema, result = schema_of(model), ModelProto()
    result.CopyFrom(model)
    (node,) = result.graph.node
    types = {entry.name: entry.type.tensor_type for entry in (*result.graph.input, *result.graph.output)}
    parameters = low_parameters(schema, low) - set(op_facts().pinned_parameters.get(op_key(node), ()))
    fixed = op_facts().output_parameter.get(op_key(node))
    parameters -= {fixed.parameter} if fixed else set()  # an attribute says float32
    chosen = {name for name, parameter in ports(node, schema) if parameter in parameters}
    chosen = {name for name in chosen if types[name].elem_type == TensorProto.FLOAT}
    for name in chosen:
        types[name].elem_type = LOW_ELEMS[low]
    rule = op_facts().dtype_attribute.get(node.op_type)
    for item in node.attribute:
        if rule and item.name == rule.attribute and item.i == TensorProto.FLOAT:
            item.i = LOW_ELEMS[low]
    return result if chosen else None


@cache
def cases() -> tuple[Judged, ...]:
    """onnx's node tests of one node without bodies, whose inputs are tensors, at an opset that ONNX Runtime knows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the generators divide by zero on purpose
        tests = load_model_tests(kind="node")
    if tests[0].model is None:
        pytest.skip("this onnx keeps its node tests in files")
    found = []
    for test in tests:
        model, (inputs, _) = test.model, test.data_sets[0]
        nodes = model.graph.node
        if len(nodes) != 1 or any(item.type == onnx.AttributeProto.GRAPH for item in nodes[0].attribute):
            continue
        tensors = all(isinstance(item, (np.ndarray, TensorProto)) for item in inputs)
        model = at_known_opset(model)
        if tensors and model is not None and nodes[0].op_type not in NOT_RUN:
            arrays = [numpy_helper.to_array(item) if isinstance(item, TensorProto) else item for item in inputs]
            if nodes[0].op_type in POOLS:
                arrays = [smaller(model, arrays[0])]
            feeds = dict(zip((entry.name for entry in model.graph.input), arrays, strict=True))
            found.append(Judged(test.name, nodes[0].op_type, model, feeds))
    return tuple(found)


def smaller(model: ModelProto, array: np.ndarray) -> np.ndarray:
    """A corner of what is pooled: the evaluator walks through every window in Python."""
    corner = array[(slice(1), slice(1), *[slice(12)] * (array.ndim - 2))]
    elem = helper.np_dtype_to_tensor_dtype(array.dtype)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info(model.graph.input[0].name, elem, corner.shape))
    for entry in model.graph.output:
        entry.type.tensor_type.ClearField("shape")
    return corner


def at_known_opset(model: ModelProto) -> ModelProto | None:
    result = ModelProto()
    result.CopyFrom(model)
    for entry in result.opset_import:
        entry.version = entry.version if entry.domain else min(entry.version, HIGHEST)
    result.ir_version = min(result.ir_version, 11)
    if result.graph.node[0].domain:
        return None
    try:
        schema_of(result)
    except defs.SchemaError:  # the op is newer
        return None
    return result


def judge(case: Judged, low: str) -> Iterator[str] | None:
    """Complaints; None where the case holds nothing low, or one of the two runtimes cannot run the original."""
    model = lowered(case.original, low)
    if model is None or case.name in DISAGREE:
        return None
    types = {entry.name: entry.type.tensor_type.elem_type for entry in model.graph.input}
    feeds = {
        name: narrowed(array, low).astype(np.float32) if types[name] == LOW_ELEMS[low] else array
        for name, array in case.feeds.items()
    }
    try:
        session(case.original).run(None, feeds)
        wanted = exact(case.original, feeds)
    except Exception:  # noqa: BLE001 - both raise untyped errors
        return None
    return complaints(case, model, low, emulated(model, feeds), wanted)


def complaints(case: Judged, model: ModelProto, low: str, outputs: list[Any], wanted: list[Any]) -> Iterator[str]:
    for entry, found, want in zip(model.graph.output, outputs, wanted, strict=True):
        label = f"{case.name}, {low}, {entry.name}"
        if found.shape != np.shape(want):
            yield f"{label}: shape {found.shape}, wanted {np.shape(want)}"
        elif found.dtype != np.float32:
            if not np.array_equal(found, want):
                yield f"{label}: differs"
        elif entry.type.tensor_type.elem_type != LOW_ELEMS[low]:
            if not np.allclose(found, want, rtol=1e-5, atol=1e-6, equal_nan=True):  # a float32 output
                yield f"{label}: differs"
        else:
            if not np.array_equal(narrowed(found, low).astype(np.float32), found, equal_nan=True):
                yield f"{label}: is not rounded"
            left = 2.0**-20 * np.max(np.abs(want), initial=0) if case.op in CANCELLING else 0
            with np.errstate(invalid="ignore"):
                close = np.abs(found - want) <= left
            away = np.where(close, 0, steps(narrowed(found, low), narrowed(want, low)))
            if away.max(initial=0) > 1:
                yield f"{label}: {away.max()} steps away"


@cache
def judged(low: str) -> Mapping[str, tuple[str, ...]]:
    """Op type -> complaints, for every op type that could be judged."""
    found: dict[str, tuple[str, ...]] = {}
    for case in cases():
        result = judge(case, low)
        if result is not None:
            found[case.op] = (*found.get(case.op, ()), *result)
    return found


@pytest.mark.slow
@low_types
def test_node_tests_of_onnx(low):
    found = judged(low)
    assert not [complaint for complaints in found.values() for complaint in complaints]
    assert len(found) > 110


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(DISAGREE))
def test_the_two_runtimes_still_disagree(name):
    case = next(case for case in cases() if case.name == name)
    (one,), (other,) = session(case.original).run(None, case.feeds), oracle(case.original, case.feeds)
    assert one.shape != other.shape or not np.allclose(one, other, rtol=1e-3, equal_nan=True)


@pytest.mark.slow
def test_every_op_with_a_low_type_is_judged_or_left_out_for_a_reason():
    latest: dict[str, defs.OpSchema] = {}
    for schema in defs.get_all_schemas_with_history():
        if not schema.domain and schema.since_version <= HIGHEST:
            latest[schema.name] = max(schema, latest.get(schema.name, schema), key=lambda item: item.since_version)
    low = {
        name
        for name, schema in latest.items()
        if not schema.deprecated and any(low_parameters(schema, low) for low in LOW_DTYPES)
    }
    tables = {*CORRECTLY_ROUNDED, *WITHIN_A_STEP, *SUMS, *MIXED, *COMPARISONS}
    done = tables | judged("float16").keys() | judged("bfloat16").keys()
    assert low - done == low & NOT_RUN.keys()
    assert not NOT_RUN.keys() & done
    assert low >= NOT_RUN.keys()
