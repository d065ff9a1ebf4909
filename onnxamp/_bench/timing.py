"""Timing functions beside each other: warmed up until they are stable, in turns, and with the spread of the result.

Each function runs in blocks of a few consecutive runs, as in production. The blocks of all functions take turns, in
reverse order every other round, so that drifting clocks and temperatures affect all functions alike.
"""

import math
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Final

import numpy as np

from onnxamp._bench.records import Latency, Ratio
from onnxamp._graph.collecting import no_collections

Run = Callable[[], None]
Clock = Callable[[], float]
Timed = Callable[[int], list[float]]
"""Runs so many times in a row, and returns the seconds of each."""
Blocks = list[list[float]]
"""Seconds of each run, by round."""

_WINDOW: Final = 5
_STEADY: Final = 0.03
"""Warm means: the medians of two windows of ``_WINDOW`` runs differ by less than this share."""
_BLOCK: Final = 0.02
"""Seconds that a block should last ..."""
_MOST: Final = 50
"""... and runs that it may have."""
_ROUNDS: Final = (8, 60)
_RESAMPLES: Final = 2000


def timed(run: Run, clock: Clock) -> Timed:
    """A function, timed from outside."""

    def block(count: int) -> list[float]:
        taken = []
        for _ in range(count):
            start = clock()
            run()
            taken.append(clock() - start)
        return taken

    return block


def warm_up(run: Timed, clock: Clock, longest: float) -> float:
    """Run until two consecutive windows take the same time, or ``longest`` seconds have passed.

    Returns:
        Seconds per run at the end.
    """
    start = clock()
    before, now = math.inf, run(1)[0]
    while clock() - start < longest and abs(before - now) > _STEADY * now:
        before, now = now, median(run(_WINDOW))
    return now


def interleave(runs: Sequence[Timed], each: Sequence[float], seconds: float, rest: float = 0.0) -> list[Blocks]:
    """Time functions in turns, for about ``seconds`` per function.

    Args:
        runs: the functions, at least one.
        each: seconds that one run of each takes, from :func:`warm_up`.
        seconds: time per function.
        rest: seconds to wait before each block.

    Returns:
        The rounds of each function, all in the same number.
    """
    sizes = [max(2, min(_MOST, math.ceil(_BLOCK / max(cost, 1e-7)))) for cost in each]
    round_cost = sum(rest + cost * (size + 1) for cost, size in zip(each, sizes, strict=True))
    rounds = int(min(max(seconds * len(runs) / max(round_cost, 1e-7), _ROUNDS[0]), _ROUNDS[1]))
    blocks: list[Blocks] = [[] for _ in runs]
    with no_collections():  # a collection would fall into the turn of one function
        for number in range(rounds):
            order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
            for index in order:
                if rest:
                    time.sleep(rest)
                runs[index](1)  # does not count: it refills the caches that the other functions have used
                blocks[index].append(runs[index](sizes[index]))
    return blocks


def latency(first: float, blocks: Blocks) -> Latency:
    """Quantiles over all runs of all rounds."""
    every = np.concatenate([np.asarray(block) for block in blocks])
    middle, p90, p99 = (float(x) for x in np.quantile(every, (0.5, 0.9, 0.99)))
    return Latency(first, middle, p90, p99, every.size)


def ratio(reference: Blocks, other: Blocks) -> Ratio:
    """How many times as fast ``other`` is: the median over rounds of the ratio of the two medians of a round.

    The interval spans the 2.5th to the 97.5th percentile of that median when rounds are resampled with replacement
    (Efron's percentile bootstrap, seeded).
    """
    quotients = np.array([median(one) / max(median(two), 1e-12) for one, two in zip(reference, other, strict=True)])
    drawn = np.random.default_rng(0).integers(0, quotients.size, (_RESAMPLES, quotients.size))
    low, high = np.quantile(np.median(quotients[drawn], axis=1), (0.025, 0.975))
    p10, p90 = np.quantile(quotients, (0.1, 0.9))
    return Ratio(float(np.median(quotients)), float(low), float(high), float(p90 - p10) / 2)
