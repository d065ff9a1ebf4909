"""Strongly connected components, against reachability by brute force."""

import random
from itertools import product

import pytest

from onnxamp._graph.loops.cycles import cycles


@pytest.mark.parametrize("seed", range(100))
def test_values_share_a_number_where_arcs_lead_there_and_back(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    arcs = [(rng.randrange(count), rng.randrange(count)) for _ in range(rng.randint(0, 20))]
    reached = {value: {value} for value in range(count)}
    for _ in range(count):
        for source, target in arcs:
            for values in reached.values():
                if source in values:
                    values.add(target)
    found = cycles(arcs)
    assert found.keys() == {value for arc in arcs for value in arc}
    for one, other in product(found, found):
        assert (found[one] == found[other]) == (other in reached[one] and one in reached[other])


@pytest.mark.slow
def test_long_cycles_need_no_recursion() -> None:
    length = 50_000
    found = cycles([*((value, value + 1) for value in range(length)), (length, 0)])
    assert len(found) == length + 1
    assert len(set(found.values())) == 1
