"""Constants of every kind in every operand: whatever exponents their op has, it computes the same bits."""

from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from every import every
from judge_numbers import run_original
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from passes import passed
from strategies import all_ops, random_model
from strategies.table import recipes

from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.exponents import exponent_rules
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._options.options import Options
from onnxamp._rewrite.passes import rescale

from .test_rescale import random_rescaling, same_bits

LARGE = 2.0**112
"""Numbers from here on are multiples of float32's largest."""

Array = NDArray[np.float32]
BODIES = ("If", "Loop", "Scan", "SequenceMap")
OPS = tuple(op for op in all_ops() if op in exponent_rules() or op in op_facts().moved_inputs or op in BODIES)

ELEMENTS: dict[str, tuple[float, ...]] = {
    "zeros": (0.0, -0.0),
    "infinity": (np.inf,),
    "minus infinity": (-np.inf,),
    "mask": (0.0, -np.inf),
    "sentinel": (-1e31,),
    "sentinels": (0.0, -2e30),
    "powers of two": (0.25, 4.0, -8.0),
    "one power of two": (4.0,),
    "one number": (0.7,),
    "numbers": (0.7, -1.3, 2.9, 0.0),
    "numbers and infinity": (0.7, -np.inf),
    "numbers and a sentinel": (0.7, -2e30),
}
"""What constants are made of."""

SHAPES = ("full", "ones", "scalar", "row")


def constant(kind: str, shape: str, like: tuple[int, ...], rng: Random) -> Array:
    """A constant that takes the place of one of another shape."""
    dims = {"full": like, "ones": (1,) * len(like), "scalar": (), "row": like[-1:]}[shape]
    drawn = [rng.choice(ELEMENTS[kind]) for _ in range(int(np.prod(dims)))]
    return np.array(drawn, np.float32).reshape(dims)


def operands(graph: Graph, op: str) -> Iterator[tuple[int, int]]:
    """(node of the main graph, input position) of the op's float32 tensors."""
    for node in graph.nodes[graph.scopes[0].nodes.start : graph.scopes[0].nodes.stop]:
        if node.key == op:
            yield from ((node.index, k) for k, value in enumerate(node.inputs) if value >= 0 and is_float(graph, value))


def is_float(graph: Graph, value: int) -> bool:
    return graph.types[value] == FLOAT


def surrounded(graph: Graph, node: int, port: int, array: Array, rng: Random) -> ModelProto:
    """The model with the constant in this operand, and a factor at each other float of the node, to take exponents."""
    model = ModelProto()
    model.CopyFrom(graph.model)
    held = model.graph
    proto = held.node[node - graph.scopes[0].nodes.start]
    before: list[NodeProto] = []

    def stored(name: str, content: Any) -> str:
        held.initializer.append(numpy_helper.from_array(np.array(content, np.float32), name))
        return name

    for k, value in enumerate(graph.nodes[node].inputs):
        if k == port:
            proto.input[k] = stored("the_constant", array)
        elif value >= 0 and is_float(graph, value):
            factor = stored(f"factor_{k}", rng.uniform(0.5, 2))
            before.append(helper.make_node("Mul", [proto.input[k], factor], [f"multiplied_{k}"]))
            proto.input[k] = f"multiplied_{k}"
    after = []
    for k, value in enumerate(graph.nodes[node].outputs):
        if value >= 0 and is_float(graph, value):
            factor = stored(f"late_{k}", rng.uniform(0.5, 2))
            after.append(helper.make_node("Mul", [proto.output[k], factor], [f"end_{k}"]))
            held.output.append(helper.make_tensor_value_info(f"end_{k}", TensorProto.FLOAT, None))
    place = node - graph.scopes[0].nodes.start
    nodes = [*held.node[:place], *before, proto, *after, *held.node[place + 1 :]]
    rebuilt = [NodeProto.FromString(one.SerializeToString()) for one in nodes]
    del held.node[:]
    held.node.extend(rebuilt)
    return model


def shapes_of(model: ModelProto, names: list[str], feeds: dict[str, Any]) -> dict[str, tuple[int, ...]] | None:
    shown = ModelProto()
    shown.CopyFrom(model)
    del shown.graph.output[:]
    shown.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    found = run_original(shown, feeds)
    return None if found is None else {name: array.shape for name, array in zip(names, found, strict=True)}


def infinite(value: Any) -> Any:
    """The numbers, infinite where they are large: to some kernels the largest number is the limit, as it is to Clip."""
    if isinstance(value, list):
        return [infinite(item) for item in value]
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return np.where(np.abs(value) >= LARGE, np.copysign(np.float32(np.inf), value), value)
    return value


def check(model: ModelProto, feeds: dict[str, Any], rng: Random) -> int | None:
    """The number of exponents; None where there is nothing to compare."""
    expected = run_original(model, feeds)
    if expected is None:
        return None
    graph = Graph.of(model)
    rescaling = random_rescaling(graph, rng)
    rescaled = passed(rescale, graph, Options(rescaling=rescaling))
    if any("logarithms" in note or "float32's range" in note for note in rescaled.notes):
        return None
    found = run_original(rescaled.graph.model, feeds)
    assert found is not None
    assert all(map(same_bits, map(infinite, expected), map(infinite, found))), rescaling
    return len(rescaling.scaled)


def compared(op: str, seed: str, draws: int) -> int:
    """How many exponents models with a constant in each operand of the op had."""
    generated = random_model(Random(seed), op, 1)
    graph, rng, total = Graph.of(generated.model), Random(seed), 0
    ports = list(operands(graph, op))
    names = [graph.values[graph.nodes[node].inputs[port]].name for node, port in ports]
    shapes = shapes_of(generated.model, names, generated.feeds) if names else None
    for (node, port), name in zip(ports, names, strict=True) if shapes else ():
        for _ in range(draws):
            kind = rng.choice(list(ELEMENTS))
            for shape in (rng.choice(SHAPES), "full") if op not in recipes() else ("full",):  # without one: elementwise
                array = constant(kind, shape, shapes[name], rng)
                try:
                    count = check(surrounded(graph, node, port, array, rng), generated.feeds, rng)
                except AssertionError as error:
                    error.add_note(f"{seed}: {kind} of shape {shape} in input {port}")
                    raise
                if count is not None:
                    total += count
                    break
    return total


@pytest.mark.slow
@every(op=OPS, parts=4)
def test_constants_in_each_operand(op: str) -> None:
    for number in range(2):
        compared(op, f"{op}/{number}", draws=2)


@pytest.mark.slow
def test_constants_meet_exponents() -> None:
    """Else the other test would say nothing."""
    ops = (
        "Where",
        "Max",
        "Min",
        "Sum",
        "Mean",
        "Concat",
        "Clip",
        "PRelu",
        "Pad",
        "ScatterND",
        "Einsum",
        "Loop",
        "Scan",
    )
    assert [op for op in ops if not any(compared(op, f"{op}/{number}", draws=2) for number in range(24))] == []
