"""Quotients that are bounded although neither operand is: a value divided by its own norm, or by its own sum.

Exporters write a normalization as a dozen nodes, and a softmax as three. The quotient is bounded because the divisor is
computed from the dividend: it is no less than a share of the root of the sum of the dividend's squares. What is known
of each node of the divisor is kept, so that no form has to be recognized as a whole.
"""

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from math import inf
from typing import Final

import numpy as np

from onnxamp._base.records import record
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._graph.bounds.bound import Bound, times
from onnxamp._graph.bounds.call import Call
from onnxamp._graph.match import reduced_axes
from onnxamp._graph.shapes import elements_along
from onnxamp._graph.view import ABSENT


class Relation(Enum):
    """The relation between a value and the one that it is computed from, its source."""

    EACH = "each element is a power of one of the source"
    SUM = "it is no less than a share of the sum of these powers"
    INVERSE = "it is no more than the reciprocal of that"


@record
class Ratio:
    """A value and its relation to the source that it is computed from.

    Attributes:
        source: the value.
        relation: what is known.
        power: the power of the source's elements, 1 or 2.
        root: whether a root was taken of the sum.
        share: the factor of the sum: one over the number of elements, for a mean.
        axes: the axes of the sum.
        is_aligned: whether these axes are there, with size 1, so that a quotient divides each vector by its own sum.
        is_last: whether the sum is over vectors along the last axis.
        lost: how much less the sum may be, because numbers that are too small become zero.
    """

    source: int
    relation: Relation
    power: int
    root: bool = False
    share: float = 1.0
    axes: tuple[int, ...] = ()
    is_aligned: bool = True
    is_last: bool = False
    lost: float = 0.0

    @property
    def limit(self) -> float:
        """The largest magnitude of an element of the source divided by the value; infinite if nothing bounds it."""
        if self.power == 2 and not self.root:
            return inf
        if self.share <= 0.0 or self.lost > 0.0:
            return inf
        return self.share**-0.5 if self.root else 1.0 / self.share


_Known = Mapping[int, Ratio]


def quotient(call: Call, ratios: _Known) -> Bound | None:
    """Return the bound of a value divided by its own norm or sum; None for other nodes."""
    node = call.node
    if node.key == "Div":
        return _divided(call, ratios.get(node.inputs[1]), 0, Relation.SUM)
    if node.key == "Mul":
        for port in range(2):
            ratio = ratios.get(node.inputs[1 - port])
            bound = _divided(call, ratio, port, Relation.INVERSE)
            if bound is not None:
                return bound
    return None


def _divided(
    call: Call, ratio: Ratio | None, port: int, relation: Relation
) -> Bound | None:
    """Return the bound of an input divided by a value, if that input is the value's source."""
    value = call.node.inputs[port]
    if ratio is None or ratio.relation is not relation or ratio.limit == inf:
        return None
    if not ratio.is_aligned or call.graph.passed_on(value) != ratio.source:
        return None
    if relation is Relation.INVERSE and call[1 - port].is_unbounded:
        return None
    # Powers, sums, roots and reciprocals are rounded one by one.
    limit = ratio.limit * (1.0 + 2.0 * call.rounding.error)
    low = 0.0 if call[port].low >= 0.0 else -limit
    high = 0.0 if call[port].high <= 0.0 else limit
    bound = Bound(low=low, high=high)
    width = call[port].width
    if ratio.is_last and width is not None and width == call.width():
        bound = replace(bound, row=limit)
        if ratio.power == 1:
            bound = replace(bound, total=limit)
    return bound.sized(call.width())


def ratio_of(call: Call, ratios: _Known) -> Ratio | None:
    """Return how the first output of a node is related to what it is computed from; None if that is unknown."""
    node = call.node
    if not node.inputs or node.inputs[0] == ABSENT:
        return None
    known = ratios.get(node.inputs[0])
    change = _CHANGES.get(node.key)
    if change is not None:
        return change(call, known, ratios)
    return known if node.index in call.graph.passing else None


def _product(call: Call, _known: Ratio | None, _ratios: _Known) -> Ratio | None:
    """Return the ratio of a product of a value with itself."""
    source, other = (call.graph.passed_on(value) for value in call.node.inputs)
    return _squared(call, source) if source == other else None


def _squared(call: Call, source: int) -> Ratio:
    least = call.rounding.least
    return Ratio(source=source, relation=Relation.EACH, power=2, lost=least)


def _power(call: Call, known: Ratio | None, ratios: _Known) -> Ratio | None:
    """Return the ratio of a square or of a root."""
    exponent = call[1]
    if exponent.low != exponent.high:
        return None
    if exponent.low == 2.0:
        return _squared(call, call.graph.passed_on(call.node.inputs[0]))
    if abs(exponent.low) != 0.5:
        return None
    root = _rooted(call, known, ratios)
    return root if exponent.low > 0.0 else _inverted(call, root, ratios)


def _exponential(call: Call, _known: Ratio | None, _ratios: _Known) -> Ratio:
    """Return the ratio of a positive value, as a softmax sums up."""
    return Ratio(source=call.node.outputs[0], relation=Relation.EACH, power=1)


def _norm(call: Call, _known: Ratio | None, _ratios: _Known) -> Ratio | None:
    """Return the ratio of a reduction that takes powers itself."""
    source = call.graph.passed_on(call.node.inputs[0])
    power = 1 if call.node.key == "ReduceL1" else 2
    # The op computes powers in float32, which holds the squares of float16.
    is_held = power == 1 or call.graph.types[source] == FLOAT16.tensor
    lost = 0.0 if is_held else _FLOAT32_LEAST
    each = Ratio(source=source, relation=Relation.EACH, power=power, lost=lost)
    known = _summed(call, each)
    is_root = call.node.key == "ReduceL2"
    return None if known is None else replace(known, root=is_root)


_FLOAT32_LEAST: Final = float(np.finfo(np.float32).smallest_subnormal)
"""The square that float32 loses."""


def _summed(call: Call, known: Ratio, *, mean: bool = False) -> Ratio | None:
    """Return the ratio of a reduction of powers; None if its axes are unknown."""
    shape = call.shape(0)
    if shape is None:
        return None
    axes = reduced_axes(call.graph, call.node, max(len(shape), 1))
    if axes is None:
        return None
    elements = elements_along(shape, axes)
    share = 1.0 / max(elements, 1.0) if mean else 1.0
    return replace(
        known,
        relation=Relation.SUM,
        share=share,
        lost=_lost(call, known, elements, mean=mean),
        axes=tuple(sorted(axes)),
        is_aligned=bool(call.attribute("keepdims", 1)),
        is_last=axes == [len(shape) - 1],
    )


def _lost(call: Call, known: Ratio, elements: float, *, mean: bool) -> float:
    """Return how much less than a sum, or a mean, what a reduction stores of it may be.

    A sum is no less than its largest term, so that one of the same type holds it, and so does a norm.
    """
    lost = known.lost if mean else times(elements, known.lost)
    types = call.graph.types
    is_held = types[call.node.outputs[0]] == types[known.source]
    is_norm = known.power == 1 or call.node.key == "ReduceL2"
    is_held = is_held and is_norm and not (mean or call.is_lowered)
    return lost if is_held else lost + call.rounding.least


def _reduced(call: Call, known: Ratio | None, _ratios: _Known) -> Ratio | None:
    if known is None or known.relation is not Relation.EACH:
        return None
    return _summed(call, known, mean=call.node.key == "ReduceMean")


def _added(call: Call, known: Ratio | None, ratios: _Known) -> Ratio | None:
    """Return the ratio of a value with an epsilon, which makes it larger. A sum of many values is none."""
    others = range(1, len(call.node.inputs))
    if known is None:
        known, others = (
            ratios.get(call.node.inputs[-1]),
            range(len(call.node.inputs) - 1),
        )
    if known is None or known.relation is not Relation.SUM:
        return None
    if not all(call[port].low >= 0.0 for port in others):
        return None
    added = sum(call[port].low for port in others)
    if known.root:
        is_made_up = added * added >= known.lost
        return replace(known, lost=0.0 if is_made_up else known.lost)
    return replace(known, lost=max(known.lost + call.rounding.least - added, 0.0))


def _at_least(call: Call, known: Ratio | None, ratios: _Known) -> Ratio | None:
    """Return the ratio of a value that is bounded from below, as by an epsilon."""
    if call.node.key == "Max":
        return _no_less_than(call, known, ratios)
    is_upper = call.has(2) or call.attribute("max") is not None
    if known is None or known.relation is not Relation.SUM or is_upper:
        return None
    given = call.attribute("min")
    least = call[1].low if call.has(1) else -inf if given is None else float(given)
    return _bounded(known, least)


def _no_less_than(call: Call, known: Ratio | None, ratios: _Known) -> Ratio | None:
    """Return the ratio of the larger one of a sum and other values."""
    others = range(1, len(call.node.inputs))
    if known is None:
        known = ratios.get(call.node.inputs[-1])
        others = range(len(call.node.inputs) - 1)
    if known is None or known.relation is not Relation.SUM:
        return None
    return _bounded(known, max((call[port].low for port in others), default=-inf))


def _bounded(known: Ratio, least: float) -> Ratio:
    """Return the ratio of a sum that is no less than a number.

    Where the sum exceeds that number, only a share of it is lost; where it does not, the number stands for it.
    """
    floor = least * least if known.root else least
    if least <= 0.0 or floor <= known.lost:
        return known
    return replace(known, lost=0.0, share=known.share * (1.0 - known.lost / floor))


def _rooted(_call: Call, known: Ratio | None, _ratios: _Known) -> Ratio | None:
    is_square = known is not None and known.power == 2 and not known.root
    return (
        replace(known, root=True)
        if known is not None and is_square and known.relation is Relation.SUM
        else None
    )


def _inverted(_call: Call, known: Ratio | None, _ratios: _Known) -> Ratio | None:
    return (
        replace(known, relation=Relation.INVERSE)
        if known is not None and known.relation is Relation.SUM
        else None
    )


def _divisor(call: Call, _known: Ratio | None, ratios: _Known) -> Ratio | None:
    """Return the ratio of a reciprocal that is written as a quotient."""
    one, divisor = call[0], ratios.get(call.node.inputs[1])
    return _inverted(call, divisor, ratios) if one.low == one.high == 1.0 else None


def _expanded(_call: Call, known: Ratio | None, _ratios: _Known) -> Ratio | None:
    """Return the ratio of a sum that is repeated along the axes of its terms."""
    return known if known is not None and known.is_aligned else None


def _unsqueezed(call: Call, known: Ratio | None, _ratios: _Known) -> Ratio | None:
    """Return the ratio of a sum whose axes are put back."""
    shape = call.output_shape()
    if known is None or known.is_aligned or shape is None:
        return None
    axes = reduced_axes(call.graph, call.node, len(shape))
    is_back = axes is not None and tuple(sorted(axes)) == known.axes
    return replace(known, is_aligned=True) if is_back else None


_CHANGES: Final = {
    "Add": _added,
    "Clip": _at_least,
    "Div": _divisor,
    "Exp": _exponential,
    "Expand": _expanded,
    "Max": _at_least,
    "Mul": _product,
    "Pow": _power,
    "Reciprocal": _inverted,
    "ReduceL1": _norm,
    "ReduceL2": _norm,
    "ReduceMean": _reduced,
    "ReduceSum": _reduced,
    "ReduceSumSquare": _norm,
    "Sqrt": _rooted,
    "Sum": _added,
    "Unsqueeze": _unsqueezed,
}
"""Op -> what it makes of what is known of its first input."""
