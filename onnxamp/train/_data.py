"""Batches of arrays, in an order that seed and epoch decide: whoever resumes meets the same ones."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxamp._errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Batches:
    """One epoch over arrays whose first axes are the samples, in an order by seed and epoch; the last may be smaller.

    Raises:
        ArgumentError: there is no array or sample, or the arrays differ in their number of samples.
    """

    arrays: Mapping[str, NDArray[Any]]
    size: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        counts = {name: array.shape[0] if array.ndim else 0 for name, array in self.arrays.items()}
        if not counts or min(counts.values()) == 0 or len(set(counts.values())) > 1:
            raise ArgumentError(f"All arrays need the same number of samples, at least one; they have {counts}.")
        if self.size < 1:
            raise ArgumentError(f"A batch needs at least one sample, not {self.size}.")

    def after(self, epochs: int) -> "Batches":
        """The batches of so many epochs later."""
        return replace(self, epoch=self.epoch + epochs)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return int(next(iter(self.arrays.values())).shape[0])

    def __len__(self) -> int:
        return (self.samples + self.size - 1) // self.size

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)
        for start in range(0, self.samples, self.size):
            rows = order[start : start + self.size]
            yield {name: array[rows] for name, array in self.arrays.items()}
