"""Watching steps of training in the runs that make them.

Overflows of scaled gradients are how a loss scale finds its size: the update is skipped, and the scale falls. They are
expected, and no fault of the model, as long as all this holds:

* the step is one that the loss scale skips, and the scale is greater than 1, so that it is what makes gradients large;
* the value depends on the scale: the forward pass and the loss do not;
* no NaN was computed from finite gradients before it: no loss scale is to blame for 0 / 0.

What depends on them is expected, too.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import numpy as np
from onnx import ModelProto

from onnxamp._numerics.measure import measure
from onnxamp._numerics.watch import Watched, classify, watched_values
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.exposed import expose
from onnxamp._runtime.flow import Flow, make_flow
from onnxamp._runtime.session import Provider, run_values
from onnxamp._runtime.values import from_value
from onnxamp.debugging._checker import TensorChecker, next_check
from onnxamp.debugging._operators import OperatorStats, active_stats, count_operators
from onnxamp.debugging._records import ValueRecord
from onnxamp.debugging._tensors import tensor_stats
from onnxamp.debugging._watch import RunRecords, conclude, records_of

if TYPE_CHECKING:
    import onnxruntime as ort


@dataclass(frozen=True, slots=True)
class _Shown:
    """A session that shows its values, and what it shows."""

    session: "ort.InferenceSession"
    flow: Flow
    rows: Sequence[Watched]
    names: tuple[str, ...]
    scaled: frozenset[str]
    """Values that depend on the loss scale."""


@dataclass(slots=True)
class StepWatch:
    """Counts the steps of a network in training, and watches those that a tensor checker wants to see.

    Args:
        model: the step in mixed precision; it is not changed.
        provider: where the step runs.
        emulated: whether its low precision is emulated.
        scaled: inputs that hold the loss scale, or sums of scaled gradients.
    """

    model: ModelProto
    provider: Provider
    emulated: bool
    scaled: Collection[str]
    _shown: _Shown | None = None
    _counted: OperatorStats | None = None

    def begin(self) -> tuple[TensorChecker, int] | None:
        """Count a step; returns the checker and the number of the step if it is to be watched."""
        stats = active_stats()
        if stats is not None:
            self._counted = self._counted or count_operators(self.model)
            stats.add(self._counted)
        return next_check()

    def run(
        self,
        check: tuple[TensorChecker, int],
        feeds: "Mapping[str, ort.OrtValue]",
        wanted: Sequence[str],
        skips: "Callable[[Mapping[str, ort.OrtValue]], bool]",
    ) -> "dict[str, ort.OrtValue]":
        """Make the step, once, with the same results as without the checker, and conclude the check.

        Args:
            check: what :meth:`begin` returned.
            feeds: all inputs of the step.
            wanted: names of outputs of the step.
            skips: tells from these outputs whether overflows are expected: see above.

        Returns:
            The wanted outputs. All watched values are held at the same time.

        Raises:
            NumericsError: the checker aborts. RuntimeFailure: ONNX Runtime cannot run the step.
            OutputError: records cannot be written.
        """
        checker, step = check
        if self._shown is None:
            self._shown = self._prepare()
        shown = self._shown
        outputs = run_values(shown.session, feeds, list(dict.fromkeys((*wanted, *shown.names))))
        run = self._records(shown, step, feeds, outputs)
        if not checker.config.scaled_overflows and skips(outputs):
            run = replace(run, records=_without_overflows(run.records, shown.scaled))
        conclude(checker, run)
        return {name: outputs[name] for name in wanted}

    def _prepare(self) -> _Shown:
        flow = make_flow(self.model, emulated=self.emulated)
        rows = watched_values(flow)
        ready = emulate(self.model) if self.emulated else self.model
        session, names = expose(
            ready, self.provider, {name for row in rows for name in (row.value, row.exact)}
        )
        scaled = set(self.scaled)
        for node, reads in zip(flow.nodes, flow.reads, strict=True):
            if not scaled.isdisjoint(reads):
                scaled.update(node.output)
        return _Shown(session, flow, rows, names, frozenset(scaled))

    def _records(
        self,
        shown: _Shown,
        step: int,
        feeds: "Mapping[str, ort.OrtValue]",
        outputs: "Mapping[str, ort.OrtValue]",
    ) -> RunRecords:
        """The records of a step. A value whose exact result a fusion took is compared with itself."""
        floats = {name: value for name, value in feeds.items() if "float" in value.data_type()}
        inputs = {name: measure(value, value, self.provider) for name, value in floats.items()}
        rows = [row for row in shown.rows if row.value in outputs]
        values = {
            row.value: measure(
                outputs.get(row.exact, outputs[row.value]), outputs[row.value], self.provider
            )
            for row in rows
        }
        seen = floats | {row.value: outputs[row.value] for row in rows}
        stats = {name: tensor_stats(np.asarray(from_value(value))) for name, value in seen.items()}
        return records_of(
            step, shown.flow, floats, classify(shown.flow, rows, values, inputs), stats
        )


def _without_overflows(
    records: Mapping[str, ValueRecord], scaled: Collection[str]
) -> dict[str, ValueRecord]:
    """The records of a step that the loss scale skips, with expected overflows excused."""
    end, finite = inf, True
    for row in records.values():
        if row.is_bad and (row.tensor not in scaled or (row.fault == "NaN" and finite and row.op)):
            end = row.position
            break
        finite = finite and (row.tensor not in scaled or row.stats.finite)
    return {
        name: replace(row, fault=None, inherited=False)
        if row.is_bad and row.tensor in scaled and (row.position < end or row.fault == "Inf")
        else row
        for name, row in records.items()
    }
