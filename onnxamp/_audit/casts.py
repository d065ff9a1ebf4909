"""The Casts of a model: how many there are, how much data they move, and which of them are redundant."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from onnx import helper

from onnxamp._audit.findings import Casts, Finding
from onnxamp._convert.estimate import shapes_at
from onnxamp._dtypes import ELEM_NUMBERS, FORMATS, element_name, is_lossless
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.trips import DEFAULT_TRIPS, guessed_scopes, loop_trips
from onnxamp._graph.view import ABSENT, Node
from onnxamp._rewrite.casts import redundant_casts
from onnxamp._rewrite.pairs import find_pairs
from onnxamp._runtime.sizes import Sizes, dim_name, is_open, listed


@dataclass(frozen=True, slots=True)
class Sized:
    """Shapes of values.

    Attributes:
        shapes: shape by value index.
        assumed: dimension of an input -> the size that is assumed, as for made-up inputs; empty for given inputs.
    """

    shapes: Sequence[Shape | None]
    assumed: Mapping[str, int]

    @property
    def told(self) -> str:
        """At which sizes figures hold, to follow them; "" where nothing is assumed."""
        return f" at {listed(self.assumed)} (assumed)" if self.assumed else ""

    def elements(self, value: int) -> int | None:
        """Return the number of elements of a value; None if a size is unknown."""
        shape = self.shapes[value]
        return None if shape is None or None in shape else elements(shape)


def sized(graph: Graph, given: Mapping[str, Sequence[int]] | None) -> Sized:
    """Return the shapes for given inputs; without any, for inputs of the sizes that made-up ones have."""
    if given:
        return Sized(shapes_at(graph, {name: tuple(shape) for name, shape in given.items()}), {})
    weights = {tensor.name for tensor in graph.model.graph.initializer}
    entries = [
        entry
        for entry in graph.model.graph.input
        if entry.name not in weights
        and entry.type.HasField("tensor_type")
        and entry.type.tensor_type.HasField("shape")
    ]
    assumed = Sizes.of(entries).resolve({})
    if not assumed:
        return Sized(graph.shapes, {})
    shapes = {
        entry.name: tuple(
            assumed[dim_name(entry.name, axis, dim)] if is_open(dim) else dim.dim_value
            for axis, dim in enumerate(entry.type.tensor_type.shape.dim)
        )
        for entry in entries
    }
    return Sized(shapes_at(graph, shapes), assumed)


_FLOATS: Final = frozenset(
    {"tensor(float)", "tensor(double)", *(low.tensor for low in FORMATS.values())}
)
_CLEAN: Final = "onnxamp.remove_redundant_casts(model) removes such Casts; no number changes."


def cast_traffic(graph: Graph, sizes: Sized) -> tuple[Casts, list[Finding]]:
    """Estimate the Casts between floats in one run, and find redundant ones. Complexity: near linear.

    Casts of constants do not count: they run once, while the model is loaded.
    """
    types, constants, trips = graph.types, graph.constants, graph.ask(loop_trips)
    count = moved = unsized = 0
    guessed, assumed = guessed_scopes(graph), dict(sizes.assumed)
    for node in graph.nodes:
        if _is_float_cast(graph, node) and not constants.is_constant(node.inputs[0]):
            count += 1
            size = element_bytes(types[node.inputs[0]]) + element_bytes(types[node.outputs[0]])
            number = sizes.elements(node.inputs[0])
            unsized += number is None
            if node.scope in guessed:
                assumed["iterations of a loop"] = DEFAULT_TRIPS
            moved += size * (number or 0) * trips[node.scope]
    redundant = {
        index
        for index in graph.ask(redundant_casts)
        if not constants.is_constant(graph.nodes[index].inputs[0])
    }
    pairs = graph.ask(find_pairs)
    findings = [
        _redundancy(graph, graph.nodes[index], is_pair=index in pairs.ends | pairs.starts)
        for index in sorted(redundant)
    ]
    return Casts(count, moved, len(redundant), unsized, assumed), [
        *findings,
        *_lossy_pairs(graph, redundant),
    ]


def element_bytes(type_name: str | None) -> int:
    """Bytes of one element of a type, at any depth: 4 if the type is unknown, 0 for strings, at least 1 otherwise."""
    name = (type_name or "float").rsplit("(", maxsplit=1)[-1].rstrip(")")
    if name == "string":
        return 0
    try:
        return int(np.dtype(helper.tensor_dtype_to_np_dtype(ELEM_NUMBERS[name])).itemsize)
    except (KeyError, TypeError):
        return 4


def _is_float_cast(graph: Graph, node: Node) -> bool:
    if node.key != "Cast" or ABSENT in (node.input(0), node.outputs[0]):
        return False
    return graph.types[node.inputs[0]] in _FLOATS and graph.types[node.outputs[0]] in _FLOATS


def _redundancy(graph: Graph, node: Node, *, is_pair: bool) -> Finding:
    before = graph.producer(node.inputs[0])
    behind = {reader.key for reader, _ in graph.consumers(node.outputs[0])}
    severity, text = "warning", "casts a value to a type that another Cast casts it to as well"
    if graph.types[node.inputs[0]] == graph.types[node.outputs[0]]:
        severity, text = (
            "note",
            "casts to the type that its input already has: runtimes drop it while they load",
        )
    elif (before is not None and before.key == "Cast") or behind == {"Cast"}:
        text = "is in a chain of Casts of which the first loses nothing: one Cast or none does the same"
    elif is_pair:
        text = "is one of a pair around data movement, which could move the narrow type"
    return Finding(
        severity=severity, kind="cast", node=node.label, op=node.key, text=text, action=_CLEAN
    )


def _lossy_pairs(graph: Graph, redundant: set[int]) -> Iterator[Finding]:
    """Casts to low precision and back: the pair rounds, perhaps on purpose."""
    for node in graph.nodes:
        before = graph.producer(node.input(0)) if _is_float_cast(graph, node) else None
        if before is None or not _is_float_cast(graph, before) or node.index in redundant:
            continue
        values = before.inputs[0], node.inputs[0], node.outputs[0]
        first, second, third = (element_name(graph.types[value]) for value in values)
        if first == third and not is_lossless(first, second):
            text = f"undoes a Cast to {second}: the pair rounds, and costs two passes over the data"
            action = "Keep pairs that round on purpose; remove_redundant_casts(model, lossy=True) removes the rest."
            yield Finding(
                severity="note", kind="cast", node=node.label, op=node.key, text=text, action=action
            )
