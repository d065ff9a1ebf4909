"""End-to-end prices from few runs: topological blocks are lowered alone, and the worst is halved again and again.

Local error ranks badly; what a block does to the outputs is measured, and shared among its ops by their local errors:
price of op i = (block's error)^2 * local_i^2 / sum of local^2 in the block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import Final

_FIRST: Final = 8
"""Blocks to begin with."""


@dataclass(frozen=True, slots=True)
class Block:
    """Ops ``start`` to ``end`` (exclusive) in execution order, and the error of the outputs when they alone are low."""

    start: int
    end: int
    error: float


def measure_blocks(count: int, error: Callable[[range], float], runs: int) -> list[Block]:
    """Blocks that cover ``count`` ops, in order.

    Args:
        error: error of the outputs with these ops low.
        runs: how often it may be asked.

    Complexity: as many calls as ``runs``, at most.
    """
    first = min(_FIRST, count, runs)
    bounds = [count * i // first for i in range(first + 1)] if first else []
    blocks = [Block(a, b, error(range(a, b))) for a, b in pairwise(bounds)]
    left = runs - len(blocks)
    while left >= 2 and (worst := _worst(blocks)) is not None:
        blocks[worst : worst + 1] = split(blocks[worst], error)
        left -= 2
    return blocks


def split(block: Block, error: Callable[[range], float]) -> list[Block]:
    """Both halves of a block, measured."""
    middle = (block.start + block.end) // 2
    halves = (range(block.start, middle), range(middle, block.end))
    return [Block(half.start, half.stop, error(half)) for half in halves]


def _worst(blocks: Sequence[Block]) -> int | None:
    """The block with the largest error that can be halved."""
    able = [i for i, block in enumerate(blocks) if block.end - block.start > 1 and block.error > 0]
    return max(able, key=lambda i: blocks[i].error, default=None)


def price(blocks: Sequence[Block], local: Sequence[float]) -> list[float]:
    """Squared error that each op causes at the outputs; infinite where its block breaks them."""
    prices = [0.0] * len(local)
    for block in blocks:
        members = range(block.start, block.end)
        energy = sum(local[i] ** 2 for i in members)
        for i in members:
            share = local[i] ** 2 / energy if energy else 1 / len(members)
            prices[i] = inf if block.error == inf else block.error**2 * share
    return prices
