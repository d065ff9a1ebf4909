"""Reasons in plain words, as reports, ``inspect`` and plans print them."""

from functools import cache
from typing import Any, Final

from onnxamp._decide.hazards import kinds
from onnxamp._decide.verdicts import Reason
from onnxamp._ops import read_table


def title_of(reason: str, *, low: bool = False) -> str:
    """Return a reason in plain words.

    Args:
        reason: the reason as in plans.
        low: whether it is that of a value in low precision.
    """
    words = _titles().get(
        reason, {"title": reason}
    )  # plans of other versions may have others
    title: str = words.get("low", words["title"]) if low else words["title"]
    return title


def told(reason: str, detail: str = "", *, low: bool = False) -> str:
    """Return a reason in plain words, with its detail; arguments as :func:`title_of`."""
    if not detail or reason in _DETAILED:
        return title_of(reason, low=low)
    return (
        detail
        if _titles().get(reason, {}).get("alone")
        else f"{title_of(reason, low=low)}: {detail}"
    )


_DETAILED: Final = frozenset({Reason.EXACT.value, Reason.CUT.value})
"""Reasons whose titles say as much as their details."""


@cache
def _titles() -> dict[str, dict[str, Any]]:
    return read_table("reasons") | {
        kind.value: {"title": kind.title} for kind in kinds()
    }
