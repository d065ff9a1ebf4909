"""Reasons and verdicts: why a variable is low precision or float32, and how reports and plans say that."""

import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from functools import cache
from importlib import import_module
from typing import Any, Final, NamedTuple, TypeAlias

from onnxamp._decide import hazards
from onnxamp._facts.dtypes import Format
from onnxamp._facts.tables import read_table
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.protos import record


class Reason(Enum):
    """The basis of a decision, if it is no hazard. ``_data/reasons.toml`` has the text for reports."""

    PATTERN = "user pattern"
    RULE = "user rule"
    PLAN = "replayed plan"
    NO_KERNEL = "no kernel"
    UNSOUND = "unsound result"
    MEASURED = "measured"
    BLACK = "black list"
    WHITE = "white list"
    LEVEL = "level"
    TIE = "tie"
    EXACT = "exact op"
    CONSTANT = "constant"
    CUT = "cut"


class Audit(NamedTuple):
    """The audit of a hazard in a model that already has low precision.

    Attributes:
        place: its place among the others, because the first reason of a node may suffice.
        text: the fault; LOW stands for the type, ``{detail}`` for the text of the rule.
        limit: the text after it: ``{end}`` is the largest number of the type, ``{integers}`` its last exact integer.
        is_telling: whether a constant of the node shows the hazard.
        must_tell: whether there is no fault without such a constant.
        rule: the rule that finds it, if not the rule of its kind.
    """

    place: int
    text: str
    limit: str = ""
    is_telling: Callable[[float, Format], bool] | None = None
    must_tell: bool = False
    rule: "Callable[[Graph, Format], Iterator[Hazard]] | None" = None


@dataclass(frozen=True, slots=True, eq=False)
class Kind:
    """A kind of hazards; there is one object for each.

    Attributes:
        value: its name in plans, like that of a :class:`Reason`.
        title: the reason in plain words, as a clause about a node.
        rule: yields the hazards of a graph in a format.
        on_target: yields those of a graph in a format on a target.
        is_measurable: whether samples show it, so that level "auto" measures it instead.
        is_cured_by_exponents: whether exponents may bring its values into range, so that its nodes want to be low.
        is_shielded: whether only a Cast is in danger, which can be shielded where the node stays low.
        is_scaled: whether a loss scale keeps gradients from it, because it depends on their sizes alone.
        is_of_kernels: whether the kernels of a target are to blame.
        breaks: whether low precision would break the node, and not merely a fusion.
        audit: what is said of low-precision nodes; None if only rules of the audit find it.
        loses: whether a weight of the node, stored low, loses the numbers that the hazard is about.
    """

    value: str
    _: KW_ONLY
    title: str
    rule: "Callable[[Graph, Format], Iterable[Hazard]] | None" = None
    on_target: "Callable[[Graph, Format, str], Iterable[Hazard]] | None" = None
    is_measurable: bool = False
    is_cured_by_exponents: bool = False
    is_shielded: bool = False
    is_scaled: bool = False
    is_of_kernels: bool = False
    breaks: bool = True
    audit: Audit | None = None
    loses: Callable[[Graph, int, Format], bool] | None = None


Basis: TypeAlias = Reason | Kind
"""The basis of a decision."""


@record
class Hazard:
    """A node that static analysis expects to break, or to lose values, in low precision.

    ``rare``: it shows only on inputs that samples may lack, unlike others with its reason. ``value``: the input or
    output of the node that must not be rounded; ABSENT where that is true of all.
    """

    node: int
    reason: Kind
    detail: str
    rare: bool = False
    value: int = ABSENT


@record
class Verdict:
    """The decision about one variable, and why."""

    variable: int
    low: bool
    reason: Basis
    detail: str = ""


@cache
def kinds() -> tuple[Kind, ...]:
    """Return the kinds of hazards, one for each module of their folder."""
    modules = pkgutil.iter_modules(hazards.__path__, f"{hazards.__name__}.")
    return tuple(import_module(module.name).KIND for module in modules)


def find_hazards(graph: Graph, low: Format) -> list[Hazard]:
    """Return all hazards of a graph, in node order; a node may have several, one of each reason and value, rare ones
    first.
    """
    found = [
        hazard
        for kind in kinds()
        if kind.rule is not None
        for hazard in kind.rule(graph, low)
    ]
    ranked = sorted(found, key=lambda hazard: hazard.rare, reverse=True)
    unique = {
        (hazard.node, hazard.reason, hazard.value): hazard
        for hazard in reversed(ranked)
    }
    return sorted(
        unique.values(), key=lambda hazard: (hazard.node, hazard.reason.value)
    )


def hazards_on(graph: Graph, low: Format, target: str) -> list[Hazard]:
    """Return the hazards of a graph on a target, in node order, those of its arithmetic before those of its kernels."""
    rules = [kind.on_target for kind in kinds() if kind.on_target is not None]
    found = [hazard for rule in rules for hazard in rule(graph, low, target)]
    return sorted(found, key=lambda hazard: (hazard.reason.is_of_kernels, hazard.node))


def title_of(reason: str, *, low: bool = False) -> str:
    """Return a reason in plain words.

    Args:
        reason: the reason as in plans.
        low: whether it is that of a value in low precision.
    """
    # Plans of other versions may have other reasons.
    words = _words().get(reason, {"title": reason})
    title: str = words.get("low", words["title"]) if low else words["title"]
    return title


def told(reason: str, detail: str = "", *, low: bool = False) -> str:
    """Return a reason in plain words, with its detail; arguments as :func:`title_of`."""
    title = title_of(reason, low=low)
    if not detail or reason in _DETAILED:
        return title
    is_enough = _words().get(reason, {}).get("alone")
    return detail if is_enough else f"{title}: {detail}"


_DETAILED: Final = frozenset({Reason.EXACT.value, Reason.CUT.value})
"""Reasons whose titles say as much as their details."""


@cache
def _words() -> dict[str, dict[str, Any]]:
    hazardous = {kind.value: {"title": kind.title} for kind in kinds()}
    return read_table("reasons") | hazardous
