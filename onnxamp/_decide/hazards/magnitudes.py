"""Inputs that may be large, as what is done to them shows: they are scaled down, squared, or integers to be summed up.

Random samples are numbers of a few units. A model that multiplies its input by 1e-5 reads cents, seconds or integers,
which may end beyond float16. And squares of an input leave the range from 256 on, as those of audio in integers do, and
lose all digits below 0.001. Neither happens in bfloat16, which has the range of float32.
"""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from onnxamp._decide.kinds import (
    ByExponents,
    Claim,
    Effect,
    Fault,
    Hazard,
    HazardKind,
    KnownNodes,
    in_range,
    large_enough,
)
from onnxamp._decide.patterns.find import GROWING, pattern_nodes
from onnxamp._facts.dtypes import Format
from onnxamp._graph.exact_walks import readers_through_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.distances import cosine_nodes
from onnxamp._graph.numbers.known import is_rounded
from onnxamp._graph.numbers.large_inputs import (
    growth,
    is_residual,
    multiplied_integers,
    restores_mean,
    scaled_down_by,
    takes_root,
    weighs_large_features,
)
from onnxamp._graph.numbers.powers import ends_in_curve, is_power, readers_of_power
from onnxamp._graph.numbers.raw_inputs import (
    RawInputs,
    raw_inputs,
    raw_makers,
    raw_readers,
)
from onnxamp._graph.passed import passed_on
from onnxamp._graph.view import Node


def input_magnitudes(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield nodes that use inputs of the model as large numbers, and the nodes before and after them that see these.

    Complexity: linear.
    """
    if not low.is_narrow:
        return
    raw = graph.ask(raw_inputs)
    raw_nodes = graph.ask(raw_readers)
    yield from _cosines(graph, raw, low)
    yield from _squared_sines(graph, low)
    seen = set[int]()
    for node in graph.computing:
        use = _use_of(graph, raw, node) if node.index in raw_nodes else None
        if use is None:
            continue
        claims = in_range(graph, node, low)
        yield Hazard(node.index, KIND, use.why, rare=True, unless=claims)
        if use.readers:
            for reader in readers_through_exact(graph, node, seen):
                yield Hazard(reader.index, KIND, use.readers, rare=True, unless=claims)
        if use.grows:
            yield from _after(graph, node, claims)
        if use.makers:
            for maker, value in raw_makers(graph, raw, node, seen):
                yield Hazard(maker.index, KIND, use.makers, True, value, claims)


class _LargeUse(NamedTuple):
    """What a node does with an input that may be large, and why its neighbors are at risk as well; "" if they are not.

    Attributes:
        why: what the node does, as a verb phrase.
        makers: the same for the nodes that lead to it from the input.
        readers: the same for the nodes that read its result through exact ops.
        grows: whether its result is larger than the input, so that the nodes up to a root or a logarithm are at risk.
    """

    why: str
    makers: str = ""
    readers: str = ""
    grows: bool = False


def _use_of(graph: Graph, raw: RawInputs, node: Node) -> _LargeUse | None:
    """Return what a node does with inputs that may be large; None if it does nothing of the kind."""
    if why := _brings_into_range(graph, raw, node):
        return _LargeUse(
            f"{why}, which shows that it may be large",
            makers=f"leads from an input to {node.label!r}, which brings it into range",
        )
    if is_residual(graph, raw, node):
        return _LargeUse(
            "adds an input of the model to a result, which has its magnitude"
        )
    if restores_mean(graph, raw, node):
        return _LargeUse(
            "gives a result the magnitude of an input of the model, by its mean",
            readers=f"reads the result of {node.label!r}, which has the magnitude of an input",
        )
    if kind := multiplied_integers(graph, raw, node):
        return _LargeUse(
            f"multiplies an input of {kind}, which may be large",
            makers=f"leads from integers to {node.label!r}, which multiplies them",
            grows=True,
        )
    why = growth(graph, raw, node)
    return _LargeUse(why, grows=True) if why else None


def _brings_into_range(graph: Graph, raw: RawInputs, node: Node) -> str:
    """Return how a node makes numbers of a few units of an input, as a verb phrase; "" if it does not."""
    factor = scaled_down_by(graph, raw, node)
    if factor is not None:
        return f"scales an input of the model by {factor:.3g}"
    if takes_root(graph, raw, node):
        return "takes a root of an input of the model"
    if weighs_large_features(graph, raw, node):
        return "multiplies an input of the model by tiny weights"
    return ""


def _cosines(graph: Graph, raw: RawInputs, low: Format) -> Iterator[Hazard]:
    """Yield the nodes of cosines of inputs that are divided by lengths at last: their product leaves the range."""
    for node in graph.nodes_of({"Div"}):
        nodes = graph.at(cosine_nodes(graph, node))
        # What a normalization divides by its own length has another reader, which computes the length.
        products = (
            one
            for one in nodes
            if len(one.inputs) > 1
            and one is not node
            and graph.only_reader(one.outputs[0]) is not None
        )
        if any(raw.are_plain(product.inputs) for product in products):
            claims = [claim for one in nodes for claim in in_range(graph, one, low)]
            why = f"multiplies inputs of the model before {node.label!r} divides by their lengths"
            for one in nodes:
                yield Hazard(one.index, KIND, why, rare=True, unless=tuple(claims))


def _squared_sines(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield squares of sines, as in haversines, with what is between them and a root: those of small angles vanish."""
    for node in graph.nodes_of({"Sin"}):
        for reader in graph.at({one.index for one, _ in graph.readers(node)}):
            if is_power(graph, reader) and ends_in_curve(graph, reader):
                claims = large_enough(graph, reader, low.smallest_normal)
                why = "squares a sine, which vanishes for small angles"
                yield Hazard(reader.index, KIND, why, rare=True, unless=claims)
                yield from _after(graph, reader, claims)


def _after(graph: Graph, power: Node, claims: tuple[Claim, ...]) -> Iterator[Hazard]:
    """Yield the nodes that read a power, up to those that bring it back into range."""
    why = f"reads what {power.label!r} computes"
    readers = readers_of_power(graph, power)
    for node in readers:
        yield Hazard(node.index, KIND, why, rare=True, unless=claims)
    # What leaves a body large must leave it unrounded, whatever the other branch returns.
    for node in (power, *readers):
        for value in passed_on(graph, node).values:
            owner = graph.producer(value)
            if owner is not None and owner is not node:
                yield Hazard(owner.index, KIND, why, True, value, claims)


class _Magnitudes(HazardKind):
    value = "input magnitude"
    title = "an input that may be large is scaled down or squared"
    looks_at = ("linear", "multiplies")
    exponents = ByExponents.CURE
    fault = Fault(Effect.LEAVES_RANGE, "{detail}, in LOW", ": it ends at {end:.6g}")

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        return input_magnitudes(graph, low)

    def loses(self, graph: Graph, weight: int, low: Format, /) -> bool:
        """Return whether a weight holds integers that low precision rounds, such as the columns of a large image."""
        numbers = graph.constants.numbers(weight)
        if numbers is None or not is_rounded(graph, weight, low):
            return False
        return bool((numbers % 1 == 0).all())

    def spared(self, known: KnownNodes, /) -> AbstractSet[int]:
        """Return the nodes whose magnitudes were measured, which ``--rescale`` brings into range."""
        return known.ranged

    def find_in_low(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        """Return the hazards but those of squares in decomposed patterns, which audits report by themselves."""
        known = pattern_nodes(graph, *GROWING)
        return (hazard for hazard in self.find(graph, low) if hazard.node not in known)


KIND: Final = _Magnitudes()
