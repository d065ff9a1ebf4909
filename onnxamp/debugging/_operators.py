"""Counts of the nodes that run, by op type and precision."""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from os import PathLike
from typing import Final, overload

from onnxamp._base.public import active_within
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import PRECISIONS, infer_types, operator_counts
from onnxamp._graph.view import inline_functions
from onnxamp._model.model import Model, ModelSource
from onnxamp._options.doors import door
from onnxamp.debugging._tables import escaped, write_table

_HEADS: Final = ("op", "FP16 calls", "BF16 calls", "FP32 calls", "other calls")


@dataclass(slots=True)
class OperatorStats:
    """Calls by op type and precision; ``str()`` returns the table that Paddle prints.

    A node counts for the lowest precision among its inputs and outputs, so that a Cast from or to low precision is a
    low-precision call. Nodes in subgraphs count once per run, however often they run. Model-local functions count as
    the nodes in their bodies.

    Attributes:
        calls: the number of calls, by (op type, "float16", "bfloat16", "float32" or "other").
        runs: the number of runs and training steps counted; 1 for a model that was counted without running it.

    Example:
        >>> import onnxamp
        >>> stats = onnxamp.debugging.collect_operator_stats("models/encoder.onnx")
        >>> stats.calls["MatMul", "float32"], stats.runs
        (16, 1)
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    runs: int = 0

    def add(self, other: "OperatorStats") -> None:
        """Add the calls of another object."""
        self.calls.update(other.calls)
        self.runs += other.runs

    def rows(self) -> list[tuple[str, int, int, int, int]]:
        """Return the calls in float16, bfloat16, float32, and others, per op type in alphabetical order."""
        ops = sorted({op for op, _ in self.calls})
        first, second, third, fourth = PRECISIONS
        return [
            (
                op,
                self.calls[op, first],
                self.calls[op, second],
                self.calls[op, third],
                self.calls[op, fourth],
            )
            for op in ops
        ]

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table as ``.csv`` or ``.xlsx``.

        Raises:
            ArgumentError: the path has another suffix.
            OutputError: the file cannot be written.
        """
        write_table(path, _HEADS, self.rows())

    def __str__(self) -> str:
        rows = [tuple(map(str, row)) for row in self.rows()]
        width = max((len(escaped(row[0])) for row in rows), default=2)
        lines = list[str]()
        for op, *cells in (_HEADS, *rows):
            columns = "".join(f"  {cell:>11}" for cell in cells)
            lines.append(f"{escaped(op):<{width}}{columns}")
        return "\n".join([*lines, f"op count: {len(rows)}"])


_ACTIVE: Final[ContextVar[OperatorStats | None]] = ContextVar(
    "onnxamp operator stats", default=None
)


@door
def enable_operator_stats_collection() -> OperatorStats:
    """Count the nodes of every model that an :class:`InferenceSession` runs, and of every training step, from now on.

    The counterpart of ``paddle.amp.debugging.enable_operator_stats_collection``, for the current thread or asyncio task
    only. Counts start from zero.

    Returns:
        The counts, updated by each run (Paddle returns nothing).

    Example:
        >>> from onnxamp import debugging, random_samples
        >>> stats = debugging.enable_operator_stats_collection()
        >>> session = debugging.InferenceSession("models/encoder.onnx")
        >>> outputs = session.run(None, random_samples("models/encoder.onnx")[0])
        >>> debugging.disable_operator_stats_collection() is stats, stats.runs
        (True, 1)
    """
    stats = OperatorStats()
    _ACTIVE.set(stats)
    return stats


@door
def disable_operator_stats_collection() -> OperatorStats | None:
    """Stop counting.

    Returns:
        The counts (Paddle prints them); None if nothing was being counted.

    Example:
        >>> from onnxamp import debugging
        >>> stats = debugging.enable_operator_stats_collection()
        >>> debugging.disable_operator_stats_collection().runs
        0
    """
    stats = _ACTIVE.get()
    _ACTIVE.set(None)
    return stats


def active_stats() -> OperatorStats | None:
    """Return the counts that runs update; None if nothing is being counted."""
    return _ACTIVE.get()


@overload
def collect_operator_stats(
    model: None = None,
) -> AbstractContextManager[OperatorStats]: ...


@overload
def collect_operator_stats(model: ModelSource) -> OperatorStats: ...


@door
def collect_operator_stats(
    model: ModelSource | None = None,
) -> AbstractContextManager[OperatorStats] | OperatorStats:
    """Count nodes by op type and precision, in the runs of a ``with`` block or in a model without running it.

    ``with collect_operator_stats() as stats:`` is the counterpart of ``paddle.amp.debugging.collect_operator_stats``;
    ``print(stats)`` prints the table that Paddle prints by itself.

    Args:
        model: a ModelProto, a path or an onnx-graphsurgeon Graph, whose weights are not needed; None for a context
            manager that counts the runs of :class:`InferenceSession` and training steps.

    Raises:
        ArgumentTypeError: the model has the wrong type.
        ModelError: the model cannot be read.

    Example:
        >>> import onnxamp
        >>> print(onnxamp.debugging.collect_operator_stats("models/classifier.onnx"))
        op                   FP16 calls   BF16 calls   FP32 calls  other calls
        Add                           0            0            1            0
        BatchNormalization            0            0            5            0
        Conv                          0            0            5            0
        Flatten                       0            0            1            0
        Gemm                          0            0            1            0
        GlobalAveragePool             0            0            1            0
        MaxPool                       0            0            1            0
        Relu                          0            0            5            0
        op count: 8
    """
    return _collecting() if model is None else count_operators(model)


@contextmanager
def _collecting() -> Iterator[OperatorStats]:
    stats = OperatorStats()
    with active_within(_ACTIVE, stats):
        yield stats


def count_operators(model: ModelSource) -> OperatorStats:
    """Count the calls in one run of a model."""
    view = Graph.of(inline_functions(Model.of(model).proto))
    return OperatorStats(operator_counts(view, infer_types(view)), 1)
