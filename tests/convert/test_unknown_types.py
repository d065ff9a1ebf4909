"""Values whose types nobody declares: outputs of custom ops, and of ops whose attributes alone tell their types."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from judge import check_signature
from judge_kernels import Typed, subgraphs, typed_nodes
from judge_numbers import run_original
from onnx import ModelProto, NodeProto, helper
from properties import WAYS, Way, check_onnx, check_runs, graphs
from strategies import random_model

import onnxamp
from onnxamp._base.errors import OpsetError
from onnxamp._facts.ops import op_facts, op_key

CUSTOM = "custom"
FLOAT = "tensor(float)"
INTEGERS = ("tensor(int32)", "tensor(int64)")
ROWS = 5000
"""More than float16 counts one by one."""


def looked_up(middle: str, label: str = "LabelEncoder") -> ModelProto:
    """Labels that become numbers of a type that nobody declares, which a product reads and a look-up counts by."""
    keys = f"keys_int64s = [{', '.join(map(str, range(ROWS)))}]"
    values = f"values_floats = [{', '.join(f'{number}.0' for number in range(ROWS))}]"
    text = f"""(int64[N,1] X) => (float[N,4] Y, float[M,K] Z) {{
        e = ai.onnx.ml.{label} <{keys}, {values}> (X)
        Y = MatMul (e, w)
        {middle}
        Z = Gather (rows, i)
    }}"""
    model = parse(text, domains={"ai.onnx.ml": 3})
    return add_weights(model, {"w": (1, 4), "rows": (2 * ROWS, 4)})


@pytest.mark.parametrize(
    "middle",
    [
        "c = Concat <axis = 0> (e, e) i = Cast <to = 7> (c)",
        "c = Concat <axis = 0> (e, e) d = Identity (c) f = Squeeze (d) i = Cast <to = 7> (f)",
        "c = Transpose (e) d = Add (c, c) i = Cast <to = 7> (d)",
    ],
)
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_lookup_beside_a_product_finds_its_rows(middle: str, level: str) -> None:
    model = looked_up(middle)
    feeds = {"X": np.array([[ROWS - 1], [ROWS - 2], [2049]])}
    before, after = (run_original(m, feeds) for m in (model, onnxamp.convert_model(model, level)))
    assert before is not None
    assert after is not None
    np.testing.assert_allclose(after[1], before[1], rtol=1e-3, atol=1e-7)
    assert any(
        node.op_type == "MatMul" and "fp16" in node.output[0] for node in onnxamp.convert_model(model).graph.node
    )


def with_product(text: str) -> ModelProto:
    """A model with custom ops, and a weight w."""
    return add_weights(parse(text, domains={CUSTOM: 1}), {"w": (4, 4)})


def custom_inputs(model: ModelProto) -> list[str]:
    """Types of what custom ops read, where they return float32 for float32."""
    shown = ModelProto.FromString(model.SerializeToString())
    custom = [node for node in shown.graph.node if node.domain == CUSTOM]
    for node in custom:
        node.op_type, node.domain = "Relu", ""
    names = {node.output[0] for node in custom}
    onnx.checker.check_model(shown, full_check=True)
    return [kind for one in typed_nodes(shown) if one.node.output[0] in names for kind in one.inputs]


@pytest.mark.parametrize("reader", ["custom.Second", "Relu", "Identity"])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_what_a_product_reveals_holds_for_all_readers(reader: str, level: str) -> None:
    """The type of the custom op's result follows from the product; what else is computed from it is a float then."""
    model = with_product(
        f"""(float[4,4] X) => (float[4,4] Y, float[8,4] Z) {{
        e = custom.First (X)
        Y = MatMul (e, w)
        c = Concat <axis = 0> (e, e)
        Z = {reader} (c)
    }}"""
    )
    result = onnxamp.convert_model(model, level)
    assert set(custom_inputs(result)) == {FLOAT}


def test_types_are_found_through_chains_and_bodies() -> None:
    """From the product back through an If, a Loop and data movement to the custom op, and forward to another one."""
    model = with_product(
        """(float[4,4] X, bool c) => (float[4,4] Y, float[8,4] Z) <int64 n = {2}> {
        e = custom.First (X)
        t = Transpose (e)
        l = Loop (n, , t) <body = b (int64 k, bool g, s) => (bool h, u) { h = Identity (g) u = Identity (s) }>
        f = If (c) <then_branch = x () => (p) { p = Transpose (l) }, else_branch = y () => (q) { q = Identity (e) }>
        Y = MatMul (f, w)
        d = Concat <axis = 0> (t, l)
        Z = custom.Second (d)
    }"""
    )
    for level in ("O1", "O2", "O3"):
        result = onnxamp.convert_model(model, level)
        assert custom_inputs(result) == [FLOAT, FLOAT], level


def test_what_stays_unknown_keeps_what_it_touches_in_float32() -> None:
    """A sequence and its elements have the same type, which no schema says."""
    model = with_product(
        """(float[4,4] X) => (float[4,4] Y) <int64 n = {0}> {
        [project] h = MatMul (X, w)
        [first] s = SequenceConstruct (h)
        e = custom.Any (X)
        [more] t = SequenceInsert (s, e)
        Y = SequenceAt (t, n)
    }"""
    )
    plan = onnxamp.plan_model(model, "O3")
    assert {row.node for row in plan.rows if row.low and row.op not in onnxamp._convert.plan.CONSTANTS} == {"project"}
    with pytest.warns(onnxamp.OptionWarning, match="the type of 'e', which it reads or writes, is unknown"):
        onnxamp.convert_model(model, "O2", white_list=["SequenceInsert"])


# --- random models ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disguised:
    """A model some of whose nodes are custom ops, without declarations, and these nodes as they were."""

    model: ModelProto
    nodes: dict[str, NodeProto]

    def revealed(self, model: ModelProto) -> ModelProto:
        """A conversion of the model with its nodes as they were."""
        result = ModelProto.FromString(model.SerializeToString())
        for graph in graphs(result):
            for node in graph.node:
                if node.domain == CUSTOM:
                    was = self.nodes[node.op_type]
                    node.op_type, node.domain = was.op_type, was.domain
                    node.attribute.extend(was.attribute)
        return result


def disguised(model: ModelProto, rng: Random) -> Disguised:
    """The model without declarations, and with some of its nodes, at all levels, as ops that nobody knows."""
    result = ModelProto.FromString(model.SerializeToString())
    known: dict[str, NodeProto] = {}
    for graph in graphs(result):
        del graph.value_info[:]
        for node in graph.node:
            if rng.random() < 0.3 and not any(subgraphs(node)) and not node.domain:
                name = f"Op{len(known)}"
                known[name] = NodeProto.FromString(node.SerializeToString())
                node.op_type, node.domain = name, CUSTOM
                del node.attribute[:]
        for info in graph.output if graph is not result.graph else ():
            info.ClearField("type")
    result.opset_import.append(helper.make_opsetid(CUSTOM, 1))
    return Disguised(result, known)


def complaints(hidden: Disguised, original: ModelProto, result: ModelProto) -> Iterator[str]:
    """Inputs of custom ops, and numbers that become integers, whose types have changed."""
    before = {one.node.output[0]: one for one in typed_nodes(original)}
    for one in typed_nodes(hidden.revealed(result)):
        was = before.get(one.node.output[0])
        if was is None or was.node.op_type != one.node.op_type:
            continue
        changed = [(old, new) for old, new in zip(was.inputs, one.inputs, strict=True) if old and new and old != new]
        if one.node.output[0] in custom_outputs(result) and changed:
            yield f"{one.node.output[0]}: {was.node.op_type} as a custom op reads other types: {changed}"
        if counts(was, before) and changed:
            yield f"{one.node.output[0]}: integers come from {one.inputs}"


def custom_outputs(model: ModelProto) -> set[str]:
    return {node.output[0] for graph in graphs(model) for node in graph.node if node.domain == CUSTOM}


def counts(one: Typed, made: dict[str, Typed]) -> bool:
    """Whether a Cast makes integers of what index arithmetic computes."""
    maker = made.get(one.node.input[0]) if one.node.input else None
    is_index = maker is not None and op_key(maker.node) in op_facts().index_arithmetic
    return one.node.op_type == "Cast" and is_index and one.inputs == [FLOAT] and one.outputs[0] in INTEGERS


@pytest.mark.slow
@settings(
    max_examples=150,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.integers(0, 2**64 - 1), st.sampled_from((4, 8, 12, 20)), st.sampled_from(WAYS))
def test_custom_ops_read_what_they_read_before(seed: int, size: int, way: Way) -> None:
    rng = Random(seed)
    generated = random_model(rng, size=size)
    hidden = disguised(generated.model, rng)
    try:
        result = onnxamp.convert_model(hidden.model, **way.options, opset="keep")
    except OpsetError:
        return
    original, revealed = hidden.revealed(hidden.model), hidden.revealed(result)
    if generated.tidy:  # otherwise the judge does not know the types
        assert list(complaints(hidden, generated.model, result)) == []
    assert list(check_signature(original, revealed, way.dtype, keep_io=way.keep_io)) == []
    assert list(check_onnx(original, revealed)) == []
    assert list(check_runs(original, revealed, generated.feeds, way, smooth=generated.smooth)) == []
