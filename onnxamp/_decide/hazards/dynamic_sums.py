"""Sums whose number of terms depends on the sizes of the inputs: a Gram matrix over rows, linear attention over tokens.

At the sizes of samples they may be small, but they grow with each row or token and leave the range of float16. Means do
not, and neither do sums weighted by numbers that add up to 1, as in attention. Sums that are quantized saturate in any
precision. bfloat16 has the range of float32. Scattered updates are added one by one, so that a sum of ones stops at
2,048 in float16, and at 256 in bfloat16.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf, prod
from typing import Final

from onnxamp._decide.kinds import (
    ByExponents,
    Effect,
    Fault,
    Hazard,
    HazardKind,
    KnownNodes,
    counts_exactly,
    in_range,
)
from onnxamp._decide.sums import is_weighted, readers_of_sum
from onnxamp._facts.dtypes import Format
from onnxamp._facts.ops import attribute_of, op_facts
from onnxamp._graph.constants import expected_terms, summed_terms
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import reduced_axes
from onnxamp._graph.shapes import Shape, elements_along
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._model.weights import SENTINEL


def dynamic_sums(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield sums of a dynamic number of terms, and the nodes that read such a sum before it is divided.

    Complexity: linear; shapes are inferred twice more if there are sums whose terms are unknown.
    """
    seen = set[int]()
    for node in _scattered(graph, low):
        why = "adds the updates of an element one after the other"
        yield Hazard(node.index, KIND, why, unless=counts_exactly(graph, node))
        if low.is_narrow and not is_weighted(graph, node):
            yield from readers_of_sum(graph, node, seen, low, KIND)
    if low.max_finite > SENTINEL:
        return
    open_sums = [
        node
        for node in _sums(graph)
        if _is_open(graph, node) and not is_weighted(graph, node)
    ]
    if not open_sums:
        return
    small, large = (graph.shapes_of(_given(graph, size)) for size in _SIZES)
    for node in open_sums:
        few = _terms(graph, node, small)
        many = _terms(graph, node, large)
        # As far as is known, the number of terms does not depend on the sizes of inputs.
        if few is None or many is None or few == many:
            continue
        why = "sums along an axis that is as long as the input makes it"
        yield Hazard(node.index, KIND, why, unless=in_range(graph, node, low))
        yield from readers_of_sum(graph, node, seen, low, KIND)


def _scattered(graph: Graph, low: Format) -> Iterator[Node]:
    """Yield nodes that add up so many updates, or an unknown number of them, that low precision may lose the last."""
    bounds = op_facts().scattered_sums
    for node in graph.nodes_of(bounds):
        how = attribute_of(node.proto, "reduction", "none")
        if how not in ("add", "mul") or not graph.is_float_output(node):
            continue
        shape = graph.shapes[node.input(1)] or (None,)
        axis = attribute_of(node.proto, bounds[node.key], 0)
        sizes = shape[:-1] if bounds[node.key] == _ROWS else shape[axis:][:1]
        known = [size for size in sizes if size is not None]
        if len(known) < len(sizes) or prod(known) > low.exact_integers:
            yield node


_ROWS: Final = "rows"
"""The entry of ops whose updates come in rows; for others, it is the name of the attribute with the axis."""
_SIZES: Final = (64, 128)
"""Two sizes of all open dimensions: what differs between them depends on the sizes of inputs."""


def _sums(graph: Graph) -> Iterator[Node]:
    """Yield the nodes that sum up computed floats, except means."""
    facts = op_facts()
    keys = facts.growing_reductions | facts.running_sums | facts.contractions
    is_constant = graph.constants.is_constant
    for node in graph.nodes_of(keys - facts.means):
        is_computed = graph.is_float_output(node) and node.input(0) != ABSENT
        if is_computed and node.key in facts.contractions:
            # The terms of a product with a weight are known.
            is_computed = not any(
                is_constant(value) and _is_sized(graph.shapes[value])
                for value in node.inputs[:2]
            )
        if is_computed:
            yield node


def _is_sized(shape: Shape | None) -> bool:
    """Return whether all sizes are known, as those of a weight are, and not those of numbers that fill a shape."""
    return shape is not None and None not in shape


def _is_open(graph: Graph, node: Node) -> bool:
    """Return whether the number of terms is not known from the declared shapes."""
    if node.key not in op_facts().contractions:
        return _terms(graph, node, graph.shapes) is None
    shapes = (graph.shapes[value] for value in node.reads)
    if all(map(_is_sized, shapes)):
        return False
    few, many = (_products(node, graph.shapes, size) for size in _SIZES)
    return few != many


def _terms(graph: Graph, node: Node, shapes: Sequence[Shape | None]) -> int | None:
    """Return how many terms each element of the output sums up; None if that is unknown."""
    facts = op_facts()
    if node.key in facts.contractions:
        return _products(node, shapes, 0) or None
    is_running = node.key in facts.running_sums
    terms = None if is_running else summed_terms(node, shapes)
    if terms is not None:
        return terms
    shape = shapes[node.inputs[0]]
    if is_running:
        axes = graph.constants.integers(node.input(1))
    elif node.key in facts.reduces_axes and shape is not None:
        # Along axes that a body captures as well, whose results have no shape.
        axes = reduced_axes(graph, node, len(shape))
    else:
        return None
    number = elements_along(shape, axes) if axes is not None else inf
    return None if number == inf else int(number)


def _products(node: Node, shapes: Sequence[Shape | None], size: int) -> int | None:
    """Return how many products each element of the output sums up if unknown dimensions have a size."""
    filled = {value: _filled(shapes[value], size) for value in node.reads}
    return expected_terms(node, filled)


def _filled(shape: Shape | None, size: int) -> Shape | None:
    """Return a shape with a size in place of each unknown dimension."""
    if shape is None:
        return None
    return tuple(size if dim is None else dim for dim in shape)


def _given(graph: Graph, size: int) -> Mapping[str, Sequence[int]]:
    """Return the shapes of the inputs whose open dimensions have a size."""
    shapes = {}
    for value in graph.scopes[0].inputs:
        shape = graph.shapes[value]
        if shape is not None and graph.values[value].origin is Origin.INPUT:
            shapes[graph.values[value].name] = [
                size if dim is None else dim for dim in shape
            ]
    return shapes


class _DynamicSums(HazardKind):
    value = "dynamic sum"
    title = "a sum that grows with the size of an input"
    looks_at = (
        "growing_reductions",
        "running_sums",
        "scattered_sums",
        "contractions",
    )
    exponents = ByExponents.CURE
    is_measurable = True
    fault = Fault(Effect.GROWS, "{detail} in LOW", ", which ends at {end:.6g}")

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return dynamic_sums(graph, low)

    def spared(self, known: KnownNodes, /) -> AbstractSet[int]:
        """Return the sums of gradients, which shrink with the loss scale, however many terms they have."""
        return known.scaled


KIND: Final = _DynamicSums()
