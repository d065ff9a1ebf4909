"""What samples showed, kept in a part of a state file: an interrupted job goes on with the samples that are missing."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from onnxamp._runtime.fingerprints import sample_print
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._state.plain import as_data, from_data
from onnxamp._state.state import Part

T = TypeVar("T")


@dataclass(slots=True)
class KeptSamples(Generic[T]):
    """Records of samples by number. Each belongs to what the sample holds: one that changed is missing again.

    Attributes:
        part: where they are kept.
        samples: the samples.
        kind: the type of the records, a dataclass.
        what: what the records are of, where a part has several.
        takes: whether to keep a record; what is of another type never is.
    """

    part: Part
    samples: Samples
    kind: type[T]
    what: str = "sample"
    takes: Callable[[T], bool] = lambda _: True
    _keys: dict[int, str] = field(default_factory=dict)

    def __contains__(self, number: int) -> bool:
        return self._key(number) in self.part

    def __getitem__(self, number: int) -> T:
        found: T = from_data(self.kind, self.part[self._key(number)])
        return found

    def keep(self, number: int, record: object) -> None:
        """Keep a record.

        Raises:
            OutputError: the state file cannot be written.
        """
        if isinstance(record, self.kind) and self.takes(record):
            self.part[self._key(number)] = as_data(record, named=False)

    def _key(self, number: int) -> str:
        if number not in self._keys:
            self._keys[number] = f"{self.what} {number} {sample_print(self.samples, number)}"
        return self._keys[number]


def each_sample(
    samples: Samples, kept: KeptSamples[Any] | None, prepare: Callable[[Sample], object], measure: Callable[[int], T]
) -> Iterator[T]:
    """What each sample shows, in order: what is kept, or what is measured now, which is kept then.

    Args:
        samples: the samples.
        kept: what is known; None if nothing is kept.
        prepare: called with the first sample before another one is measured, if that one need not be.
        measure: called with the number of each sample that is missing.

    Raises:
        OutputError: the state file cannot be written.
    """
    is_prepared = False
    for number in samples.numbers():
        if kept is not None and number in kept:
            yield kept[number]
            continue
        if number and not is_prepared:
            prepare(samples[0])
        is_prepared = True
        found = measure(number)
        if kept is not None:
            kept.keep(number, found)
        yield found
