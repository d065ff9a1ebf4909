"""Proof that an upgraded or folded model still computes the same in float32."""

from dataclasses import field, replace
from typing import Final

from onnxamp._base.records import record
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.limits import Limits

_SAME: Final = Limits(tolerance=1e-5)
"""The largest change by the order of sums; a wrong meaning of an attribute changes more."""


@record
class UpgradeProof:
    """Compares upgraded and folded models with the original, each once.

    Attributes:
        comparison: has the original and its inputs, and keeps its outputs.
    """

    comparison: Comparison
    _verdicts: dict[tuple[int, frozenset[tuple[str, int]]], str | None] = field(
        default_factory=dict
    )
    """Opset and numbers of ops of a model -> the fault."""

    def __call__(self, graph: Graph) -> str | None:
        """Return a clause about the fault of the upgraded model; None if there is none, or if the original does not
        run.
        """
        counts = ((key, len(nodes)) for key, nodes in graph.by_key.items())
        changed = graph.book.opsets[""], frozenset(counts)
        if changed not in self._verdicts:
            upgraded = Model(graph.model, graph.folder)
            exact = replace(self.comparison, limits=_SAME, beyond=None)
            report = exact.compare(
                upgraded, layers=False, activity="checking the upgrade"
            )
            why = report.failure or next(iter(report.warnings), "its outputs differ")
            text = f"float32 results would change as well: {why.rstrip('.')}"
            is_same = report.passed or report.skipped
            self._verdicts[changed] = None if is_same else text
        return self._verdicts[changed]

    @property
    def has_refused(self) -> bool:
        """Return whether an upgrade changed results."""
        return any(self._verdicts.values())
