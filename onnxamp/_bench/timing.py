"""Timing of functions beside each other: warmed up until stable, in turns, with the spread of what comes out.

Every function runs in blocks, a few runs one behind the other as in production; the blocks of all functions take turns,
each round in the opposite order of the last, so that drift of clocks and temperature meets all of them alike.
"""

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Final

import numpy as np

from onnxamp._bench.records import Latency, Ratio

Run = Callable[[], None]
Clock = Callable[[], float]
Blocks = list[list[float]]
"""Seconds of each run, by round."""

_WINDOW: Final = 5
_STEADY: Final = 0.03
"""Windows of so many runs whose medians differ by less: warm."""
_BLOCK: Final = 0.02
"""Seconds that a block should last, and ..."""
_MOST: Final = 50
"""... runs that it may have."""
_ROUNDS: Final = (8, 60)
_RESAMPLES: Final = 2000


def warm_up(run: Run, clock: Clock, longest: float) -> float:
    """Run until two windows take the same time, or ``longest`` seconds have passed.

    Returns:
        Seconds of a run at the end.
    """
    start = clock()
    run()
    before, now = math.inf, clock() - start
    while clock() - start < longest and abs(before - now) > _STEADY * now:
        before, now = now, median(_block(run, _WINDOW, clock))
    return now


def interleave(runs: Sequence[Run], each: Sequence[float], seconds: float, clock: Clock) -> list[Blocks]:
    """Time functions in turns, for about ``seconds`` per function.

    Args:
        runs: at least one.
        each: seconds that one run of each takes, from :func:`warm_up`.

    Returns:
        For each function, its rounds; all have the same number of them.
    """
    sizes = [max(2, min(_MOST, math.ceil(_BLOCK / max(cost, 1e-7)))) for cost in each]
    round_cost = sum(cost * (size + 1) for cost, size in zip(each, sizes, strict=True))
    rounds = int(min(max(seconds * len(runs) / max(round_cost, 1e-7), _ROUNDS[0]), _ROUNDS[1]))
    found: list[Blocks] = [[] for _ in runs]
    with _no_collection():
        for number in range(rounds):
            order = range(len(runs)) if number % 2 == 0 else reversed(range(len(runs)))
            for index in order:
                runs[index]()  # not timed: it brings back caches that the other functions have taken
                found[index].append(_block(runs[index], sizes[index], clock))
    return found


def _block(run: Run, count: int, clock: Clock) -> list[float]:
    taken = []
    for _ in range(count):
        start = clock()
        run()
        taken.append(clock() - start)
    return taken


@contextmanager
def _no_collection() -> Iterator[None]:
    """The garbage collector would run in one function's turn, and not in another's."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def latency(first: float, blocks: Blocks) -> Latency:
    """Quantiles over all runs."""
    every = np.concatenate([np.asarray(block) for block in blocks])
    middle, p90, p99 = (float(x) for x in np.quantile(every, (0.5, 0.9, 0.99)))
    return Latency(first, middle, p90, p99, every.size)


def ratio(reference: Blocks, other: Blocks) -> Ratio:
    """How many times as fast ``other`` is: the median over rounds of the quotient of their medians.

    The interval is the 2.5th to the 97.5th percentile of that median when rounds are drawn anew with replacement
    (Efron's percentile bootstrap, seeded).
    """
    quotients = np.array([median(one) / max(median(two), 1e-12) for one, two in zip(reference, other, strict=True)])
    drawn = np.random.default_rng(0).integers(0, quotients.size, (_RESAMPLES, quotients.size))
    low, high = np.quantile(np.median(quotients[drawn], axis=1), (0.025, 0.975))
    return Ratio(float(np.median(quotients)), float(low), float(high))
