"""Tables of what roundings cost: a row for each way to round a value, and a column for each group of outputs."""

from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from onnxamp._gradients.passes import Rounded, Sensitivities

Numbers: TypeAlias = npt.NDArray[np.float64]

Rows: TypeAlias = Mapping[tuple[str, str], int]
"""The row of a value, by its name and the way it is rounded: :data:`CAST`, :data:`MADE`, :data:`REST`, or the key of
the one reader that it is cast for."""

CAST: Final = ""
"""A value is cast for all its readers."""

MADE: Final = "\n"
"""A value is rounded as its node computes it in low precision."""

REST: Final = "\n\n"
"""A value is cast for readers that are not known separately."""

MOST: Final = 1e6
"""The largest squared error that counts: beyond it, all is lost."""


def find_rows(samples: Sequence[Sensitivities]) -> Rows:
    """Number the roundings that samples measure."""
    rows = dict[tuple[str, str], int]()
    for sample in samples:
        for name, rounded in sample.values.items():
            rest = [REST] if rounded.read else []
            for way in (CAST, MADE, *rounded.read, *rest):
                rows.setdefault((name, way), len(rows))
    return rows


def cost_tables(
    samples: Sequence[Sensitivities],
    rows: Rows,
    *,
    factors: Numbers,
    lost: Sequence[int],
    everything: Sequence[int] | None,
) -> list[Numbers]:
    """Return the table of each sample: the squared error that each rounding causes in each group of outputs.

    The last column is that of values that decide selections and branches.

    Args:
        samples: the measurements.
        rows: the rows.
        factors: by row: factor on its costs.
        lost: rows in which all is lost.
        everything: the rows of all that is rounded if every node is in low precision, whose costs are scaled to the
            error that the low pass of a sample shows; None if no such pass shows them.
    """
    tables = list[Numbers]()
    for sample in samples:
        groups = max((len(row.costs) for row in sample.values.values()), default=2)
        table = np.zeros((len(rows), groups))
        for name, rounded in sample.values.items():
            _enter(table, rows, name, rounded)
        scale = np.ones_like(table)
        if everything is not None and len(sample.shown) == groups:
            is_shown = _shown_groups(samples, groups)
            scale = _scale_to_shown(table, sample.shown, is_shown, everything)
        # Only now, because the low pass does not round sums.
        for name, rounded in sample.values.items():
            if rounded.summed:
                table[rows[name, MADE]] = rounded.summed
        table *= factors[:, np.newaxis]
        scaled = np.where(np.isfinite(table), table * scale, table)
        scaled[lost] = MOST
        tables.append(np.minimum(scaled, MOST))
    return tables


def _enter(table: Numbers, rows: Rows, name: str, rounded: Rounded) -> None:
    """Enter the costs of rounding a value, in each way."""
    table[rows[name, CAST]] = rounded.costs
    table[rows[name, MADE]] = rounded.costs
    for reader, costs in rounded.read.items():
        table[rows[name, reader]] = costs
    if rounded.read:
        known = np.minimum(np.sum([*rounded.read.values()], 0), MOST)
        rest = np.minimum(rounded.costs, MOST) - known
        table[rows[name, REST]] = np.maximum(rest, 0.0)


def _shown_groups(
    samples: Sequence[Sensitivities], groups: int
) -> npt.NDArray[np.bool_]:
    """Return the groups of outputs in which the low pass of any sample shows an error."""
    # In other branches, samples may have other outputs.
    alike = [sample.shown for sample in samples if len(sample.shown) == groups]
    return np.asarray(np.any(alike, axis=0))


def _scale_to_shown(
    table: Numbers,
    shown: Sequence[float],
    is_shown: npt.NDArray[np.bool_],
    everything: Sequence[int],
) -> Numbers:
    """Return factors for the costs, such that their sum is the error that the low pass of a sample shows.

    Beyond a step of a grid, errors are not linear: no cost exceeds the error of all, unless it is infinite.
    """
    counts = np.isfinite(table) & (table > 0)
    limits = np.where(is_shown, shown, np.inf)
    kept = np.where(counts, np.minimum(table, limits), 0.0)
    sums = kept[everything].sum(axis=0)
    factors = np.divide(shown, sums, np.ones(len(shown)), where=is_shown & (sums > 0))
    ones = np.ones_like(table)
    return np.asarray(np.divide(kept * factors, table, ones, where=counts))
