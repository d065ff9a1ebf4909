"""The grids of quantized types, from ``_data/grids.toml``: numbers that are multiplied by a scale."""

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from onnxamp._facts.tables import read_table


class Grid(NamedTuple):
    """The numbers of a quantized type; ``_data/grids.toml`` explains the fields."""

    end: float
    steps: int


@cache
def grids() -> Mapping[str, Grid]:
    """Return the grids by the name of their type."""
    return {name: Grid(**row) for name, row in read_table("grids").items()}
