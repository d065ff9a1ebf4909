"""remove_redundant_casts: its three laws, what it must leave alone, and that no number changes."""

import random

import numpy as np
import onnx
import pytest
from every import every
from graphs import CASES
from graphs.case import parse
from onnx import ModelProto, TensorProto, helper
from onnx.reference import ReferenceEvaluator

import onnxamp
from onnxamp import remove_redundant_casts

F32, F16, F64, I32, I64, BOOL = 1, 10, 11, 6, 7, 9


def g(inputs: str, outputs: str, nodes: str) -> ModelProto:
    """A model; ``{f16}`` and so on in ``nodes`` stand for element types."""
    numbers = {"f32": F32, "f16": F16, "f64": F64, "i32": I32, "i64": I64, "bool": BOOL, "bf16": 16, "str": 8}
    for name, number in numbers.items():
        nodes = nodes.replace(f"<{name}>", f"<to = {number}>")
    return parse(f"({inputs}) => ({outputs}) {{ {nodes} }}")


def nodes(model: ModelProto) -> list[str]:
    """The nodes as text: ``y = Cast (x)``."""
    return [f"{', '.join(node.output)} = {node.op_type}({', '.join(node.input)})" for node in model.graph.node]


LAWS = {
    "identity": (
        ("float[N] x", "float[N] y", "a = Cast <f32> (x) y = Neg (a)"),
        ["y = Neg(x)"],
    ),
    "identity of an intermediate value": (
        ("float[N] x", "float[N] y", "a = Neg (x) b = Cast <f32> (a) y = Neg (b)"),
        ["a = Neg(x)", "y = Neg(a)"],
    ),
    "duplicates": (
        ("float[N] x", "float16[N] y", "a = Cast <f16> (x) b = Cast <f16> (x) y = Add (a, b)"),
        ["a = Cast(x)", "y = Add(a, a)"],
    ),
    "two types are no duplicates": (
        ("float[N] x", "float16[N] y, double[N] z", "a = Cast <f16> (x) b = Cast <f64> (x) y = Neg (a) z = Neg (b)"),
        ["a = Cast(x)", "b = Cast(x)", "y = Neg(a)", "z = Neg(b)"],
    ),
    "lossless chain": (
        ("float16[N] x", "double[N] y", "a = Cast <f32> (x) b = Cast <f64> (a) y = Neg (b)"),
        ["b = Cast(x)", "y = Neg(b)"],
    ),
    "there and back": (
        ("float16[N] x", "float16[N] y", "a = Cast <f32> (x) b = Cast <f16> (a) y = Neg (b)"),
        ["y = Neg(x)"],
    ),
    "a long way there and back": (
        ("bool[N] x", "bool[N] y", "a = Cast <i32> (x) b = Cast <f32> (a) c = Cast <bool> (b) y = Not (c)"),
        ["y = Not(x)"],
    ),
    "a chain that others read, too": (
        ("float16[N] x", "float16[N] y, float[N] z", "a = Cast <f32> (x) b = Cast <f16> (a) y = Neg (b) z = Neg (a)"),
        ["a = Cast(x)", "y = Neg(x)", "z = Neg(a)"],
    ),
    "a lossy pair": (
        ("float[N] x", "float[N] y", "a = Cast <f16> (x) b = Cast <f32> (a) y = Neg (b)"),
        ["a = Cast(x)", "b = Cast(a)", "y = Neg(b)"],
    ),
    "double rounding": (
        ("double[N] x", "float16[N] y", "a = Cast <f32> (x) b = Cast <f16> (a) y = Neg (b)"),
        ["a = Cast(x)", "b = Cast(a)", "y = Neg(b)"],
    ),
    "integers beyond the significand": (
        ("int32[N] x", "int32[N] y", "a = Cast <f32> (x) b = Cast <i32> (a) y = Neg (b)"),
        ["a = Cast(x)", "b = Cast(a)", "y = Neg(b)"],
    ),
    "bfloat16 is not within float16": (
        ("bfloat16[N] x", "float[N] y", "a = Cast <f16> (x) b = Cast <f32> (a) y = Neg (b)"),
        ["a = Cast(x)", "b = Cast(a)", "y = Neg(b)"],
    ),
    "a lossy Cast within a lossless chain": (
        ("int32[N] x", "double[N] c", "a = Cast <bool> (x) b = Cast <i64> (a) c = Cast <f64> (b)"),
        ["a = Cast(x)", "c = Cast(a)"],
    ),
    "digits depend on the type": (
        ("bool[N] x", "string[N] y", "a = Cast <f32> (x) y = Cast <str> (a)"),
        ["a = Cast(x)", "y = Cast(a)"],
    ),
    "a duplicate of a graph output": (
        ("float[N] x", "float16[N] a, float16[N] y", "a = Cast <f16> (x) b = Cast <f16> (x) y = Neg (b)"),
        ["a = Cast(x)", "y = Neg(a)"],
    ),
    "a graph output keeps its Cast": (
        ("float[N] x", "float[N] y", "y = Cast <f32> (x)"),
        ["y = Cast(x)"],
    ),
    "a graph output reads the source": (
        ("float16[N] x", "double[N] y", "a = Cast <f32> (x) y = Cast <f64> (a)"),
        ["y = Cast(x)"],
    ),
    "a returned Cast and its other reader": (
        ("float[N] x", "float[N] a, float[N] y", "a = Cast <f32> (x) y = Neg (a)"),
        ["a = Cast(x)", "y = Neg(a)"],
    ),
    "unread from the start": (
        ("float[N] x", "float[N] y", "a = Cast <f16> (x) y = Neg (x)"),
        ["a = Cast(x)", "y = Neg(x)"],
    ),
    "other nodes": (
        ("float[N] x", "float[N] y", "a = Identity (x) b = Identity (a) y = Neg (b)"),
        ["a = Identity(x)", "b = Identity(a)", "y = Neg(b)"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("graph", "wanted"), LAWS.values(), ids=LAWS)
def test_laws(graph: tuple[str, str, str], wanted: list[str]) -> None:
    model = g(*graph)
    before = model.SerializeToString()
    result = remove_redundant_casts(model)
    assert nodes(result) == wanted
    assert model.SerializeToString() == before
    assert remove_redundant_casts(result) == result
    onnx.checker.check_model(result, full_check=True)


def test_lossy_pairs_go_when_asked() -> None:
    model = g("float[N] x", "float[N] y", "a = Cast <f16> (x) b = Cast <f32> (a) y = Neg (b)")
    assert nodes(remove_redundant_casts(model, lossy=True)) == ["y = Neg(x)"]
    model = g("float[N] x", "float[N] y", "a = Cast <bf16> (x) b = Cast <f32> (a) y = Neg (b)")
    assert nodes(remove_redundant_casts(model, lossy=True)) == ["y = Neg(x)"]


@pytest.mark.parametrize("between", ["i32", "bool", "i64"])
def test_lossy_means_low_floats_alone(between: str) -> None:
    model = g("float[N] x", "float[N] y", f"a = Cast <{between}> (x) b = Cast <f32> (a) y = Neg (b)")
    assert remove_redundant_casts(model, lossy=True) == model


def test_double_rounding_stays_when_lossy_pairs_go() -> None:
    model = g("double[N] x", "float16[N] y", "a = Cast <f32> (x) b = Cast <f16> (a) y = Neg (b)")
    assert remove_redundant_casts(model, lossy=True) == model


def test_bodies() -> None:
    """Each scope by itself; a body reads the source of an outer Cast that went."""
    model = parse("""(bool flag, float[2] x) => (float[2] y) {
        a = Cast <to = 1> (x)
        y = If (flag) <
            then_branch = yes () => (float[2] p) { b = Cast <to = 1> (a) p = Neg (b) },
            else_branch = no () => (float[2] q) { c = Cast <to = 11> (a) d = Cast <to = 11> (a) e = Add (c, d)
                q = Cast <to = 1> (e) }
        >
    }""")
    result = remove_redundant_casts(model)
    yes, no = (attribute.g.node for attribute in result.graph.node[0].attribute)
    assert [list(node.input) for node in yes] == [["x"]]
    assert [list(node.input) for node in no] == [["x"], ["c", "c"], ["e"]]
    onnx.checker.check_model(result, full_check=True)


def test_declarations_of_removed_casts_go() -> None:
    model = g("float[N] x", "float[N] y", "a = Cast <f32> (x) y = Neg (a)")
    model.graph.value_info.append(helper.make_tensor_value_info("a", TensorProto.FLOAT, ["N"]))
    assert not remove_redundant_casts(model).graph.value_info


def test_everything_else_is_kept() -> None:
    model = CASES["metadata"].build()
    assert remove_redundant_casts(model).SerializeToString() == model.SerializeToString()


def test_wrong_types() -> None:
    with pytest.raises(onnxamp.ArgumentTypeError, match=r"onnx\.ModelProto, not str"):
        remove_redundant_casts("model.onnx")  # type: ignore[arg-type]


# --- random chains ----------------------------------------------------------------------------------------------

KINDS = (F32, F16, F64, I32, I64)


def chains(seed: int) -> ModelProto:
    """Casts and negations of earlier values, some of which are returned."""
    rng = random.Random(seed)
    values = [("x", rng.choice(KINDS))]
    made = []
    for index in range(rng.randint(2, 10)):
        source, elem = rng.choice(values[-4:])
        is_cast = rng.random() < 0.75
        to = rng.choice((*KINDS, F32, elem)) if is_cast else elem
        name = f"v{index}"
        made.append(
            helper.make_node("Cast", [source], [name], to=to) if is_cast else helper.make_node("Neg", [source], [name])
        )
        values.append((name, to))
    outputs = rng.sample(values[1:], min(len(values) - 1, 3))
    graph = helper.make_graph(
        made,
        "chains",
        [helper.make_tensor_value_info(*values[0], [6])],
        [helper.make_tensor_value_info(name, elem, [6]) for name, elem in outputs],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
@every(seed=range(150))
def test_numbers_stay(seed: int) -> None:
    model = chains(seed)
    result = remove_redundant_casts(model)
    assert len(result.graph.node) <= len(model.graph.node)
    onnx.checker.check_model(result, full_check=True)
    assert remove_redundant_casts(result) == result
    dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    x = np.asarray([0, 1, -7, 0.1, 2049, 16_777_217]).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        feeds = {"x": x.astype(dtype)}
        pairs = zip(
            ReferenceEvaluator(model).run(None, feeds), ReferenceEvaluator(result).run(None, feeds), strict=True
        )
        for before, after in pairs:
            assert before.dtype == after.dtype
            np.testing.assert_array_equal(before, after)


@pytest.mark.parametrize("text", [
    "a = Cast <f32> (x) b = Cast <f64> (a) c = Transpose (b) d = Cast <f32> (c) y = Relu (d)",
    "a = Cast <f32> (x) b = Cast <f32> (a) y = Relu (b)",
    "a = Cast <f32> (x) y = Relu (a)",
])  # fmt: skip
def test_the_audit_counts_what_goes(text: str) -> None:
    model = g("float16[2,3] x", "float[2,3] y", text)
    left = remove_redundant_casts(model)
    gone = sum(node.op_type == "Cast" for node in model.graph.node)
    gone -= sum(node.op_type == "Cast" for node in left.graph.node)
    assert onnxamp.audit_model(model).casts.redundant == gone
