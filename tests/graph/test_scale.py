"""Work that grows with the model and no faster: calls are counted, not seconds, at a size and at ten times that."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import pytest
from counting import calls as calls_of
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

import onnxamp
from onnxamp._base.public import no_collections
from onnxamp._facts.ops import op_facts
from onnxamp._model.wellformed import MAX_NESTING

FLOAT, SHAPE = TensorProto.FLOAT, [2, 2]


def value(name: str, elem: int = FLOAT, shape: Any = SHAPE) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, elem, shape)


def model(nodes: list[NodeProto], outputs: list[str], inputs: Any = (), **weights: Any) -> ModelProto:
    held = [numpy_helper.from_array(np.asarray(array, np.float32), name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [value("X"), *inputs], [value(name, shape=None) for name in outputs], held)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def chain(ops: list[str], count: int, second: str | list[str] = "w") -> tuple[list[NodeProto], str]:
    """Nodes in a row; binary ones read a weight, too. And the last value."""
    nodes, last = [], "X"
    for index in range(count):
        op, other = ops[index % len(ops)], second if isinstance(second, str) else second[index % len(second)]
        reads = [last, other] if op in ("MatMul", "Add", "Mul", "Max", "Sum") else [last]
        nodes.append(helper.make_node(op, reads, [f"v{index}"], name=f"n{index}"))
        last = f"v{index}"
    return nodes, last


def row(count: int) -> ModelProto:
    nodes, last = chain(["MatMul", "Softmax", "Add", "Relu"], count)
    return model(nodes, [last], w=np.eye(2))


def backwards(count: int) -> ModelProto:
    found = row(count)
    nodes = list(found.graph.node)[::-1]
    del found.graph.node[:]
    found.graph.node.extend(nodes)
    return found


def loop(count: int) -> ModelProto:
    nodes, last = chain(["MatMul", "Softmax", "Add", "Relu"], count)
    nodes[0].input[0] = "s"
    nodes.append(helper.make_node("Identity", ["c"], ["again"]))
    body = helper.make_graph(nodes, "body", [value("i", TensorProto.INT64, []), value("c", TensorProto.BOOL, []),
                             value("s")], [value("again", TensorProto.BOOL, []), value(last)])  # fmt: skip
    node = helper.make_node("Loop", ["N", "C", "X"], ["Y"], body=body)
    inputs = [value("N", TensorProto.INT64, []), value("C", TensorProto.BOOL, [])]
    return model([node], ["Y"], inputs, w=np.eye(2))


def fan(count: int) -> ModelProto:
    ops = ["MatMul", "Softmax", "Add", "Relu"]
    nodes = [helper.make_node(ops[i % 4], ["m", "w"][: 2 - i % 2], [f"y{i}"], name=f"n{i}") for i in range(count)]
    return model([helper.make_node("MatMul", ["X", "w"], ["m"]), *nodes], [f"y{i}" for i in range(count)], w=np.eye(2))


def many_weights(count: int) -> ModelProto:
    nodes, last = chain(["MatMul", "Mul"], count, [f"w{i}" for i in range(count)])
    return model(nodes, [last], **{f"w{i}": np.eye(2) for i in range(count)})


def one_node(count: int) -> ModelProto:
    makers = [helper.make_node(["Relu", "Softmax", "Exp"][i % 3], ["X"], [f"v{i}"], name=f"n{i}") for i in range(count)]
    return model([*makers, helper.make_node("Concat", [f"v{i}" for i in range(count)], ["Y"], axis=0)], ["Y"])


def calls(count: int) -> ModelProto:
    nodes, last = chain(["MatMul"], count)
    for node in nodes:
        node.op_type, node.domain = "F", "f"
    found = model(nodes, [last], w=np.eye(2))
    body = [helper.make_node("MatMul", ["a", "b"], ["t"]), helper.make_node("Relu", ["t"], ["z"])]
    found.functions.append(helper.make_function("f", "F", ["a", "b"], ["z"], body, [helper.make_opsetid("", 17)]))
    found.opset_import.append(helper.make_opsetid("f", 1))
    return found


def casts(count: int) -> ModelProto:
    nodes, last = chain(["Cast"], count)
    for index, node in enumerate(nodes):
        node.attribute.append(helper.make_attribute("to", FLOAT if index % 2 else TensorProto.FLOAT16))
    return model([*nodes, helper.make_node("Cast", [last], ["Y"], to=FLOAT)], ["Y"])


def limits(count: int) -> ModelProto:
    """Constants out of range and epsilons, all of which the ops behind them carry on."""
    nodes, last = chain(["Max"], count, ["big", "tiny"])
    return model(nodes, [last], big=[1e6], tiny=[1e-12])


def masks(count: int) -> ModelProto:
    nodes, last = chain(["Add"], count, "mask")
    return model([*nodes, helper.make_node("Softmax", [last], ["Y"])], ["Y"], mask=[-1e38])


def large_masks(count: int) -> ModelProto:
    nodes, last = chain(["Add"], count, "mask")
    return model([*nodes, helper.make_node("Softmax", [last], ["Y"])], ["Y"], mask=[-1e5])


def epsilons(count: int) -> ModelProto:
    nodes, last = [], "X"
    for i in range(count):
        nodes += [helper.make_node("Add", [last, "tiny"], [f"a{i}"]), helper.make_node("Sqrt", [f"a{i}"], [f"s{i}"]),
                  helper.make_node("Div", ["X", f"s{i}"], [f"d{i}"])]  # fmt: skip
        last = f"s{i}"
    return model(nodes, [f"d{count - 1}"], tiny=[1e-12])


def integer_products(count: int) -> ModelProto:
    nodes, last = [], "X"
    for i in range(count):
        nodes += [helper.make_node("MatMulInteger", ["A", "B"], [f"i{i}"]),
                  helper.make_node("Cast", [f"i{i}"], [f"f{i}"], to=FLOAT),
                  helper.make_node("Mul", [last, f"f{i}"], [f"m{i}"])]  # fmt: skip
        last = f"m{i}"
    return model(nodes, [last], [value("A", TensorProto.UINT8), value("B", TensorProto.UINT8)])


def deepest(function: Callable[[], Any]) -> int:
    """How deep Python's calls went."""
    depth, found = 0, 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal depth, found
        depth += (event == "call") - (event == "return")
        found = max(found, depth)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


SHAPES = [row, backwards, loop, fan, many_weights, one_node, calls, casts, limits, masks, large_masks, epsilons,
          integer_products]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("make", SHAPES, ids=lambda make: make.__name__)
def test_linear(make: Callable[[int], ModelProto], level: str) -> None:
    small, large = make(60), make(600)
    # What is read once is there then, and the solver that only large cuts need.
    onnxamp.convert_model(large, level)
    few = calls_of(lambda: onnxamp.convert_model(small, level))
    many = calls_of(lambda: onnxamp.convert_model(large, level))
    assert many <= 12 * few


def test_linear_with_thousands_of_casts() -> None:
    few = calls_of(lambda: onnxamp.convert_model(row(60), black_list=["Add", "Relu"]))
    many = calls_of(lambda: onnxamp.convert_model(row(600), black_list=["Add", "Relu"]))
    assert many <= 12 * few


@pytest.mark.slow
@pytest.mark.parametrize("external_data", ["never", "always"])
def test_files_are_linear(tmp_path: Path, external_data: str) -> None:
    found = []

    def convert() -> None:
        onnxamp.convert_file(tmp_path / "m.onnx", tmp_path / "o.onnx", external_data=external_data, validate=False)

    for count in (60, 60, 600):
        made = many_weights(count)
        for tensor in made.graph.initializer:
            tensor.CopyFrom(numpy_helper.from_array(np.ones((20, 40), np.float32), tensor.name))
        onnx.save(made, tmp_path / "m.onnx", save_as_external_data=True, location=f"m{len(found)}.bin")
        found.append(calls_of(convert))
    assert found[2] <= 12 * found[1]


def nested(depth: int) -> ModelProto:
    """Ifs in Ifs. Built from outside, since protobuf copies nothing that is deeper than it reads."""
    made = model([], ["z0"], [value("C", TensorProto.BOOL, [])])
    graph = made.graph
    for k in range(depth):
        node = graph.node.add(op_type="If", input=["C"], output=[f"z{k}"], name=f"if{k}")
        other = node.attribute.add(name="else_branch", type=onnx.AttributeProto.GRAPH).g
        other.node.add(op_type="Identity", input=["X"], output=[f"e{k}"])
        other.output.append(value(f"e{k}"))
        graph = node.attribute.add(name="then_branch", type=onnx.AttributeProto.GRAPH).g
        graph.output.append(value(f"z{k + 1}"))
    graph.node.add(op_type="MatMul", input=["X", "X"], output=[f"z{depth}"])
    return made


@pytest.mark.slow
def test_no_recursion() -> None:
    """Bodies in bodies take more calls, but no deeper ones."""
    for depth in (3, 30):
        onnxamp.convert_model(nested(depth))
    shallow, deep = (deepest(lambda d=d: onnxamp.convert_model(nested(d))) for d in (3, 30))
    assert deep == shallow


@pytest.mark.slow
@pytest.mark.parametrize("depth", [MAX_NESTING - 2, MAX_NESTING + 1, 200, 500])
def test_deep_nesting_gives_a_result_or_says_why_not(tmp_path: Path, depth: int) -> None:
    made, path = nested(depth), tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    if depth < MAX_NESTING:
        assert onnxamp.convert_model(made) != made
        onnxamp.convert_file(path, tmp_path / "o.onnx", validate=False)
        assert onnx.load(tmp_path / "o.onnx") == onnxamp.convert_model(made)
        return
    with pytest.raises(onnxamp.ModelError, match=r"nest|deep"):
        onnxamp.convert_model(made)
    # older protobufs do not say why they cannot
    with pytest.raises(onnxamp.ModelError, match=r"nests graphs more deeply|cannot be parsed"):
        onnxamp.convert_file(path, tmp_path / "o.onnx", validate=False)


def test_ops_with_bodies_are_known() -> None:
    """Resolving looks for bodies in these, and in ops that nobody knows."""
    graph = onnx.defs.OpSchema.AttrType.GRAPH
    schemas = (schema for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == "")
    found = {schema.name for schema in schemas if any(a.type == graph for a in schema.attributes.values())}
    assert found <= op_facts().control_flow


def test_collections_go_on_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(onnxamp.ModelError):
        onnxamp.convert_model(nested(MAX_NESTING + 1))
    onnxamp.convert_model(row(3))
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
