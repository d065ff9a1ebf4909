"""Models whose fusions the decided precision must not cost, and what is lost all the same, with the reason."""

from collections import Counter
from functools import cache
from typing import Any

import onnx
from fusion_proxy import fused_ops
from graphs import CASES
from onnx import ModelProto
from real_models import REAL_MODELS
from repository import MODELS

FILES = {path.stem: path for path in [*MODELS, *REAL_MODELS]}
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
    # At O1 arithmetic stays in float32: the factor that FusedMatMul takes in is multiplied there.
    "O1": {"decoder", "encoder", "function", "function_in_branch", "function_in_function", "function_used_twice"},
    # Weights that are dequantized stay in float32, and the product is low: a Cast stands between.
    "any": {"dequantized_weights"},
    # The factor is beyond the range of float16: it keeps its multiplication in float32.
    "large_constant": {"large_constant"},
    # ONNX Runtime does not know this form of Gelu: its last factor went into FusedMatMul, and is float32 with its Pow.
    "Pow": {"gelu_tanh"},
    # What is cast to double is not rounded: the Transpose that FusedMatMul takes in stays in float32.
    "double": {"cast_to_double_beside_low_readers"},
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


def explained(wishes: str) -> set[str]:
    """Models of which something is lost, with a reason."""
    return set().union(*(names for kind, names in LOST.items() if kind != "O1" or wishes == "O1"))


def options_of(name: str, wishes: dict[str, Any]) -> dict[str, Any]:
    """Wishes on top of those that the model needs."""
    return {**(CASES[name].options if name in CASES else {}), **wishes}
