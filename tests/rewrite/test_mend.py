"""Models that contradict themselves, which no runtime loads, are mended where a declaration is wrong, or refused."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from commands import run
from onnx import ModelProto, TensorProto, helper, numpy_helper
from opening import outcomes

import onnxamp
from onnxamp._base.errors import ModelError

FLOAT, FLOAT16, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
value = helper.make_tensor_value_info
node = helper.make_node


def model_of(nodes: list[onnx.NodeProto], outputs: dict[str, int], *, opset: int = 18) -> ModelProto:
    """A model from x, in float32, with weights w and b, and outputs that are declared as these types."""
    weights = {"w": np.eye(16, 8, dtype=np.float32), "b": np.ones(16, np.float32)}
    ends = [value(name, elem, None) for name, elem in outputs.items()]
    graph = helper.make_graph(nodes, "g", [value("x", FLOAT, [4, 16])], ends)
    read = {name for one in nodes for name in one.input}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items() if name in read)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def product(to: int = 0, op: str = "Relu") -> list[onnx.NodeProto]:
    casts = [node("Cast", ["h"], ["c"], to=to)] if to else [node("Identity", ["h"], ["c"])]
    return [node("MatMul", ["x", "w"], ["h"]), *casts, node(op, ["c"], ["y"])]


def declared(name: str, elem: int) -> ModelProto:
    """A model with a wrong declaration of a value in between."""
    model = model_of([*product(FLOAT16), node("Cast", ["y"], ["z"], to=FLOAT)], {"z": FLOAT})
    model.graph.value_info.append(value(name, elem, [4, 8]))
    return model


def branches(*types: int) -> ModelProto:
    """An If whose branches return these types, and declare float32."""
    bodies = [
        helper.make_graph([node("Cast", ["h"], [f"o{n}"], to=elem)], f"b{n}", [], [value(f"o{n}", FLOAT, [4, 8])])
        for n, elem in enumerate(types)
    ]
    choose = node("If", ["which"], ["z"], then_branch=bodies[0], else_branch=bodies[1], name="choose")
    model = model_of([node("MatMul", ["x", "w"], ["h"]), choose, node("Cast", ["z"], ["y"], to=FLOAT)], {"y": FLOAT})
    model.graph.input.append(value("which", TensorProto.BOOL, []))
    return model


def weight_as_input() -> ModelProto:
    """A float16 weight that is an input of the model, declared as float32."""
    model = model_of([node("Cast", ["x"], ["x16"], to=FLOAT16), node("MatMul", ["x16", "w"], ["y"])], {"y": FLOAT16})
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.eye(16, 8, dtype=np.float16), "w"))
    model.graph.input.append(value("w", FLOAT, [16, 8]))
    return model


MENDED = {
    "an output of float16": (model_of(product(FLOAT16), {"y": FLOAT}), "The output 'y' was float16, but declared"),
    "an output of float32": (model_of(product(), {"y": FLOAT16}), "The output 'y' was float32, but declared float16"),
    "an output of integers": (
        model_of([*product(), node("ArgMax", ["y"], ["z"])], {"z": FLOAT}), "The output 'z' was int64"
    ),
    "an output that is read": (
        model_of([*product(FLOAT16), node("Neg", ["y"], ["n"])], {"y": FLOAT, "n": FLOAT16}),
        "The output 'y' was float16",
    ),
    "a value between": (declared("c", FLOAT), "were corrected: 'c'"),
    "branches": (branches(FLOAT16, FLOAT16), "were corrected: 'o0', 'o1'"),
    "a weight that is an input": (weight_as_input(), "were corrected: 'w'"),
}  # fmt: skip


@pytest.mark.slow
def test_mended_results_open() -> None:
    """At each level, also where nothing else is converted."""
    assert all(said != "opens" for said in outcomes(model for model, _ in MENDED.values()))
    results = {
        f"{name}, {level}": onnxamp.convert_model(model, level)
        for name, (model, _) in MENDED.items()
        for level in ("O0", "O2", "O3")
    }
    found = dict(zip(results, outcomes(results.values()), strict=True))
    assert {name: said for name, said in found.items() if said != "opens"} == {}


@pytest.mark.parametrize("name", MENDED)
def test_mended_outputs_have_their_declared_types(name: str) -> None:
    model, _ = MENDED[name]
    result = onnxamp.convert_model(model)
    types = [entry.type.tensor_type.elem_type for entry in model.graph.output]
    assert [entry.type.tensor_type.elem_type for entry in result.graph.output] == types
    assert [entry.name for entry in result.graph.output] == [entry.name for entry in model.graph.output]
    assert onnxamp.convert_model(result) == result


REFUSED = {
    "LayerNormalization": (
        model_of(
            [node("Cast", ["x"], ["x16"], to=FLOAT16), node("LayerNormalization", ["x16", "b"], ["y"], name="norm")],
            {"y": FLOAT16},
        ),
        "node 'norm' (LayerNormalization) reads float32 as 'Scale', but its other inputs need float16.",
    ),
    "MatMul": (
        model_of(
            [node("Cast", ["x"], ["low"], to=TensorProto.BFLOAT16), node("MatMul", ["low", "w"], ["y"])],
            {"y": TensorProto.BFLOAT16},
        ),
        "node 'y' (MatMul) reads float32 as 'B', but its other inputs need bfloat16.",
    ),
    "Concat": (
        model_of([node("Cast", ["x"], ["low"], to=FLOAT16), node("Concat", ["x", "low"], ["y"], axis=0)], {"y": FLOAT}),
        "node 'y' (Concat) reads float16 as 'inputs', but its other inputs need float32.",
    ),
    "branches": (branches(FLOAT, FLOAT16), "the branches of 'choose' return different types."),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_nodes_that_contradict_themselves_are_refused(name: str, dtype: str) -> None:
    model, why = REFUSED[name]
    with pytest.raises(ModelError) as caught:
        onnxamp.convert_model(model, dtype=dtype)
    assert why in str(caught.value)


def test_commands_say_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, why = REFUSED["LayerNormalization"]
    onnx.save(model, "broken.onnx")
    converted = run("convert", "broken.onnx", "-o", "out.onnx", "--provider", "cpu", "-v")
    assert converted.exit_code != 0
    assert why in " ".join(converted.output.split())
    assert not Path("out.onnx").exists()
    checked = run("check", "broken.onnx", "--static")
    assert checked.exit_code == 1
    told = "LayerNormalization 'norm': reads float32 as 'Scale', but its other inputs need float16."
    assert told in " ".join(checked.output.split())
    model, note = MENDED["an output of float16"]
    onnx.save(model, "declared.onnx")
    mended = run("convert", "declared.onnx", "-o", "out.onnx", "--provider", "cpu", "-v")
    assert mended.exit_code == 0, mended.output
    assert note in " ".join(mended.output.split())
    assert "loads in ONNX Runtime" in mended.output
    named = run("check", "declared.onnx", "--static")
    assert "Relu 'y': outputs float16, but the model declares float32." in " ".join(named.output.split())
