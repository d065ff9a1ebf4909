"""Reasons and verdicts: why a variable is low precision or float32."""

from enum import Enum

from onnxamp._graph.view import ABSENT
from onnxamp._model.record import record


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
