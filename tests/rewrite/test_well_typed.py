"""The quick proof that a model is well typed, against the search for faults in its graph."""

import random
from pathlib import Path

import pytest
from every import every
from graphs.case import parse
from onnx import ModelProto, TensorProto, load

from onnxamp._base.errors import OnnxAmpError
from onnxamp._graph.graph import Graph
from onnxamp._rewrite.checks.verify import all_conflicts
from onnxamp._rewrite.checks.well_typed import is_well_typed

ENCODER = Path(__file__).parents[2] / "models/encoder.onnx"


def damaged(rng: random.Random) -> ModelProto:
    """The encoder with other types, names or attributes in one place."""
    model = load(ENCODER)
    graph = model.graph
    node, other = rng.choice(graph.node), rng.choice(graph.node)
    kind = rng.choice([TensorProto.FLOAT16, TensorProto.INT64, TensorProto.DOUBLE])
    match rng.randrange(5):
        case 0:
            rng.choice(graph.initializer).data_type = kind
        case 1:
            node.input[rng.randrange(len(node.input))] = other.output[0]
        case 2:
            graph.output[0].type.tensor_type.elem_type = kind
        case 3:
            node.output[0] = other.output[0]
        case 4:
            graph.value_info.add(name=node.output[0]).type.tensor_type.elem_type = kind
    return model


def has_fault(model: ModelProto) -> bool:
    """Whether the names of a model cannot be resolved, or types contradict each other."""
    try:
        return any(all_conflicts(Graph.of(model)))
    except OnnxAmpError:
        return True


@every(seed=range(40))
def test_nothing_faulty_is_proven(seed: int) -> None:
    model = damaged(random.Random(seed))
    assert not (is_well_typed(model) and has_fault(model))


def test_sound_models_are_proven() -> None:
    assert is_well_typed(load(ENCODER))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("(float[2] X) => (float[2] Y) { Y = Relu (Z) }", "reads what nothing defines"),
        ("(float[2] X) => (float[2] Y) { Z = Relu (Y)  Y = Relu (X) }", "reads what comes later"),
        ("(float[2] X) => (float[2] Y) { Y = Relu (X)  Y = Neg (X) }", "defines a name twice"),
        ("(float[2] X) => (float[2] Y) { Z = Relu (X) }", "defines no output"),
        ("(float[2] X) => (float16[2] Y) { Y = Relu (X) }", "declares another type"),
        ("(float[2] X, int64[2] I) => (float[2] Y) { Y = Add (X, I) }", "adds other types"),
    ],
)
def test_faults_are_not_proven_away(text: str, why: str) -> None:
    assert not is_well_typed(parse(text)), why
