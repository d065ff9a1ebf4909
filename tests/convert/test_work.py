"""How much work a conversion is: calls of Python functions for each node, problems, cuts and graphs."""

import sys
from collections import Counter
from types import FrameType
from typing import Any

import numpy as np
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto, helper, numpy_helper, shape_inference

import onnxamp
from onnxamp._convert import analysis
from onnxamp._decide.mincut import Network
from onnxamp._graph.graph import Graph
from onnxamp._graph.static_shapes import MANY

WIDTH = 8
LAYER = """h = MatMul (X, w)  b = Add (h, v)  g = Div (b, root)  e = Erf (g)  o = Add (e, one)  p = Mul (b, o)
    a = Mul (p, half)  k = MatMul (a, w)  r = Add (k, X)  m = ReduceMean <axes = [-1]> (r)  d = Sub (r, m)
    s = Pow (d, two)  q = ReduceMean <axes = [-1]> (s)  i = Add (q, epsilon)  t = Sqrt (i)  n = Div (d, t)
    c = Mul (n, v)  Y = Add (c, v)"""
"""Products with a Gelu, a residual sum, and a LayerNorm, in basic ops."""

CALLS = 76
"""The calls for each node that a conversion may take; 75 when this was written."""


def encoder(count: int) -> ModelProto:
    """A chain of layers with at least so many nodes in all."""
    model = parse(f"(float[4,{WIDTH}] X) => (float[4,{WIDTH}] Y) {{ {LAYER} }}")
    layer = list(model.graph.node)
    del model.graph.node[:]
    last = "X"
    for number in range(-(-count // len(layer))):
        made = {name: f"{name}{number}" for node in layer for name in node.output} | {"X": last}
        for node in layer:
            names = [made.get(name, name) for name in node.input]
            new = helper.make_node(node.op_type, names, [made[node.output[0]]])
            new.attribute.extend(node.attribute)
            model.graph.node.append(new)
        last = made["Y"]
    model.graph.node.append(helper.make_node("Identity", [last], ["Y"]))
    rng = np.random.default_rng(0)
    numbers = {"root": 2**0.5, "one": 1, "half": 0.5, "two": 2, "epsilon": 1e-5}
    weights = {"w": rng.standard_normal((WIDTH, WIDTH)), "v": rng.standard_normal(WIDTH), **numbers}
    for name, numbers_of in weights.items():
        model.graph.initializer.append(numpy_helper.from_array(np.asarray(numbers_of, np.float32), name))
    return model


def calls_of(model: ModelProto) -> Counter[str]:
    """Calls of the package's functions during a conversion, by name."""
    found = Counter[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("onnxamp"):
            found[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        onnxamp.convert_model(model)
    finally:
        sys.setprofile(None)
    return found


def test_work_is_linear_in_nodes() -> None:
    onnxamp.convert_model(encoder(100))  # fills what is cached for all models
    per_node = {}
    for count in (1000, 4000):
        model = encoder(count)
        per_node[count] = calls_of(model).total() / len(model.graph.node)
    assert per_node[4000] < 1.02 * per_node[1000], per_node
    assert per_node[1000] < CALLS, per_node


def work_of(model: ModelProto, monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[int, int, int]:
    """How many problems a conversion states, how many cuts it solves, and how many graphs it builds."""
    stated, solved, built = [], [], []
    state, solve, resolve = analysis.find_problem, Network.solve, Graph.of
    monkeypatch.setattr(analysis, "find_problem", lambda *given, **named: stated.append(1) or state(*given, **named))
    monkeypatch.setattr(Network, "solve", lambda network: solved.append(1) or solve(network))
    monkeypatch.setattr(Graph, "of", lambda *given, **named: built.append(1) or resolve(*given, **named))
    onnxamp.convert_model(model, **options)
    return len(stated), len(solved), len(built)


@pytest.mark.parametrize(
    ("options", "graphs"),
    [
        ({}, 2),
        ({"dtype": "bfloat16"}, 2),
        ({"level": "O3"}, 2),
        ({"keep_nodes": ["b0"]}, 2),
        ({"black_list": ["MatMul"], "level": "O3"}, 2),
        ({"fold": False}, 1),
        ({"fold": True}, 3),
        ({"level": "O1"}, 1),
        ({"target": "cuda@1.24"}, 1),
        ({"lists": "conservative"}, 1),
        ({"target": "webgpu", "split_k": False}, 1),
    ],
    ids=str,
)
def test_one_problem_is_stated_and_solved(
    options: dict[str, Any], graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LayerNorms are units, unless their op cannot be low. Graphs are of the original, upgraded and folded model."""
    assert work_of(encoder(50), monkeypatch, **options) == (1, 1, graphs)


def test_a_gelu_with_a_listed_power_is_a_unit_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes have one precision, so the power alone keeps all of them in float32."""
    tanh = """x = MatMul (X, w)  c = Pow (x, three)  t = Mul (c, share)  s = Add (x, t)  u = Mul (s, scale)
        h = Tanh (u)  o = Add (h, one)  m = Mul (x, o)  a = Mul (m, half)  Y = MatMul (a, w)"""
    numbers = {"three": 3.0, "share": 0.044715, "scale": 0.7978846, "one": 1.0, "half": 0.5}
    weights = {"w": (8, 8)} | {name: np.array(number, np.float32) for name, number in numbers.items()}
    model = add_weights(parse(f"(float[4,8] X) => (float[4,8] Y) {{ {tanh} }}"), weights)
    assert work_of(model, monkeypatch) == (1, 1, 3)
    result = onnxamp.convert_model(model)
    assert [node.op_type for node in result.graph.node if node.op_type != "Cast"] == ["MatMul", "Gelu", "MatMul"]


def test_onnx_infers_shapes_once_for_each_form_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers have the same forms, so twice as many nodes take no more inferences."""
    asked = Counter[str]()

    def count(name: str) -> None:
        infer = getattr(shape_inference, name)

        def counted(*given: object, **keywords: object) -> object:
            asked[name] += 1
            return infer(*given, **keywords)

        monkeypatch.setattr(shape_inference, name, counted)

    count("infer_shapes")
    count("infer_node_outputs")
    forms = {}
    for nodes in (MANY, 2 * MANY):
        asked.clear()
        graph = Graph.of(encoder(nodes))
        assert graph.shapes[graph.scopes[0].outputs[0]] == (4, WIDTH)
        forms[nodes] = asked["infer_node_outputs"]
        assert not asked["infer_shapes"]
    assert forms[MANY] == forms[2 * MANY] < 30, forms
