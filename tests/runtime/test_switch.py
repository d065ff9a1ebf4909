"""The switched graph against what it stands for: the model itself, its conversion, and single nodes lowered by hand."""

import re
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from itertools import chain, combinations
from typing import Any

import numpy as np
import onnx
import pytest
from conversions import opset
from engine import prepared, space_of
from every import every
from graphs import CASES
from graphs.case import parse
from onnx import ModelProto, numpy_helper
from repository import MODELS

from onnxamp import apply_plan
from onnxamp._convert.plan import make_plan
from onnxamp._dtypes import low_type
from onnxamp._errors import OpsetError
from onnxamp._graph.view import Ports
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.random_inputs import random_inputs
from onnxamp._runtime.session import make_session, run
from onnxamp._runtime.switch import Switched, switched
from onnxamp._runtime.values import check_inputs

FILES = {path.stem: path for path in MODELS}
EPSILON = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
INEXACT = {"float16_initializer"}
"""Where the switched graph rounds less: its weights are in float16 already, and the conversion folds a Cast of them."""
GRAPHS = [name for name, case in CASES.items() if case.loads and case.tolerance != np.inf]


@cache
def model_called(name: str) -> tuple[ModelProto, Mapping[str, Any]]:
    if name in FILES:
        model = onnx.load(FILES[name])
        return model, random_inputs(model)
    case = CASES[name]
    return case.build(), case.inputs()


def outputs(model: ModelProto, feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Without optimisations, and without packed weights: kernels for those add up in another order."""
    session = make_session(model, optimize=False, lean=True)
    types = {item.name: item.type for item in session.get_inputs()}
    given = {name: feed for name, feed in feeds.items() if name in types and feed is not None}
    return run(session, {n: f.astype(np.float32) if types[n] == "tensor(float)" else f for n, f in given.items()})


def with_switches(graph: Switched, feeds: Mapping[str, Any], low: Collection[str]) -> dict[str, Any]:
    return outputs(graph.model, {**feeds, graph.mask: graph.masked(frozenset(low))})


def arrays(found: Mapping[str, Any]) -> list[np.ndarray]:
    parts = [item if isinstance(item, list) else [item] for item in found.values()]
    return [np.asarray(array) for part in parts for array in part if array is not None]


def assert_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Bit for bit."""
    assert found.keys() == wanted.keys()
    for a, b in zip(arrays(found), arrays(wanted), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
        assert a.dtype.kind != "f" or np.array_equal(np.signbit(a), np.signbit(b))


def distance(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> float:
    """The worst relative L2 error of float outputs; 0 where everything is equal, NaN and infinities included."""
    worst = 0.0
    assert found.keys() == wanted.keys()
    for a, b in zip(arrays(found), arrays(wanted), strict=True):
        assert a.shape == b.shape
        if a.dtype.kind != "f" or a.dtype == np.float64:
            continue
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        if not same.all():
            off = a.astype(np.float64) - b.astype(np.float64)
            error = np.sqrt(np.sum(off[~same] ** 2)) / max(np.linalg.norm(b[np.isfinite(b)]), 1e-30)
            worst = max(worst, np.inf if np.isnan(error) else float(error))
    return worst


@every(name=[*GRAPHS, *FILES], dtype=["float16", "bfloat16"], parts=8)
def test_none_is_the_model_and_all_is_the_conversion(name: str, dtype: str) -> None:
    model, given = model_called(name)
    as_it_is: dict[str, Any] = {"dtype": dtype, "freeze_defaults": False, "fold": False}
    proto = prepared(model, "auto", **as_it_is).graph.model
    feeds = check_inputs(proto, given)
    if opset(proto) < (13 if dtype == "bfloat16" else 9):  # too old for the low type, or for Where
        with pytest.raises(OpsetError):
            switched(proto, space_of(proto, **as_it_is).ports(), low_type(dtype))
        return
    space = space_of(proto, **as_it_is)
    graph = switched(proto, space.ports(), low_type(dtype))
    assert_same(with_switches(graph, feeds, ()), outputs(proto, feeds))
    converted = emulate(apply_plan(model, make_plan(space.all_low)))
    found, wanted = with_switches(graph, feeds, graph.nodes), outputs(converted, feeds)
    if name in INEXACT:
        assert distance(found, wanted) < EPSILON[dtype]
    else:
        assert distance(found, wanted) == 0


BODIES = """(float[4] x, int64 n, bool c) => (float[4] y, float[4] s, float[M,4] all, float[4] z, float[M,4] z_all)
    <float[4] w = {1.1, 0.3, 7, 0.01}> {
    t = Mul (x, w)
    yes = Constant <value = bool {1}> ()
    y, all = Loop (n, yes, t) <body = step (int64 i, bool go, float[4] a) => (bool on, float[4] b, float[4] scan) {
        on = Identity (go)
        in_loop = Mul (a, w)
        b = Add (in_loop, t)
        scan = Exp (in_loop) }>
    s = If (c) <
        then_branch = then () => (float[4] p) { in_then = Sqrt (t)  deep = If (c) <
            then_branch = a () => (float[4] d) { d = Mul (in_then, x) },
            else_branch = b () => (float[4] d) { d = Identity (x) }>  p = Sub (deep, w) },
        else_branch = no () => (float[4] q) { q = Div (t, w) }>
    last, z_all = Scan (t, all) <num_scan_inputs = 1, body = sum (float[4] state, float[4] row) =>
        (float[4] next, float[4] one) { next = Add (state, row)  one = Mul (next, w) }>
    z = Mul (last, x)
}"""
FEEDS = {"x": np.array([0.1, 2.3, 1.7, 0.9], np.float32), "n": np.array(3), "c": np.array(True)}


def lowered_by_hand(text: str, name: str) -> ModelProto:
    """The graph with the line that makes ``name`` between Casts, written as text."""
    found = re.search(rf"\b{name} = (\w+) \(([^)]*)\)", text)
    assert found is not None
    inputs = [item.strip() for item in found[2].split(",")]
    rounded = [f"{name}_{i}l = Cast <to = 10> ({item}) {name}_{i} = Cast <to = 1> ({name}_{i}l)"
               for i, item in enumerate(inputs)]  # fmt: skip
    called = ", ".join(f"{name}_{i}" for i in range(len(inputs)))
    line = f"{' '.join(rounded)} {name}_e = {found[1]} ({called})"
    line += f" {name}_l = Cast <to = 10> ({name}_e) {name} = Cast <to = 1> ({name}_l)"
    return parse(text.replace(found[0], line))


@pytest.mark.parametrize("name", ["t", "in_loop", "scan", "in_then", "deep/d", "p", "one", "next", "z"])
def test_one_node_is_that_node_between_casts(name: str) -> None:
    model, name = parse(BODIES), name.rpartition("/")[2]
    ports = {key: Ports((0, 1) if key not in ("scan", "in_then") else (0,), (0,)) for key in
             ("t", "in_loop", "b", "scan", "in_then", "p", "q", "next", "one", "z")}  # fmt: skip
    ports |= {"d": Ports((0, 1), (0,))} if name == "d" else {}
    text = BODIES.replace("else_branch = b () => (float[4] d) { d = Identity (x) }",
                          "else_branch = b () => (float[4] r) { r = Identity (x) }")  # fmt: skip
    graph = switched(parse(text), ports, low_type("float16"))
    assert_same(with_switches(graph, FEEDS, ()), outputs(model, FEEDS))
    found, wanted = with_switches(graph, FEEDS, {name}), outputs(lowered_by_hand(text, name), FEEDS)
    assert_same(found, wanted)
    exact = outputs(model, FEEDS)
    assert any(not np.array_equal(found[key], exact[key]) for key in exact), "the switch does something"


def test_both_ways_through_a_branch() -> None:
    graph = switched(parse(BODIES), {"q": Ports((0, 1), (0,)), "p": Ports((0, 1), (0,))}, low_type("float16"))
    for way, name in ((True, "p"), (False, "q")):
        feeds = {**FEEDS, "c": np.array(way)}
        exact = outputs(parse(BODIES), feeds)
        assert_same(with_switches(graph, feeds, {"p", "q"} - {name}), exact)
        assert not np.array_equal(with_switches(graph, feeds, {name})["s"], exact["s"])


def test_sentinels_saturate_and_infinities_stay() -> None:
    text = "(float[4] x) => (float[4] y) <float[4] w = {-3.4e38, 1e30, 65504, 1}> { y = Add (x, w) }"
    graph = switched(parse(text), {"y": Ports((0, 1), (0,))}, low_type("float16"))
    found = with_switches(graph, {"x": np.array([1, 1, 0, 1], np.float32)}, {"y"})["y"]
    np.testing.assert_array_equal(found, np.array([-32752, 32752, 65504, 2], np.float32))
    infinite = parse(text)
    infinite.graph.initializer[0].CopyFrom(numpy_helper.from_array(np.array([-np.inf] * 4, np.float32), "w"))
    graph = switched(infinite, {"y": Ports((0, 1), (0,))}, low_type("float16"))
    assert (with_switches(graph, {"x": np.zeros(4, np.float32)}, {"y"})["y"] == -np.inf).all()


def test_constant_nodes_saturate_like_initializers() -> None:
    text = "(float[2] x) => (float[2] y) { w = Constant <value = float[2] {-1e30, 0.1}> ()  y = Add (x, w) }"
    graph = switched(parse(text), {"y": Ports((0, 1), (0,))}, low_type("float16"))
    found = with_switches(graph, {"x": np.zeros(2, np.float32)}, {"y"})["y"]
    np.testing.assert_array_equal(found, np.array([-32752, np.float16(0.1)], np.float32))


def test_overflow_shows() -> None:
    text = "(float[2] x) => (float[2] y) { h = Mul (x, x)  y = Sqrt (h) }"
    ports = {"h": Ports((0, 1), (0,)), "y": Ports((0,), (0,))}
    graph = switched(parse(text), ports, low_type("float16"))
    found = with_switches(graph, {"x": np.array([300, 1e-4], np.float32)}, {"h"})["y"]
    np.testing.assert_array_equal(
        found, np.array([np.inf, np.sqrt(np.float32(np.float16(np.float16(1e-4) ** 2)))], np.float32)
    )


def test_nodes_in_any_order() -> None:
    model = onnx.load(FILES["classifier"])
    feeds = random_inputs(model)
    space = space_of(model)
    wanted = [with_switches(switched(model, space.ports(), low_type("float16")), feeds, low)
              for low in ((), [unit.key for unit in space.tunable])]  # fmt: skip
    nodes = list(model.graph.node)
    del model.graph.node[:]
    model.graph.node.extend(reversed(nodes))
    graph = switched(model, space.ports(), low_type("float16"))
    assert_same(with_switches(graph, feeds, ()), wanted[0])
    assert_same(with_switches(graph, feeds, [unit.key for unit in space.tunable]), wanted[1])


SHARED = """(float[2] x) => (float[2] y, float[2] z) {
    h = Mul (x, x)
    y = Sqrt (h)
    z = Mul (h, x)
}"""


@pytest.mark.parametrize("low", [*chain.from_iterable(combinations("hyz", count) for count in range(4))])
def test_a_value_is_rounded_once_and_chosen_once_for_each_reader(low: tuple[str, ...]) -> None:
    ports = {"h": Ports((0, 1), (0,)), "y": Ports((0,), (0,)), "z": Ports((0, 1), (0,))}
    graph = switched(parse(SHARED), ports, low_type("float16"))
    made = Counter(node.op_type for node in graph.model.graph.node)
    assert made["Cast"] == 2 * len("xhyz")
    assert made["Where"] == len(["x for h", "h for y", "h for z", "x for z", "y", "z"])
    assert sorted(filter(None, graph.switches)) == [("h",), ("h", "y"), ("h", "z"), ("y",), ("z",)]

    def rounded(value: Any, *nodes: str) -> Any:
        return value.astype(np.float16).astype(np.float32) if set(nodes) & set(low) else value

    x = np.array([0.1, 1.7], np.float32)
    h = rounded(rounded(x, "h") * rounded(x, "h"), "h")
    y, z = rounded(np.sqrt(rounded(h, "y")), "y"), rounded(rounded(h, "z") * rounded(x, "z"), "z")
    assert_same(with_switches(graph, {"x": x}, low), {"y": y, "z": z})


@pytest.mark.parametrize(("constant", "choices"), [("0.5, 2", 2), ("0.5, 0.1", 3)])
def test_constants_that_stay_as_they_are_are_not_chosen(constant: str, choices: int) -> None:
    text = f"(float[2] x) => (float[2] y) <float[2] w = {{{constant}}}> {{ y = Mul (x, w) }}"
    graph = switched(parse(text), {"y": Ports((0, 1), (0,))}, low_type("float16"))
    assert sum(node.op_type == "Where" for node in graph.model.graph.node) == choices
    x, w = np.array([0.1, 3], np.float16), np.array([float(part) for part in constant.split(",")], np.float16)
    found = with_switches(graph, {"x": np.array([0.1, 3], np.float32)}, {"y"})
    assert_same(found, {"y": (x * w).astype(np.float32)})


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("opset", [9, 12, 13, 18])
def test_scalars_stay_scalars(opset: int, known: bool) -> None:
    text = "(float x, float[2] v) => (float y, float[2] w) <float c = {0.1}> { y = Mul (x, c)  w = Mul (v, y) }"
    model = parse(text, opset=opset, ir=4)
    for entry in (*model.graph.input, *model.graph.output):
        if not known:
            entry.type.tensor_type.ClearField("shape")
    graph = switched(model, {"y": Ports((0, 1), (0,)), "w": Ports((0, 1), (0,))}, low_type("float16"))
    feeds = {"x": np.array(2, np.float32), "v": np.array([1, 3], np.float32)}
    found = with_switches(graph, feeds, {"y", "w"})
    y = np.float16(2) * np.float16(0.1)
    assert_same(found, {"y": y.astype(np.float32), "w": (np.array([1, 3], np.float16) * y).astype(np.float32)})
    assert found["y"].shape == ()
    assert_same(with_switches(graph, feeds, ()), outputs(model, feeds))


def test_switches_stand_in_front_of_who_needs_them() -> None:
    """More of them than come off the mask together, in the main graph and behind a node with bodies."""
    chain = " ".join(f"v{i + 1} = Mul (v{i}, x)" for i in range(70))
    branch = " ".join(f"{{0}}{i + 1} = Mul ({{0}}{i}, x)" for i in range(70))
    text = f"""(float[2] x, bool c) => (float[2] v70, float[2] y) {{
        v0 = Mul (x, x)
        y = If (c) <then_branch = yes () => (float[2] p70) {{ p0 = Mul (v0, x) {branch.format("p")} }},
                    else_branch = no () => (float[2] q70) {{ q0 = Mul (v0, x) {branch.format("q")} }}>
        {chain} }}"""
    keys = [f"{name}{i}" for name in "vpq" for i in range(71)]
    graph = switched(parse(text), dict.fromkeys(keys, Ports((0, 1), (0,))), low_type("float16"))
    onnx.checker.check_model(graph.model, full_check=True)
    x = np.array([1.01, 0.99], np.float32)
    for way in (True, False):
        feeds = {"x": x, "c": np.array(way)}
        assert_same(with_switches(graph, feeds, ()), outputs(parse(text), feeds))
        exact, one = outputs(parse(text), feeds), with_switches(graph, feeds, {"p70" if way else "q70"})
        assert np.array_equal(one["v70"], exact["v70"])
        assert not np.array_equal(one["y"], exact["y"])
        assert np.array_equal(one["y"], one["y"].astype(np.float16)), "rounded"


def test_the_mask_finds_a_name() -> None:
    text = "(float[2] switches, float[2] x) => (float[2] y) { y = Mul (x, switches) }"
    graph = switched(parse(text), {"y": Ports((0, 1), (0,))}, low_type("float16"))
    assert graph.mask not in ("switches", "x", "y")
    feeds = {"switches": np.array([0.1, 1], np.float32), "x": np.ones(2, np.float32)}
    np.testing.assert_array_equal(with_switches(graph, feeds, {"y"})["y"], np.array([np.float16(0.1), 1], np.float32))


def test_the_model_is_not_changed_and_others_are_left_out() -> None:
    model = parse(BODIES)
    before = model.SerializeToString(deterministic=True)
    graph = switched(model, {"nobody": Ports((0,), (0,)), "t": Ports((0,), ())}, low_type("float16"))
    assert model.SerializeToString(deterministic=True) == before
    assert graph.nodes == ("t",)


def test_too_old_for_where() -> None:
    model = parse("(float[2] x) => (float[2] y) { y = Mul (x, x) }", opset=8, ir=3)
    with pytest.raises(OpsetError, match=r"opset 8 has no Where.*--opset 9"):
        switched(model, {"y": Ports((0, 1), (0,))}, low_type("float16"))
