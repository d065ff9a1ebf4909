"""How much work a conversion is: calls of Python functions for each node, problems, cuts and graphs."""

import sys
from collections import Counter
from types import FrameType

import numpy as np
import pytest
from graphs.case import parse
from onnx import ModelProto, helper, numpy_helper, shape_inference

import onnxamp
from onnxamp._decide.mincut import Network
from onnxamp._graph.graph import Graph
from onnxamp._graph.static_shapes import MANY

WIDTH = 8
LAYER = """h = MatMul (X, w)  b = Add (h, v)  g = Div (b, root)  e = Erf (g)  o = Add (e, one)  p = Mul (b, o)
    a = Mul (p, half)  k = MatMul (a, w)  r = Add (k, X)  m = ReduceMean <axes = [-1]> (r)  d = Sub (r, m)
    s = Pow (d, two)  q = ReduceMean <axes = [-1]> (s)  i = Add (q, epsilon)  t = Sqrt (i)  n = Div (d, t)
    c = Mul (n, v)  Y = Add (c, v)"""
"""Products with a Gelu, a residual sum, and a LayerNorm, in basic ops."""

CALLS = 92
"""The calls for each node that a conversion may take; 84 when this was written."""


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


@pytest.mark.parametrize(("fold", "graphs"), [(None, 2), (False, 1), (True, 3)])
def test_one_problem_is_stated_and_solved(fold: bool | None, graphs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """LayerNorms are folded at once. Graphs are of the original, upgraded and folded model."""
    solved, built = [], []
    solve, resolve = Network.solve, Graph.of
    monkeypatch.setattr(Network, "solve", lambda network: solved.append(1) or solve(network))
    monkeypatch.setattr(Graph, "of", lambda *given: built.append(1) or resolve(*given))
    onnxamp.convert_model(encoder(50), fold=fold)
    assert (len(solved), len(built)) == (1, graphs)


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
