"""The minimum cut against brute force, and the traps of the solver underneath."""

import itertools
import random

import numpy as np
import pytest
from every import every

from onnxamp._base.errors import InternalError
from onnxamp._decide import mincut
from onnxamp._decide.mincut import INFINITE, Network

_BIG = 10**6


def _cost(arcs, lows, highs, answer):
    """Cost of one answer, by definition; infinite arcs count as _BIG."""
    price = {INFINITE: _BIG}
    total = sum(price.get(c, c) for u, v, c in arcs if answer[u] and not answer[v])
    total += sum(price.get(c, c) for q, c in lows if answer[q])
    return total + sum(price.get(c, c) for q, c in highs if not answer[q])


@pytest.mark.slow
@every(seed=range(300))
def test_equals_brute_force(seed):
    rng = random.Random(seed)
    size = rng.randint(1, 9)
    pick = lambda: rng.choice([INFINITE, 0, *range(1, 20)])  # noqa: E731
    arcs = [(rng.randrange(size), rng.randrange(size), pick()) for _ in range(rng.randint(0, 25))]
    lows = [(rng.randrange(size), pick()) for _ in range(rng.randint(0, 6))]
    highs = [(rng.randrange(size), pick()) for _ in range(rng.randint(0, 6))]
    arcs = [(u, v, c) for u, v, c in arcs if u != v]
    network = Network()
    network.add(size)
    for u, v, c in arcs:
        network.arc(u, v, c)
    for q, c in lows:
        network.charge_low(q, c)
    for q, c in highs:
        network.charge_high(q, c)

    costs = {a: _cost(arcs, lows, highs, a) for a in itertools.product((False, True), repeat=size)}
    best = min(costs.values())
    if best >= _BIG:
        with pytest.raises(InternalError, match="no solution"):
            network.solve()
        return
    cut = network.solve()
    answer = tuple(bool(x) for x in cut.low)
    assert costs[answer] == best == cut.cost
    fewest = min(sum(a) for a, c in costs.items() if c == best)
    assert sum(answer) == fewest, "ties go to high"


def test_parallel_infinite_arcs_do_not_overflow():
    network = Network()
    a, b = network.add(2), 1
    network.charge_high(a, INFINITE)
    network.charge_high(a, INFINITE)
    for _ in range(5):
        network.arc(a, b, INFINITE)
    network.charge_low(b, 7)
    cut = network.solve()
    assert cut.cost == 7
    assert list(cut.low) == [True, True]


def test_costs_beyond_int32_are_scaled():
    network = Network()
    network.add(3)
    network.charge_high(0, INFINITE)
    network.arc(0, 1, 3_000_000_000)
    network.arc(1, 2, 1_000_000_000)
    network.charge_low(2, INFINITE)
    assert list(network.solve().low) == [True, True, False]


def test_nothing_wants_low():
    network = Network()
    network.add(4)
    network.arc(0, 1, 5)
    cut = network.solve()
    assert cut.cost == 0
    assert not np.any(cut.low)


@every(seed=range(60))
def test_both_solvers_agree(seed):
    """Dinic's algorithm and scipy's, on networks with many answers of the same cost."""
    rng = random.Random(seed)
    size = rng.randint(2, 120)
    network = Network()
    network.add(size)
    for _ in range(rng.randint(0, 4 * size)):
        cost = rng.choice([1, 1, 2, 5, INFINITE]) if seed % 2 else rng.randint(1, 4)
        network.arc(rng.randrange(size), rng.randrange(size), cost)
    for _ in range(size // 3):
        network.charge_low(rng.randrange(size), rng.randint(1, 6))
        network.charge_high(rng.randrange(size), rng.choice([3, 4, INFINITE]) if rng.random() < 0.2 else 2)
    here, there = network.solve(small=10**6), network.solve(small=0)
    assert here.cost == there.cost
    assert list(here.low) == list(there.low)


@every(seed=range(60))
def test_settled_questions_change_no_cut(seed, monkeypatch):
    """Compare the flow of a reduced network with that of the whole network."""
    rng = random.Random(seed)
    size = rng.randint(2, 60)
    network = Network(size)
    for _ in range(rng.randint(0, 3 * size)):
        cost = rng.choice([1, 1, 2, INFINITE]) if seed % 3 == 0 else rng.randint(1, 4)
        network.arc(rng.randrange(size), rng.randrange(size), cost)
    for question in range(size):
        network.charge_low(question, rng.randint(0, 5))
        network.charge_high(question, rng.randint(0, 5))
    cut = network.solve()
    monkeypatch.setattr(mincut, "_ROUNDS", 0)
    whole = network.solve()
    assert (cut.cost, list(cut.low)) == (whole.cost, list(whole.low))


def test_a_chain_is_settled_before_the_flow(monkeypatch):
    """Questions that settle each other, one after another, are taken out before the flow is computed."""
    network = Network(20)
    network.charge_high(0, 9)
    network.charge_low(19, 4)
    for question in range(19):
        network.differ(question, question + 1, 5 if question < 9 else 3)
    left = []
    solve = mincut._dinic
    monkeypatch.setattr(mincut, "_maximum_flow", None)
    monkeypatch.setattr(mincut, "_dinic", lambda *network: left.append(network[0]) or solve(*network))
    monkeypatch.setattr(mincut, "find_spec", lambda _: None)
    cut = network.solve()
    assert (cut.cost, sum(cut.low)) == (3, 10)
    assert left == [11]


@pytest.mark.slow
def test_large_networks_take_no_scipy(monkeypatch):
    """Deciding is part of the smallest installation; the cut is the same."""
    rng = random.Random(7)
    cuts = []
    network = Network()
    network.add(8_000)
    for question in range(8_000):
        network.charge_low(question, rng.randrange(1, 50))
        network.charge_high(question, rng.randrange(1, 50))
        network.arc(question, rng.randrange(8_000 - 1), rng.randrange(1, 30))
    for hidden in (set(), {"scipy"}):
        monkeypatch.setattr(mincut, "find_spec", lambda name, hidden=hidden: None if name in hidden else object())
        cuts.append(network.solve(small=0))
    assert cuts[0].cost == cuts[1].cost
    assert np.array_equal(cuts[0].low, cuts[1].low)
