"""Measurements of a tuning in its part of a state file: an interrupted one resumes, and nothing is measured twice."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import isfinite
from typing import Any, Final

from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.watch import join
from onnxamp._options.options import Options
from onnxamp._runtime.loop import KeptSamples
from onnxamp._runtime.samples import Samples
from onnxamp._state.state import Part, as_data, fingerprint
from onnxamp._tuning.sensitivity import LocalSample

PARTS: Final = (
    "tuning",
    "tuning with exponents",
    "tuning with compensation",
    "tuning with exponents and compensation",
)
"""Parts of the state file."""


def part_of(options: Options) -> str:
    """The part of a tuning with these options."""
    return PARTS[2 * options.compensates + (options.rescaling is not None)]


class TuningState:
    """Measurements of one tuning. ``part`` is where they are kept; None if they are not.

    Attributes:
        local: the local error of each value over all samples.
        worst: the worst error of the outputs with everything in (emulated) low precision.
        errors, times: what was measured, by what it is of.
        known: keys of the errors that were loaded.
        recalled: the loaded errors of mask runs that were needed again.
    """

    def __init__(self, part: Part | None) -> None:
        self.part, self.worst = part, 0.0
        self.local = dict[str, Measurement]()
        self.errors, self.times = dict[str, float](), dict[str, Any]()
        kept: Mapping[str, Any] = {} if part is None else part
        for key in kept:
            kind, _, name = key.partition(" ")
            if kind == "error":
                self.errors[name] = float(kept[key])
            elif kind == "time":
                self.times[name] = kept[key]
        self.known, self.recalled = frozenset(self.errors), set[str]()

    def add(self, sample: LocalSample) -> None:
        """Add what a sample shows."""
        join(self.local, sample.values)
        self.worst = max(self.worst, sample.error)

    def error(
        self, low: Iterable[str], how: Sequence[int] | str, measure: Callable[[], float]
    ) -> float:
        """The known error of a choice, or a new measurement; ``how`` is the samples of a mask run, or a name."""
        return next(self.errors_of([frozenset(low)], how, lambda _: iter([measure()])))

    def judged(self, low: Iterable[str], how: str, samples: Samples) -> KeptSamples[float] | None:
        """What keeps the error of a choice on each sample; None if nothing is kept."""
        key = f"judged {fingerprint(*sorted(low), '', how)}"
        return None if self.part is None else KeptSamples(self.part, samples, float, key, isfinite)

    def measured(self, samples: Samples) -> KeptSamples[LocalSample] | None:
        """Return what keeps the local errors of each sample; None if nothing is kept."""
        return None if self.part is None else KeptSamples(self.part, samples, LocalSample)

    def errors_of(
        self,
        choices: Sequence[AbstractSet[str]],
        how: Sequence[int] | str,
        measure: Callable[[Sequence[AbstractSet[str]]], Iterator[float]],
    ) -> Iterator[float]:
        """:meth:`error` of several choices, as they are measured; ``measure`` gets those that are not known."""
        keys = [fingerprint(*sorted(low), "", *map(str, how)) for low in choices]
        missing = {
            key: low for key, low in zip(keys, choices, strict=True) if key not in self.errors
        }
        found = measure(list(missing.values())) if missing else iter(())
        for key in keys:
            if key not in self.errors:
                self.errors[key] = next(found)
                self._keep(f"error {key}", as_data(float(self.errors[key])))
            if key in self.known and not isinstance(how, str):
                self.recalled.add(key)
            yield self.errors[key]

    def node_times(self, name: str, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The known seconds of the nodes of a model, or a new measurement."""
        if name not in self.times:
            self._time(name, measure())
        return dict(self.times[name])

    def times_of(
        self,
        choices: Sequence[frozenset[str]],
        where: str,
        measure: Callable[[Sequence[frozenset[str]]], Sequence[float]],
    ) -> list[float]:
        """Seconds of float32 and of some choices; ``measure`` times those that are not known beside float32."""
        keys = [fingerprint(*sorted(low), "", where) for low in choices]
        missing = {
            key: low for key, low in zip(keys, choices, strict=True) if key not in self.times
        }
        if missing:
            float32, *found = measure(list(missing.values()))
            for key, seconds in zip(missing, found, strict=True):
                self._time(key, [float32, seconds])
        pairs = [self.times[key] for key in keys]
        return [pairs[0][0], *(seconds * pairs[0][0] / float32 for float32, seconds in pairs)]

    def _time(self, key: str, value: object) -> None:
        self.times[key] = value
        self._keep(f"time {key}", value)

    def _keep(self, key: str, value: object) -> None:
        if self.part is not None:
            self.part[key] = value
