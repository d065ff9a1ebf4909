"""Reasons and verdicts: why a variable is low precision or float32."""

from enum import Enum
from functools import cache
from typing import Any, Final

from onnxamp._graph.view import ABSENT
from onnxamp._model.record import record
from onnxamp._ops.tables import read_table


class Reason(Enum):
    """What a decision is based on."""

    PATTERN = "user pattern"
    RULE = "user rule"
    PLAN = "replayed plan"
    NO_KERNEL = "no kernel"
    RANGE = "constant range"
    EPSILON = "epsilon"
    MASK = "mask"
    DECOMPOSED = "decomposed pattern"
    INDEX = "index path"
    REDUCTION = "large reduction"
    PRODUCT = "long float16 product"
    ACCUMULATION = "float16 accumulator"
    WRONG_KERNEL = "wrong kernel"
    UNSOUND = "unsound result"
    FUSION = "runtime fusion"
    QDQ = "quantized unit"
    MEASURED = "measured"
    BLACK = "black list"
    WHITE = "white list"
    LEVEL = "level"
    TIE = "tie"
    EXACT = "exact op"
    CONSTANT = "constant"
    CUT = "cut"

    @property
    def title(self) -> str:
        """The reason in plain words, as a clause about a node."""
        return title_of(self.value)


def title_of(reason: str, *, low: bool = False) -> str:
    """Return a reason in plain words.

    Args:
        reason: the reason as plans hold it.
        low: whether it is that of a value in low precision.
    """
    words = _titles().get(reason, {"title": reason})  # plans of other versions may hold others
    title: str = words.get("low", words["title"]) if low else words["title"]
    return title


def told(reason: str, detail: str = "", *, low: bool = False) -> str:
    """Return a reason in plain words, with its detail; arguments as :func:`title_of`."""
    if not detail or reason in _DETAILED:
        return title_of(reason, low=low)
    return detail if _titles().get(reason, {}).get("alone") else f"{title_of(reason, low=low)}: {detail}"


_DETAILED: Final = frozenset({Reason.EXACT.value, Reason.CUT.value})
"""Reasons whose titles say all that their details do."""


@cache
def _titles() -> dict[str, dict[str, Any]]:
    return read_table("reasons")


@record
class Hazard:
    """A node that static analysis expects to break, or to lose values, in low precision.

    ``rare``: inputs that samples may lack show it, whatever others of its reason do.
    ``value``: what the node reads or makes that must not be rounded; ABSENT where that is true of all.
    """

    node: int
    reason: Reason
    detail: str
    rare: bool = False
    value: int = ABSENT


@record
class Verdict:
    """The decision about one variable, and why."""

    variable: int
    low: bool
    reason: Reason
    detail: str = ""
