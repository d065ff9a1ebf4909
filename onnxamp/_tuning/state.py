"""The part of a tuning in a state file."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, Final

from onnxamp._numerics.passes import Sensitivities
from onnxamp._options.options import Options
from onnxamp._runtime.loop import KeptSamples
from onnxamp._runtime.samples import Samples
from onnxamp._state import Part, as_data, fingerprint

PARTS: Final = (
    "tuning",
    "tuning with exponents",
    "tuning with compensation",
    "tuning with exponents and compensation",
)
"""Parts of the state file."""


def part_of(options: Options) -> str:
    """Return the part of a tuning with these options."""
    return PARTS[2 * options.compensates + (options.rescaling is not None)]


class TuningState:
    """Measurements of one tuning. ``part`` is where they are stored; None if they are not.

    Attributes:
        errors, times: what was measured, by what it is of.
        recalled: samples whose sensitivities were loaded.
    """

    def __init__(self, part: Part | None) -> None:
        self.part, self.recalled = part, 0
        self.errors, self.times = dict[str, float](), dict[str, Any]()
        kept: Mapping[str, Any] = {} if part is None else part
        for key in kept:
            kind, _, name = key.partition(" ")
            if kind == "error":
                self.errors[name] = float(kept[key])
            elif kind == "time":
                self.times[name] = kept[key]
            self.recalled += kind == "sample"

    def error(
        self, low: Iterable[str], how: str, measure: Callable[[], float]
    ) -> float:
        """Return the known error of a choice, or a new measurement; ``how`` names it."""
        key = fingerprint(*sorted(low), "", how)
        if key not in self.errors:
            self.errors[key] = measure()
            self._keep(f"error {key}", as_data(float(self.errors[key])))
        return self.errors[key]

    def judged(
        self, low: Iterable[str], how: str, samples: Samples
    ) -> KeptSamples[float] | None:
        """Return the store of a choice's error on each sample; None if nothing is stored."""
        key = f"judged {fingerprint(*sorted(low), '', how)}"
        return (
            None
            if self.part is None
            else KeptSamples(self.part, samples, float, key, isfinite)
        )

    def measured(self, samples: Samples) -> KeptSamples[Sensitivities] | None:
        """Return the store of the sensitivities of each sample; None if nothing is stored."""
        return (
            None
            if self.part is None
            else KeptSamples(self.part, samples, Sensitivities)
        )

    def node_times(
        self, name: str, measure: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Return the known seconds of the nodes of a model, or a new measurement."""
        if name not in self.times:
            self._time(name, measure())
        return dict(self.times[name])

    def times_of(
        self,
        choices: Sequence[frozenset[str]],
        where: str,
        measure: Callable[[Sequence[frozenset[str]]], Sequence[float]],
    ) -> list[float]:
        """Return the known seconds of float32 and of some choices, or a new measurement, in turns."""
        rows = (fingerprint(*sorted(low), "", where) for low in choices)
        key = fingerprint(*rows)
        if key not in self.times:
            self._time(key, list(measure(choices)))
        return list(self.times[key])

    def _time(self, key: str, value: object) -> None:
        self.times[key] = value
        self._keep(f"time {key}", value)

    def _keep(self, key: str, value: object) -> None:
        if self.part is not None:
            self.part[key] = value
