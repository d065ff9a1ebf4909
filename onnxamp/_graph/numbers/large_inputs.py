"""Uses of a model's inputs that show that an input may be large, see :mod:`onnxamp._graph.numbers.raw_inputs`."""

import re
from typing import Final

import numpy as np

from onnxamp._facts.dtypes import FLOAT_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.channels import weight_rows
from onnxamp._graph.numbers.index_paths import INTEGERS
from onnxamp._graph.numbers.powers import is_power, uncast
from onnxamp._graph.numbers.raw_inputs import RawInputs
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node

_DOWN: Final = 1 / 256
"""Factors below this scale down more than the colors of an image, so that an input may be large."""

_COUNTS_DOWN: Final = 1 / 64
"""The same for inputs of integers, such as cents and milliseconds."""

_UNALIKE: Final = 1e-3
"""Share of the largest weights of a first layer below which those of a feature show that it has another unit."""

_SMALL: Final = 2e-4
"""Weights of a feature below which it is large, if others have larger ones: the layer makes numbers of a few units."""

_STABILIZES: Final = 0.1
"""The smallest number whose sum with counts has a root that is taken to even out their noise."""

_DEAD: Final = 1e-8
"""Weights of a feature from which on they are no remains of a decay."""

_MOST: Final = 1 << 16
"""Elements of a factor up to which it is read."""

_FLAGS: Final = re.compile("mask|len|valid|pad|segment|type|flag", re.IGNORECASE)
"""Parts of the names of inputs whose integers are small: what counts, how many count, kinds."""

_SHARES: Final = re.compile("scale|gain|gate|alpha|noise", re.IGNORECASE)
"""Parts of the names of inputs that are factors of a few units."""

_SERIES: Final = 3
"""Axes of a batch of series: samples, steps and features."""

_REACH: Final = 16
"""Nodes that are followed back to an input."""


def scaled_down_by(graph: Graph, raw: RawInputs, node: Node) -> float | None:
    """Return the smallest factor by which a node scales raw values; None if it does not scale them down far."""
    if node.key not in ("Mul", "Div") or ABSENT in node.inputs:
        return None
    is_divided = node.key == "Div"
    # Of a quotient, only the dividend is scaled.
    pairs = [(node.inputs[0], node.inputs[1])]
    pairs += [] if is_divided else [(node.inputs[1], node.inputs[0])]
    for value, other in pairs:
        source = raw.sums.get(value, raw.means.get(value, value))
        if not raw.are_plain([source]):
            continue
        numbers = graph.constants.numbers(other, most=_MOST)
        if numbers is None:
            continue
        sizes = np.abs(numbers.astype(np.float64).reshape(-1))
        factors = sizes[sizes > 0]
        factors = 1 / factors if is_divided else factors
        least = float(factors.min(initial=1.0))
        if value in raw.sums and _is_mean(graph, source, value, least):
            continue
        is_count = least < _COUNTS_DOWN and bool(_integer_type(graph, raw, value))
        return least if least < _DOWN or is_count else None
    return None


def _is_mean(graph: Graph, source: int, total: int, factor: float) -> bool:
    """Return whether a factor divides a sum by about the number of its terms, which says nothing of them."""
    before, after = (elements(graph.shapes[value]) for value in (source, total))
    return 1 / _ABOUT < factor * before / max(after, 1) < _ABOUT


_ABOUT: Final = 4.0
"""How far the number by which a sum is divided may be from that of its terms, some of which a mask may leave out."""


def takes_root(graph: Graph, raw: RawInputs, node: Node) -> bool:
    """Return whether a node takes a root or the like of an input, which brings large numbers into range.

    A square root alone may be of any number. That of counts and a constant evens out their noise (Anscombe, 1948).
    """
    if not raw.are_plain(node.inputs[:1]):
        return False
    if node.key == "Pow":
        exponent = graph.constants.uniform(node.input(1))
        return exponent is not None and 0 < exponent < 1
    total = graph.producer(node.input(0), "Add") if node.key == "Sqrt" else None
    numbers = () if total is None else map(graph.constants.uniform, total.inputs)
    return node.key == "Asinh" or any(
        number and number >= _STABILIZES for number in numbers
    )


def weighs_large_features(graph: Graph, raw: RawInputs, node: Node) -> bool:
    """Return whether the weights of a first layer show that some features are large, because theirs are tiny.

    Exporters fold x / deviation into the first layer.
    """
    if node.key not in ("Gemm", "MatMul") or not raw.are_plain(node.inputs[:1]):
        return False
    rows = weight_rows(graph, node)
    if rows is None:
        return False
    largest = np.abs(rows).max(axis=0)
    used = largest[largest > _DEAD]
    # Where some have decayed that far, small ones are what a decay has left as well.
    has_decayed = ((largest > 0) & (largest <= _DEAD)).any()
    if not used.size or has_decayed:
        return False
    return float(used.min()) < min(_SMALL, _UNALIKE * float(used.max()))


def is_residual(graph: Graph, raw: RawInputs, node: Node) -> bool:
    """Return whether a result of the model is the sum of an input and something computed, as in forecasts."""
    if node.key not in op_facts().additive or len(node.reads) != 2:
        return False
    plain = [value for value in node.reads if raw.are_plain([value])]
    is_result = len(plain) == 1 and node.outputs[0] in graph.ask(_results)
    other = [value for value in node.reads if value not in plain]
    is_computed = bool(other) and not graph.constants.is_constant(other[0])
    return is_result and is_computed


def _results(graph: Graph) -> frozenset[int]:
    """Return the values that the model returns, in any type."""
    return frozenset(uncast(graph, value) for value in graph.scopes[0].outputs)


def restores_mean(graph: Graph, raw: RawInputs, node: Node) -> bool:
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


def multiplied_integers(graph: Graph, raw: RawInputs, node: Node) -> str:
    """Return the type of integers of an input that a node multiplies as they are; "" for other nodes.

    Masks and lengths are integers as well, which their names tell.
    """
    is_constant = graph.constants.is_constant
    if node.key in op_facts().products and is_constant(node.input(1)):
        return _weighted_integers(graph, raw, node.input(0))
    if node.key == "Mul" and not any(map(is_constant, node.reads)):
        return _scaled_integers(graph, raw, node)
    return ""


def _weighted_integers(graph: Graph, raw: RawInputs, value: int) -> str:
    """Return the type of integers that weights multiply; "" if there are none.

    They add up whatever their type holds, such as samples of 16 bits, or incomes and years of 64.
    """
    kind = _integer_type(graph, raw, value)
    sizes = graph.shapes[value] or ()
    # Positions and time steps, one in each row, are a hazard of their own.
    is_single = sizes[-1:] == (1,)
    return "" if "64" in kind and is_single else kind


def _scaled_integers(graph: Graph, raw: RawInputs, node: Node) -> str:
    """Return the type of integers that a computed value multiplies; "" if there are none.

    Times single values, only larger types than 16 bits leave the range.
    """
    given = [value for value in node.reads if raw.are_plain([value])]
    if len(given) != 1:
        return ""
    kind = _integer_type(graph, raw, given[0])
    return "" if "16" in kind else kind


def _integer_type(graph: Graph, raw: RawInputs, value: int) -> str:
    """Return the type of the integers that a raw value is, cast and moved, in words; "" for other values."""
    stack = [value]
    for _ in range(_REACH):
        if not stack:
            break
        value = stack.pop()
        if value in raw.wide:
            kind = graph.types[value]
            names = [graph.values[source].name for source in raw.wide[value]]
            is_flag = all(map(_FLAGS.search, names))
            if kind in INTEGERS and not is_flag:
                return f"{kind}"[len("tensor(") : -1]
            continue
        if not raw.are_plain([value]):
            continue
        if value in raw.sources:
            stack.append(raw.sources[value][0])
            continue
        maker = graph.producer(value)
        if maker is None:
            continue
        is_moved = maker.key in op_facts().moves_data or maker.index in graph.passing
        if maker.key == "Concat":
            stack += maker.inputs
        elif maker.key == "Cast" or is_moved:
            stack.append(maker.inputs[0])
    return ""


def growth(graph: Graph, raw: RawInputs, node: Node) -> str:
    """Return how a node makes large numbers of raw ones, as a verb phrase; "" for other nodes."""
    if node.input(0) in raw.channels and is_power(graph, node):
        return "squares an input of the model, which leaves the range from 256 on"
    is_exponent = node.key == "Pow" and graph.constants.is_constant(node.inputs[0])
    is_exponential = node.key in op_facts().exponentials or is_exponent
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
