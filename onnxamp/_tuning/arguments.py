"""The arguments of a tuning, checked before anything slow runs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from onnxamp._errors import ArgumentError
from onnxamp._options.values import TOLERANCE
from onnxamp._target import AUTO, device_called, device_titled, target_of

if TYPE_CHECKING:
    from onnxamp._numerics.limits import Accept
    from onnxamp._state import StateLike
    from onnxamp._tuning.metric import MetricLike

TIMES: Final = ("roofline", "measured")
"""The source of nodes' times."""

RUNS: Final = 12
"""Candidates that may be converted and measured by default."""

SECONDS: Final = 60.0
"""Time for all runs of a search by default; large models take some seconds for each."""


def meant_device(name: str, target: str = "") -> str:
    """Return the device to estimate times for; "auto" is the target's device, else the installed GPU, or an A100 if it
    is unknown.

    Raises:
        ArgumentError: there is no device of that name.
    """
    if name != AUTO:
        return device_called(name).name
    from onnxamp._runtime.plugins import device_name  # noqa: PLC0415 - loads ONNX Runtime

    return (target_of(target).device if target else "") or device_titled(device_name())


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Options of level auto's search; see :func:`onnxamp.tune_model` for each field.

    Raises:
        ArgumentError: a value is not known.
    """

    tolerance: float = TOLERANCE
    metric: "MetricLike" = "auto"
    device: str = AUTO
    times: str = TIMES[0]
    runs: int = RUNS
    pick: int | None = None
    seconds: float = SECONDS
    allow_slower: bool = False
    accept: "Accept | None" = None

    def __post_init__(self) -> None:
        if self.device != AUTO:  # whose meaning the target tells
            device_called(self.device)
        if (
            isinstance(self.runs, bool)
            or not isinstance(self.runs, int)
            or self.runs < 1
        ):
            raise ArgumentError(
                f"runs must be a whole number of at least 1, not {self.runs!r}."
            )
        if self.times not in TIMES:
            raise ArgumentError(
                f"Unknown times {self.times!r}: choose one of {', '.join(TIMES)}."
            )

    def check_state(self, state: "StateLike") -> None:
        """Check that another process can recognize the contents of a state file.

        Raises:
            ArgumentError: there is a state, and the metric has no name.
        """
        if state is not None and not isinstance(self.metric, str):
            raise ArgumentError(
                "A state file needs a metric with a name: write it as 'package:function'."
            )


class Timed(Protocol):
    """Something that takes microseconds per run."""

    @property
    def time(self) -> float:
        """Microseconds per run."""


def is_slower(choice: Timed, float32: Timed) -> bool:
    """Return whether a choice is slower than float32, so that it must be allowed."""
    return choice.time > float32.time
