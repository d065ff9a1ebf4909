"""Values that two models share, and how the ops of one are fed with the values of the other."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from onnxamp._numerics.meters import MEASURABLE
from onnxamp._runtime.flow import Flow

_REACH: Final = 64
"""Nodes that may lie between a value of the result and the nearest values that the reference has, too."""


@dataclass(frozen=True, slots=True)
class Replay:
    """Nodes of the result, in order, that compute a value from values of the reference, and those values."""

    nodes: tuple[int, ...]
    reads: tuple[str, ...]
    rounded: frozenset[str]
    """Those of ``reads`` that are low precision in the result, but not in the reference."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """Values that nodes of both models compute under one name, and how the result's ops are fed to be judged alone."""

    shared: Mapping[str, Replay | None]
    """In the reference's order; None if too many nodes lie between a value and the nearest that the reference has."""
    replaceable: frozenset[str] = frozenset()
    """Values of the result that are replaced by the reference's when ops are replayed."""
    accumulated: bool = True
    """Whether the result's own values are compared as well as the replayed ones."""
    exponents: Mapping[str, int] = field(default_factory=dict)
    """Value -> e, where the result stores it as a multiple by 2^-e of what the reference does."""

    def reads(self) -> Counter[str]:
        """By value of the reference: the number of replays that read it."""
        return Counter(
            name for replay in self.shared.values() if replay is not None for name in replay.reads
        )


def pair(reference: Flow, result: Flow) -> Pairing:
    """Match values by name and type.

    Complexity: linear in nodes, times the few nodes (Casts) between shared values.
    """
    both = reference.own & result.own
    made = [
        name
        for node in reference.nodes
        for name in node.output
        if name in result.maker and name in both
    ]
    shared = {
        name: _replay(reference, result, name)
        for name in made
        if _is_measurable(reference, result, name)
    }
    replaceable = frozenset(name for name in made if _can_replace(reference, result, name))
    return Pairing(shared, replaceable, exponents=exponents_between(reference, result))


def exponents_between(reference: Flow, result: Flow) -> dict[str, int]:
    """Value -> e, where the result stores it as a multiple by 2^-e of what the reference does."""
    one, other = reference.exponents, result.exponents
    differences = {name: other.get(name, 0) - one.get(name, 0) for name in (*one, *other)}
    return {name: exponent for name, exponent in differences.items() if exponent}


def _is_measurable(reference: Flow, result: Flow, name: str) -> bool:
    """Whether both values are tensors of numbers, as far as types are known."""
    return all(
        kind is None or kind in MEASURABLE
        for kind in (reference.types.get(name), result.types.get(name))
    )


def _replay(reference: Flow, result: Flow, target: str) -> Replay | None:
    nodes, reads = {result.maker[target]}, dict[str, None]()
    waiting = list(nodes)
    while waiting:
        for name in result.reads[waiting.pop()]:
            if _can_replace(reference, result, name):
                reads[name] = None
            elif name in result.maker and result.maker[name] not in nodes:
                nodes.add(result.maker[name])
                waiting.append(result.maker[name])
            elif name in result.inputs or name in result.defaults:
                return None
        if len(nodes) > _REACH:
            return None
    rounded = frozenset(
        name for name in reads if result.low.get(name) not in (None, reference.low.get(name))
    )
    return Replay(tuple(sorted(nodes)), tuple(reads), rounded)


def _can_replace(reference: Flow, result: Flow, name: str) -> bool:
    """Whether the reference's value can be fed to readers of the result's."""
    known = name in reference.maker or name in reference.inputs or name in reference.defaults
    if not known or name not in reference.own:
        return False
    one, other = reference.types.get(name), result.types.get(name)
    if (one or "").startswith("optional"):
        return False  # an empty one could not be fed
    return one == other or (one == "tensor(float)" and name in result.low)
