"""Accumulators of targets for sums and products in float16, from ``arithmetic.toml`` in their folders.

``scripts/ask_engine.py`` measures an engine, writes its profile, and explains the fields. The profile of an engine that
has not been measured names the source of its facts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any, Final, NamedTuple

from onnx import NodeProto

from onnxamp._dtypes import FLOAT16
from onnxamp._ops.facts import attribute, op_key
from onnxamp._ops.targets import device_of, target_table

_TRANSPOSED: Final = "transB"
"""The form of a product whose second factor is transposed."""

_DOT: Final = 4
"""Length of the vectors that such products use if the number of terms is a multiple of it."""

_TERMS: Final = 4096
"""Number of terms of the sums to which ``growth`` refers."""

_STEPS: Final = 1.1
"""Error relative to that of rounding once, above which an op is known to round intermediate results."""

_ROUNDING: Final = FLOAT16.epsilon / 5
"""Measured relative L2 error of rounding a normally distributed number once: 2.06e-4 in float16."""


class Accumulation(NamedTuple):
    """The accumulation of float16 in an op.

    Attributes:
        accumulator: "float32" or "float16".
        growth: error of a sum of 4,096 random terms, relative to that of rounding it once.
        order: "sequential" for one accumulator, "parallel" for several, "float32" if it does not matter.
        overflows: whether a result in range becomes infinite because an intermediate sum is out of range.
        split, results: poolings of fewer terms than ``split``, and those with ``results`` or more results, have one
            accumulator in any case.
    """

    accumulator: str
    growth: float = 1.0
    order: str = "parallel"
    overflows: bool = False
    split: int = 0
    results: int = 0

    def error(self, terms: int) -> float:
        """Return the expected relative L2 error of a sum of random terms.

        As in a random walk, it grows with the square root of their number.
        """
        if self.accumulator == "float32":
            return _ROUNDING
        return _ROUNDING * max(1.0, self.growth * sqrt(terms / _TERMS))


@dataclass(frozen=True, slots=True)
class Profile:
    """The known arithmetic of a target.

    Attributes:
        seen: whether an engine was measured; otherwise the facts are from documentation.
        source: the engine, or the documentation.
        values: the treatment of overflow and subnormals, and whether types are honored.
        products, sums: by op, how it accumulates.
        dots: by op, how its products accumulate if it takes four at a time because their factors are adjacent.
        roundings: by op that computes in several steps of float16, its error relative to rounding its result once.
        formulas: by op with one input, the formula that computes it, see :mod:`onnxamp._ops.exponents`.
        cancelling: normalizations that subtract the mean in float16.
        folded_first: kinds of folds to apply before any number is rounded.
    """

    name: str
    seen: bool
    source: str
    values: Mapping[str, Any]
    products: Mapping[str, Accumulation]
    sums: Mapping[str, Accumulation]
    dots: Mapping[str, Accumulation]
    roundings: Mapping[str, float]
    formulas: Mapping[str, str]
    cancelling: frozenset[str]
    folded_first: frozenset[str]

    def product(self, node: NodeProto, terms: int) -> Accumulation:
        """Return the accumulation of a product with this number of terms. Its op must be one of ``products``."""
        key = op_key(node)
        takes_four = (
            key in self.dots and terms % _DOT == 0 and attribute(node, "transB")
        )
        return self.dots[key] if takes_four else self.products[key]


def emulated_arithmetic(target: str) -> Profile | None:
    """Return the profile of a target that sums up products in float16; None for others.

    CUDA uses float16 sums in CumSum alone, which the default lists keep in float32.
    """
    profile = profile_of(target)
    facts = () if profile is None else profile.products.values()
    return profile if any(fact.accumulator == "float16" for fact in facts) else None


def sums_low(*engines: str | None) -> bool:
    """Return whether any of these targets or providers sums up products of float16 in float16."""
    return any(emulated_arithmetic(name.partition(":")[0]) for name in engines if name)


def computes_low(target: str) -> bool:
    """Return whether a target computes in float16 regardless of the types of a model."""
    profile = profile_of(target)
    return profile is not None and profile.values.get("computes_in") == "float16"


def folded_first(target: str) -> frozenset[str]:
    """Return the kinds of folds that a target applies after numbers are rounded, and that are better applied before."""
    profile = profile_of(target)
    return profile.folded_first if profile is not None else frozenset()


@cache
def profile_of(target: str) -> Profile | None:
    """Return the profile of a target, of any version; None if there is none, as for "any"."""
    data = target_table(target, "arithmetic")
    if not data:
        return None
    products: dict[str, Accumulation] = {}
    dots: dict[str, Accumulation] = {}
    for name, row in data["products"].items():
        op, _, form = name.partition(" ")
        fact = Accumulation(**row)
        if form == _TRANSPOSED:
            dots[op] = fact
        else:  # "Conv 3x3": the worst form of an op counts
            products[op] = max(fact, products.get(op, fact), key=lambda one: one.growth)
    norms = data["normalizations"]
    steps = norms | data.get("steps", {}) | data.get("elementwise", {})
    return Profile(
        name=device_of(target),
        seen=data["seen"],
        source=data["source"],
        values=data["values"],
        products=products,
        sums={name: Accumulation(**row) for name, row in data["sums"].items()},
        dots=dots,
        roundings={
            name: row["growth"]
            for name, row in steps.items()
            if row.get("growth", 1.0) > _STEPS
        },
        formulas={
            name: row["computed"] for name, row in steps.items() if "computed" in row
        },
        cancelling=frozenset(name for name, row in norms.items() if row.get("cancels")),
        folded_first=frozenset(data.get("folds", {}).get("first", ())),
    )
