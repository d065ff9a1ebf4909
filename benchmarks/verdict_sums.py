"""What the rows of verdict.py and of corpora.py come to."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

FLOAT16_MAX = 65_504.0
MOST_LISTED = "_MOST"
"""What limits the values that reports list by their headroom, in onnxamp._numerics.unseen.rooms."""
HEADROOM = (0.01, 0.1, 0.5)
"""Shares of float16's range between which values that are not proven are counted."""

Facts = dict[str, Any]


def summary(rows: Sequence[Facts]) -> Facts:
    """Return what the rows of single models come to."""
    planted = [row for row in rows if is_planted(row)]
    others = [row for row in rows if not is_planted(row)]
    before = sum(row["seconds without stress"] for row in others)
    alarms = [row["false alarms"] for row in others]
    return {
        "planted": facts_of(planted),
        "planted, right on the worst input": sum(row["right"] for row in planted),
        "others": facts_of(others) | {"false alarms": unneeded(alarms)},
        "others, processor time": round(sum(row["seconds"] for row in others) / before, 2) if before else None,
        "false alarms of stress": mean(of_stress(one) for one in alarms),
        "false alarms of validation": mean(of_validation(one) for one in alarms),
        "false alarms of hazards": mean(of_hazards(one) for one in alarms),
        "false alarms of hazards, by traffic": by_traffic(alarms, [of_hazards(one) for one in alarms]),
    }


def is_planted(row: Facts) -> bool:
    """Return whether a row is that of a planted network."""
    return "hardest" in row


def facts_of(rows: Sequence[Facts]) -> Facts:
    """Return how many values there are, are proven, and reach which share of the range; and what stress repaired."""
    return {
        "models": len(rows),
        "values": sum(row["values"] or 0 for row in rows),
        "proven": sum(row["proven"] or 0 for row in rows),
        "headroom": [sum(column) for column in zip(*(row["headroom"] for row in rows), strict=True)],
        "repaired by stress alone": [row["model"] for row in rows if row["repaired by stress alone"]],
    }


def by_headroom(shares: Sequence[float], rest: int) -> list[int]:
    """Return how many values that are not proven are below each of ``HEADROOM``, how many above, and how many were not
    measured.

    Args:
        shares: shares of the range that values reach on samples or hard inputs, those that are not proven first.
        rest: how many values are not proven.
    """
    known = [share for share in shares[:rest] if share > 0]
    ends = (0.0, *HEADROOM, float("inf"))
    counts = [sum(low < share <= high for share in known) for low, high in pairwise(ends)]
    return [*counts, rest - len(known)]


def unneeded(alarms: Sequence[Facts]) -> Facts:
    """Return what several models keep in float32, how much of it samples need, and the traffic that none needs."""
    kept = [row for one in alarms for row in kept_rows(one)]
    shares = [of_validation(one) + of_hazards(one) for one in alarms]
    return {
        "kept": len(kept),
        "needed": sum(row["fails"] for row in kept),
        "at 1,000 samples": sum(row["samples"] == 1000 for row in kept if not row["fails"]),
        "of all traffic": by_traffic(alarms, shares),
        "mean of models": mean(shares),
    }


def kept_rows(alarms: Facts) -> list[Facts]:
    """Return what a model keeps in float32: for each hazard, and for validation."""
    return [row for row in (*alarms["hazards"], alarms["validation"]) if row and row["share"] > 0]


def of_stress(alarms: Facts) -> float:
    """Return the share of traffic that stress alone keeps in float32, and no sample needs."""
    kept = alarms["validation"]
    return of_validation(alarms) if kept and kept["reason"] == "stress" else 0.0


def of_validation(alarms: Facts) -> float:
    """Return the share of traffic that validation keeps in float32 in any way, and no sample needs."""
    kept = alarms["validation"]
    return kept["share"] if kept and not kept["fails"] else 0.0


def of_hazards(alarms: Facts) -> float:
    """Return the share of traffic that hazards keep in float32, and no sample needs."""
    return sum(row["share"] for row in alarms["hazards"] if row["share"] > 0 and not row["fails"])


def mean(numbers: Iterable[float]) -> float:
    """Return the mean of numbers; 0 if there are none."""
    every = list(numbers)
    return sum(every) / max(len(every), 1)


def by_traffic(alarms: Sequence[Facts], shares: Sequence[float]) -> float:
    """Return shares of the traffic of models as a share of all of it."""
    kept = sum(share * one["traffic"] for share, one in zip(shares, alarms, strict=True))
    return kept / max(sum(one["traffic"] for one in alarms), 1)
