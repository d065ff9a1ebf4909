"""What is worth offering: what is no slower than float32, which may be written, or what saves more bytes than time."""

from typing import Protocol


class Costs(Protocol):
    """What a choice costs: microseconds per run, and bytes of weights."""

    @property
    def time(self) -> float:
        """Microseconds per run."""

    @property
    def weights(self) -> int:
        """Bytes of weights."""


def is_slower(choice: Costs, float32: Costs) -> bool:
    """Return whether a choice is slower than float32: it is then written only if that is allowed."""
    return choice.time > float32.time


def is_worth(choice: Costs, float32: Costs) -> bool:
    """Whether a choice is no slower than float32, or saves a larger share of the bytes than it loses of the time."""
    return not is_slower(choice, float32) or balance(choice, float32) < 0


def balance(choice: Costs, float32: Costs) -> float:
    """The share of float32's time that a choice loses, less the share of the bytes of its weights that it saves."""
    lost = choice.time / float32.time - 1 if float32.time else float(choice.time > 0)
    return lost - saved(choice, float32)


def saved(choice: Costs, float32: Costs) -> float:
    """The share of the bytes of weights that a choice saves."""
    return 1 - choice.weights / float32.weights if float32.weights else 0.0


def standing(choice: Costs, float32: Costs) -> tuple[bool, float]:
    """Orders choices: those that are no slower than float32, fastest first; then others, the best balance first.

    Float32 itself, whose balance is 0, comes behind all that is worth it.
    """
    is_slow = choice == float32 or is_slower(choice, float32)
    return is_slow, balance(choice, float32) if is_slow else choice.time
