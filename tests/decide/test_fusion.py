"""The decided precision must not cost ONNX Runtime its fusions: fused ops of models and of their results' proxies.

What is lost all the same stands in ``LOST``, with the reason.
"""

import onnx
import pytest
from fusion_cases import WISHES, explained, families, fused, fused_before, options_of, original
from fusion_proxy import fused_ops, proxy
from graphs.case import add_weights, parse

import onnxamp


@pytest.mark.slow
def test_there_are_fusions_to_keep() -> None:
    assert len(fused()) > 25
    kinds = set().union(*map(fused_before, fused()))
    assert kinds >= {"FusedMatMul", "Gelu", "LayerNormalization", "RMSNormalization", "SkipLayerNormalization"}


@pytest.mark.slow
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


@pytest.mark.parametrize(("lists", "adds"), [("conservative", False), ("default", True)])
def test_sums_go_with_the_normalization_behind_them(lists: str, adds: bool) -> None:
    """Alone in low precision an Add would not be one op with the LayerNormalization, and gain nothing."""
    model = add_weights(parse(RESIDUAL), {"w": (8, 8), "g": (8,), "s": (8,)})
    assert fused_ops(model)["SkipLayerNormalization"] == 2
    assert fused_ops(proxy(model, "O2", lists=lists))["SkipLayerNormalization"] == 2
    rows = onnxamp.plan_model(model, "O2", lists=lists).rows
    assert {row.low for row in rows if row.op == "Add"} == {adds}


def test_opaque_ops_stand_where_precision_changes() -> None:
    """The proxy is float32 throughout; where a Cast stands inside an island, ONNX Runtime does not fuse it."""
    model = add_weights(parse(RESIDUAL), {"w": (8, 8), "g": (8,), "s": (8,)})
    options = {"lists": "conservative", "keep_high": ["n"], "force_low": ["b"]}
    found = proxy(model, "O2", **options)
    assert {tensor.data_type for tensor in found.graph.initializer} == {onnx.TensorProto.FLOAT}
    low = onnxamp.convert_model(model, "O2", **options)
    assert [node.op_type for node in found.graph.node] == [
        "Max" if node.op_type == "Cast" else node.op_type for node in low.graph.node
    ]
    assert fused_ops(found)["SkipLayerNormalization"] == 1
