"""The decided precision must not cost ONNX Runtime its fusions: fused ops of models and of their results' proxies.

What is lost all the same stands in ``LOST``, with the reason.
"""

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import onnx
import pytest
from fusion_proxy import fused_ops, proxy
from graphs import CASES
from graphs.case import add_weights, parse
from onnx import ModelProto
from real_models import REAL_MODELS

import onnxamp

FILES = {path.stem: path for path in [*sorted((Path(__file__).parents[1] / "models").glob("*.onnx")), *REAL_MODELS]}
WISHES: dict[str, dict[str, Any]] = {
    "O1": {"level": "O1"},
    "O2": {"level": "O2"},
    "O2 fast": {"level": "O2", "lists": "fast"},
    "O2 mindspore": {"level": "O2", "lists": "mindspore"},
    "O2 bfloat16": {"level": "O2", "dtype": "bfloat16"},
    "O2 fast folded": {"level": "O2", "lists": "fast", "fold": True},
    "O3": {"level": "O3"},
}
NAMES = {"BiasGelu": "Gelu", "FastGelu": "Gelu", "SkipRMSNormalization": "RMSNormalization"}
"""Fused ops that do the work of another one."""
LOST = {
    # At O1 arithmetic stays float32: the factor that FusedMatMul takes in is multiplied there.
    "O1": {"decoder", "encoder", "function", "function_in_branch", "function_in_function", "function_used_twice"},
    # Weights that are dequantized stay float32, and the product is low: a Cast stands between.
    "any": {"dequantized_weights"},
    # The factor is beyond the range of float16: it keeps its multiplication in float32.
    "large_constant": {"large_constant"},
    # ONNX Runtime does not know this form of Gelu: its last factor went into FusedMatMul, and is float32 with its Pow.
    "Pow": {"gelu_tanh"},
}


@cache
def original(name: str) -> ModelProto:
    return CASES[name].build() if name in CASES else onnx.load(FILES[name])


@cache
def fused_before(name: str) -> Counter[str]:
    return families(fused_ops(original(name)))


def families(counts: Counter[str]) -> Counter[str]:
    """SkipLayerNormalization counts as LayerNormalization, too; so it must be kept, and the other may become it."""
    found: Counter[str] = Counter()
    for name, count in counts.items():
        found[NAMES.get(name, name)] += count
    found["LayerNormalization"] += found["SkipLayerNormalization"]
    return +found


@cache
def fused() -> list[str]:
    """The models in which anything is fused."""
    return [name for name in [*FILES, *(n for n, case in CASES.items() if case.loads)] if fused_before(name)]


def test_there_are_fusions_to_keep() -> None:
    assert len(fused()) > 25
    kinds = set().union(*map(fused_before, fused()))
    assert kinds >= {"FusedMatMul", "Gelu", "LayerNormalization", "RMSNormalization", "SkipLayerNormalization"}


def explained(wishes: str) -> set[str]:
    """Models of which something is lost, with a reason."""
    return set().union(*(names for kind, names in LOST.items() if kind != "O1" or wishes == "O1"))


def options_of(name: str, wishes: dict[str, Any]) -> dict[str, Any]:
    """Wishes on top of those that the model needs."""
    return {**(CASES[name].options if name in CASES else {}), **wishes}


@pytest.mark.parametrize("wishes", WISHES)
def test_precision_costs_no_fusion(wishes: str) -> None:
    for name in fused():
        try:
            after = families(fused_ops(proxy(original(name), **options_of(name, WISHES[wishes]))))
        except onnxamp.OpsetError:
            continue
        lost = fused_before(name) - after
        assert not lost or name in explained(wishes), (
            f"{name}: {dict(lost)} lost, {dict(after - fused_before(name))} gained"
        )


RESIDUAL = """(float[2,3,8] X) => (float[2,3,8] Y) {
    a = MatMul (X, w) b = Add (a, X) n = LayerNormalization (b, g, s) c = MatMul (n, w) d = Add (c, n)
    Y = LayerNormalization (d, g, s)
}"""


@pytest.mark.parametrize(("lists", "adds"), [("default", False), ("fast", True)])
def test_sums_go_with_the_normalisation_behind_them(lists: str, adds: bool) -> None:
    """Alone in low precision an Add would not be one op with the LayerNormalization, and gain nothing."""
    model = add_weights(parse(RESIDUAL), {"w": (8, 8), "g": (8,), "s": (8,)})
    assert fused_ops(model)["SkipLayerNormalization"] == 2
    assert fused_ops(proxy(model, "O2", lists=lists))["SkipLayerNormalization"] == 2
    rows = onnxamp.plan_model(model, "O2", lists=lists).rows
    assert {row.low for row in rows if row.op == "Add"} == {adds}


def test_opaque_ops_stand_where_precision_changes() -> None:
    """The proxy is float32 throughout; where a Cast stands inside an island, ONNX Runtime does not fuse it."""
    model = add_weights(parse(RESIDUAL), {"w": (8, 8), "g": (8,), "s": (8,)})
    found = proxy(model, "O2", keep_high=["n"], force_low=["b"])
    assert {tensor.data_type for tensor in found.graph.initializer} == {onnx.TensorProto.FLOAT}
    low = onnxamp.convert_model(model, "O2", keep_high=["n"], force_low=["b"])
    assert [node.op_type for node in found.graph.node] == [
        "Max" if node.op_type == "Cast" else node.op_type for node in low.graph.node
    ]
    assert fused_ops(found)["SkipLayerNormalization"] == 1
