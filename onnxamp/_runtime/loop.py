"""The one loop over samples: comparisons, checks, ranges, tuning and rounding are probes that it runs.

A :class:`Probe` knows how to open its models and what to measure on a sample. :func:`observe` does everything else: it
measures in this process or hands samples to workers, survives a worker that dies, stores results in a state and reuses
them, and reports progress.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

from onnxamp._base.errors import ArgumentError, OnnxAmpError, RuntimeFailure
from onnxamp._base.executor import Crash, Memory, Workers, run_in_order
from onnxamp._base.state import Part, as_data, from_data
from onnxamp._model.model import Model
from onnxamp._runtime.engines import Progress, engine_on, progress_of_part
from onnxamp._runtime.fingerprints import IN_FILES, sample_print
from onnxamp._runtime.inputs.draws import Draw
from onnxamp._runtime.inputs.sample_files import read_spooled
from onnxamp._runtime.inputs.samples import Sample, Samples, read_row
from onnxamp._runtime.inputs.suited import other_sizes
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.starting import Surroundings
from onnxamp._runtime.sessions.values import check_inputs
from onnxamp._runtime.sizes import listed


def input_failure(
    text: str, error: RuntimeFailure, samples: Samples, number: int, model: Model
) -> str:
    """Return a sentence about a model that fails on a sample: ``text``, the sample's number, the error, and advice.

    Random inputs may be the cause if a node fails, but not if the model does not even load. If other sizes were not
    tried before, the model runs with them to name some that work.

    Raises:
        ArgumentError: the inputs are the user's, and the model had loaded: they do not fit it.
    """
    counted = f" of {samples.counted}" if samples.counted is not None else ""
    which = f" (sample {number + 1}{counted})" if samples.counted != 1 else ""
    sentence = f"{text}{which}: {error}"
    if not error.loaded:
        return sentence
    if samples.draw is None:
        raise ArgumentError(
            f"{sentence} Check the inputs ({samples.description})."
        ) from error
    return f"{sentence} {_advice(samples.draw, model)}"


def _advice(draw: Draw, model: Model) -> str:
    """Return sizes with which the model runs, as options, or other advice."""
    other = draw
    if not draw.tried:
        session = engine_on("cpu").open(model, whole=True)

        def run(candidate: Draw) -> object:
            return session.run(check_inputs(model.proto, candidate.make(0)))

        other = other_sizes(draw, run)
    sizes = {**draw.sizes, **other.sizes}
    options = " ".join(f"--dim {name}={size}" for name, size in sizes.items())
    if options and other.sizes != draw.sizes:
        return f"The inputs are random and their sizes do not suit the model, but these do: {options}"
    tried = ""
    if other.tried:
        tried = f" (tried without success: {'; '.join(map(listed, other.tried))})"
    return f"Real inputs (--inputs data.npz) or sizes (--dim name=N) may help{tried}."


T = TypeVar("T")


class SentSample(NamedTuple):
    """A sample: its number, and a function that reads it, here or in another process."""

    number: int
    read: Callable[[], Sample]


class LoadedSample(NamedTuple):
    """A sample to measure now: its number, its arrays, and its progress callback."""

    number: int
    sample: Sample
    progress: Progress


Told: TypeAlias = Callable[[int], Progress]
"""Returns the progress callback for a sample, given its number."""

Measure: TypeAlias = Callable[
    [Iterator[SentSample], Told], Iterator[T | RuntimeFailure]
]
"""Yields the measurement of each sample, or why the model does not run on it. It may measure several together."""


class Opened(NamedTuple, Generic[T]):
    """A probe whose models are open.

    Attributes:
        prepare: prepares the models for the first sample, if another one is measured before it. Errors in that sample
            do not matter here, because its own measurement reports them.
        measure: measures samples.
    """

    prepare: Callable[[Sample], object]
    measure: Measure[T]


def one_by_one(measure: Callable[[LoadedSample], T]) -> Measure[T]:
    """Return a function that measures samples one after the other. ``measure`` raises RuntimeFailure if the model does
    not run.
    """

    def measured(
        items: Iterator[SentSample], told: Told
    ) -> Iterator[T | RuntimeFailure]:
        for item in items:
            try:
                arrays = item.read()
                sample = LoadedSample(item.number, arrays, told(item.number))
                result = measure(sample)
            except RuntimeFailure as failure:
                yield failure
            else:
                yield result

    return measured


def in_groups(
    size: int, model: Model, measure: Callable[[Mapping[int, Sample]], Iterable[T]]
) -> Measure[T]:
    """Return a function that measures a few samples at a time.

    Args:
        size: how many samples are held at a time, at most.
        model: the model that the samples have to suit.
        measure: measures samples by number, in order; it raises RuntimeFailure if the model does not run.
    """

    def measured(
        items: Iterator[SentSample], told: Told
    ) -> Iterator[T | RuntimeFailure]:
        del told
        while group := list(islice(items, size)):
            feeds = {
                item.number: check_inputs(model.proto, item.read()) for item in group
            }
            done = 0
            try:
                for result in measure(feeds):
                    done += 1
                    yield result
            except RuntimeFailure as failure:
                # It counts for all samples of the group that have no result yet.
                yield from [failure] * (len(group) - done)

    return measured


class Probe(ABC, Generic[T]):
    """A measurement of each sample. It goes to worker processes, so it has to be picklable.

    Attributes:
        has_steps: whether measuring a sample reports its own progress; if not, the loop reports finished samples.
    """

    has_steps: ClassVar[bool] = True

    @abstractmethod
    def open(self, memory: Memory) -> Opened[T]:
        """Open the models.

        Args:
            memory: values that earlier probes left in the worker or the caller; see :func:`remembered`.
        """


def remembered(memory: Memory, name: str, key: str, make: Callable[[], T]) -> T:
    """Return the value that was made for a key, and forget the value of the same name for another key."""
    if name not in memory or memory[name][0] != key:
        memory[name] = key, make()
    result: T = memory[name][1]
    return result


@dataclass(slots=True)
class KeptSamples(Generic[T]):
    """Records of samples in a part of a state file. A record belongs to the contents of its sample: if they change, it
    is missing.

    Attributes:
        part: where they are stored.
        samples: the samples.
        kind: the type of the records.
        what: the subject of the records, if a part has several.
        takes: whether to store a record.
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
        record: T = from_data(self.kind, self.part[self._key(number)])
        return record

    def __setitem__(self, number: int, record: T) -> None:
        if self.takes(record):
            self.part[self._key(number)] = as_data(record, named=False)

    def _key(self, number: int) -> str:
        if number not in self._keys:
            self._keys[number] = (
                f"{self.what} {number} {sample_print(self.samples, number)}"
            )
        return self._keys[number]


class Found(NamedTuple, Generic[T]):
    """The measurement of a sample, or why there is none."""

    number: int
    result: T | None
    trouble: RuntimeFailure | Crash | None


Kept: TypeAlias = KeptSamples[T] | dict[int, T]
"""Records that are not measured again, by number of the sample."""


def observe(
    run: Run,
    probe: Probe[T],
    activity: str = "",
    *,
    kept: Kept[T] | None = None,
    memory: Memory | None = None,
    only: int | None = None,
    once: bool = False,
) -> Generator[Found[T]]:
    """Yield the measurement of each sample of a run, in order.

    Models are prepared for the first sample, whichever is measured first, so results do not depend on the workers.

    Args:
        run: the samples, the workers and the progress callback.
        probe: what to measure.
        activity: a description for progress reports; "" for no reports.
        kept: results of an earlier run, which are not measured again; new ones are added at once, whatever their order.
        memory: the probe's memory in this process; workers have their own.
        only: the number of the one sample to measure; None for all.
        once: no sample is needed again, so that samples of an iterator can be forgotten.

    Raises:
        OutputError: the state file cannot be written.
        Others as the probe, but for RuntimeFailure, and as
        :func:`onnxamp._base.executor.run_in_order`.
    """
    round_ = _Round(run, probe, activity, kept, only)
    workers = run.sample_workers
    results = (
        round_.measured_here({} if memory is None else memory)
        if workers is None
        else round_.handed_to(workers)
    )
    with closing(results):
        for number in round_.numbers():
            if kept is not None and round_.is_known(number):
                yield Found(number, kept[number], None)
            else:
                result = next(results)
                if isinstance(result, (RuntimeFailure, Crash)):
                    yield Found(number, None, result)
                else:
                    yield Found(number, result, None)
            if once:
                run.samples.forget(number)


def observe_all(
    run: Run,
    probe: Probe[T],
    activity: str = "",
    *,
    kept: Kept[T] | None = None,
    memory: Memory | None = None,
    only: int | None = None,
    crashed: str,
    failed: str = "",
    model: Model | None = None,
) -> Generator[T]:
    """Yield the measurement of each sample, or raise if one fails. Other arguments as :func:`observe`.

    Args:
        crashed: message for a sample that ends its worker, with "{crash}", "{sample}" (its number) and "{total}".
        failed: beginning of the message for a sample on which the model does not run.
        model: the model, for advice on its inputs; None to raise that error as it is.

    Raises:
        RuntimeFailure: a sample cannot be measured. ArgumentError: it does not fit the model.
    """
    with closing(
        observe(run, probe, activity, kept=kept, memory=memory, only=only)
    ) as results:
        for observed in results:
            trouble = observed.trouble
            if isinstance(trouble, Crash):
                text = crashed.format(
                    sample=observed.number + 1,
                    total=run.samples.expected,
                    crash=trouble,
                )
                raise RuntimeFailure(text)
            if trouble is not None:
                if model is None:
                    raise trouble
                raise RuntimeFailure(
                    input_failure(failed, trouble, run.samples, observed.number, model)
                ) from trouble
            assert observed.result is not None
            yield observed.result


@dataclass(slots=True)
class _Round(Generic[T]):
    """One round of the loop: the samples to measure now, and the handling of results."""

    run: Run
    probe: Probe[T]
    activity: str
    kept: Kept[T] | None
    only: int | None
    known: dict[int, bool] = field(default_factory=dict)
    """By number: whether the result was kept before the round began."""
    given: list[int] = field(default_factory=list)
    """The numbers of the samples that are measured, in the order in which they are handed out."""
    finished: int = 0

    def is_known(self, number: int) -> bool:
        """Return whether the result of a sample was kept before the round began."""
        if number not in self.known:
            self.known[number] = self.kept is not None and number in self.kept
        return self.known[number]

    def numbers(self) -> Iterator[int]:
        """Yield the numbers of the samples to measure, or whose results are known."""
        return self.run.samples.numbers() if self.only is None else iter([self.only])

    def measured_here(self, memory: Memory) -> Generator[T | RuntimeFailure]:
        """Measure the samples without results in this process, and yield their results."""
        opened = self.probe.open(memory)
        missing = self._missing()
        first = next(missing)
        if first.number:
            with suppress(OnnxAmpError):
                opened.prepare(self.run.samples[0])
        for position, result in enumerate(
            opened.measure(chain([first], missing), self._told)
        ):
            self._done(position, result)
            if self.activity and not self.probe.has_steps:
                self.run.report(
                    self.activity, self.given[position] + 1, self.run.samples.expected
                )
            yield result

    def handed_to(self, workers: Workers) -> Generator[T | RuntimeFailure | Crash]:
        """Measure them on workers, and yield their results."""
        first = next(sent_samples(self.run.samples, [0], workers))
        work = partial(_opened, self.probe, first, Surroundings.here())

        def done(position: int, result: Any) -> None:
            self._done(position, result)
            if self.activity:
                self.run.report(
                    self.activity,
                    self.finished + sum(self.known.values()),
                    self.run.samples.expected,
                )

        yield from run_in_order(workers, work, self._missing(workers), done=done)

    def _missing(self, workers: Workers | None = None) -> Iterator[SentSample]:
        samples = self.run.samples
        for number in self.numbers():
            if not self.is_known(number):
                self.given.append(number)
                if workers is None:
                    yield SentSample(number, samples.readers[number])
                else:
                    yield from sent_samples(samples, [number], workers)

    def _told(self, number: int) -> Progress:
        if not self.activity:
            return _unheard
        progress = self.run.progress(self.activity)
        return progress_of_part(progress, number, self.run.samples.expected)

    def _done(self, position: int, result: T | RuntimeFailure | Crash) -> None:
        self.finished += 1
        if self.kept is not None and not isinstance(result, (RuntimeFailure, Crash)):
            self.kept[self.given[position]] = result


def _unheard(done: int, total: int) -> None:
    """Ignore progress."""
    del done, total


def _opened(
    probe: Probe[T], first: SentSample, surroundings: Surroundings, memory: Memory
) -> Callable[[SentSample], Any]:
    """Open the models of a probe in a worker process, and return the function that measures a sample.

    Args:
        probe: the probe.
        first: the sample for which models are prepared, as in one process, regardless of which sample comes first.
        surroundings: what the worker needs to know of the process that sent the probe.
        memory: the memory of the worker.
    """
    surroundings.enter()
    opened = probe.open(memory)
    with suppress(OnnxAmpError):
        opened.prepare(first.read())

    def measure(item: SentSample) -> Any:
        (result,) = opened.measure(iter([item]), lambda _: _unheard)
        return list(result) if isinstance(result, Iterator) else result

    return measure


def sent_samples(
    samples: Samples,
    numbers: Iterable[int] | None = None,
    workers: Workers | None = None,
) -> Iterator[SentSample]:
    """Yield samples by number, all by default; samples in files are read by the worker.

    So are those of a Ray Dataset, if the workers belong to its cluster, and those of an iterator in temporary files, if
    the workers run on this machine.
    """
    travels = IN_FILES | {
        read_row if workers is not None and workers.is_cluster else read_spooled
    }
    for number in samples.numbers() if numbers is None else numbers:
        reader = samples.readers[number]
        is_sent = getattr(reader, "func", None) in travels
        yield SentSample(number, reader if is_sent else partial(dict, samples[number]))
