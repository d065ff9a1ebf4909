"""Measurements of a tuning in its part of a state file: an interrupted one resumes, and nothing is measured twice."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final

from onnxamp._options.options import Options
from onnxamp._runtime.loop import KeptSamples
from onnxamp._runtime.samples import Samples
from onnxamp._state.state import Part, as_data, fingerprint
from onnxamp._tuning.sensitivity import LocalErrors, LocalSample

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


@dataclass(slots=True)
class TuningState:
    """Measurements of one tuning. ``part`` is where they are kept; None if they are not."""

    part: Part | None = None
    local: LocalErrors = field(default_factory=LocalErrors)
    errors: dict[str, float] = field(default_factory=dict)
    times: dict[str, Any] = field(default_factory=dict)
    """Times that were measured, by what they are of."""
    known: frozenset[str] = frozenset()
    """Keys of the errors that were loaded."""
    recalled: set[str] = field(default_factory=set)
    """The loaded errors of mask runs that were needed again."""

    @classmethod
    def of(cls, part: Part | None) -> "TuningState":
        """What a part holds."""
        errors, times = dict[str, float](), dict[str, Any]()
        for key in part or ():
            assert part is not None
            kind, _, name = key.partition(" ")
            if kind == "error":
                errors[name] = float(part[key])
            elif kind == "time":
                times[name] = part[key]
        return cls(part, LocalErrors(), errors, times, frozenset(errors))

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
