"""Inputs that may be large, as what is done to them shows: they are scaled down, squared, or integers to be summed up.

Random samples are numbers of a few units. A model that multiplies its input by 1e-5 reads cents, seconds or integers,
which may end beyond float16. And squares of an input leave the range from 256 on, as those of audio in integers do, and
lose all digits below 0.001. Neither happens in bfloat16, which has the range of float32.
"""

import re
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

import numpy as np

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
from onnxamp._decide.patterns import GROWING, patterns_of
from onnxamp._facts.dtypes import FLOAT_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.distances import cosine_nodes
from onnxamp._graph.exact_walks import readers_through_exact
from onnxamp._graph.graph import Graph
from onnxamp._graph.index_paths import INTEGERS
from onnxamp._graph.known import is_rounded
from onnxamp._graph.raw_inputs import RawInputs, raw_inputs, raw_makers, raw_readers
from onnxamp._graph.view import ABSENT, Node, passed_values


def input_magnitudes(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield nodes that scale an input down, with those before them, and nodes that square one, with those after them.

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
        if node.index not in raw_nodes:
            continue
        factor = _factor(graph, raw, node)
        claims = in_range(graph, node, low)
        if factor is not None:
            why = f"scales an input of the model by {factor:.3g}, so that it may be large"
            yield Hazard(node.index, KIND, why, rare=True, unless=claims)
            why = f"leads from an input to {node.label!r}, which scales it down"
            for maker, value in raw_makers(graph, raw, node, seen):
                yield Hazard(maker.index, KIND, why, True, value, claims)
        elif _is_residual(graph, raw, node):
            why = "adds an input of the model to a result, which has its magnitude"
            yield Hazard(node.index, KIND, why, rare=True, unless=claims)
        elif _restores(graph, raw, node):
            why = "gives a result the magnitude of an input of the model, by its mean"
            yield Hazard(node.index, KIND, why, rare=True, unless=claims)
            why = f"reads the result of {node.label!r}, which has the magnitude of an input"
            for reader in readers_through_exact(graph, node, seen):
                yield Hazard(reader.index, KIND, why, rare=True, unless=claims)
        elif kind := _integers_multiplied(graph, raw, node):
            why = f"multiplies an input of {kind}, which may be large"
            yield Hazard(node.index, KIND, why, rare=True, unless=claims)
            yield from _after(graph, node, claims)
            why = f"leads from integers to {node.label!r}, which multiplies them"
            for maker, value in raw_makers(graph, raw, node, seen):
                yield Hazard(maker.index, KIND, why, True, value, claims)
        elif why := _growth(graph, raw, node):
            yield Hazard(node.index, KIND, why, rare=True, unless=claims)
            yield from _after(graph, node, claims)


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
        if any(raw.are_plain(one.inputs) for one in products):
            claims = [claim for one in nodes for claim in in_range(graph, one, low)]
            why = f"multiplies inputs of the model before {node.label!r} divides by their lengths"
            for one in nodes:
                yield Hazard(one.index, KIND, why, rare=True, unless=tuple(claims))


def _squared_sines(graph: Graph, low: Format) -> Iterator[Hazard]:
    """Yield squares of sines, as in haversines, with what is between them and a root: those of small angles vanish."""
    for node in graph.nodes_of({"Sin"}):
        for reader in graph.at({one.index for one, _ in graph.readers(node)}):
            if not _squares(graph, reader):
                continue
            if any(one.key in op_facts().curves for one in _spread(graph, [reader])):
                claims = large_enough(graph, reader, low.smallest_normal)
                why = "squares a sine, which vanishes for small angles"
                yield Hazard(reader.index, KIND, why, rare=True, unless=claims)
                yield from _after(graph, reader, claims)


def _factor(graph: Graph, raw: RawInputs, node: Node) -> float | None:
    """Return the smallest factor by which a node scales raw values; None if it does not scale them down far."""
    if node.key not in ("Mul", "Div") or ABSENT in node.inputs:
        return None
    is_divided = node.key == "Div"
    for value, other in (node.inputs, reversed(node.inputs)):
        numbers = graph.constants.numbers(other) if raw.are_plain([value]) else None
        if numbers is not None and numbers.size <= _MOST:
            sizes = np.abs(numbers.astype(np.float64).reshape(-1))
            factors = 1 / sizes[sizes > 0] if is_divided else sizes[sizes > 0]
            least = float(factors.min(initial=1.0))
            return least if least < _DOWN else None
        if is_divided:
            break
    return None


_DOWN: Final = 1 / 2048
"""Factors below this bring what ends beyond float16 to less than 32: what is scaled to units is 2,048 or more."""
_MOST: Final = 1 << 16
"""Elements of a factor up to which it is read."""


def _restores(graph: Graph, raw: RawInputs, node: Node) -> bool:
    """Return whether a node adds a mean of an input to something computed, or multiplies it by the mean.

    Forecasters normalize a series by its mean, and undo that at the end.
    """
    if node.key not in ("Add", "Mul") or ABSENT in node.inputs:
        return False
    means, others = 0, 0
    for value in node.inputs:
        is_mean = raw.are_plain([raw.means.get(value, ABSENT)])
        is_own = raw.are_plain([value]) or graph.constants.is_constant(value)
        means += is_mean
        others += not (is_mean or is_own)
    return bool(means and others)


def _is_residual(graph: Graph, raw: RawInputs, node: Node) -> bool:
    """Return whether a result of the model is the sum of an input and something computed, as in forecasts."""
    if node.key not in op_facts().additive or len(node.reads) != 2:
        return False
    plain = [value for value in node.reads if raw.are_plain([value])]
    results = (_uncast(graph, value) for value in graph.scopes[0].outputs)
    is_result = len(plain) == 1 and node.outputs[0] in results
    other = [value for value in node.reads if value not in plain]
    is_computed = bool(other) and not graph.constants.is_constant(other[0])
    return is_result and is_computed


def _integers_multiplied(graph: Graph, raw: RawInputs, node: Node) -> str:
    """Return the type of integers of an input that a node multiplies as they are; "" for other nodes.

    Weights that multiply them add up whatever their type holds, such as samples of 16 bits, or incomes and years of 64.
    Times single computed values, only larger types than 16 bits leave the range. Masks and lengths are integers as
    well, which their names tell.
    """
    if node.key in op_facts().products and graph.constants.is_constant(node.input(1)):
        kind = _integer_type(graph, raw, node.input(0))
        sizes = graph.shapes[node.input(0)] or ()
        # Positions and time steps, one in each row, are a hazard of their own.
        is_single = sizes[-1:] == (1,)
        return "" if "64" in kind and is_single else kind
    if node.key == "Mul" and not any(map(graph.constants.is_constant, node.reads)):
        given = [value for value in node.reads if raw.are_plain([value])]
        kind = _integer_type(graph, raw, given[0]) if len(given) == 1 else ""
        return "" if "16" in kind else kind
    return ""


def _integer_type(graph: Graph, raw: RawInputs, value: int) -> str:
    """Return the type of the integers that a raw value is, cast and moved, in words; "" for other values."""
    for _ in range(_REACH):
        if not raw.are_plain([value]):
            return ""
        if value in raw.sources:
            value = raw.sources[value][0]
            continue
        maker = graph.producer(value)
        if maker is None:
            return ""
        is_moved = maker.key in op_facts().moves_data or maker.index in graph.passing
        if maker.key != "Cast" and not is_moved:
            return ""
        value = maker.inputs[0]
        if value in raw.wide:
            kind = graph.types[value]
            is_flag = _FLAGS.search(graph.values[value].name) is not None
            is_count = kind in INTEGERS and not is_flag
            return f"{kind}"[len("tensor(") : -1] if is_count else ""
    return ""


_FLAGS: Final = re.compile("mask|len|valid|pad|segment|type|flag", re.IGNORECASE)
"""Parts of the names of inputs whose integers are small: what counts, how many count, kinds."""


def _growth(graph: Graph, raw: RawInputs, node: Node) -> str:
    """Return how a node makes large numbers of raw ones, as a verb phrase; "" for other nodes."""
    if node.input(0) in raw.channels and _squares(graph, node):
        return "squares an input of the model, which leaves the range from 256 on"
    is_power = node.key == "Pow" and graph.constants.is_constant(node.inputs[0])
    is_exponential = node.key in op_facts().exponentials or is_power
    if is_exponential and raw.are_plain(node.inputs[-1:]):
        return "takes the exponential of an input of the model, which soon leaves the range"
    if node.key == "Mul" and _are_columns(graph, raw, *node.inputs):
        return "multiplies two inputs of the model, which leave the range from 256 on"
    return ""


def _are_columns(graph: Graph, raw: RawInputs, one: int, other: int) -> bool:
    """Return whether two raw values are columns of a table or parts of a series, and neither is a share of the other.

    Images are multiplied by masks and shares of other images, and features by scales, which mostly have another shape.
    """
    values = one, other
    shapes = [graph.shapes[value] for value in values]
    is_table = all(shape and len(shape) <= _SERIES for shape in shapes)
    if not (is_table and all(raw.are_plain([value]) for value in values)):
        return False
    sources = [_origin(graph, raw, value) for value in values]
    is_float = all(graph.types[source] in FLOAT_TENSORS for source in sources)
    names = [graph.values[source].name for source in sources]
    is_share = any(_FLAGS.search(name) or _SHARES.search(name) for name in names)
    is_alike = shapes[0] == shapes[1] or sources[0] == sources[1]
    return is_float and is_alike and not is_share


_SHARES: Final = re.compile("scale|gain|gate|alpha|noise", re.IGNORECASE)
"""Parts of the names of inputs that are factors of a few units."""


def _origin(graph: Graph, raw: RawInputs, value: int) -> int:
    """Return the input of the model that a raw value is computed from, or how far it was followed."""
    for _ in range(_REACH):
        maker = graph.producer(value)
        read = () if maker is None else maker.inputs
        known = [one for one in read if one in raw.channels or one in raw.wide]
        if not known:
            break
        value = known[0]
    return value


_SERIES: Final = 3
"""Axes of a batch of series: samples, steps and features."""


def _squares(graph: Graph, node: Node) -> bool:
    """Return whether a node squares its first input, or raises it to a higher power."""
    if node.key == "Mul":
        one, other = (_uncast(graph, value) for value in node.inputs)
        return one == other
    if node.key == "Pow":
        exponent = graph.constants.uniform(node.input(1))
        return exponent is not None and exponent >= 2
    return node.key == "ReduceSumSquare"


def _uncast(graph: Graph, value: int) -> int:
    """Return the value that is passed on as this one, in any type."""
    while (maker := graph.producer(graph.passed_on(value), "Cast")) is not None:
        value = maker.inputs[0]
    return graph.passed_on(value)


def _after(graph: Graph, power: Node, claims: tuple[Claim, ...]) -> Iterator[Hazard]:
    """Yield the nodes that read a power, up to those that bring it back into range: a root, a logarithm, weights."""
    why = f"reads what {power.label!r} computes"
    ends = _spread(graph, [power])
    found = {node.index for node in ends}
    products = [node for node in ends if node.key in op_facts().contractions]
    # Weights may bring powers back into range. Those of a spectrum do not if its logarithm follows.
    for product in products:
        after = _spread(graph, [product])
        if any(node.key in op_facts().curves for node in after):
            found.update(node.index for node in after)
    for index in sorted(found):
        yield Hazard(index, KIND, why, rare=True, unless=claims)
    # What leaves a body large must leave it unrounded, whatever the other branch returns.
    for node in graph.at({power.index, *found}):
        for value in _passed_on(graph, node):
            owner = graph.producer(value)
            if owner is not None:
                yield Hazard(
                    owner.index, KIND, why, rare=True, value=value, unless=claims
                )


def _spread(graph: Graph, starts: list[Node]) -> list[Node]:
    """Return the nodes that read the results of some nodes, directly or through sums, factors and exact ops."""
    facts = op_facts()
    passes = facts.additive | facts.reductions | facts.means
    seen = {node.index for node in starts}
    found = list[Node]()
    stack = list(starts)
    while stack and len(found) < _REACH:
        for reader, port in _readers(graph, stack.pop()):
            if reader.index in seen or reader.bodies or _has_one_type(reader, port):
                continue
            seen.add(reader.index)
            found.append(reader)
            computed = [
                value
                for value in reader.reads
                if not graph.constants.is_constant(value)
            ]
            is_scaling = reader.key in facts.linear and len(computed) == 1
            if is_scaling or reader.key in passes or reader.index in graph.exact:
                stack.append(reader)
    return found


_REACH: Final = 16
"""Nodes that are followed from a power."""


def _passed_on(graph: Graph, node: Node) -> list[int]:
    """Return the values as which control flow passes on a node's results, into bodies and out of them."""
    passed = graph.ask(passed_values)
    found = dict[int, None]()
    stack = list(node.writes) if passed else []
    while stack:
        results = [one for one in passed.get(stack.pop(), ()) if one not in found]
        found.update(dict.fromkeys(results))
        stack += results
    return list(found)


def _readers(graph: Graph, node: Node) -> Iterator[tuple[Node, int]]:
    """Yield the readers of a node's results, with the ports, also where control flow passes them on."""
    yield from graph.readers(node)
    for value in _passed_on(graph, node):
        yield from graph.consumers(value)


def _has_one_type(node: Node, port: int) -> bool:
    """Return whether an input has the same type in any precision, as the scales of a Resize have."""
    signature = node.signature
    if signature is None:
        return False
    formal = signature.input(port)
    return formal is not None and formal.type not in signature.params


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
        return bool((numbers == np.round(numbers)).all())

    def spared(self, known: KnownNodes, /) -> AbstractSet[int]:
        """Return the nodes whose magnitudes were measured, which ``--rescale`` brings into range."""
        return known.ranged

    def find_in_low(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        """Return the hazards but those of squares in decomposed patterns, which audits report by themselves."""
        known = set[int]()
        for match in patterns_of(graph, *GROWING):
            known |= match.nodes
        return (one for one in self.find(graph, low) if one.node not in known)


KIND: Final = _Magnitudes()
