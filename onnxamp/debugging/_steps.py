"""Watching training steps while they run.

A loss scale finds its value through overflows of scaled gradients: the update is skipped, and the scale falls. Such
overflows are expected, and not a fault of the model, if all of the following hold:

* the loss scale skips the step, and the scale is greater than 1, so that the scale is what makes gradients large;
* the value depends on the scale: the forward pass and the loss do not;
* no NaN was computed from finite gradients before it, because no loss scale is to blame for 0 / 0.

Non-finite values that depend on expected overflows are also expected.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from onnx import ModelProto

from onnxamp._model.model import Model
from onnxamp._numerics.differences.measure import measure
from onnxamp._numerics.differences.metrics import Measurement
from onnxamp._numerics.watch import WatchedValue, classify, watched_values
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.piecewise.flow import DataflowGraph, expose, make_flow
from onnxamp._runtime.sessions.session import Provider, run_values
from onnxamp._runtime.sessions.values import from_value
from onnxamp.debugging._checker import TensorChecker, next_check
from onnxamp.debugging._chosen import chosen_values
from onnxamp.debugging._operators import OperatorStats, active_stats, count_operators
from onnxamp.debugging._records import ValueRecord
from onnxamp.debugging._tensors import tensor_stats
from onnxamp.debugging._watch import RunRecords, conclude, records_of

if TYPE_CHECKING:
    import onnxruntime as ort


class _ExposedStep(NamedTuple):
    """A step, a session of it that outputs its intermediate values, and a description of these."""

    model: Model
    session: "ort.InferenceSession"
    flow: DataflowGraph
    rows: Sequence[WatchedValue]
    names: tuple[str, ...]
    scaled: frozenset[str]
    """Values that depend on the loss scale."""


@dataclass(slots=True)
class StepWatch:
    """Counts the steps of a network in training, and watches those that a tensor checker selects.

    Args:
        model: the step in mixed precision; it is not changed.
        provider: where the step runs.
        emulated: whether its low precision is emulated.
        scaled: the inputs that hold the loss scale, or sums of scaled gradients.
    """

    model: ModelProto
    provider: Provider
    emulated: bool
    scaled: Collection[str]
    _shown: _ExposedStep | None = None
    _counted: OperatorStats | None = None

    def begin(self) -> tuple[TensorChecker, int] | None:
        """Count a step, and return the checker and the number of the step if it is to be watched."""
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
        """Run the step once, with the same results as without the checker, and conclude the check.

        Args:
            check: the result of :meth:`begin`.
            feeds: all inputs of the step.
            wanted: the names of outputs of the step.
            skips: a function that determines from these outputs whether overflows are expected; see the module.

        Returns:
            The wanted outputs. All watched values are in memory at the same time.

        Raises:
            NumericsError: the checker aborts. RuntimeFailure: ONNX Runtime cannot run the step.
            OutputError: records cannot be written.
        """
        checker, step = check
        if self._shown is None:
            self._shown = self._prepare()
        shown = self._shown
        outputs = run_values(
            shown.session, feeds, list(dict.fromkeys((*wanted, *shown.names)))
        )
        run = self._records(shown, step, feeds, outputs)
        if not checker.config.scaled_overflows and skips(outputs):
            run = run._replace(records=_without_overflows(run.records, shown.scaled))
        conclude(checker, run, chosen_values(shown.model, checker.config))
        return {name: outputs[name] for name in wanted}

    def _prepare(self) -> _ExposedStep:
        flow = make_flow(self.model, emulated=self.emulated)
        rows = watched_values(flow)
        ready = emulate(self.model) if self.emulated else self.model
        watched = {row.value for row in rows} | {row.exact for row in rows}
        session, names = expose(ready, self.provider, watched)
        # Nodes are in order, so that one pass reaches all values that depend on the scale.
        scaled = set(self.scaled)
        for node, reads in zip(flow.nodes, flow.reads, strict=True):
            if not scaled.isdisjoint(reads):
                scaled.update(node.output)
        return _ExposedStep(
            model=Model(self.model),
            session=session,
            flow=flow,
            rows=rows,
            names=names,
            scaled=frozenset(scaled),
        )

    def _records(
        self,
        shown: _ExposedStep,
        step: int,
        feeds: "Mapping[str, ort.OrtValue]",
        outputs: "Mapping[str, ort.OrtValue]",
    ) -> RunRecords:
        """Return the records of a step. A value is compared with itself if a fusion removed its exact result."""
        floats = {
            name: value
            for name, value in feeds.items()
            if "float" in value.data_type()
        }
        inputs = {name: measure(value, value) for name, value in floats.items()}
        rows = [row for row in shown.rows if row.value in outputs]
        values = dict[str, Measurement]()
        for row in rows:
            value = outputs[row.value]
            values[row.value] = measure(outputs.get(row.exact, value), value)
        seen = floats | {row.value: outputs[row.value] for row in rows}
        stats = {
            name: tensor_stats(np.asarray(from_value(value)))
            for name, value in seen.items()
        }
        checks = classify(shown.flow, rows, values, inputs)
        return records_of(step, shown.flow, floats, checks, stats)


def _without_overflows(
    records: Mapping[str, ValueRecord], scaled: Collection[str]
) -> dict[str, ValueRecord]:
    """Return the records of a step that the loss scale skips, with expected overflows excused."""
    end = inf
    finite = True
    # Nothing is excused after a fault that no scale explains: in the forward pass, or NaN from finite gradients.
    for row in records.values():
        is_scaled = row.tensor in scaled
        is_new_nan = row.fault == "NaN" and finite and row.op != ""
        if row.is_bad and (not is_scaled or is_new_nan):
            end = row.position
            break
        finite = finite and (not is_scaled or row.stats.finite)
    excused = dict(records)
    for name, row in records.items():
        is_before = row.position < end or row.fault == "Inf"
        if row.is_bad and row.tensor in scaled and is_before:
            excused[name] = replace(row, fault=None, inherited=False, fp16=None)
    return excused
