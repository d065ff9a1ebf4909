"""How sensitive the outputs are to each op.

An instrumented pass replays every op of the lowered model on the float32 model's values: its local error. It can stop
after any sample and resume later. Local errors alone rank ops badly, so mask runs lower topological blocks of ops one
at a time, and halve the worst again and again. The error of a block is shared among its ops by their local errors:
price of op i = (error of the block)^2 * local_i^2 / sum of local^2 in the block.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import islice, pairwise
from math import inf, isfinite
from typing import Any, Final, NamedTuple, TypeAlias

from onnxamp._dtypes import Format
from onnxamp._errors import RuntimeFailure
from onnxamp._numerics.metrics import Measurement
from onnxamp._numerics.walk import Pairing, SideBySide, Walked, pair
from onnxamp._numerics.watch import join
from onnxamp._options.options import Options
from onnxamp._runtime.engines import Engine, OutputCache
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.loop import KeptSamples, Opened, Probe, SentSample, Told
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.values import Feed, check_inputs
from onnxamp._state import Part, as_data, fingerprint
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.space import TunableNode
from onnxamp._workers.executor import Memory

Errors: TypeAlias = Callable[[Sequence[range]], Sequence[float]]
"""Measures blocks that do not depend on each other: for each, the error with its ops in low precision."""

Progress: TypeAlias = Callable[[str, int, int], None]
"""Called with the current activity ("activity: detail"), the steps done, and their number."""

_HEADROOM: Final = 4.0
"""Factor by which values of other samples may exceed the measured ones."""

_FIRST_BLOCKS: Final = 8
"""Blocks of the first partition."""

_BROKEN_ABOVE: Final = 0.1
"""Local relative L2 error above which an op stays float32."""


class LocalError(NamedTuple):
    """A node's own relative error, its largest magnitude, and why it must stay float32, if so."""

    error: float
    largest: float
    broken: str | None


@dataclass(frozen=True, slots=True)
class LocalSample:
    """The local errors of values on one sample, and the error with everything in (emulated) low precision."""

    values: Mapping[str, Measurement]
    error: float


OUTPUTS: Final = "outputs of the tuned model"
"""Where the memory of this process collects float32 outputs, by sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalProbe(Probe[LocalSample]):
    """Replaying every op of the lowered model on the values of the float32 model.

    Attributes:
        names: the values that are compared.
        engine: emulates low precision.
        metric: measures the error of the outputs.
    """

    model: SentModel
    lowered: SentModel
    names: frozenset[str]
    engine: Engine
    metric: Metric
    budget: int

    def open(self, memory: Memory) -> Opened[LocalSample]:
        """As :meth:`Probe.open`."""
        one = self.engine.open(self.model.opened(), budget=self.budget)
        lowered = self.engine.open(
            self.lowered.opened(), budget=self.budget, origin=one
        )
        walk = SideBySide(one, lowered, self._paired)

        def prepare(sample: Sample) -> None:
            walk.together(check_inputs(one.model.proto, sample), ())

        return Opened(
            prepare, _LocalErrors(walk, self.metric, memory.get(OUTPUTS)).measure
        )

    def activity(self, activity: str, first: int, count: int, total: int) -> str:
        """As :meth:`Probe.activity`."""
        which = (
            f"sample {first + 1}"
            if count == 1
            else f"samples {first + 1} to {first + count}"
        )
        return f"{activity}: {which} of {total}"

    def _paired(self, reference: Flow, result: Flow) -> Pairing:
        pairing = pair(reference, result)
        shared = {
            name: replay
            for name, replay in pairing.shared.items()
            if name in self.names and replay is not None
        }
        return Pairing(shared, pairing.replaceable, accumulated=False)


class _LocalErrors:
    """Measures local errors of several samples at a time where they share large weights."""

    def __init__(
        self, walk: SideBySide, metric: Metric, outputs: OutputCache | None
    ) -> None:
        self.walk, self.metric, self.outputs = walk, metric, outputs
        self._waiting: deque[tuple[int, Mapping[str, Feed]]] = (
            deque()
        )  # samples that were read

    def measure(
        self, items: Iterator[SentSample], told: Told
    ) -> Iterator[LocalSample | RuntimeFailure]:
        """Measure samples, as :data:`Measure`."""
        feeds = self._read(items)
        while self._waiting or next(feeds, None) is not None:
            first, count = self._waiting[0], 1
            results: Sequence[LocalSample | RuntimeFailure]
            try:
                group = self.walk.together(first[1], self._following(feeds))
                count = len(group)
                walks = self.walk.run_together(group, told(first[0], count))
            except RuntimeFailure as failure:
                results = [failure] * count
            else:
                numbers = [number for number, _ in islice(self._waiting, count)]
                results = [
                    self._sample(number, walked)
                    for number, walked in zip(numbers, walks, strict=True)
                ]
            for _ in range(count):
                self._waiting.popleft()
            yield from results

    def _read(self, items: Iterator[SentSample]) -> Iterator[Mapping[str, Feed]]:
        """Read samples one by one, which wait then."""
        for item in items:
            feeds = check_inputs(self.walk.reference.model.proto, item.read())
            self._waiting.append((item.number, feeds))
            yield feeds

    def _following(
        self, feeds: Iterator[Mapping[str, Feed]]
    ) -> Iterator[Mapping[str, Feed]]:
        """Yield the samples after the first that waits, as far as they are asked for."""
        waiting = [feeds for _, feeds in self._waiting]
        yield from waiting[1:]
        yield from feeds

    def _sample(self, number: int, walked: Walked) -> LocalSample:
        """Return what was measured on one sample."""
        error = inf
        if walked.failure is None:
            error = self.metric.error(walked.reference, walked.result)
            if self.outputs is not None:
                self.outputs.keep(number, walked.reference)
        local = {
            name: row.local
            for name, row in walked.compared.items()
            if row.local is not None
        }
        return LocalSample(local, error)


def names_of(units: Iterable[TunableNode]) -> frozenset[str]:
    """The values that the nodes compute."""
    return frozenset(name for unit in units for name in unit.names)


def local_of(
    unit: TunableNode, values: Mapping[str, Measurement], low: Format
) -> LocalError:
    """The local error of a node."""
    mine = [values[name] for name in unit.names if name in values]
    if (
        not mine
    ):  # in the body of a loop, or computed from values that only the lowered model has
        return LocalError(low.epsilon / 2, 0.0, None)
    error, largest = max(m.rel_l2 for m in mine), max(m.reference_max for m in mine)
    broken = next((m.alarm for m in mine if m.alarm), None)
    if broken is None and error > _BROKEN_ABOVE:
        broken = f"its own error is {100 * error:.0f} %"
    elif broken is None and largest * _HEADROOM > low.max_finite:
        broken = f"it reaches {largest:.4g}; {low.name} ends at {low.max_finite:.6g}"
    return LocalError(
        error if broken else max(error, low.epsilon / 64), largest, broken
    )


class Block(NamedTuple):
    """Ops ``start`` to ``end`` (exclusive) in execution order, and the error of the outputs with only these lowered."""

    start: int
    end: int
    error: float


def measure_blocks(
    count: int, errors: Errors, runs: int, is_late: Callable[[], bool] = lambda: False
) -> list[Block]:
    """Blocks that cover ``count`` ops, in order.

    Args:
        errors: measures the error of the outputs with the ops of each of several blocks in low precision.
        runs: how many measurements may be made.
        is_late: whether there is no time to halve further blocks.

    Complexity: as many measurements as ``runs``, at most.
    """
    first = min(_FIRST_BLOCKS, count, runs)
    bounds = [count * i // first for i in range(first + 1)] if first else []
    blocks = _measured(bounds, errors)
    left = runs - len(blocks)
    while left >= 2 and not is_late():
        able = [
            block for block in blocks if block.end - block.start > 1 and block.error > 0
        ]
        if not able:
            break
        worst = max(able, key=lambda block: block.error)
        place, middle = blocks.index(worst), (worst.start + worst.end) // 2
        blocks[place : place + 1] = _measured([worst.start, middle, worst.end], errors)
        left -= 2
    return blocks


def _measured(bounds: Sequence[int], errors: Errors) -> list[Block]:
    """The blocks between these bounds."""
    pairs = list(pairwise(bounds))
    found = errors([range(*pair) for pair in pairs])
    return [Block(*pair, error) for pair, error in zip(pairs, found, strict=True)]


def error_prices(blocks: Sequence[Block], local: Sequence[float]) -> list[float]:
    """The squared error that each op causes at the outputs; infinite if its block breaks them."""
    prices = [0.0] * len(local)
    for block in blocks:
        members = range(block.start, block.end)
        energy = sum(local[i] ** 2 for i in members)
        for i in members:
            share = local[i] ** 2 / energy if energy else 1 / len(members)
            prices[i] = inf if block.error == inf else block.error**2 * share
    return prices


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

    def judged(
        self, low: Iterable[str], how: str, samples: Samples
    ) -> KeptSamples[float] | None:
        """What keeps the error of a choice on each sample; None if nothing is kept."""
        key = f"judged {fingerprint(*sorted(low), '', how)}"
        return (
            None
            if self.part is None
            else KeptSamples(self.part, samples, float, key, isfinite)
        )

    def measured(self, samples: Samples) -> KeptSamples[LocalSample] | None:
        """Return what keeps the local errors of each sample; None if nothing is kept."""
        return (
            None if self.part is None else KeptSamples(self.part, samples, LocalSample)
        )

    def errors_of(
        self,
        choices: Sequence[AbstractSet[str]],
        how: Sequence[int] | str,
        measure: Callable[[Sequence[AbstractSet[str]]], Iterator[float]],
    ) -> Iterator[float]:
        """:meth:`error` of several choices, as they are measured; ``measure`` gets those that are not known."""
        keys = [fingerprint(*sorted(low), "", *map(str, how)) for low in choices]
        missing = {
            key: low
            for key, low in zip(keys, choices, strict=True)
            if key not in self.errors
        }
        found = measure(list(missing.values())) if missing else iter(())
        for key in keys:
            if key not in self.errors:
                self.errors[key] = next(found)
                self._keep(f"error {key}", as_data(float(self.errors[key])))
            if key in self.known and not isinstance(how, str):
                self.recalled.add(key)
            yield self.errors[key]

    def node_times(
        self, name: str, measure: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
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
            key: low
            for key, low in zip(keys, choices, strict=True)
            if key not in self.times
        }
        if missing:
            float32, *found = measure(list(missing.values()))
            for key, seconds in zip(missing, found, strict=True):
                self._time(key, [float32, seconds])
        pairs = [self.times[key] for key in keys]
        return [
            pairs[0][0],
            *(seconds * pairs[0][0] / float32 for float32, seconds in pairs),
        ]

    def _time(self, key: str, value: object) -> None:
        self.times[key] = value
        self._keep(f"time {key}", value)

    def _keep(self, key: str, value: object) -> None:
        if self.part is not None:
            self.part[key] = value
