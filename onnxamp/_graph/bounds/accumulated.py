"""Bounds of sums that a target adds up in float16: partial sums are rounded, and may leave its range."""

from collections.abc import Mapping, Sequence
from math import exp, inf
from typing import Final

from onnxamp._facts.dtypes import FLOAT16, Format
from onnxamp._facts.providers import Accumulation, profile_of
from onnxamp._graph.bounds.bound import UNKNOWN, Bound, times
from onnxamp._graph.bounds.call import Call
from onnxamp._graph.constants import summed_terms

_GROWTH: Final = 2.0
"""Adding rounds to the nearest number, one of which is the sum so far: what is added counts twice at most, or never."""


def low_sums(low: Format, target: str) -> Mapping[str, Accumulation]:
    """Return the ops that a target adds up in low precision."""
    profile = profile_of(target)
    if profile is None or low is not FLOAT16:
        return {}
    facts = {**profile.products, **profile.sums}
    return {op: fact for op, fact in facts.items() if fact.accumulator == FLOAT16.name}


def bounds_of_sums(
    call: Call, results: Sequence[Bound], fact: Accumulation
) -> list[Bound]:
    """Return the bounds of the results of an op that is added up in float16.

    Args:
        call: the op.
        results: its bounds if terms are added up exactly, none of which cancels others.
        fact: how it adds up.
    """
    if fact.overflows and not _fits(call):
        return [UNKNOWN] * len(results)
    # Sums of integers that are small enough are exact.
    return [
        bound if bound.is_exact_in(FLOAT16) else _grown(bound) for bound in results
    ]


def _grown(bound: Bound) -> Bound:
    return Bound(
        low=min(_GROWTH * bound.low, 0.0),
        high=max(_GROWTH * bound.high, 0.0),
        row=_GROWTH * bound.row,
        column=_GROWTH * bound.column,
        total=_GROWTH * bound.total,
        width=bound.width,
        is_single=bound.is_single,
    )


def _fits(call: Call) -> bool:
    """Return whether the sum is in range from which an op computes a smaller result, such as a mean."""
    terms = summed_terms(call.node, call.shapes)
    if terms is None:
        return False
    each = call[0].magnitude
    if call.node.key == "ReduceLogSumExp":
        each = exp(each) if each < _FAR else inf
    elif call.node.key == "ReduceL2":
        each *= each
    return times(_GROWTH * terms, each) < FLOAT16.overflow


_FAR: Final = 80.0
"""A number whose exponential is far out of range."""
