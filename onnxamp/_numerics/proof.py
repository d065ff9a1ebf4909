"""Proof of upgrades and folds: the float32 model at the newer opset, or with single ops, computes what it did."""

from dataclasses import dataclass, field, replace
from typing import Final

from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.limits import Limits

_SAME: Final = Limits(tolerance=1e-5)
"""What the order of sums may change; another meaning of an attribute changes more."""


@dataclass(frozen=True, slots=True)
class UpgradeProof:
    """Compares upgraded and folded models with the original, each once.

    Attributes:
        comparison: has the original and its inputs, and keeps its outputs.
    """

    comparison: Comparison
    _verdicts: dict[tuple[int, frozenset[tuple[str, int]]], str | None] = field(
        default_factory=dict
    )
    """Opset and numbers of ops of a model -> what is wrong with it."""

    def __call__(self, graph: Graph) -> str | None:
        """What is wrong with the upgraded model, in a clause; None if nothing is, or the original does not run."""
        changed = (
            graph.book.opsets[""],
            frozenset((key, len(nodes)) for key, nodes in graph.by_key.items()),
        )
        if changed not in self._verdicts:
            upgraded = Model(graph.model, graph.folder, origin=self.comparison.reference.model)
            exact = replace(self.comparison, limits=_SAME)
            report = exact.compare(upgraded, layers=False, activity="checking the upgrade")
            why = report.failure or next(iter(report.warnings), "its outputs differ")
            is_same = report.passed or report.skipped
            self._verdicts[changed] = (
                None if is_same else f"float32 results would change already: {why.rstrip('.')}"
            )
        return self._verdicts[changed]

    @property
    def has_refused(self) -> bool:
        """Whether an upgrade changed results."""
        return any(self._verdicts.values())
