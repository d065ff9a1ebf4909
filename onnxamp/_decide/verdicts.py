"""Why a variable lives where it lives: the words in which every decision is explained."""

from dataclasses import dataclass
from enum import Enum


class Reason(Enum):
    """Which source of facts or wishes spoke."""

    PATTERN = "user pattern"
    RULE = "user rule"
    PLAN = "replayed plan"
    NO_KERNEL = "no kernel"
    RANGE = "constant range"
    EPSILON = "epsilon"
    MASK = "mask"
    ISLAND = "normalisation island"
    INDEX = "index path"
    REDUCTION = "large reduction"
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


@dataclass(frozen=True, slots=True)
class Hazard:
    """A place that static knowledge expects to break, or to be lost, in low precision."""

    node: int
    reason: Reason
    detail: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was decided for one variable, and why."""

    variable: int
    low: bool
    reason: Reason
    detail: str = ""
