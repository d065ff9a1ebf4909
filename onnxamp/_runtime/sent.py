"""What samples take in another process: models, and how a sample gets there."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from onnx import ModelProto

from onnxamp._errors import OnnxAmpError
from onnxamp._model.external_data import INSIDE
from onnxamp._model.model import Model
from onnxamp._model.protos import tensors_of
from onnxamp._model.sources import FileStamp, check_same
from onnxamp._runtime.custom_ops import Surroundings
from onnxamp._runtime.dataset import read_row
from onnxamp._runtime.engines import Progress
from onnxamp._runtime.fingerprints import IN_FILES
from onnxamp._runtime.kept import KeptSamples
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.spool import read_spooled
from onnxamp._workers.executor import Memory, Work, Workers, run_in_order


@dataclass(frozen=True, slots=True)
class SentModel:
    """A model by its path, or as it is in memory; weights that were left in files are still read from there."""

    path: Path | None
    data: bytes
    folder: Path | None
    inside: str
    """What marks a weight that was left in a model file; another process has another mark."""
    stamps: Mapping[Path, FileStamp]
    """What identifies the contents of the files that were read."""

    @classmethod
    def of(cls, model: Model) -> "SentModel":
        """A model to send."""
        data = model.proto.SerializeToString() if model.path is None else b""
        return cls(model.path, data, model.folder, INSIDE, model.stamps)

    def opened(self, origin: Model | None = None) -> Model:
        """The model, where it was sent.

        Raises:
            SourceChangedError: its files are not those that were read where it comes from.
        """
        if self.path is not None:
            model = Model.read(self.path, origin)
            check_same(self.stamps, model.stamps)
            return model
        proto = ModelProto.FromString(self.data)
        for item in (item for tensor in tensors_of(proto) for item in tensor.external_data):
            if item.key == "location" and item.value.startswith(self.inside):
                item.value = INSIDE + item.value.removeprefix(self.inside)
        return Model(proto, self.folder, origin=origin)


class SentSample(NamedTuple):
    """A sample: its number, and what reads it."""

    number: int
    read: Callable[[], Sample]


Made: TypeAlias = tuple[Callable[[Sample], object], Callable[[SentSample], Any]]
"""What prepares models for the first sample, and what measures a sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleWork(ABC):
    """Work on samples in worker processes.

    Attributes:
        first: the sample for which models are prepared, as in one process, whatever sample comes first.
        surroundings: what the worker needs to know of this process.
    """

    first: SentSample
    surroundings: Surroundings = field(default_factory=Surroundings.here)

    def __call__(self, memory: Memory) -> Callable[[SentSample], Any]:
        """What a worker does with each sample."""
        self.surroundings.enter()
        prepare, measure = self.made(memory)
        with suppress(OnnxAmpError):  # as its own item will tell
            prepare(self.first.read())
        return measure

    @abstractmethod
    def made(self, memory: Memory) -> Made:
        """Read the models."""


def sent_samples(
    samples: Samples, numbers: Iterable[int] | None = None, workers: Workers | None = None
) -> Iterator[SentSample]:
    """Samples by number, all by default; those in files are read where they are sent to.

    So are those of a Ray Dataset, if the workers are of its cluster, and those of an iterator that are in temporary
    files, if they are of this machine.
    """
    travels = IN_FILES | {read_row if workers is not None and workers.is_ray else read_spooled}
    for number in samples.numbers() if numbers is None else numbers:
        reader = samples.readers[number]
        is_sent = getattr(reader, "func", None) in travels
        yield SentSample(number, reader if is_sent else partial(dict, samples[number]))


def run_samples(
    workers: Workers,
    work: Work,
    samples: Samples,
    progress: Progress | None = None,
    kept: KeptSamples[Any] | None = None,
) -> Iterator[Any]:
    """What workers make of the samples, in their order; a crash where a sample ends its worker.

    ``progress`` is called with the samples that are done, whatever their order, and their number. What is ``kept``
    already is not done again; what is done is kept at once, whatever its order.

    Raises:
        As :func:`onnxamp._workers.executor.run_in_order`.
    """
    known, finished = list[bool](), 0

    def is_known(number: int) -> bool:
        """Whether it was kept before this began."""
        if number == len(known):
            known.append(kept is not None and number in kept)
        return known[number]

    numbers = list[int]()

    def missing() -> Iterator[SentSample]:
        for number in samples.numbers():
            if not is_known(number):
                numbers.append(number)
                yield from sent_samples(samples, [number], workers)

    def done(position: int, result: Any) -> None:
        nonlocal finished
        finished += 1
        if kept is not None:
            kept.keep(numbers[position], result)
        if progress is not None:
            progress(finished + sum(known), samples.expected)

    results = run_in_order(workers, work, missing(), done=done)
    for number in samples.numbers():
        if is_known(number):
            assert kept is not None
            yield kept[number]
        else:
            yield next(results)
