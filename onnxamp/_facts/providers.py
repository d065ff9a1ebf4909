"""Facts about how targets run ops: their accumulators, and conditions under which they do not run a node.

``arithmetic.toml`` in the folder of a target describes its accumulators for sums and products in float16.
``scripts/ask_engine.py`` measures an engine, writes its profile, and explains the fields. The profile of an engine that
has not been measured names the source of its facts.

``placement.toml`` lists conditions under which a provider leaves a node to the CPU, or fails, although it has a kernel,
each with its source. The provider's registry does not contain them.
"""

import itertools
from collections.abc import Mapping, Sequence
from functools import cache
from math import sqrt
from typing import Any, Final, NamedTuple

from onnx import NodeProto

from onnxamp._base.records import record
from onnxamp._facts.dtypes import FLOAT16, FLOAT_TENSORS
from onnxamp._facts.ops import attribute, op_key
from onnxamp._facts.tables import device_of, target_names, target_table

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
BUILT_IN: Final = ("cuda", "cpu")
"""Providers that are no plugins."""
ANY: Final = "any"
"""The target that stands for any provider: missing kernels do not limit it, but failing ones do."""


def is_plugin(provider: str) -> bool:
    """Return whether the provider computes low precision itself, but not the reference to compare with."""
    return provider not in BUILT_IN


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


@record
class Profile:
    """The known arithmetic of a target.

    Attributes:
        seen: whether an engine was measured; otherwise the facts are from documentation.
        source: the engine, or the documentation.
        values: the treatment of overflow and subnormals, and whether types are honored.
        products, sums: by op, how it accumulates.
        dots: by op, how its products accumulate if it takes four at a time because their factors are adjacent.
        roundings: by op that computes in several steps of float16, its error relative to rounding its result once.
        formulas: by op with one input, the formula that computes it, see :mod:`onnxamp._facts.formulas`.
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
        else:
            # Engines choose kernels by shapes ("Conv 3x3", "Conv 1x1"), so the worst form of an op counts.
            products[op] = max(
                fact, products.get(op, fact), key=lambda one: one.growth
            )
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
        cancelling=frozenset(
            name for name, row in norms.items() if row.get("cancels")
        ),
        folded_first=frozenset(data.get("folds", {}).get("first", ())),
    )


@cache
def _rules() -> Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]:
    """Return (provider, op type) -> its conditions; "any" has the failures of all providers."""
    rules: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for provider in target_names():
        for rule in target_table(provider, "placement").get("rows", ()):
            types = {f"tensor({name})" for name in rule.get("types", ())}
            row = {**rule, "types": types} if types else rule
            places = (provider, ANY) if rule.get("fails") else (provider,)
            for op, place in itertools.product(rule["ops"], places):
                rules.setdefault((place, op), []).append(row)
    return rules


def kernel_limit(
    provider: str, node: NodeProto, bound: Mapping[str, str]
) -> str | None:
    """Return why the provider does not run the node with these types by parameter; None if it does."""
    rule = _rule_of(provider, node, bound)
    return None if rule is None else str(rule["because"])


def kernel_failure(
    provider: str, node: NodeProto, bound: Mapping[str, str], *, expanded: bool = False
) -> str | None:
    """Return why the provider takes the node with these types by parameter but fails to run it; None if it runs it.

    Args:
        provider: the provider, or "any".
        node: the node.
        bound: type parameter -> type.
        expanded: whether no kernel takes the node, so that ONNX Runtime expands it.
    """
    rule = _rule_of(provider, node, bound) or {}
    is_failing = rule.get("fails") and (rule.get("expanded") or not expanded)
    return str(rule["because"]) if is_failing else None


def _rule_of(
    provider: str, node: NodeProto, bound: Mapping[str, str]
) -> Mapping[str, Any] | None:
    for rule in _rules().get((provider, op_key(node)), ()):
        if _is_of_types(rule, bound) and _holds(rule, node, bound):
            return rule
    return None


def _is_of_types(rule: Mapping[str, Any], bound: Mapping[str, str]) -> bool:
    if "types" not in rule:
        return True
    types = (
        (bound.get(rule["parameter"], ""),) if "parameter" in rule else bound.values()
    )
    return not rule["types"].isdisjoint(types)


def placement_rules(provider: str, key: str) -> Sequence[Mapping[str, Any]]:
    """Return the rows about where nodes of an op run on a provider, or fail."""
    return _rules().get((provider, key), ())


def has_kernel_limits(provider: str, key: str) -> bool:
    """Return whether the attributes and inputs of the op affect where it runs."""
    return (provider, key) in _rules()


def _holds(rule: Mapping[str, Any], node: NodeProto, bound: Mapping[str, str]) -> bool:
    if "differ" in rule:
        types = {bound[name] for name in rule["differ"] if name in bound}
        return len(types & FLOAT_TENSORS) > 1
    if "present" in rule:
        return any(item.name in rule["present"] for item in node.attribute)
    if "input" in rule:
        return any(node.input[rule["input"] : rule["input"] + 1])
    if "outputs" in rule:
        return any(node.output[rule["outputs"] :])
    if "asymmetric" in rule:
        # ONNX lists the pads of all axes at their begin, and then at their end.
        pads = attribute(node, rule["asymmetric"]) or []
        half = len(pads) // 2
        return bool(pads[:half] != pads[half:])
    return "attribute" not in rule or _is_other(
        rule, attribute(node, rule["attribute"])
    )


def _is_other(rule: Mapping[str, Any], value: Any) -> bool:
    """Return whether the value of an attribute is among those of a rule, or differs from the only supported one."""
    value = value.decode() if isinstance(value, bytes) else value
    if "among" in rule:
        return value in rule["among"]
    if "beyond" in rule:
        names = [name.decode().lower() for name in value or ()]
        return bool(names != rule["beyond"][: len(names)])
    return bool((rule["default"] if value is None else value) != rule["other_than"])
