"""The hunt for candidates: prices from block runs, choices by the cut, and a mask run to judge each."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from onnxamp._tuning.blocks import Block, measure_blocks, price, split
from onnxamp._tuning.local import Local, Told
from onnxamp._tuning.memory import Memory
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.probe import Probe
from onnxamp._tuning.search import Candidate, Chooser
from onnxamp._tuning.units import Unit

PRICING: Final = 32
"""Mask runs that prices may take, by default."""

JUDGING: Final = 16
"""Mask runs that candidates may take. Two more go to the reference, and to the float32 model against itself."""

_RELOWERINGS: Final = 5
"""Mask runs of these that are left for lowering more of the best candidate."""

_REPEATS: Final = 12
"""Cuts in a row that lead to known candidates, before the prices are thought to have said what they know."""

_PRIOR: Final = 1e-6
"""Share of the squared tolerance that all local errors together cost where blocks show nothing: ranks, not sizes."""


@dataclass(slots=True)
class Hunt:
    """A search for candidates; ``locals`` are what is known of each unit on its own, ``subset`` the samples of mask
    runs, ``known`` errors of choices that need no run. Errors are amplitudes (:mod:`onnxamp._tuning.metric`) here.
    """

    chooser: Chooser
    probe: Probe
    memory: Memory
    metric: Metric
    locals: Sequence[Local]
    subset: Sequence[int]
    runs: int
    told: Told
    known: Mapping[frozenset[str], float] = field(default_factory=dict)
    found: list[Candidate] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    asked: set[frozenset[str]] = field(default_factory=set)

    @property
    def left(self) -> int:
        """Mask runs that may still be asked for."""
        return self.runs + JUDGING - len(self.asked)

    def ask(self, low: Iterable[str]) -> float:
        """The error of a choice on the subset of samples."""
        keys = frozenset(low)
        if keys in self.known:
            return self.metric.amplitude(self.known[keys])
        self.asked.add(keys)
        done, most = len(self.asked), self.runs + JUDGING
        self.told(f"trying blocks and candidates: run {done} of at most {most}", done, most)
        error = self.memory.error(keys, self.subset, lambda: self.probe.error(keys, self.subset))
        return self.metric.amplitude(error)

    def search(self, tolerance: float) -> list[float]:
        """Add candidates to ``found``; returns the price of every unit."""
        units = self.chooser.space.units
        free = [unit for unit in units if unit.seen and unit.key not in self.chooser.pinned]
        flat = [0.0] * len(units)
        everything = self.chooser.choose(flat, 0.0)
        if not free or not everything:
            return flat
        error = self.ask(everything)
        if error <= tolerance:
            found = self.chooser.candidate(everything, flat, error)
            self.found.append(replace(found, predicted=error))  # nothing has a price
            return flat
        if not self.blocks:
            self.blocks = measure_blocks(len(free), lambda members: self.of_block(free, members), self.runs)
        prices = self.prices(free, tolerance)
        self.found.append(self.chooser.candidate(everything, prices, error))
        prices = self.push(free, prices, tolerance, everything)
        self.relower(prices, tolerance)
        return prices

    def of_block(self, free: Sequence[Unit], members: range) -> float:
        """The error with a block of units low."""
        return self.ask(free[i].key for i in members)

    def prices(self, free: Sequence[Unit], tolerance: float) -> list[float]:
        """Prices of all units; those that are pinned have none."""
        units = self.chooser.space.units
        local = dict(zip((unit.key for unit in units), self.locals, strict=True))
        mine = [local[unit.key].error for unit in free]
        prior = _PRIOR * tolerance**2 / (sum(error**2 for error in mine) or 1)
        costs = [cost + prior * error**2 for cost, error in zip(price(self.blocks, mine), mine, strict=True)]
        found = dict(zip((unit.key for unit in free), costs, strict=True))
        return [found.get(unit.key, 0.0) for unit in units]

    def push(
        self, free: Sequence[Unit], prices: list[float], tolerance: float, everything: frozenset[str]
    ) -> list[float]:
        """Verify what prices predict; refine them on a miss, ask for more on a hit; returns the prices at last."""
        target, tried = (0.9 * tolerance) ** 2, {everything: False}
        repeats, step = 0, 2.0
        while self.left > _RELOWERINGS and repeats < _REPEATS:
            low = self.chooser.within(prices, target)
            if not low:
                break
            if low in tried:
                target *= step if tried[low] else 1 / step
                repeats, step = repeats + 1, step**0.8
                continue
            error = self.ask(low)
            self.found.append(self.chooser.candidate(low, prices, error))
            ratio, tried[low] = (tolerance / error) ** 2 if error else inf, error <= tolerance
            if tried[low]:
                target *= min(4.0, max(1.25, 0.8 * ratio))
                continue
            target = self.chooser.predicted(low, prices) * max(0.1, min(0.9, 0.8 * ratio))
            worst = self.dominating(free, prices, low)
            if worst is not None and self.left >= _RELOWERINGS + 3:
                self.blocks[worst : worst + 1] = split(self.blocks[worst], lambda members: self.of_block(free, members))
                prices = self.prices(free, tolerance)
        return prices

    def dominating(self, free: Sequence[Unit], prices: Sequence[float], low: frozenset[str]) -> int | None:
        """The block, of those that can be halved, to which a prediction owes most."""
        cost = dict(zip((unit.key for unit in self.chooser.space.units), prices, strict=True))
        shares = {
            number: sum(cost[free[i].key] for i in range(block.start, block.end) if free[i].key in low)
            for number, block in enumerate(self.blocks)
            if block.end - block.start > 1
        }
        return max(shares, key=lambda number: shares[number], default=None)

    def relower(self, prices: Sequence[float], tolerance: float) -> None:
        """To the best choice so far, add what turns out to be cheap: all the rest, or halves of what is too much."""
        best, units = self.best(tolerance), self.chooser.space.units
        low = best.low if best is not None else frozenset[str]()
        order = sorted(zip(units, prices, strict=True), key=lambda pair: pair[1] / pair[0].gain)
        pinned = self.chooser.pinned
        chunks = [[u.key for u, cost in order if u.key not in low and u.key not in pinned and cost < inf]]
        while chunks and self.left:
            chunk = chunks.pop()
            if not chunk:
                continue
            more = low | set(chunk)
            wanted = self.chooser.choose([0.0 if unit.key in more else inf for unit in units], 0.0)
            error = self.ask(wanted)
            if error <= tolerance:
                self.found.append(self.chooser.candidate(wanted, prices, error))
                low = more
            elif len(chunk) > 1:
                chunks += [chunk[len(chunk) // 2 :], chunk[: len(chunk) // 2]]

    def best(self, tolerance: float) -> Candidate | None:
        """The choice within the tolerance of which most is low."""
        good = [found for found in self.found if found.error is not None and found.error <= tolerance]
        return max(good, key=lambda found: (found.flops + found.bytes, -found.predicted), default=None)


def pareto(found: Iterable[Candidate]) -> list[Candidate]:
    """Candidates that no other beats in both error and time, fastest first."""
    best: list[Candidate] = []
    unique = {candidate.low: candidate for candidate in found}
    for candidate in sorted(unique.values(), key=lambda c: (c.time, c.least)):
        if not best or candidate.least < best[-1].least:
            best.append(candidate)
    return best
