"""Reasons and verdicts: why a variable is low precision or float32, and how reports and plans say that."""

import re
import shlex
from enum import Enum
from functools import cache
from typing import Any, Final, TypeAlias

from onnxamp._base.records import record
from onnxamp._decide.kinds import HazardKind, kinds
from onnxamp._decide.mincut import Question
from onnxamp._facts.tables import read_table


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


Basis: TypeAlias = Reason | HazardKind
"""The basis of a decision."""


@record
class Verdict:
    """The decision about one variable, and why."""

    variable: Question
    low: bool
    reason: Basis
    detail: str = ""


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


def reason_text(reason: str, detail: str = "", *, low: bool = False) -> str:
    """Return a reason in plain words, with its detail; arguments as :func:`title_of`."""
    title = title_of(reason, low=low)
    if not detail or reason in _DETAILED:
        return title
    is_enough = _words().get(reason, {}).get("alone")
    return detail if is_enough else f"{title}: {detail}"


def option_for(reason: Basis, node: str, op: str) -> str:
    """Return the options that would change what a reason decided about a node, in a clause; "" if none does."""
    pattern = as_pattern(node)
    if isinstance(reason, HazardKind):
        return f"--no-hazards, or --force-low {pattern}"
    option: str = _words()[reason.value].get("option", "")
    return option.replace("NODE", pattern).replace("OP", op)


def as_pattern(name: str) -> str:
    """Return the argument of a command that matches this name alone, where it takes a regular expression."""
    return shlex.quote(re.escape(name))


_DETAILED: Final = frozenset({Reason.EXACT.value, Reason.CUT.value})
"""Reasons whose titles say as much as their details."""


@cache
def _words() -> dict[str, dict[str, Any]]:
    """Return reason -> its texts, hazards included."""
    hazardous = {kind.value: {"title": kind.title} for kind in kinds()}
    return read_table("reasons") | hazardous
