"""Ask an engine how it computes float16, and write the answers to onnxamp/_data/targets/ENGINE/arithmetic.toml.

    python scripts/ask_engine.py webgpu             ask WebGPU (an engine is a provider, as --provider takes it)
    python scripts/ask_engine.py cuda --check       ask CUDA, and compare with what the file says

Each question is a float16 graph of one or two nodes whose answer tells arithmetics apart:

growth      error of a sum of 4,096 random terms, over the error of rounding the exact sum once: about 1 if terms are
            summed up in float32, about 40 if one float16 accumulator takes them one after the other; of ops in several
            steps and elementwise ones likewise, for normally distributed inputs
transB      form of a product whose second factor is transposed, so that four numbers along the sum are taken at once
order       "sequential" if the result is, bit for bit, that of one accumulator that rounds each product and each sum;
            "float32" if growth is small; else "parallel": several accumulators, or a tree
overflows   a mean or a norm whose result is in range, but whose sum is not, becomes Inf or NaN
split       number of terms from which on a pooling with fewer results than `results` has several accumulators; others
            have one
cancels     a normalization subtracts large numbers in float16, so that it loses digits where the mean is large
largest     largest error of an elementwise op over all float16 numbers, over that of rounding a result of the same size
            (of 1 if it is smaller); 0.5 is right
folds_norms the numbers of a BatchNormalization are put into the weights of a convolution, which are rounded again: all
            results of a channel are off by the same factor
computed    the formula by which an elementwise op is computed, bit for bit for at least 99 % of all float16 numbers, if
            each of its steps is rounded; exp(x) is 2 to the rounded product of x and log2(e), and log(x) likewise
left_to_cpu what the engine has no float16 kernel for (opset 21)
"""

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import NodeProto, helper, numpy_helper
from scipy import special

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from onnxamp import OnnxAmpError  # noqa: E402 - behind the path that it is found on
from onnxamp._facts.formulas import compute  # noqa: E402
from onnxamp._runtime.engines import engine_on  # noqa: E402
from onnxamp._runtime.sessions.session import assigned_nodes, choose_provider, make_session, run  # noqa: E402

TARGETS = ROOT / "onnxamp" / "_data" / "targets"
TERMS = 4096
MANY = 100_000
"""So many ones have a sum that float16 does not hold; in a tree, it sums up fewer ones exactly."""
FLOAT16, FLOAT32 = np.float16, np.float32
FLOAT16_UNIT = 2.0**-11
Array = np.ndarray[Any, Any]


class LeftToCpuError(OnnxAmpError):
    """The engine has no kernel for a question."""


def ask(
    provider: str, nodes: Sequence[NodeProto], feeds: Mapping[str, Array], weights: Mapping[str, Array] | None = None
) -> Array:
    """The value ``y`` of a graph of nodes.

    Raises:
        LeftToCpuError: the engine did not run them.
    """
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    output = onnx.ValueInfoProto(name="y")
    initializers = [numpy_helper.from_array(array, name) for name, array in (weights or {}).items()]
    graph = helper.make_graph(nodes, "question", inputs, [output], initializers)
    newer = {"RMSNormalization": 23, "HardSwish": 22, "Mish": 22}
    opset = max(newer.get(item.op_type, 21) for item in nodes)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = make_session(model, provider, record=True)
    asked = {item.op_type for item in nodes}
    if provider != "cpu" and any(where == "CPU" and op in asked for where, op, _ in assigned_nodes(session)):
        raise LeftToCpuError(f"{provider} leaves {', '.join(sorted(asked))} to the CPU")
    return np.asarray(run(session, feeds)["y"])


# Sums: by op, the nodes that sum up the terms of x (with weights w, where there are products).


def node(kind: str, inputs: Sequence[str], outputs: Sequence[str], **attributes: Any) -> NodeProto:
    """A node of an op, which is named as in the kernel tables."""
    domain, _, op_type = kind.rpartition("::")
    return helper.make_node(op_type, inputs, outputs, domain=domain, **attributes)


def product(kind: str, terms: Array, factors: Array) -> tuple[NodeProto, Array, dict[str, Array]]:
    """A node that sums up products of terms [K] with the columns of factors [K, N]; input, and weights."""
    size, columns = factors.shape
    if kind in ("Conv 1x1", "Conv 3x3"):
        side = int(kind[-1])
        used = size // side**2 * side**2
        channels = used // side**2
        x = terms[:used].reshape(1, channels, side, side)
        filters = np.ascontiguousarray(factors[:used].T).reshape(-1, *x.shape[1:])
        return node("Conv", ["x", "w"], ["y"]), x, {"w": filters}
    if kind == "ConvTranspose":
        return node(kind, ["x", "w"], ["y"]), terms.reshape(1, size, 1, 1), {"w": factors.reshape(size, columns, 1, 1)}
    if kind == "Einsum":
        return node(kind, ["x", "w"], ["y"], equation="mk,kn->mn"), terms[None], {"w": factors}
    if kind == "Gemm transB":
        return node("Gemm", ["x", "w"], ["y"], transB=1), terms[None], {"w": np.ascontiguousarray(factors.T)}
    return node(kind, ["x", "w"], ["y"]), terms[None], {"w": factors}


PRODUCTS = ("MatMul", "Gemm", "Gemm transB", "Conv 1x1", "Conv 3x3", "ConvTranspose", "Einsum")

SUMS: Mapping[str, tuple[str, Mapping[str, Any], bool]] = {
    "ReduceSum": ("ReduceSum", {}, True),
    "ReduceMean": ("ReduceMean", {}, True),
    "ReduceSumSquare": ("ReduceSumSquare", {}, True),
    "ReduceL1": ("ReduceL1", {}, True),
    "ReduceL2": ("ReduceL2", {}, True),
    "ReduceLogSumExp": ("ReduceLogSumExp", {}, True),
    "GlobalAveragePool": ("GlobalAveragePool", {}, False),
    "AveragePool": ("AveragePool", {"kernel_shape": [64, 64]}, False),
    "CumSum": ("CumSum", {}, True),
}
"""Op -> op type, attributes, and whether it takes axes; the others take images."""

TRUTH = {
    "ReduceSum": np.sum, "ReduceMean": np.mean, "GlobalAveragePool": np.mean, "AveragePool": np.mean,
    "ReduceSumSquare": lambda x: np.sum(x**2), "ReduceL1": lambda x: np.sum(np.abs(x)),
    "ReduceL2": lambda x: sqrt(np.sum(x**2)), "ReduceLogSumExp": lambda x: np.log(np.sum(np.exp(x))),
    "CumSum": np.sum,
}  # fmt: skip

OVERFLOWS: Mapping[str, float] = {"ReduceMean": 300, "GlobalAveragePool": 300, "AveragePool": 300, "ReduceL2": 30,
                                  "ReduceLogSumExp": 12}  # fmt: skip
"""Op -> a number; of 4,096 such terms the result is in range, but not their sum, or that of squares or exponentials."""

NORMS: Mapping[str, tuple[tuple[str, ...], tuple[int, ...]]] = {
    "LayerNormalization": (("s",), (1, TERMS)),
    "RMSNormalization": (("s",), (1, TERMS)),
    "InstanceNormalization": (("s1", "b1"), (1, 1, 64, 64)),
    "Softmax": ((), (1, MANY)),
    "LogSoftmax": ((), (1, MANY)),
}
"""Op -> its further inputs, and the shape of x."""


def _normalized(x: Array, axes: tuple[int, ...] | int = -1, *, centered: bool = True) -> Array:
    kept = x - x.mean(axes, keepdims=True) if centered else x
    return np.asarray(kept / np.sqrt(np.mean(kept**2, axes, keepdims=True) + 1e-5))


def _shares(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _in_groups(x: Array) -> Array:
    return _normalized(x.reshape(4, 2, -1)).reshape(x.shape)


ROWS, IMAGES, CHANNELS = (32, 256), (4, 8, 16, 16), (8, 1, 1)
STEPS: Mapping[str, tuple[tuple[int, ...], tuple[tuple[int, ...], ...], Mapping[str, Any], Any]] = {
    "LayerNormalization": (ROWS, ((256,),), {}, lambda x, s: _normalized(x) * s),
    "RMSNormalization": (ROWS, ((256,),), {}, lambda x, s: _normalized(x, centered=False) * s),
    "InstanceNormalization": (IMAGES, ((8,), (8,)), {}, lambda x, s, b: _normalized(x, (2, 3)) * s + b),
    "GroupNormalization": (IMAGES, ((8,), (8,)), {"num_groups": 2}, lambda x, s, b: _in_groups(x) * s + b),
    "BatchNormalization": (
        IMAGES, ((8,), (8,), (8,), (8,)), {}, lambda x, s, b, m, v: (x - m) / np.sqrt(v + 1e-5) * s + b,
    ),
    "com.microsoft::SkipLayerNormalization": (
        (1, *ROWS), ((1, *ROWS), (256,), (256,)), {}, lambda x, k, s, b: _normalized(x + k) * s + b,
    ),
    "com.microsoft::SkipSimplifiedLayerNormalization": (
        (1, *ROWS), ((1, *ROWS), (256,)), {}, lambda x, k, s: _normalized(x + k, centered=False) * s,
    ),
    "com.microsoft::BiasGelu": (ROWS, ((256,),), {}, lambda x, b: (x + b) * (1 + special.erf((x + b) / sqrt(2))) / 2),
    "Softmax": (ROWS, (), {}, _shares),
    "LogSoftmax": (ROWS, (), {}, lambda x: np.log(_shares(x))),
}  # fmt: skip
"""Op -> the shapes of x and of further inputs, attributes, and what it computes; channels are inputs of one axis."""

ELEMENTWISE = {
    "Exp": np.exp, "Log": np.log, "Sqrt": np.sqrt, "Tanh": np.tanh, "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Reciprocal": lambda x: 1 / x, "Erf": special.erf, "Sin": np.sin, "Cos": np.cos,
    "Softplus": lambda x: np.logaddexp(0, x), "Gelu": lambda x: x * (1 + special.erf(x / sqrt(2))) / 2,
    "Elu": lambda x: np.where(x > 0, x, np.expm1(x)), "Mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1), "HardSigmoid": lambda x: np.clip(0.2 * x + 0.5, 0, 1),
    "Tan": np.tan, "Asin": np.arcsin, "Acos": np.arccos, "Atan": np.arctan, "Sinh": np.sinh, "Cosh": np.cosh,
    "Asinh": np.arcsinh, "LeakyRelu": lambda x: np.where(x < 0, 0.01 * x, x),
    "com.microsoft::Gelu": lambda x: x * (1 + special.erf(x / sqrt(2))) / 2,
    "com.microsoft::FastGelu": lambda x: x * (1 + np.tanh(sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "com.microsoft::QuickGelu": lambda x: x / (1 + np.exp(-1.702 * x)),
}  # fmt: skip

_TANH = "sign({0}) * (1 - exp(-2 * abs({0}))) / (1 + exp(-2 * abs({0})))"
_SOFTPLUS = "(max(x, 0) + log(1 + exp(-abs(x))))"
FORMULAS = {
    "Exp": "exp(x)",
    "Log": "log(x)",
    "Sigmoid": "1 / (1 + exp(-x))",
    "Tanh": _TANH.format("x"),
    "Softplus": "max(x, 0) + log(1 + exp(-abs(x)))",
    "Mish": f"x * ({_TANH.format(_SOFTPLUS)})",
    "Sinh": "(exp(x) - exp(-x)) * 0.5",
    "Cosh": "(exp(x) + exp(-x)) * 0.5",
    "com.microsoft::FastGelu": f"(0.5 + 0.5 * ({_TANH.format('(x * (0.0356774 * x * x + 0.797885))')})) * x",
}
"""Op -> how engines may compute it (microsoft/onnxruntime, core/providers/webgpu/math/unary_elementwise_ops.cc)."""
STEP = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Neg": np.negative,
    "abs": np.abs, "sign": np.sign, "max": np.maximum,
}  # fmt: skip
"""Step of a formula -> what it computes before it is rounded."""

BY_HAND = "# By hand:"
SPLIT, RESULTS = 128, 4096
"""Terms from which on, and results up to which WebGPU pools in several accumulators (microsoft/onnxruntime,
core/providers/webgpu/nn/pool.cc: are_small_output_big_kernel); asked with 11 * 11 and 12 * 12, and 256 and 4,096."""


def one_accumulator(terms: Array, factors: Array) -> Array:
    """One float16 accumulator per column, which rounds each product and each sum."""
    total = np.zeros(factors.shape[1], FLOAT16)
    for term, row in zip(terms, factors, strict=True):
        total += (FLOAT32(term) * row.astype(FLOAT32)).astype(FLOAT16)
    return total


def growth(found: Array, exact: Array) -> float:
    """Error over that of rounding the exact numbers once."""
    rounded = np.linalg.norm(exact.astype(FLOAT16).astype(np.float64) - exact)
    return float(np.linalg.norm(found.ravel().astype(np.float64) - exact) / rounded)


def ask_product(provider: str, kind: str) -> dict[str, Any]:
    """How an op sums up products."""
    random = np.random.default_rng(0)
    terms, factors = (random.standard_normal(shape).astype(FLOAT16) for shape in ((TERMS,), (TERMS, 64)))
    op, x, weights = product(kind, terms, factors)
    used = x.size
    found = ask(provider, [op], {"x": x}, weights)
    grown = growth(found, terms[:used].astype(np.float64) @ factors[:used].astype(np.float64))
    is_exact = np.array_equal(found.ravel(), one_accumulator(terms[:used], factors[:used]))
    order = "sequential" if is_exact or grown > 30 else "float32" if grown < 1.5 else "parallel"
    return {"accumulator": "float32" if order == "float32" else "float16", "order": order, "growth": round(grown, 1)}


def splits(provider: str, kind: str) -> bool:
    """Whether a pooling of few terms, and one with many results, are off by more than one of many with few results."""
    errors = []
    for size, channels in ((12, 256), (11, 256), (12, RESULTS)):
        x = np.random.default_rng(0).standard_normal((1, channels, size, size)).astype(FLOAT16)
        attributes = {"kernel_shape": [size, size]} if kind == "AveragePool" else {}
        found = ask(provider, [node(kind, ["x"], ["y"], **attributes)], {"x": x})
        errors.append(growth(found, x.astype(np.float64).mean((0, 2, 3))))
    return min(errors[1:]) > 1.5 * errors[0]


def ask_sum(provider: str, kind: str) -> dict[str, Any]:
    """How an op sums up its input."""
    op_type, attributes, has_axes = SUMS[kind]
    inputs = ["x", "a"] if has_axes else ["x"]
    shape = (64, TERMS) if has_axes else (1, 64, 64, 64)
    axes = {"a": np.array(1) if kind == "CumSum" else np.array([1])} if has_axes else {}
    op = node(op_type, inputs, ["y"], **attributes)
    x = np.random.default_rng(0).standard_normal(shape).astype(FLOAT16)
    if kind == "ReduceSumSquare":
        x /= 4
    found = ask(provider, [op], {"x": x}, axes)
    found = found[:, -1] if kind == "CumSum" else found
    rows = x.reshape(64, TERMS).astype(np.float64)
    grown = growth(found, np.array([TRUTH[kind](row) for row in rows]))
    answer = {"accumulator": "float32" if grown < 1.5 else "float16", "growth": round(grown, 1)}
    if kind in OVERFLOWS:
        large = ask(provider, [op], {"x": np.full(shape, OVERFLOWS[kind], FLOAT16)}, axes)
        answer["overflows"] = not bool(np.isfinite(large).all())
        answer["accumulator"] = "float16" if answer["overflows"] else answer["accumulator"]
    if grown > 30:
        answer["order"] = "sequential"
    if kind.endswith("Pool") and splits(provider, kind):
        answer |= {"split": SPLIT, "results": RESULTS}
    return answer


def ask_norm(provider: str, kind: str) -> dict[str, Any]:
    """Whether an op that normalizes keeps its sums in float32, and what it subtracts."""
    names, shape = NORMS[kind]
    values = {"s": np.ones(TERMS, FLOAT16), "s1": np.ones(1, FLOAT16), "b1": np.zeros(1, FLOAT16)}
    x = np.tile(np.array([300, -300], FLOAT16), TERMS // 2).reshape(shape) if names else np.zeros(shape, FLOAT16)
    found = ask(provider, [node(kind, ["x", *names], ["y"])], {"x": x}, {name: values[name] for name in names})
    truth = {"Softmax": 1 / MANY, "LogSoftmax": -np.log(MANY)}.get(kind, np.sign(x.astype(FLOAT32)))
    is_right = bool(np.allclose(found.astype(FLOAT32), truth, rtol=4e-3))
    answer = {"accumulator": "float32" if is_right else "float16"}
    if names:
        x = (200 + np.random.default_rng(0).integers(-8, 9, shape) / 8).astype(FLOAT16)
        found = ask(provider, [node(kind, ["x", *names], ["y"])], {"x": x}, {name: values[name] for name in names})
        wide = x.astype(np.float64)
        centered = wide if kind == "RMSNormalization" else wide - wide.mean()
        exact = centered / np.sqrt(np.mean(centered**2) + 1e-5)
        answer["cancels"] = growth(found, exact.ravel()) > 4
    return answer


def ask_steps(provider: str, kind: str) -> dict[str, float]:
    """The error of an op that takes several steps, of normally distributed numbers; variances are positive."""
    shape, others, attributes, compute = STEPS[kind]
    random = np.random.default_rng(0)
    x, *further = (random.standard_normal(size).astype(FLOAT16) for size in (shape, *others))
    if kind == "BatchNormalization":
        further[-1] = np.abs(further[-1])
    given = {f"i{position}": array for position, array in enumerate(further)}
    found = ask(provider, [node(kind, ["x", *given], ["y"], **attributes)], {"x": x}, given)
    wide = (array.astype(np.float64) for array in further)
    channels = (array.reshape(CHANNELS) if len(shape) == 4 else array for array in wide)
    return {"growth": round(growth(found, compute(x.astype(np.float64), *channels).ravel()), 1)}


def ask_elementwise(provider: str, kind: str) -> dict[str, Any]:
    """The largest error over all float16 numbers whose result is finite, and the usual one."""
    every = np.arange(2**16, dtype=np.uint16).view(FLOAT16)
    with np.errstate(all="ignore"):
        exact = ELEMENTWISE[kind](every.astype(np.float64))
        right = exact.astype(FLOAT16)
        kept = np.isfinite(right) & np.isfinite(every) & np.isfinite(exact)
    found = ask(provider, [node(kind, ["x"], ["y"])], {"x": every[kept]})
    size = 2.0 ** np.floor(np.log2(np.maximum(np.abs(exact[kept]), 1)))
    largest = float(np.max(np.abs(found.astype(np.float64) - exact[kept]) / size) * 2**10)
    x = np.abs(np.random.default_rng(0).standard_normal(4096)).astype(FLOAT16)
    x[::2] *= -1 if np.isfinite(right[kept & (every < 0)]).any() else 1
    with np.errstate(invalid="ignore"):
        exact = ELEMENTWISE[kind](x.astype(np.float64))
    found = ask(provider, [node(kind, ["x"], ["y"])], {"x": x})
    inside = np.isfinite(exact)
    answer = {"largest": round(largest, 1), "growth": round(growth(found[inside], exact[inside]), 1)}
    return answer | ({"computed": FORMULAS[kind]} if kind in FORMULAS and is_computed(provider, kind, every) else {})


def is_computed(provider: str, kind: str, every: Array) -> bool:
    """Whether an op is computed by its formula."""
    x = every[np.isfinite(every)]
    found = ask(provider, [node(kind, ["x"], ["y"])], {"x": x})
    with np.errstate(all="ignore"):
        expected = compute(FORMULAS[kind], x.astype(np.float64), _step).astype(FLOAT16)
    return float(np.mean((found == expected) | (np.isnan(found) & np.isnan(expected)))) > 0.99


def _step(kind: str, operands: Sequence[Array | float]) -> Array:
    """A rounded step of a formula."""
    first, *others = (one if isinstance(one, np.ndarray) else _rounded(np.float64(one)) for one in operands)
    if kind == "exp":
        return _rounded(np.exp2(_rounded(first * _rounded(np.log2(np.e)))))
    if kind == "log":
        return _rounded(_rounded(np.log2(first)) * _rounded(np.log(2)))
    return _rounded(STEP[kind](first, *others))


def _rounded(exact: Any) -> Array:
    return np.asarray(np.asarray(exact, FLOAT16), np.float64)


def ask_values(provider: str) -> dict[str, Any]:
    """What becomes of values beside sums."""
    large = {"x": np.full(8, 300, FLOAT16)}
    square = node("Mul", ["x", "x"], ["q"])
    overflow = ask(provider, [node("Mul", ["x", "x"], ["y"])], large)[0]
    chain = ask(provider, [square, node("Div", ["q", "x"], ["y"])], large)[0]
    tiny = ask(provider, [node("Mul", ["x", "one"], ["y"])], {"x": np.full(8, 1e-6, FLOAT16)}, {"one": FLOAT16(1)})[0]
    return {
        "overflow": "Inf" if np.isinf(overflow) else "NaN" if np.isnan(overflow) else "saturates",
        "subnormals": "kept" if tiny else "flushed",
        "honors_types": bool(np.isinf(chain)),
        "folds_norms": folds_norms(provider),
    }


def folds_norms(provider: str) -> bool:
    """Whether the factors by which channels are off, rounding averaged out, are those of weights rounded twice."""
    random, channels = np.random.default_rng(0), 64
    x, w, scale = (random.uniform(1, 2, shape).astype(FLOAT16) for shape in ((1, 1, 64, 64), channels, channels))
    nodes = [node("Conv", ["x", "w"], ["c"]), node("BatchNormalization", ["c", "s", "b", "b", "v"], ["y"], epsilon=0.0)]
    weights = {"w": w.reshape(-1, 1, 1, 1), "s": scale, "b": np.zeros_like(w), "v": np.ones_like(w)}
    found = ask(provider, nodes, {"x": x}, weights)[0].astype(np.float64)
    off = (found / x[0].astype(np.float64)).mean((1, 2)) / (w.astype(np.float64) * scale) - 1
    return float(np.abs(off).mean()) > FLOAT16_UNIT / 8


def float32_noise(provider: str) -> float:
    """Largest relative L2 error of products and of a Softmax in float32."""
    random = np.random.default_rng(0)
    terms, factors = (random.standard_normal(shape).astype(FLOAT32) for shape in ((TERMS,), (TERMS, 64)))
    worst = 0.0
    for kind in ("MatMul", "Conv 1x1"):
        op, x, weights = product(kind, terms, factors)
        exact = terms.astype(np.float64) @ factors.astype(np.float64)
        found = ask(provider, [op], {"x": x}, weights).ravel()
        worst = max(worst, float(np.linalg.norm(found - exact) / np.linalg.norm(exact)))
    return float(f"{worst:.1e}")


def answers(provider: str) -> dict[str, Any]:
    """All answers of an engine; ops that it cannot run are left out."""
    questions = {
        "products": {kind: partial(ask_product, provider, kind) for kind in PRODUCTS},
        "sums": {kind: partial(ask_sum, provider, kind) for kind in SUMS},
        "normalizations": {kind: partial(ask_norm, provider, kind) for kind in NORMS},
        "steps": {kind: partial(ask_steps, provider, kind) for kind in STEPS},
        "elementwise": {kind: partial(ask_elementwise, provider, kind) for kind in ELEMENTWISE},
    }
    found: dict[str, Any] = {"values": ask_values(provider)}
    for part, asked in questions.items():
        found[part] = {}
        for kind, question in asked.items():
            try:
                found[part][kind] = question()
            except OnnxAmpError as error:
                print(f"{kind}: {error}", file=sys.stderr)
                found["values"].setdefault("left_to_cpu", []).append(kind)
    found["values"]["float32_noise"] = float32_noise(provider)
    return found


def as_toml(provider: str, found: Mapping[str, Any], kept: str = "") -> str:
    """The text of a profile, with what was written by hand."""
    lines = [
        f"# How {provider} computes float16. Written by scripts/ask_engine.py, which explains the fields.",
        "seen = true",
        f'source = "asked {engine_on(provider).name()}, onnxruntime {onnxruntime.__version__}"',
    ]
    for part, rows in found.items():
        lines += ["", f"[{part}]", *(f"{_key(name)} = {_value(row)}" for name, row in rows.items())]
    return "\n".join(lines) + "\n" + kept


def by_hand(path: Path) -> str:
    """What a profile says that nobody can ask: the end of the file, from a line of its own on."""
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return text[text.index(BY_HAND) - 1 :] if BY_HAND in text else ""


def _key(name: str) -> str:
    return name if name.isidentifier() else f'"{name}"'


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(item)}" for name, item in value.items()) + " }"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else f"{value}"


def differences(said: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Where answers differ from a profile; errors may differ by half, as devices sum up in different orders."""
    lines = []
    for part in ("values", "products", "sums", "normalizations", "steps", "elementwise"):
        for name in sorted(said.get(part, {}).keys() & found.get(part, {}).keys()):
            one, other = said[part][name], found[part][name]
            pairs = one.items() if isinstance(one, dict) else [(name, one)]
            for fact, expected in pairs:
                actual = other.get(fact) if isinstance(other, dict) else other
                is_number = isinstance(expected, float) and not isinstance(expected, bool)
                if actual != expected and not (is_number and expected / 2 <= (actual or 0) <= expected * 2):
                    lines.append(f"{part}, {name}: {fact} is {actual}, the profile says {expected}")
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and write or compare; the exit code is 0, or 1 if nothing could be asked or something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("provider", help="the engine, as --provider takes it")
    parser.add_argument("--check", action="store_true", help="compare with the profile, and write nothing")
    parser.add_argument("--to", type=Path, metavar="DIR", default=TARGETS, help="write DIR/ENGINE/arithmetic.toml")
    options = parser.parse_args(argv)
    try:
        choose_provider(options.provider)
    except OnnxAmpError as error:
        print(error, file=sys.stderr)
        return 1
    found = answers(options.provider)
    path = options.to / options.provider / "arithmetic.toml"
    if not options.check:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(as_toml(options.provider, found, by_hand(path)), encoding="utf-8", newline="\n")
        return 0
    lines = differences(tomllib.loads(path.read_text(encoding="utf-8")), found)
    print("\n".join(lines) or f"{options.provider} computes as its profile says.")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
