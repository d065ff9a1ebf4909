"""What is known of a result beyond its samples: what holds for every input, and inputs that are made to be hard."""

from typing import TYPE_CHECKING, NamedTuple

from onnxamp._base.records import record

if TYPE_CHECKING:
    from onnxamp._runtime.inputs.samples import Samples


@record
class Proof:
    """What is proven of the values that a result computes in low precision.

    Attributes:
        values: how many there are.
        proven: how many of them no input brings out of range.
        assumed: inputs of which a range was assumed: that of the given samples, or the one that the user states.
        sampled: those of them whose range is that of the samples.
    """

    values: int
    proven: int
    assumed: tuple[str, ...] = ()
    sampled: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether no input overflows any of them."""
        return self.proven == self.values


@record
class Headroom:
    """How far a value was driven up.

    Attributes:
        value: its name in the original.
        seen: its largest magnitude on the samples, as the result stores it (``--rescale``).
        stressed: likewise, on inputs that were made to be hard.
        range: the largest number of the low-precision type.
    """

    value: str
    seen: float
    stressed: float
    range: float

    @property
    def share(self) -> float:
        """The largest magnitude that was found, as a share of the type's range."""
        return max(self.seen, self.stressed) / self.range


@record
class ErrorSought:
    """The outcome of the search for an input on which a result is far off.

    Attributes:
        error: the largest relative L2 error of an output that was found, beside those of the first sample if these are
            larger.
        inputs: how many inputs both models ran on.
    """

    error: float
    inputs: int


@record
class Room:
    """The largest magnitudes of a value, which leave it more or less room in the range of its type.

    Attributes:
        value: its name in the original.
        proven: the magnitude that no input exceeds, as the result stores it; None if nothing bounds it.
        seen: the largest one on the samples; None if it was not measured.
        stressed: the largest one on inputs that were made to be hard; None if it was not measured.
    """

    value: str
    proven: float | None = None
    seen: float | None = None
    stressed: float | None = None

    @property
    def found(self) -> float:
        """The largest magnitude that any input showed, 0 if none was measured."""
        return max(self.seen or 0.0, self.stressed or 0.0)


class Stressed(NamedTuple):
    """What is proven of a result, and inputs that are hard for it.

    Attributes:
        proof: what holds for every input.
        samples: the inputs; None if all is proven, nothing can be changed, or no gradient leads there.
        headroom: how far they drive the value with the least headroom.
        why: the reason if there should be such inputs, and are none.
        rooms: the values with the least headroom.
    """

    proof: Proof
    samples: "Samples | None" = None
    headroom: Headroom | None = None
    why: str = ""
    rooms: tuple[Room, ...] = ()
