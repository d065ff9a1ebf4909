"""Ray Datasets as samples: a row is a sample, a column an input. Blocks stay where they are until a row is read."""

from collections.abc import Callable
from functools import partial
from typing import Any

from onnxamp._runtime.values import Feed, as_array


def is_dataset(given: Any) -> bool:
    """Whether this is a Dataset of Ray, which need not be installed."""
    return type(given).__module__.partition(".")[0] == "ray" and hasattr(given, "to_numpy_refs")


def row_readers(dataset: Any) -> list[Callable[[], dict[str, Feed]]]:
    """What reads each row. The dataset is computed now, on its cluster, and its rows are counted there."""
    import ray  # noqa: PLC0415 - there is one, as there is a dataset

    blocks = dataset.to_numpy_refs()
    counts = ray.get([ray.remote(num_cpus=0)(_length).remote(block) for block in blocks])
    pairs = zip(blocks, counts, strict=True)
    return [partial(read_row, block, row) for block, count in pairs for row in range(count)]


def read_row(block: Any, row: int) -> dict[str, Feed]:
    """A row of a block, wherever on the cluster that is."""
    import ray  # noqa: PLC0415

    return {name: as_array(column[row]) for name, column in ray.get(block).items()}


def _length(block: Any) -> int:
    return len(next(iter(block.values()), ()))
