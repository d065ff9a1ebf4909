"""The decision against brute force: no assignment that respects the pins costs less than the one that is chosen."""

import itertools
import random

import numpy as np
import onnx
import pytest
from conversions import count
from engine import analysis_of
from every import every
from graphs.case import parse
from onnx import TensorProto, helper, numpy_helper
from prices import price

import onnxamp

_UNARY = ("Relu", "Tanh", "Exp", "Softmax", "Neg", "Sigmoid", "Identity")
_BINARY = ("Add", "Mul", "MatMul", "Max", "Concat")
_CASTS = (TensorProto.FLOAT16, TensorProto.FLOAT)


def random_model(seed, size=4):
    """A connected graph of 4 to 9 nodes over square values, with shared weights, user's Casts and several outputs."""
    rng = random.Random(seed)
    weights = [f"w{i}" for i in range(rng.randint(0, 2))]
    values, nodes = ["X", *weights], []
    for index in range(rng.randint(4, 9)):
        result = f"v{index}"
        kind = rng.random()
        if kind < 0.15:
            source = rng.choice(values)
            half = f"{result}_half"
            nodes.append(helper.make_node("Cast", [source], [half], to=TensorProto.FLOAT16))
            nodes.append(helper.make_node("Cast", [half], [result], to=TensorProto.FLOAT))
        elif kind < 0.2:
            doubled = f"{result}_double"
            nodes.append(helper.make_node("Cast", [rng.choice(values)], [doubled], to=TensorProto.DOUBLE))
            nodes.append(helper.make_node("Cast", [doubled], [result], to=TensorProto.FLOAT))
        elif kind < 0.55:
            nodes.append(helper.make_node(rng.choice(_UNARY), [rng.choice(values)], [result]))
        else:
            op, pair = rng.choice(_BINARY), [rng.choice(values), rng.choice(values)]
            wide = f"{result}_wide"
            if op == "Concat":  # keep all values square
                nodes.append(helper.make_node("Concat", pair, [wide], axis=0))
                nodes.append(helper.make_node("Slice", [wide, "zero", "size"], [result]))
            else:
                nodes.append(helper.make_node(op, pair, [result]))
        values.append(result)
    read = {name for node in nodes for name in node.input}
    ends = [name for name in values if name.startswith("v") and name not in read]
    inner = [name for name in values if name.startswith("v") and name in read]
    ends += rng.sample(inner, k=min(1, len(inner)))
    graph = helper.make_graph(
        nodes,
        "random",
        [helper.make_tensor_value_info("X", TensorProto.FLOAT, [size, size])],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, size]) for name in dict.fromkeys(ends)],
        [numpy_helper.from_array(np.full((size, size), 0.5 + i, np.float32), name) for i, name in enumerate(weights)]
        + [numpy_helper.from_array(np.array([0]), "zero"), numpy_helper.from_array(np.array([size]), "size")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.slow
@every(seed=range(120), level=["O1", "O2"], parts=8)
def test_no_assignment_is_cheaper(seed, level):
    model = random_model(seed)
    onnx.checker.check_model(model, full_check=True)
    check_cheapest(analysis_of(model, level))


@pytest.mark.mostly_slow(fast=2)
@every(seed=range(60), level=["O1", "O2"], parts=4)
def test_no_assignment_is_cheaper_where_weights_are_large(seed, level):
    check_cheapest(analysis_of(random_model(seed, 160), level, target="cpu"))


def check_cheapest(analysis):
    ports, pins, chosen = analysis.ports, analysis.pins, analysis.decision
    roots = sorted(set(ports.roots))
    open_roots = [root for root in roots if root not in pins.verdicts]
    fixed = {root: pins.verdicts[root].low for root in roots if root in pins.verdicts}
    assert len(open_roots) <= 14
    costs = {}
    for answer in itertools.product((False, True), repeat=len(open_roots)):
        low = {**fixed, **dict(zip(open_roots, answer, strict=True))}
        if all(low[q] or not low[p] for p, q in pins.implies):
            costs[answer] = price(analysis, low)
    best = min(costs.values())
    answer = tuple(chosen.low[root] for root in open_roots)
    assert costs[answer] == best
    assert sum(answer) == min(sum(a) for a, c in costs.items() if c == best), "ties go to float32"


@pytest.mark.slow
@every(seed=range(120))
def test_casts_in_the_result_are_those_of_the_cut(seed):
    """The rewriting adds exactly the Casts that the decision pays for, never two of one value and type."""
    model = random_model(seed)
    analysis = analysis_of(model)
    pairs = [(cast.source, cast.elem) for cast in analysis.edits.casts]
    assert len(pairs) == len(set(pairs))


def with_idle_casts(model, seed):
    """The model with Casts that change no type in front of some inputs, and some Casts twice."""
    rng = random.Random(seed)
    result = onnx.ModelProto()
    result.CopyFrom(model)
    del result.graph.node[:]
    twins = {}
    for index, node in enumerate(model.graph.node):
        own = result.graph.node.add()
        own.CopyFrom(node)
        if rng.random() < 0.5:
            own.input[0] = twins.get(own.input[0], own.input[0])
        if node.op_type == "Cast":
            twins[node.output[0]] = f"twin{index}"
            result.graph.node.append(helper.make_node("Cast", own.input, [f"twin{index}"], to=node.attribute[0].i))
        elif rng.random() < 0.4:
            idle = helper.make_node("Cast", [own.input[0]], [f"idle{index}"], to=TensorProto.FLOAT)
            own.input[0] = idle.output[0]
            result.graph.node.insert(len(result.graph.node) - 1, idle)
    return result


@pytest.mark.slow
@every(seed=range(60), level=["O1", "O2", "O3"], parts=4)
def test_converting_again_changes_no_casts(seed, level):
    model = with_idle_casts(random_model(seed), seed)
    onnx.checker.check_model(model, full_check=True)
    once = onnxamp.convert_model(model, level)
    assert onnxamp.convert_model(once, level) == once


@pytest.mark.parametrize(("moved", "casts"), [("Transpose <perm = [0, 1, 3, 2]> (c)", 3), ("Reshape (c, shape)", 0)])
def test_views_save_no_traffic(moved, casts):
    """Casts of large float32 values pay for ops that move them in low precision, not for those that share memory."""
    text = f"""(float[8,64,64,64] A, float[8,64,64,64] B) => (float[8,128,64,64] Y, int64[4] S)
    <int64[4] shape = {{8, 128, 64, 64}}> {{
        a = Softplus (A)
        b = Softplus (B)
        c = Concat <axis = 1> (a, b)
        S = Shape (c)
        d = {moved}
        e = Relu (d)
        Y = Sigmoid (e)
    }}"""
    assert count(onnxamp.convert_model(parse(text))) == casts
