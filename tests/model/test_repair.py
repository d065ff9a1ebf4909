"""Models that ONNX Runtime loads although the standard forbids what they do: converted, repaired, and told."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from graphs.case import parse
from onnx import ModelProto, numpy_helper

import onnxamp
from onnxamp import ModelError
from onnxamp._model.model import Model

FEEDS = {"x": np.float32([1, 2])}


def run(model: ModelProto) -> np.ndarray:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options).run(None, FEEDS)[0]


def constants(*order: str, initializers: tuple[float, ...] = ()) -> ModelProto:
    """A model with nodes in this order: "2" and "3" are Constants of one name, which "Mul" reads."""
    model = parse("(float[2] x) => (float[2] y) { y = Mul (x, k) }", opset=17)
    model.graph.ClearField("node")
    for step in order:
        if step == "Mul":
            model.graph.node.append(onnx.helper.make_node("Mul", ["x", "k"], ["y"]))
        else:
            model.graph.node.append(onnx.helper.make_node("Constant", [], ["k"], value_float=float(step)))
    model.graph.initializer.extend(numpy_helper.from_array(np.float32(number), "k") for number in initializers)
    return model


@pytest.mark.parametrize(
    "model",
    [
        constants("2", "3", "Mul"),
        constants("2", "Mul", "3"),
        constants("2", "2", "Mul"),
        constants("2", "Mul", initializers=(5,)),
        constants("Mul", initializers=(5, 7)),
        constants("2", "3", "Mul", initializers=(5, 7)),
    ],
)
def test_of_constants_of_one_name_that_counts_which_counts_in_onnx_runtime(model: ModelProto) -> None:
    before = model.SerializeToString()
    result = onnxamp.convert_model(model, "O3")
    onnx.checker.check_model(result, full_check=True)
    np.testing.assert_array_equal(run(result), run(model))
    assert onnxamp.convert_model(model, "O0") == model, "what is not converted is not touched"
    assert model.SerializeToString() == before, "the original is not changed"


def test_other_values_of_one_name_are_an_error() -> None:
    """ONNX Runtime refuses them as well."""
    model = constants("2", "Mul")
    model.graph.node.append(onnx.helper.make_node("Abs", ["x"], ["k"]))
    with pytest.raises(ModelError, match="'k' is defined twice in the graph"):
        onnxamp.convert_model(model)


def reversed_nodes(model: ModelProto) -> ModelProto:
    nodes = list(model.graph.node)
    result = ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    result.graph.node.extend(reversed(nodes))
    return result


def test_nodes_out_of_order_are_sorted() -> None:
    """Those that bodies read from outside count, and those that bodies only hide do not."""
    model = parse("""(float[2] x) => (float[2] y) {
        c = Constant <value = bool {1}> ()
        a = Abs (x)
        b = If (c) <then_branch = t () => (float[2] u) { h = Exp (a) u = Neg (h) },
                    else_branch = e () => (float[2] v) { v = Neg (a) }>
        h = Relu (b)
        y = Sub (h, a)
    }""")
    untidy = reversed_nodes(model)
    result = Model.of(untidy)
    assert result.repairs == ("Nodes were out of order and have been sorted.",)
    onnx.checker.check_model(result.proto, full_check=True)
    np.testing.assert_array_equal(run(result.proto), run(model))
    assert sorted(n.op_type for n in result.proto.graph.node) == sorted(n.op_type for n in model.graph.node)


def test_bodies_are_sorted_as_well() -> None:
    model = parse("""(float[2] x) => (float[2] y) {
        c = Constant <value = bool {1}> ()
        y = If (c) <then_branch = t () => (float[2] u) { u = Neg (h) h = Exp (x) },
                    else_branch = e () => (float[2] v) { v = Neg (x) }>
    }""")
    result = onnxamp.convert_model(model, "O3")
    onnx.checker.check_model(result, full_check=True)
    np.testing.assert_allclose(run(result), -np.exp(FEEDS["x"]), rtol=1e-2)


def test_a_cycle_stays_one() -> None:
    model = parse("(float[2] x) => (float[2] y) { a = Add (x, b) b = Abs (a) y = Neg (b) }")
    with pytest.raises(ModelError, match="cyclic"):
        onnxamp.convert_model(model)


DEAD = {
    "undefined": "v = Add (x, nothing)",
    "an If without an input": """v = If () <then_branch = a () => (float[2] p) { p = Neg (x) },
                                 else_branch = b () => (float[2] q) { q = Abs (x) }>""",
    "a node without an input": "v = Add (x)",
}


@pytest.mark.parametrize("body", DEAD.values(), ids=DEAD)
@pytest.mark.parametrize("taken", [True, False])
def test_what_never_runs_need_not_be_right(body: str, *, taken: bool) -> None:
    live, dead = ("then", "else") if taken else ("else", "then")
    text = f"""{{
        c = Constant <value = bool {{{int(taken)}}}> ()
        [choice] y = If (c) <{live}_branch = l () => (float[2] u) {{ u = Neg (x) }},
                             {dead}_branch = d () => (float[2] v) {{ {body} }}>
    }}"""
    model = parse(f"(float[2] x) => (float[2] y) {text}")
    (note,) = Model.of(model).repairs
    assert note.startswith(f"The {dead}_branch of 'choice' never runs and cannot be read")
    np.testing.assert_array_equal(run(onnxamp.convert_model(model, "O3")), -FEEDS["x"])
    unknown = parse(f"(float[2] x, bool d) => (float[2] y) {text.replace('If (c)', 'If (d)')}")
    with pytest.raises(ModelError):
        onnxamp.convert_model(unknown)


def test_a_right_model_is_not_copied() -> None:
    model = constants("2", "Mul")
    assert Model.of(model).proto is model
    assert Model.of(model).repairs == ()


def test_what_was_repaired_is_told(tmp_path: Path) -> None:
    onnx.save(constants("2", "3", "Mul"), tmp_path / "model.onnx")
    made = onnxamp.convert_file(tmp_path / "model.onnx", tmp_path / "low.onnx", "O3", validate=False)
    assert "Several constants had the same name, and the last one counts, as in ONNX Runtime: 'k'." in made.notes
