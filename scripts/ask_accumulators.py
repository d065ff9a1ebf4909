"""Ask an engine which of its normalizations and means sum up in float32, and write accumulate.toml of its target.

    python scripts/ask_accumulators.py webgpu           ask WebGPU (an engine is a provider, as --provider takes it)
    python scripts/ask_accumulators.py cpu --check      ask the CPU, and compare with what the file says

Each question is a model of one node in low precision whose exact result is in range. Two answers tell accumulators
apart:

overflow    the terms are so large, or so many, that a sum of float16 is infinite where the result is not
factor      the factor by which a row of 4,096 numbers is off as a whole, over rows: rounding of single numbers averages
            out, so what is left is the error of the sum that they are divided by; not above that of rounding it once

Another one tells what becomes of the mean:

cancels     numbers around 200 lose digits, more than in float32, because the mean is subtracted in low precision

A BatchNormalization sums up nothing; it is asked whether a difference that float16 cannot hold comes out right. Rows of
targets that no engine here can be asked about are written by hand.
"""

import argparse
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
from ask_engine import Array, node
from onnx import NodeProto, helper, numpy_helper

from onnxamp import OnnxAmpError
from onnxamp._facts.kernels import takes_anywhere
from onnxamp._facts.signature import lookup
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.sessions.session import assigned_nodes, choose_provider, make_session, run

TARGETS = Path(__file__).resolve().parents[1] / "onnxamp" / "_data" / "targets"
HEAD = "# Which normalizations and means sum up in float32 on {}; ../README.md explains the fields.\n"
OPSET = 24
ROWS, TERMS, MANY = 64, 4096, 100_000
TYPES: Mapping[str, Any] = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
FLOAT32 = "float32"
UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
ROUNDED = 0.7
"""Units that a rounded number is off: at most 1, and 0.58 as the mean of squares if it is just above a power of two."""
LARGE = 300.0
"""A number whose square float16 does not hold."""


@dataclass(frozen=True)
class Op:
    """An op to ask about.

    Attributes:
        exact: its result, of its inputs in float64.
        large: inputs of which a sum in float16 overflows.
        rows: inputs of which each row is divided by a sum.
        centered: whether it subtracts the mean.
        attributes: of the node.
    """

    exact: Callable[..., Array]
    large: Sequence[Array]
    rows: Sequence[Array] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)
    centered: bool = False


def _normalized(x: Array, axes: tuple[int, ...] | int = -1, *, centered: bool = True, epsilon: float = 1e-5) -> Array:
    kept = x - x.mean(axes, keepdims=True) if centered else x
    return np.asarray(kept / np.sqrt(np.mean(kept**2, axes, keepdims=True) + epsilon))


def _shares(x: Array) -> Array:
    powers = np.exp(x - x.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _in_groups(x: Array, scale: Array, bias: Array) -> Array:
    return _normalized(x.reshape(x.shape[0], 2, -1)).reshape(x.shape) * scale.reshape(-1, 1, 1) + bias.reshape(-1, 1, 1)


def _attention(q: Array, k: Array, v: Array) -> Array:
    return np.asarray(_shares(q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])) @ v)


def _by_lines(x: Array, scale: Array, bias: Array) -> Array:
    return np.moveaxis(_in_groups(np.moveaxis(x, -1, 1), scale, bias), 1, -1)


RANDOM = np.random.default_rng(0).standard_normal
SIGNS = np.tile([LARGE, -LARGE], TERMS // 2).reshape(1, TERMS)
LINES = RANDOM((ROWS, TERMS))
ONES, ZEROS = np.ones(TERMS), np.zeros(TERMS)
IMAGE, IMAGES = SIGNS.reshape(1, 2, 32, 64), RANDOM((ROWS, 2, 32, 64))
PAIR, NOTHING = np.ones(2), np.zeros(2)
FAR = np.full((1, 2, 4, 4), 60000.0)
SCORES = np.full((1, 1, 4, 64), 40.0)
KEYS = np.zeros((1, 1, MANY, 8))


def _layer(x: Array, *others: Array) -> Array:
    scale, *bias = others
    return _normalized(x) * scale + (bias[0] if bias else 0)


def _skip(x: Array, skip: Array, *others: Array) -> Array:
    return _layer(x + skip, *others)


def _root(x: Array, scale: Array) -> Array:
    return _normalized(x, centered=False) * scale


OPS: Mapping[str, Op] = {
    "LayerNormalization": Op(_layer, (SIGNS, ONES, ZEROS), (LINES, ONES, ZEROS), centered=True),
    "RMSNormalization": Op(_root, (SIGNS, ONES), (LINES, ONES)),
    "SimplifiedLayerNormalization": Op(_root, (SIGNS, ONES), (LINES, ONES), {"axis": -1, "epsilon": 1e-5}),
    "com.microsoft::SkipLayerNormalization": Op(
        _skip, (SIGNS[None], SIGNS[None] * 0, ONES, ZEROS), (LINES[None], LINES[None] * 0, ONES, ZEROS),
        {"epsilon": 1e-5}, centered=True,
    ),
    "com.microsoft::SkipSimplifiedLayerNormalization": Op(
        lambda x, skip, scale: _root(x + skip, scale), (SIGNS[None], SIGNS[None] * 0, ONES),
        (LINES[None], LINES[None] * 0, ONES), {"epsilon": 1e-5},
    ),
    "GroupNormalization": Op(
        _in_groups, (IMAGE, PAIR, NOTHING), (IMAGES, PAIR, NOTHING), {"num_groups": 2}, centered=True
    ),
    "com.microsoft::GroupNorm": Op(
        _by_lines, (np.moveaxis(IMAGE, 1, -1), PAIR, NOTHING), (np.moveaxis(IMAGES, 1, -1), PAIR, NOTHING),
        {"groups": 2, "activation": 0, "epsilon": 1e-5}, centered=True,
    ),
    "InstanceNormalization": Op(_in_groups, (IMAGE, PAIR, NOTHING), (IMAGES, PAIR, NOTHING), centered=True),
    "MeanVarianceNormalization": Op(
        lambda x: _normalized(x, (2, 3), epsilon=1e-18), (IMAGE,), (IMAGES,), {"axes": [2, 3]}, centered=True
    ),
    "BatchNormalization": Op(
        lambda x, s, b, m, v: s.reshape(-1, 1, 1) * (x - m.reshape(-1, 1, 1)) / np.sqrt(v.reshape(-1, 1, 1) + 1e-5)
        + b.reshape(-1, 1, 1),
        (FAR, PAIR, NOTHING, -60000 * PAIR, 60000 * PAIR),
    ),
    "LpNormalization": Op(lambda x: x / np.sqrt(np.sum(x**2, -1, keepdims=True)), (SIGNS,), (LINES,), {"axis": -1}),
    "ReduceMean": Op(lambda x: x.mean(keepdims=True), (np.full((1, MANY), 60000.0),)),
    "Softmax": Op(_shares, (np.zeros((1, MANY)),), (LINES,)),
    "LogSoftmax": Op(lambda x: np.log(_shares(x)), (np.zeros((1, MANY)),)),
    "com.microsoft::BiasSoftmax": Op(
        lambda x, b: _shares(x + b), (np.zeros((1, 1, MANY)), np.zeros((1, 1, MANY))),
        (LINES.reshape(1, ROWS, TERMS), np.zeros((1, 1, TERMS))), {"axis": 2, "is_inner_broadcast": 1},
    ),
    "com.microsoft::GatedRMSNorm": Op(
        lambda x, s, g: _root(x, s) * g / (1 + np.exp(-g)), (SIGNS, ONES, SIGNS * 0 + 1), (LINES, ONES, LINES * 0 + 1),
        {"epsilon": 1e-5},
    ),
    "com.microsoft::BranchwiseRMSNorm": Op(_root, (SIGNS[None], ONES), (LINES[None], ONES), {"epsilon": 1e-5}),
    "Attention": Op(_attention, (SCORES, SCORES, SCORES / 40)),
    "Attention of many keys": Op(_attention, (KEYS[:, :, :4], KEYS, KEYS + 1)),
    "com.microsoft::MultiHeadAttention": Op(
        _attention, (SCORES[0], SCORES[0], SCORES[0] / 40), attributes={"num_heads": 1}
    ),
    "com.microsoft::MultiHeadAttention of many keys": Op(
        _attention, (KEYS[0, :, :4], KEYS[0], KEYS[0] + 1), attributes={"num_heads": 1}
    ),
}  # fmt: skip
"""Op -> what is asked; an op may be asked twice."""


def ask(provider: str, item: NodeProto, inputs: Sequence[Array], kind: str) -> Array:
    """The result of a node in a type, in float64.

    Raises:
        OnnxAmpError: the engine does not run the node, or leaves it to the CPU.
    """
    dtype = np.dtype(TYPES.get(kind, kind))
    elem = helper.np_dtype_to_tensor_dtype(dtype)
    first, *others = inputs
    feeds = [helper.make_tensor_value_info("i0", elem, first.shape)]
    stored = [numpy_helper.from_array(value.astype(dtype), f"i{n}") for n, value in enumerate(others, 1)]
    if "Attention" in item.op_type:  # constant keys are not asked here
        feeds += [helper.make_tensor_value_info(value.name, elem, value.dims) for value in stored]
    given = {info.name: value.astype(dtype) for info, value in zip(feeds, inputs, strict=False)}
    graph = helper.make_graph(
        [item], "question", feeds, [helper.make_tensor_value_info("y", elem, None)], stored[len(feeds) - 1 :]
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", 1)]
    session = make_session(helper.make_model(graph, opset_imports=opsets, ir_version=10), provider, record=True)
    if provider != "cpu" and any(where == "CPU" for where, _, _ in assigned_nodes(session)):
        raise OnnxAmpError(f"{provider} leaves it to the CPU")
    return np.asarray(run(session, given)["y"]).astype(np.float64)


def is_right(provider: str, item: NodeProto, op: Op, kind: str) -> bool:
    """Whether both questions about an op are answered as by sums in float32."""
    low = TYPES[kind]
    exact = op.exact(*(value.astype(low).astype(np.float64) for value in op.large))
    found = ask(provider, item, op.large, kind)
    if not np.allclose(found, exact, rtol=16 * UNIT[kind]):
        return False
    if not op.rows:
        return True
    exact = op.exact(*(value.astype(low).astype(np.float64) for value in op.rows)).reshape(ROWS, -1)
    found = ask(provider, item, op.rows, kind).reshape(ROWS, -1)
    factors = np.sum(found * exact, -1) / np.sum(exact * exact, -1) - 1
    return bool(np.sqrt(np.mean(factors**2)) < ROUNDED * UNIT[kind])


def cancels(provider: str, item: NodeProto, op: Op, kind: str) -> bool:
    """Whether an op loses digits of numbers that are far from zero."""
    first, *others = op.rows
    far = 200 + np.random.default_rng(0).integers(-8, 9, first.shape) / 8  # a float16; in bfloat16 what rounding leaves
    inputs = [value.astype(TYPES[kind]).astype(np.float64) for value in (far, *others)]
    exact = op.exact(*inputs)
    error, wide = (np.linalg.norm(ask(provider, item, inputs, asked) - exact) for asked in (kind, FLOAT32))
    rounded = np.linalg.norm(exact.astype(TYPES[kind]).astype(np.float64) - exact)
    return bool(error > 4 * max(rounded, wide))


def accumulators(provider: str) -> dict[tuple[str, str], dict[str, Any]]:
    """How an engine sums up, by op and type; what it has no kernel for, or cannot run, is left out."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for name, op in OPS.items():
        key = name.partition(" ")[0]
        for kind in TYPES:
            if not _may_run(provider, key, kind):
                continue
            item = node(key, [f"i{position}" for position in range(len(op.large))], ["y"], **op.attributes)
            try:
                row: dict[str, Any] = {"accumulator": FLOAT32 if is_right(provider, item, op, kind) else kind}
                if op.centered and cancels(provider, item, op, kind):
                    row["cancels"] = True
            except (OnnxAmpError, onnx.checker.ValidationError) as error:
                print(f"{name}, {kind}: {error}", file=sys.stderr)
                continue
            if found.get((key, kind), {"accumulator": FLOAT32})["accumulator"] == FLOAT32:
                found[key, kind] = row
    return found


def _may_run(provider: str, key: str, kind: str) -> bool:
    """Whether there is a kernel, or a function body."""
    domain, _, op_type = key.rpartition("::")
    signature = lookup(domain, op_type, 1 if domain else OPSET)
    return takes_anywhere(provider, key, f"tensor({kind})") or (signature is not None and signature.has_function)


def rows_of(provider: str, found: Mapping[tuple[str, str], Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows, one for each op, or for each type of an op that sums up its types in different ways."""
    engine = engine_on(provider).name()
    source = f"asked {engine}, onnxruntime {onnxruntime.__version__} (scripts/ask_accumulators.py)"
    rows: list[dict[str, Any]] = []
    for (op, kind), answer in found.items():
        same = next((row for row in rows if row["op"] == op and row.items() >= answer.items()), None)
        if same is None:
            rows.append({"op": op, "types": [kind], **answer, "source": source})
        else:
            same["types"].append(kind)
    return rows


def as_text(head: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The text of the file."""
    parts = ["\n".join(["[[rows]]", *(f"{name} = {_value(value)}" for name, value in row.items())]) for row in rows]
    return head + "\n" + "\n\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else "[" + ", ".join(map(_value, value)) + "]"


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, and write or compare; the exit code is 0, or 1 if nothing could be asked or something differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("provider", help="the engine, as --provider takes it")
    parser.add_argument("--check", action="store_true", help="compare with the file, and write nothing")
    options = parser.parse_args(argv)
    try:
        choose_provider(options.provider)
    except OnnxAmpError as error:
        print(error, file=sys.stderr)
        return 1
    path = TARGETS / options.provider / "accumulate.toml"
    text = path.read_text(encoding="utf-8") if path.is_file() else HEAD.format(options.provider)
    found = accumulators(options.provider)
    if options.check:
        said = {
            (row["op"], kind): {name: row[name] for name in ("accumulator", "cancels") if name in row}
            for row in tomllib.loads(text)["rows"] for kind in row["types"]
        }  # fmt: skip
        for op, kind in sorted(said.keys() | found.keys()):
            if said.get((op, kind)) != found.get((op, kind)):
                print(f"{op}, {kind}: the answer is {found.get((op, kind))}; the file says {said.get((op, kind))}")
        return int(said != found)
    head = text.partition("[[")[0].rstrip("\n") + "\n"
    path.write_text(as_text(head, rows_of(options.provider, found)), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
