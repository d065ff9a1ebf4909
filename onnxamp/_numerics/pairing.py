"""Which values two models share, and how an op of the second is fed with values of the first."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from onnxamp._runtime.flow import Flow
from onnxamp._runtime.meters import MEASURABLE

_REACH: Final = 64
"""Nodes that may lie between a value of the result and the nearest values that the reference has, too."""


@dataclass(frozen=True, slots=True)
class Replay:
    """The nodes of the result that make a value from values of the reference, in order, and those values."""

    nodes: tuple[int, ...]
    reads: tuple[str, ...]
    rounded: frozenset[str]
    """Those of ``reads`` that have a low type in the result, but not in the reference."""


@dataclass(frozen=True, slots=True)
class Pairing:
    """``shared``: values that nodes of both make, by name, in the reference's order; None where too much lies between a
    value and what the reference knows.
    """

    shared: Mapping[str, Replay | None]
    standing: frozenset[str] = frozenset()
    """Those of ``shared`` that the reference's values stand for when the result's ops are replayed."""
    accumulated: bool = True
    """Whether the result's own values are compared, too, and not replayed ones alone."""

    def reads(self) -> Counter[str]:
        """Value of the reference -> number of replays that read it."""
        return Counter(name for replay in self.shared.values() if replay is not None for name in replay.reads)


def pair(reference: Flow, result: Flow) -> Pairing:
    """Match values by name and type.

    Complexity: linear in nodes, times the nodes between shared values (which are few: Casts).
    """
    both = reference.own & result.own
    made = [name for node in reference.nodes for name in node.output if name in result.maker and name in both]
    shared = {name: _replay(reference, result, name) for name in made if _comparable(reference, result, name)}
    return Pairing(shared, frozenset(name for name in made if _corresponds(reference, result, name)))


def _comparable(reference: Flow, result: Flow, name: str) -> bool:
    """Whether both values are tensors of numbers that can be measured, as far as types are known."""
    return all(kind is None or kind in MEASURABLE for kind in (reference.types.get(name), result.types.get(name)))


def _replay(reference: Flow, result: Flow, target: str) -> Replay | None:
    nodes, reads = {result.maker[target]}, dict[str, None]()
    waiting = list(nodes)
    while waiting:
        for name in result.reads[waiting.pop()]:
            if _corresponds(reference, result, name):
                reads[name] = None
            elif name in result.maker and result.maker[name] not in nodes:
                nodes.add(result.maker[name])
                waiting.append(result.maker[name])
            elif name in result.inputs or name in result.defaults:
                return None
        if len(nodes) > _REACH:
            return None
    rounded = frozenset(name for name in reads if result.low.get(name) not in (None, reference.low.get(name)))
    return Replay(tuple(sorted(nodes)), tuple(reads), rounded)


def _corresponds(reference: Flow, result: Flow, name: str) -> bool:
    """Whether the reference's value of that name can stand for the result's."""
    known = name in reference.maker or name in reference.inputs or name in reference.defaults
    if not known or name not in reference.own:
        return False
    one, other = reference.types.get(name), result.types.get(name)
    if (one or "").startswith("optional"):
        return False  # it may hold nothing, and could not be fed then
    return one == other or (one == "tensor(float)" and name in result.low)
