"""Comparisons beyond the samples, and what cannot be run there."""

from typing import NamedTuple

from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.samples import Samples


class Excursion(NamedTuple):
    """A comparison beyond the samples.

    Attributes:
        what: the branches or sizes, in words.
        samples: the inputs.
        reference: the original, which takes these branches or sizes, and keeps its outputs.
        alone: the same for each single branch, if there are several: with all together, the values at hand may suit
            none.
        is_hard: whether the inputs are made to be hard, so that limits are wider.
        is_empty: whether padding is all that the inputs hold, so that outputs mean nothing and only NaN and Inf count.
    """

    what: str
    samples: Samples
    reference: Session
    alone: tuple["Excursion", ...] = ()
    is_hard: bool = False
    is_empty: bool = False


class NotRun(NamedTuple):
    """What is not compared, such as branches or sizes, and why not, in words."""

    what: str
    why: str

    @property
    def clause(self) -> str:
        """Both in a clause."""
        return f"{self.what} ({self.why})"
