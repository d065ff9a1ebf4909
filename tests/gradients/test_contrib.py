"""Gradient rules of ONNX Runtime's own ops against central differences of its kernels, in float32."""

from typing import Any

import numpy as np
import pytest
from gradient_cases import Array, loss_of
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._gradients.walk import differentiate
from onnxamp._runtime.sessions.session import make_session, run

RNG = np.random.default_rng(0)


def n(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def ints(*values: int) -> Array:
    return np.array(values, np.int32)


def angles(rows: int, half: int) -> tuple[Array, Array]:
    """Cosines and sines as of rotary positions."""
    turns = np.outer(np.arange(rows), 10.0 ** -np.arange(half))
    return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)


def attention(
    *,
    batch: int = 1,
    length: int = 3,
    past: int = 4,
    size: int = 16,
    rotary: int = 0,
    packed: bool = False,
    lengths: Array | None = None,
    outputs: int = 3,
    **more: Any,
) -> tuple[Any, ...]:
    """A GroupQueryAttention; all of the cache holds tokens, unless ``lengths`` says how many there are then."""
    heads, shared, total = 4, 2, past + length
    tokens = n(batch, length, (heads + 2 * shared) * size), None, None
    if not packed:
        tokens = n(batch, length, heads * size), n(batch, length, shared * size), n(batch, length, shared * size)
    caches = (n(batch, shared, past, size), n(batch, shared, past, size)) if past else (None, None)
    used = np.full(batch, total - 1, np.int32) if lengths is None else lengths
    tables = angles(64, rotary // 2) if rotary else (None, None)
    inputs = (*tokens, *caches, used, np.array(int(used.max()) + 1, np.int32), *tables)
    more |= {"num_heads": heads, "kv_num_heads": shared, "do_rotary": int(bool(rotary))}
    return "com.microsoft::GroupQueryAttention", inputs, outputs, more


def packed(rows: int, columns: int, *, block: int = 32, bits: int = 4, zeros: str = "", bias: bool = False) -> Any:
    """A MatMulNBits."""
    blocks = -(-columns // block)
    numbers = RNG.integers(0, 256, (rows, blocks, block * bits // 8)).astype(np.uint8)
    points = {
        "packed": RNG.integers(0, 256, (rows, -(-blocks * bits // 8))).astype(np.uint8),
        "floats": n(rows, blocks),
    }
    inputs = (n(2, 3, columns), numbers, n(rows, blocks), points.get(zeros), None, n(rows) if bias else None)
    sizes = {"K": columns, "N": rows, "block_size": block, "bits": bits}
    return "com.microsoft::MatMulNBits", inputs, 1, sizes


SKIP = "com.microsoft::SkipSimplifiedLayerNormalization"
MANY = "com.microsoft::MultiHeadAttention"
TURN = "com.microsoft::RotaryEmbedding"
CASES = {
    "simplified": ("SimplifiedLayerNormalization", (n(2, 3, 8), n(8)), 1, {"axis": -1}),
    "skip": (SKIP, (n(2, 3, 8), n(2, 3, 8), n(8)), 4, {"epsilon": 0.1}),
    "skip-bias": (SKIP, (n(2, 3, 8), n(1, 3, 8), n(8), n(8)), 4, {}),
    "skip-sum-unused": (SKIP, (n(2, 3, 8), n(2, 3, 8), n(8)), 1, {}),
    "skip-centred": ("com.microsoft::SkipLayerNormalization", (n(2, 3, 8), n(2, 3, 8), n(8), n(8), n(8)), 4, {}),
    "group": attention(),
    "group-prompt": attention(past=0),
    "group-rotary": attention(rotary=16),
    "group-interleaved": attention(rotary=16, rotary_interleaved=1, scale=0.3),
    "group-partly-rotary": attention(rotary=16, packed=True, size=32),
    "group-capped": attention(softcap=2.0),
    "group-packed": attention(packed=True, rotary=16, batch=2, length=1),
    "group-alone": attention(past=0, outputs=1),
    "group-columns": attention(batch=2, length=1, lengths=ints(2, 4)[:, None], rotary=16),
    "group-window": attention(local_window_size=3, length=5),
    "group-shorter": attention(batch=2, length=1, lengths=ints(2, 4)),
    "group-window-cache": attention(local_window_size=3, sliding_window_cache=1, lengths=ints(4), length=2),
    "group-window-moves": attention(local_window_size=3, sliding_window_cache=1, lengths=ints(8), length=3, rotary=16),
    "many": (MANY, (n(2, 3, 8), n(2, 5, 8), n(2, 5, 8)), 1, {"num_heads": 2}),
    "many-biases": (MANY, (n(2, 3, 8), n(2, 3, 8), n(2, 3, 8), n(24)), 1, {"num_heads": 2, "unidirectional": 1}),
    "many-scores": (
        MANY, (n(2, 3, 8), n(2, 5, 8), n(2, 5, 8), None, None, n(1, 2, 3, 5)), 1, {"num_heads": 2, "scale": 0.7},
    ),
    "many-masked": (
        MANY, (n(2, 3, 8), n(2, 4, 8), n(2, 4, 8), None, np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)), 1,
        {"num_heads": 2},
    ),
    "many-past": (
        MANY, (n(2, 3, 8), n(2, 3, 8), n(2, 3, 8), None, None, None, n(2, 2, 4, 4), n(2, 2, 4, 4)), 3, {"num_heads": 2},
    ),
    "many-apart": (MANY, (n(2, 3, 8), n(2, 2, 5, 4), n(2, 2, 5, 4)), 1, {"num_heads": 2}),
    "bits": packed(5, 64),
    "bits-zeros": packed(6, 96, zeros="packed", bias=True),
    "bits-float-zeros": packed(3, 40, block=16, zeros="floats"),
    "bits-bytes": packed(4, 50, block=16, bits=8, zeros="packed"),
    "looked-up": (
        "com.microsoft::GatherBlockQuantized",
        (RNG.integers(0, 256, (7, 16)).astype(np.uint8), np.array([[1, 3, 1]]), n(7, 2)), 1,
        {"block_size": 16, "bits": 4, "quantize_axis": 1},
    ),
    "looked-up-partly": (
        "com.microsoft::GatherBlockQuantized",
        (RNG.integers(0, 256, (7, 24)).astype(np.uint8), np.array([[1, 3, 1]]), n(7, 2)), 1,
        {"block_size": 32, "bits": 4, "quantize_axis": 1},
    ),
    "rotary": (TURN, (n(2, 3, 12), np.array([[0, 1, 2], [5, 1, 7]]), *angles(9, 3)), 1, {}),
    "rotary-apart": (TURN, (n(2, 2, 3, 6), np.array([4]), *angles(9, 3)), 1, {"interleaved": 1}),
    "rotary-partly": (
        TURN, (n(2, 3, 16), np.array([2]), *angles(9, 2)), 1, {"num_heads": 2, "rotary_embedding_dim": 4},
    ),
}  # fmt: skip


def model_of(key: str, inputs: tuple[Array | None, ...], outputs: int, attributes: dict[str, Any]) -> ModelProto:
    """The op, and a loss of all outputs that are asked for."""
    domain, _, op = key.rpartition("::")
    names = ["" if array is None else f"x{at}" for at, array in enumerate(inputs)]
    made = [f"y{at}" if at in (0, outputs - 1) or "Attention" in op else "" for at in range(outputs)]
    node = helper.make_node(op, names, made, domain=domain, **attributes)
    feeds = [
        helper.make_tensor_value_info(f"x{at}", TensorProto.FLOAT, array.shape)
        for at, array in enumerate(inputs)
        if array is not None and array.dtype == np.float32
    ]
    fixed = [
        numpy_helper.from_array(array, f"x{at}")
        for at, array in enumerate(inputs)
        if array is not None and array.dtype != np.float32
    ]
    fixed += [numpy_helper.from_array(np.array(v, np.int64), name) for name, v in (("minus", [-1]), ("zero", [0]))]
    fixed.append(numpy_helper.from_array(RNG.uniform(0.5, 1.5, 4096).astype(np.float32), "weight"))
    nodes = [node, *loss_of([name for name in made if name])]
    loss = helper.make_tensor_value_info("loss", TensorProto.FLOAT, [])
    graph = helper.make_graph(nodes, op, feeds, [loss], fixed)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


@pytest.mark.mostly_slow(fast=18)
@pytest.mark.parametrize("name", CASES)
def test_central_differences(name: str) -> None:
    key, inputs, outputs, attributes = CASES[name]
    model = model_of(key, inputs, outputs, attributes)
    feeds = {f"x{at}": a for at, a in enumerate(inputs) if a is not None and a.dtype == np.float32}
    found = differentiate(model, "loss", list(feeds))
    gradients = run(make_session(found.model), feeds, list(found.outputs.values()))
    session, rng, step = make_session(model), np.random.default_rng(1), 5e-3

    def loss(changed: str, moved: Array) -> float:
        return float(run(session, feeds | {changed: moved}, ["loss"])["loss"])

    for wish, output in found.outputs.items():
        gradient, x = gradients[output], feeds[wish]
        assert gradient.shape == x.shape
        for _ in range(3):
            direction = rng.standard_normal(gradient.shape).astype(np.float32)
            ends = [loss(wish, x + np.float32(sign * step) * direction) for sign in (1, -1)]
            wanted, got = (ends[0] - ends[1]) / (2 * step), float((gradient * direction).sum())
            scale = float(np.linalg.norm(gradient) * np.linalg.norm(direction)) + 1
            assert abs(wanted - got) <= 4e-3 * scale, f"{wish}: {got} where the difference says {wanted}"
