"""Upgrades of whole models: names, bodies, weights and what is declared survive, and what stops an upgrade is named."""

from pathlib import Path

import numpy as np
import onnx
import onnx.backend.test
import onnxruntime
import pytest
from every import every
from graphs.case import parse
from onnx import ModelProto, helper, numpy_helper

import onnxamp
from onnxamp._graph.graph import Graph
from onnxamp._rewrite.passes.upgrade import plan_upgrade, upgraded

CLIPPED = """(float[2,3] x, bool c) => (float[2,3] y) {
    [first] a = Clip <min = 0.0, max = 6.0> (x)
    [second] y = If (c) <
        then_branch = g () => (float[2,3] t) { [inner] t = Clip <max = 6.0> (a) },
        else_branch = h () => (float[2,3] e) { s = Softmax <axis = 0> (a) e = Sub (s, a) }>
}"""


def newer(model: ModelProto, opset: int) -> ModelProto:
    result = upgraded(Graph.of(model), opset).model
    onnx.checker.check_model(result, full_check=True)
    return result


def outputs(model: ModelProto, **feeds: object) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


@pytest.mark.parametrize("ir", [3, 4])
@pytest.mark.parametrize("opset", [12, 13, 21])
def test_bodies_read_constants_of_the_main_graph(ir: int, opset: int) -> None:
    model = parse(CLIPPED, opset=9, ir=ir)
    result = newer(model, opset)
    x = np.linspace(-4, 9, 6, dtype=np.float32).reshape(2, 3)
    for c in (True, False):
        for one, other in zip(outputs(model, x=x, c=np.array(c)), outputs(result, x=x, c=np.array(c)), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-6)
    made = [node.output[0] for node in result.graph.node if node.op_type == "Constant"]
    assert sorted([*made, *(tensor.name for tensor in result.graph.initializer)]) == ["first/max", "first/min"]
    assert bool(made) == (ir == 3), "before IR version 4, an initializer must be an input"


def test_names_do_not_collide() -> None:
    model = parse(CLIPPED, opset=9, ir=4)
    model.graph.initializer.append(numpy_helper.from_array(np.float32([1]), "first/max"))
    result = newer(model, 13)
    names = [tensor.name for tensor in result.graph.initializer]
    assert len(names) == len(set(names))
    assert {"first/max", "first/max_1"} <= set(names)


def test_metadata_and_declarations_stay() -> None:
    model = parse(CLIPPED, opset=9, ir=4)
    model.producer_name, model.doc_string, model.graph.doc_string = "maker", "about", "inside"
    model.metadata_props.add(key="author", value="someone")
    model.graph.value_info.append(helper.make_tensor_value_info("a", 1, [2, 3]))
    model.graph.node[0].doc_string = "the first"
    before = onnx.ModelProto.FromString(model.SerializeToString())
    result = newer(model, 13)
    assert model == before, "the original does not change"
    assert (result.producer_name, result.doc_string, result.graph.doc_string) == ("maker", "about", "inside")
    assert list(result.metadata_props) == list(model.metadata_props)
    assert list(result.graph.value_info) == list(model.graph.value_info)
    assert [node.name for node in result.graph.node] == ["first", "second"]
    assert result.graph.node[0].doc_string == "the first"


def test_deferred_weights_stay_deferred() -> None:
    model = parse("(float[2,3] x) => (float[2,4] y) { h = MatMul (x, w) y = Clip <min = 0.0> (h) }", opset=9, ir=4)
    weight = model.graph.initializer.add(name="w", data_type=1, dims=[3, 4], data_location=1)
    weight.external_data.add(key="location", value="nowhere.bin")
    result = plan_upgrade(Graph.of(model), 13).result.model
    assert result.graph.initializer[0] == weight


def test_an_obstacle_is_named_and_the_rest_is_reached() -> None:
    model = parse("(float[2,3] x) => (float[2,3] y, bool[2,3] m) { [drop] y, m = Dropout (x) }", opset=12, ir=7)
    assert plan_upgrade(Graph.of(model), 21).obstacle is None
    text = "(float[2,3] x) => (float[2,3] y, float[2,3] m) { [drop] y, m = Dropout (x) }"
    plan = plan_upgrade(Graph.of(parse(text, opset=7, ir=4)), 21)
    assert plan.opset == 9
    assert str(plan.obstacle) == (
        "'drop' (Dropout) cannot follow to opset 10: its mask is read, which has another type there"
    )
    with pytest.raises(
        onnxamp.OpsetError, match=r"'drop' \(Dropout\).*--opset 9 is the highest opset that the model can reach"
    ):
        onnxamp.convert_model(parse(text, opset=7, ir=4), opset=21)


FUNCTION = """(float[2] x) => (float[2] y) { y = own.f (x) }
    <domain: "own", opset_import: ["" : 12]> f (a) => (b) { b = BODY }"""


def test_functions_follow_where_their_nodes_need_no_change() -> None:
    model = parse(FUNCTION.replace("BODY", "Relu (a)"), opset=12, ir=8, domains={"own": 1})
    result = newer(model, 14)
    assert {entry.version for entry in result.functions[0].opset_import} == {14}
    held = parse(
        FUNCTION.replace("BODY", "ReduceSum <axes = [0], keepdims = 0> (a)"), opset=12, ir=8, domains={"own": 1}
    )
    assert "function f" in str(plan_upgrade(Graph.of(held), 14).obstacle)


def test_a_node_that_stays_as_it_is_is_not_touched() -> None:
    model = parse("(float[2,3] x) => (float[2,3] y) { y = Softmax <axis = -1> (x) }", opset=11, ir=7)
    result = newer(model, 13)
    assert result.graph == model.graph


@pytest.mark.parametrize("op", ["Hardmax", "LogSoftmax", "Softmax"])
@pytest.mark.parametrize(("axis", "shape"), [(0, (0, 3, 4)), (1, (2, 3, 0)), (0, (0, 0, 3))])
def test_exponentials_of_empty_tensors_stay_empty(op: str, axis: int, shape: tuple[int, ...]) -> None:
    text = f"(float[A,B,C] x) => (float[A,B,C] y) {{ y = {op} <axis = {axis}> (x) }}"
    result = onnxamp.convert_model(parse(text, opset=11, ir=7), "O0", opset=17)
    session = onnxruntime.InferenceSession(result.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {"x": np.zeros(shape, np.float32)})
    assert found.shape == shape


DATA = Path(onnx.backend.test.__file__).parent / "data"
OF_PYTORCH = sorted(
    path.parent for kind in ("operator", "converted") for path in DATA.glob(f"pytorch-{kind}/*/model.onnx")
)


def stored(folder: Path, kind: str) -> list[np.ndarray]:
    count = len(list(folder.glob(f"test_data_set_0/{kind}_*.pb")))
    return [
        numpy_helper.to_array(onnx.load_tensor(folder / f"test_data_set_0/{kind}_{number}.pb"))
        for number in range(count)
    ]


@pytest.mark.mostly_slow(fast=1)
@every(2, folder=OF_PYTORCH)
def test_models_of_opset_6_compute_what_pytorch_computed(folder: Path) -> None:
    """onnx's own tests of models that PyTorch wrote, with what it computed."""
    model = onnx.load(folder / "model.onnx")
    plan = plan_upgrade(Graph.of(model), 22)
    assert plan.obstacle is None
    weights = {tensor.name for tensor in model.graph.initializer}
    names = [entry.name for entry in model.graph.input if entry.name not in weights]
    found = outputs(plan.result.model, **dict(zip(names, stored(folder, "input"), strict=True)))
    for one, other in zip(stored(folder, "output"), found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-3, atol=1e-5)
