"""How sensitive the outputs are to each op.

An instrumented pass replays every op of the lowered model on the float32 model's values: its local error. It can stop
after any sample and resume later. Local errors alone rank ops badly, so mask runs lower topological blocks of ops one
at a time, and halve the worst again and again. The error of a block is shared among its ops by their local errors:
price of op i = (error of the block)^2 * local_i^2 / sum of local^2 in the block.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from math import inf
from typing import Final, TypeAlias

from onnxamp._dtypes import Format
from onnxamp._errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.pairing import Pairing, pair
from onnxamp._numerics.walk import SideBySide, Walked
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.advice import input_failure
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.engines import Executable, OutputCache, part_of
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Samples
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.space import TunableNode

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


@dataclass(frozen=True, slots=True)
class LocalError:
    """A node's own relative error, its largest magnitude, and why it must stay float32, if so."""

    error: float
    largest: float
    broken: str | None


@dataclass(frozen=True, slots=True)
class LocalSample:
    """The local errors of values on one sample, and the error with everything in (emulated) low precision."""

    values: Mapping[str, Measurement]
    error: float


@dataclass(slots=True)
class LocalErrors:
    """What the pass has measured: the number of samples, the local error of each value, and the worst error of the
    outputs with everything in (emulated) low precision. ``ahead`` are samples that were done before earlier ones.
    """

    samples: int = 0
    values: dict[str, Measurement] = field(default_factory=dict)
    worst: float = 0.0
    ahead: dict[int, LocalSample] = field(default_factory=dict)

    def missing(self, count: int) -> list[int]:
        """Which of so many samples are not measured yet."""
        return [number for number in range(self.samples, count) if number not in self.ahead]

    def fold(self) -> None:
        """Add up what is next, in the order of the samples."""
        while (found := self.ahead.pop(self.samples, None)) is not None:
            for name, row in found.values.items():
                self.values[name] = self.values[name] + row if name in self.values else row
            self.samples, self.worst = self.samples + 1, max(self.worst, found.error)


def measure_samples(
    missing: Sequence[int],
    model: Model,
    lowered: Model,
    units: Sequence[TunableNode],
    samples: Samples,
    metric: Metric,
    progress: Progress,
    add: Callable[[int, LocalSample], None],
    references: OutputCache,
    budget: int = BUDGET,
    arithmetic: Profile | None = None,
) -> None:
    """Measure the samples that are missing, several at a time where they share large weights.

    ``add`` is called with the number of each, and what it shows; ``references`` keep float32 outputs; ``budget`` is the
    number of bytes of values and weights to hold at a time; ``arithmetic`` is the target whose float16 sums are
    emulated.

    Raises:
        RuntimeFailure: the model does not run.
    """
    walk = side_by_side(model, lowered, names_of(units), budget, arithmetic)
    if missing and missing[0]:  # all are prepared as the first one is
        walk.together(check_inputs(model.proto, samples[0]), ())
    while missing:
        first = missing[0]
        left = (check_inputs(model.proto, samples[number]) for number in missing)
        try:
            group = walk.together(next(left), left)
            numbers, missing = missing[: len(group)], missing[len(group) :]
            told = partial(progress, _activity(first, len(group), len(samples)))
            walks = walk.run_together(group, part_of(told, first, len(samples), len(group)))
        except RuntimeFailure as failure:
            raise RuntimeFailure(input_failure("The model does not run", failure, samples, first, model)) from failure
        for number, walked in zip(numbers, walks, strict=True):
            if walked.failure is None:
                references.keep(number, walked.reference)
            add(number, local_sample(walked, metric))


def _activity(first: int, count: int, total: int) -> str:
    """What is being done, for people."""
    which = f"sample {first + 1}" if count == 1 else f"samples {first + 1} to {first + count}"
    return f"measuring each op: {which} of {total}"


def side_by_side(
    model: Model, lowered: Model, names: Collection[str], budget: int, arithmetic: Profile | None
) -> SideBySide:
    """The model and its lowered form, of which values of some names are compared."""

    def paired(reference: Flow, result: Flow) -> Pairing:
        pairing = pair(reference, result)
        shared = {name: replay for name, replay in pairing.shared.items() if name in names and replay is not None}
        return Pairing(shared, pairing.replaceable, accumulated=False)

    one = Executable(model, "cpu", emulated=True, whole=False, budget=budget, arithmetic=arithmetic)
    return SideBySide(one, replace(one, model=lowered, origin=one), paired)


def names_of(units: Iterable[TunableNode]) -> frozenset[str]:
    """The values that the nodes compute."""
    return frozenset(name for unit in units for name in unit.names)


def local_sample(walked: Walked, metric: Metric) -> LocalSample:
    """What was measured on one sample."""
    error = metric.error(walked.reference, walked.result) if walked.failure is None else inf
    rows = walked.compared.items()
    return LocalSample({name: row.local for name, row in rows if row.local is not None}, error)


def local_of(unit: TunableNode, values: Mapping[str, Measurement], low: Format) -> LocalError:
    """The local error of a node."""
    mine = [values[name] for name in unit.names if name in values]
    if not mine:  # in the body of a loop, or computed from values that only the lowered model has
        return LocalError(low.epsilon / 2, 0.0, None)
    error, largest = max(m.rel_l2 for m in mine), max(m.reference_max for m in mine)
    alarm = next((m.alarm for m in mine if m.alarm), None)
    if alarm is not None:
        return LocalError(error, largest, alarm)
    if error > _BROKEN_ABOVE:
        return LocalError(error, largest, f"its own error is {100 * error:.0f} %")
    if largest * _HEADROOM > low.max_finite:
        return LocalError(error, largest, f"it reaches {largest:.4g}; {low.name} ends at {low.max_finite:.6g}")
    return LocalError(max(error, low.epsilon / 64), largest, None)


@dataclass(frozen=True, slots=True)
class Block:
    """Ops ``start`` to ``end`` (exclusive) in execution order, and the error of the outputs with only these lowered."""

    start: int
    end: int
    error: float


def measure_blocks(count: int, errors: Errors, runs: int, is_late: Callable[[], bool] = lambda: False) -> list[Block]:
    """Blocks that cover ``count`` ops, in order.

    Args:
        errors: measures the error of the outputs with the ops of each of several blocks in low precision.
        runs: how many measurements may be made.
        is_late: whether there is no time to halve further blocks.

    Complexity: as many measurements as ``runs``, at most.
    """
    first = min(_FIRST_BLOCKS, count, runs)
    bounds = [count * i // first for i in range(first + 1)] if first else []
    blocks = _measured([range(a, b) for a, b in pairwise(bounds)], errors)
    left = runs - len(blocks)
    while left >= 2 and not is_late() and (worst := _worst(blocks)) is not None:
        blocks[worst : worst + 1] = split(blocks[worst], errors)
        left -= 2
    return blocks


def split(block: Block, errors: Errors) -> list[Block]:
    """Measure both halves of a block."""
    middle = (block.start + block.end) // 2
    return _measured([range(block.start, middle), range(middle, block.end)], errors)


def _measured(parts: Sequence[range], errors: Errors) -> list[Block]:
    return [Block(part.start, part.stop, error) for part, error in zip(parts, errors(parts), strict=True)]


def _worst(blocks: Sequence[Block]) -> int | None:
    """The position of the block with the largest error among those that can be halved."""
    able = [i for i, block in enumerate(blocks) if block.end - block.start > 1 and block.error > 0]
    return max(able, key=lambda i: blocks[i].error, default=None)


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
