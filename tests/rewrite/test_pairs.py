"""Redundant pairs of Casts around data movement: which go, which stay, and that no number changes."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from commands import run
from every import every
from onnx import ModelProto, TensorProto, helper, parser
from onnx.reference import ReferenceEvaluator

import onnxamp
from onnxamp import convert_model, remove_redundant_casts

F32, F16, F64, BF16 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16
NARROWER = {F64: (F32, F16, BF16), F32: (F16, BF16), F16: (), BF16: ()}
"""Type -> the types that it holds without loss."""


def g(text: str, opset: int = 21) -> ModelProto:
    """A model; ``<f16>`` and so on stand for Casts to element types."""
    for name, number in {"f32": F32, "f16": F16, "f64": F64, "bf16": BF16}.items():
        text = text.replace(f"<{name}>", f"<to = {number}>")
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {text}')
    onnx.checker.check_model(model, full_check=True)
    return model


def ops(model: ModelProto) -> list[str]:
    """Op types of the main graph, Casts with the type that they cast to."""
    names = {F32: "f32", F16: "f16", F64: "f64", BF16: "bf16"}
    nodes = model.graph.node
    return [f"Cast {names[node.attribute[0].i]}" if node.op_type == "Cast" else node.op_type for node in nodes]


CASES: dict[str, tuple[str, list[str]]] = {
    "several types deep": (
        """(float16[2,3] x) => (float16[3,2] y) {
            a = Cast <f32> (x)  b = Cast <f64> (a)  c = Transpose (b)  d = Cast <f32> (c)  e = Cast <f16> (d)
            y = Neg (e)
        }""",
        ["Transpose", "Neg"],
    ),
    "pairs around pairs": (
        """(float16[2,3] x) => (float16[2,3] y) {
            a = Cast <f32> (x)  b = Transpose (a)  c = Cast <f64> (b)  d = Transpose (c)  e = Cast <f32> (d)
            f = Identity (e)  h = Cast <f16> (f)  y = Neg (h)
        }""",
        ["Transpose", "Transpose", "Identity", "Neg"],
    ),
    "one pair after another": (
        """(float16[2,3] x) => (float16[2,3] y) {
            a = Cast <f32> (x)  b = Transpose (a)  c = Cast <f16> (b)  d = Cast <f32> (c)  e = Transpose (d)
            f = Cast <f16> (e)  y = Neg (f)
        }""",
        ["Transpose", "Transpose", "Neg"],
    ),
    "split, and joined with what is left of another": (
        """(float16[2,4] x, float16[2,4] z) => (float16[2,8] y) {
            a = Cast <f32> (x)  b,  c = Split <axis = 1, num_outputs = 2> (a)  d = Cast <f32> (z)
            e = Concat <axis = 1> (c, d, b)  f = Cast <f16> (e)  y = Neg (f)
        }""",
        ["Split", "Concat", "Neg"],
    ),
    "a lossy pair": (
        """(float[2,3] x) => (float[3,2] y) {
            a = Cast <f16> (x)  b = Transpose (a)  c = Cast <f32> (b)  y = Exp (c)
        }""",
        ["Cast f16", "Transpose", "Cast f32", "Exp"],
    ),
    "a lossy pair of numbers that fit": (
        """(float16[2,3] x) => (float[3,2] y) {
            a = Cast <f32> (x)  b = Transpose (a)  c = Cast <f16> (b)  d = Cast <f32> (c)  y = Exp (d)
        }""",
        ["Transpose", "Cast f32", "Exp"],
    ),
    "two types": (
        """(bfloat16[2,3] x, float16[2,3] z) => (float16[4,3] y) {
            a = Cast <f32> (x)  b = Cast <f32> (z)  c = Concat <axis = 0> (a, b)  d = Cast <f16> (c)  y = Neg (d)
        }""",
        ["Cast f32", "Cast f32", "Concat", "Cast f16", "Neg"],
    ),
    "arithmetic": (
        """(float16[2,3] x) => (float16[2,3] y) {
            a = Cast <f32> (x)  b = Add (a, a)  c = Cast <f16> (b)  y = Neg (c)
        }""",
        ["Cast f32", "Add", "Cast f16", "Neg"],
    ),
    "other readers of the wide value": (
        """(float16[2,3] x) => (float16[3,2] y, float[3,2] z) {
            a = Cast <f32> (x)  b = Transpose (a)  c = Cast <f16> (b)  y = Neg (c)  z = Exp (b)
        }""",
        ["Cast f32", "Transpose", "Cast f16", "Neg", "Exp"],
    ),
    "other readers of the Cast": (
        """(float16[2,3] x) => (float16[3,2] y, float[2,3] z) {
            a = Cast <f32> (x)  b = Transpose (a)  c = Cast <f16> (b)  y = Neg (c)  z = Exp (a)
        }""",
        ["Cast f32", "Transpose", "Neg", "Exp"],
    ),
    "a wide value that is returned": (
        """(float16[2,3] x) => (float[3,2] b, float16[3,2] y) {
            a = Cast <f32> (x)  b = Transpose (a)  c = Cast <f16> (b)  y = Neg (c)
        }""",
        ["Cast f32", "Transpose", "Cast f16", "Neg"],
    ),
    "several returned values of one": (
        """(float16[2,3] x) => (float16[3,2] y, float16[3,2] z) {
            a = Cast <f32> (x)  b = Transpose (a)  y = Cast <f16> (b)  z = Cast <f16> (b)
        }""",
        ["Transpose", "Identity"],
    ),
    "sizes are no data": (
        """(float16[2,3] x, int64[2] s, bool[2,1] m) => (float16[2,3] y) {
            a = Cast <f32> (x)  b = Expand (a, s)  c = Where (m, b, a)  d = Cast <f16> (c)  y = Neg (d)
        }""",
        ["Expand", "Where", "Neg"],
    ),
    "a Cast that changes no type": (
        """(float16[2,3] x) => (float16[3,2] y) {
            a = Cast <f32> (x)  b = Cast <f32> (a)  c = Transpose (b)  d = Cast <f16> (c)  y = Neg (d)
        }""",
        ["Transpose", "Neg"],
    ),
    "a Cast that changes no type behind data movement": (
        """(float16[2,3] x) => (float16[3,2] y) {
            a = Cast <f32> (x)  b = Transpose (a)  c = Cast <f32> (b)  d = Cast <f16> (c)  y = Neg (d)
        }""",
        ["Transpose", "Identity", "Neg"],
    ),
    "declared types": (
        """(float16[2,3] x) => (float16[3,2] y) <float[2,3] a, float[3,2] b, float16[3,2] c> {
            a = Cast <f32> (x)  b = Transpose (a)  c = Cast <f16> (b)  y = Neg (c)
        }""",
        ["Transpose", "Neg"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_goes(name: str) -> None:
    text, expected = CASES[name]
    model = g(text)
    before = model.SerializeToString()
    result = remove_redundant_casts(model)
    assert ops(result) == expected
    assert model.SerializeToString() == before
    onnx.checker.check_model(result, full_check=True)
    assert_same(model, result)
    if "Cast f16" not in expected:  # the others move to where they cost least
        assert ops(convert_model(model, "O1")) == expected
    assert convert_model(model, "O0") == model


def test_pairs_in_bodies_that_read_values_from_around() -> None:
    model = g(
        "(float16[2,2] x, bool k) => (float16[2,2] y) { b = Cast <f32> (x) y = If (k) <"
        " then_branch = t () => (float16[2,2] p) { u = Transpose (b) v = Cast <f16> (u) p = Neg (v) },"
        " else_branch = e () => (float16[2,2] q) { w = Cast <f32> (x) q = Cast <f16> (w) }> }"
    )
    result = remove_redundant_casts(model)
    assert ops(result) == ["If"]
    branches = [[node.op_type for node in item.g.node] for item in result.graph.node[0].attribute]
    assert branches == [["Transpose", "Neg"], ["Identity"]]
    onnx.checker.check_model(result, full_check=True)


def test_a_name_that_a_body_takes_for_itself_is_not_read_there() -> None:
    """In the branch, ``x`` is another value: what it reads through the Casts must not become it."""
    model = g(
        "(float16[2] x, bool k) => (float16[2] y) { a = Cast <f32> (x) b = Cast <f16> (a) y = If (k) <"
        " then_branch = t () => (float16[2] p) { p = Neg (b) },"
        " else_branch = e () => (float16[2] q) { r = Identity (b) q = Neg (r) }> }"
    )
    branch = model.graph.node[2].attribute[1].g
    branch.node[0].output[0] = branch.node[1].input[0] = "x"
    assert remove_redundant_casts(model) == model


def test_data_movement_without_a_kernel_keeps_its_casts() -> None:
    """ONNX Runtime has no bfloat16 kernel of SpaceToDepth."""
    model = g(
        "(bfloat16[1,1,2,2] x) => (bfloat16[1,4,1,1] y) { a = Cast <f32> (x) b = SpaceToDepth <blocksize = 2> (a)"
        " c = Cast <bf16> (b) y = Neg (c) }"
    )
    for target in ("cuda", "cpu"):
        assert convert_model(model, "O1", target=target) == model
    assert ops(convert_model(model, "O1", target="any")) == ["SpaceToDepth", "Neg"]


PAIR = (
    "(float16[2,3] x) => (float16[3,2] y) { a = Cast <f32> (x) [move] b = Transpose (a)"
    " c = Cast <f16> (b) y = Neg (c) }"
)


@pytest.mark.parametrize(
    "options",
    [{"black_list": ["Transpose"]}, {"keep_high": ["move"]},
     {"rule": lambda node: "high" if node.op_type == "Transpose" else None}],
    ids=["black list", "pattern", "rule"],
)  # fmt: skip
def test_what_the_user_wants_in_float32_stays(options: dict[str, Any]) -> None:
    assert convert_model(g(PAIR), "O2", **options) == g(PAIR)


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_levels_and_types_remove_pairs(level: Any, dtype: Any) -> None:
    assert ops(convert_model(g(PAIR), level, dtype=dtype)) == ["Transpose", "Neg"]


def test_plans_repeat_it() -> None:
    model = g(PAIR)
    plan = onnxamp.plan_model(model, "O2")
    assert onnxamp.apply_plan(model, plan) == convert_model(model, "O2")


# --- reports ----------------------------------------------------------------------------------------------------


def test_reports_count_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(g(CASES["one pair after another"][0]), "model.onnx")
    shown = run("convert", "model.onnx", "-o", "out.onnx", "--html", "page.html", "--no-validate")
    assert "2 redundant Cast pairs removed" in shown.output
    assert "2 redundant Cast pairs removed" in Path("page.html").read_text(encoding="utf-8")
    summary = json.loads(run("convert", "model.onnx", "-o", "out.onnx", "--format", "json", "--no-validate").output)[
        "summary"
    ]
    facts = ("casts_before", "casts_added", "casts_removed", "pairs_removed")
    assert [summary[name] for name in facts] == [4, 0, 4, 2]


def test_pairs_between_ops_that_become_low_count_too(tmp_path: Path) -> None:
    """Such a pair rounds in the original; here, the ops round anyway."""
    text = "(float[2,2] x, float[2,2] w) => (float[2,2] y) { h = MatMul (x, w) c = Cast <f16> (h) d = Cast <f32> (c)"
    onnx.save(g(text + " y = MatMul (d, w) }"), tmp_path / "model.onnx")
    made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "out.onnx", level="O2", validate=False)
    assert (made.summary.casts_before, made.summary.casts_removed, made.summary.pairs_removed) == (2, 2, 1)
    plain = onnxamp.convert_file(tmp_path / "out.onnx", tmp_path / "again.onnx", level="O2", validate=False)
    assert plain.summary.pairs_removed == 0


def test_audits_see_the_model_as_it_is() -> None:
    audit = onnxamp.audit_model(g(PAIR), "cuda")
    assert (audit.casts.count, audit.casts.redundant) == (2, 2)
    texts = {finding.node: finding.text for finding in audit.findings if finding.kind == "cast"}
    assert texts.keys() == {"a", "c"}
    assert all("data movement" in text for text in texts.values())


# --- random models ----------------------------------------------------------------------------------------------


def drawn(rng: random.Random, values: list[tuple[str, int]], index: int) -> tuple[onnx.NodeProto, int]:
    """A node that reads earlier values, and the type of its output; all values are of shape [2, 2]."""
    source, elem = rng.choice(values[-5:])
    kind = rng.choice(("Cast", "Cast", "Cast", "Transpose", "Identity", "Where", "Relu"))
    if kind == "Cast":
        to = rng.choice((F16, F32, F64, elem))
        return helper.make_node("Cast", [source], [f"v{index}"], to=to), to
    others = [rng.choice([value for value, type_ in values if type_ == elem])] if kind == "Where" else []
    return helper.make_node(kind, [*(["m"] if others else []), source, *others], [f"v{index}"]), elem


def random_model(seed: int) -> ModelProto:
    """Casts and data movement, with some arithmetic, and some values returned."""
    rng = random.Random(seed)
    values = [("x", rng.choice((F16, F32))), ("z", F16)]
    made: list[onnx.NodeProto] = []
    for index in range(rng.randint(4, 16)):
        node, elem = drawn(rng, values, index)
        made.append(node)
        values.append((node.output[0], elem))
    returned = rng.sample(values[2:], min(len(values) - 2, 2)) + values[-1:]
    ports = [helper.make_tensor_value_info(name, elem, [2, 2]) for name, elem in values[:2]]
    ports.append(helper.make_tensor_value_info("m", TensorProto.BOOL, [2, 2]))
    outputs = [helper.make_tensor_value_info(name, elem, [2, 2]) for name, elem in dict(returned).items()]
    graph = helper.make_graph(made, "random", ports, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def assert_same(model: ModelProto, result: ModelProto, tolerance: float = 0) -> None:
    """Both compute the same bits of the same types, or numbers within a relative tolerance."""
    rng = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for entry in model.graph.input:
        dtype = helper.tensor_dtype_to_np_dtype(entry.type.tensor_type.elem_type)
        dims = [dim.dim_value for dim in entry.type.tensor_type.shape.dim]
        numbers = (
            rng.choice([0.1, -3.7, 2049.0, 6e4, 1e-3, 5e4 if tolerance else 7e4], dims)
            if dtype.kind != "i"
            else np.array([2, 3, 1])
        )
        with np.errstate(over="ignore"):
            feeds[entry.name] = numbers[: dims[0]].astype(dtype) if dtype.kind == "i" else numbers.astype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = zip(*(ReferenceEvaluator(each).run(None, feeds) for each in (model, result)), strict=True)
    for one, other in pairs:
        assert one.dtype == other.dtype
        if tolerance:
            np.testing.assert_allclose(other, one, tolerance)
        else:
            assert one.tobytes() == other.tobytes()


MOVES = ("Transpose", "Identity", "Where")


def left_pairs(model: ModelProto) -> list[str]:
    """Casts back to the type that everything behind them was cast from, by a search of their whole surroundings.

    Between the Casts there is data movement alone, whose values go nowhere else.
    """
    made = {output: node for node in model.graph.node for output in node.output}
    types = {entry.name: entry.type.tensor_type.elem_type for entry in model.graph.input}
    for node in model.graph.node:
        types[node.output[0]] = node.attribute[0].i if node.op_type == "Cast" else types[data_of(node)[0]]
    returned = {entry.name for entry in model.graph.output}
    return [node.output[0] for node in casts(model) if is_pair(model, node, made, types, returned)]


def casts(model: ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type == "Cast"]


def data_of(node: onnx.NodeProto) -> list[str]:
    return list(node.input[1:] if node.op_type == "Where" else node.input)


def is_pair(
    model: ModelProto, end: onnx.NodeProto, made: dict[str, Any], types: dict[str, int], returned: set[str]
) -> bool:
    narrow = types[end.output[0]]
    seen: set[str] = set()
    waiting = [end.input[0]]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        maker = made.get(value)
        if maker is None:
            return False
        if maker.op_type == "Cast":
            if types[maker.input[0]] != narrow or narrow not in NARROWER[types[value]]:
                return False
            continue
        if maker.op_type not in MOVES or value in returned:
            return False
        waiting += data_of(maker)
        for node in model.graph.node:
            if value in node.input and node.op_type == "Cast" and types[node.output[0]] == narrow:
                continue
            if value in node.input:
                if node.op_type not in MOVES:
                    return False
                waiting.append(node.output[0])
    return True


@pytest.mark.slow
@every(seed=range(200))
def test_no_pair_is_left_and_numbers_stay(seed: int) -> None:
    model = random_model(seed)
    result = remove_redundant_casts(model)
    onnx.checker.check_model(result, full_check=True)
    assert left_pairs(result) == []
    assert_same(model, result)
    assert remove_redundant_casts(result) == result


@pytest.mark.slow
@every(seed=range(60))
def test_conversion_leaves_no_pair_and_rounds_once(seed: int) -> None:
    """Low precision begins where that saves Casts, which rounds once."""
    model = random_model(seed)
    result = convert_model(model, "O1")
    assert left_pairs(result) == []
    assert_same(model, result, 2**-11)
    assert len(casts(convert_model(result, "O1"))) <= len(casts(result))
