"""How many nodes of which op type ran in which precision."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike
from typing import Final, overload

from onnxamp._graph.graph import Graph
from onnxamp._graph.inline import inline_functions
from onnxamp._graph.stats import PRECISIONS, operator_counts
from onnxamp._graph.types import infer_types
from onnxamp._model.model import Model, ModelSource
from onnxamp.debugging._tables import escaped, table_path, write_table

_HEADS: Final = ("op", "FP16 calls", "BF16 calls", "FP32 calls", "other calls")


@dataclass(slots=True)
class OperatorStats:
    """Calls by op type and precision; ``str()`` of it is a table as Paddle prints it.

    A node counts for the lowest precision among the values that it reads and makes, so that a Cast from or to a low
    type is low. Nodes in bodies of control flow count once per run, whether they run never or often; functions of the
    model count as what is in them.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(op type, "float16", "bfloat16", "float32" or "other") -> calls."""
    runs: int = 0
    """Runs that were counted; 1 for a model as such."""

    def add(self, other: "OperatorStats") -> None:
        """Count the calls of another, too."""
        self.calls.update(other.calls)
        self.runs += other.runs

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """By op type, in alphabetical order: calls in float16, bfloat16, float32, and others."""
        ops = sorted({op for op, _ in self.calls})
        return [(op, *(self.calls[op, precision] for precision in PRECISIONS)) for op in ops]  # type: ignore[misc]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table as ``.csv`` or ``.xlsx``.

        Raises:
            ArgumentError: it is called otherwise. OutputError: it cannot be written.
        """
        write_table(table_path(path), _HEADS, self.rows())

    def __str__(self) -> str:
        rows = [tuple(map(str, row)) for row in self.rows()]
        width = max((len(escaped(row[0])) for row in rows), default=2)
        lines = [
            f"{escaped(op):<{width}}" + "".join(f"  {cell:>11}" for cell in cells) for op, *cells in (_HEADS, *rows)
        ]
        return "\n".join([*lines, f"op count: {len(rows)}"])


_ACTIVE: Final[ContextVar[OperatorStats | None]] = ContextVar("onnxamp operator stats", default=None)


def enable_operator_stats_collection() -> OperatorStats:
    """Count the nodes of every model that an :class:`~onnxamp.debugging.InferenceSession` runs from here on.

    As ``paddle.amp.debugging.enable_operator_stats_collection``, but for the current thread (or asyncio task) alone.
    What was counted before is forgotten.

    Returns:
        What is counted into (Paddle returns nothing).
    """
    stats = OperatorStats()
    _ACTIVE.set(stats)
    return stats


def disable_operator_stats_collection() -> OperatorStats | None:
    """Count no more.

    Returns:
        What was counted (Paddle prints it); None where nothing was being counted.
    """
    stats = _ACTIVE.get()
    _ACTIVE.set(None)
    return stats


def active_stats() -> OperatorStats | None:
    """What is counted into here."""
    return _ACTIVE.get()


@overload
def collect_operator_stats(model: None = None) -> AbstractContextManager[OperatorStats]: ...


@overload
def collect_operator_stats(model: ModelSource) -> OperatorStats: ...


def collect_operator_stats(model: ModelSource | None = None) -> AbstractContextManager[OperatorStats] | OperatorStats:
    """Count op types by precision: of the runs in a ``with`` block, or of one model without running it.

    ``with collect_operator_stats() as stats:`` is ``paddle.amp.debugging.collect_operator_stats``, but that the table
    is in ``stats`` instead of being printed: ``print(stats)`` prints it. ``collect_operator_stats(model)`` is what one
    run of a model would give; its weights are not needed.

    Raises:
        ModelError: the model cannot be read.
    """
    return _collecting() if model is None else count_operators(model)


@contextmanager
def _collecting() -> Iterator[OperatorStats]:
    stats = OperatorStats()
    token = _ACTIVE.set(stats)
    try:
        yield stats
    finally:
        _ACTIVE.reset(token)


def count_operators(model: ModelSource) -> OperatorStats:
    """The calls of one run of a model."""
    view = Graph.of(inline_functions(Model.of(model).proto))
    return OperatorStats(operator_counts(view, infer_types(view)), 1)
