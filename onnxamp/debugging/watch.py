"""Running a model op by op with all its floats looked at: the records of one run."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from onnx import ModelProto

from onnxamp.debugging.records import ValueRecord
from onnxamp.debugging.tensors import TensorStats, tensor_stats
from onnxamp.dtypes import ELEM_NAMES
from onnxamp.numerics.check import OpFilter
from onnxamp.numerics.results import ValueCheck
from onnxamp.numerics.watch import Watched, classify, watched_values
from onnxamp.runtime.flow import Flow, Runner, fitted
from onnxamp.runtime.inputs import check_inputs
from onnxamp.runtime.measure import Measurement, measure
from onnxamp.runtime.observe import Observed, observe
from onnxamp.runtime.session import Provider
from onnxamp.runtime.side import BUDGET, Side, parts_of, start
from onnxamp.runtime.values import Feed, from_value

_NAMED: Final = 6
"""Values that an error names per level."""

_NUMPY: Final = {"float": "float32", "double": "float64"}
"""Types of ONNX that NumPy calls otherwise."""


@dataclass(frozen=True, slots=True)
class Looked:
    """All that one run showed: a record per float value by name, in the order of execution, inputs of the model first.

    ``nodes`` has the node of the flow that makes a value, but for inputs of the model.
    """

    flow: Flow
    records: Mapping[str, ValueRecord]
    nodes: Mapping[str, int]

    def first_bad(self, ops: OpFilter) -> ValueRecord | None:
        """The first NaN or Inf among the ops that are looked at."""
        return next((row for row in self.records.values() if row.is_bad and ops.takes(row.op)), None)

    def sources(self, tensor: str) -> list[ValueRecord]:
        """The floats that a value is made of, in the order of the node's inputs, seen through what emulation adds."""
        found: dict[str, ValueRecord] = {}
        waiting = [*reversed(self.flow.reads[self.nodes[tensor]])] if tensor in self.nodes else []
        while waiting:
            name = waiting.pop()
            if name in self.records:
                found[name] = self.records[name]
            elif name in self.flow.maker and name not in self.flow.own:
                waiting += reversed(self.flow.reads[self.flow.maker[name]])
        return list(found.values())

    def story(self, bad: ValueRecord, height: int) -> str:
        """What led to a value, in sentences: where it began, and ``height`` levels of what it is made of."""
        source = next((row for row in self.records.values() if row.fault), None)
        text = f"It began at {source} ({source.fault})." if bad.inherited and source is not None else ""
        level, seen = [bad], {bad.tensor}
        for depth in range(height):
            before = {row.tensor: row for later in level for row in self.sources(later.tensor)}
            level = [row for name, row in before.items() if name not in seen]
            seen |= before.keys()
            if not level:
                break
            more = f"; and {len(level) - _NAMED} more" if len(level) > _NAMED else ""
            lead = "Made of" if depth == 0 else "Those of"
            text += f" {lead} {'; '.join(map(str, level[:_NAMED]))}{more}."
        return text.strip()


@dataclass(slots=True)
class Watcher:
    """A model that is looked at run by run: made ready with the first, and again where other branches are taken."""

    model: ModelProto
    folder: Path | None
    provider: Provider
    _observed: Observed | None = None
    _runner: Runner | None = None
    _rows: list[Watched] = field(default_factory=list)

    def look(self, step: int, sample: Mapping[str, Feed], ops: OpFilter | None = None, *, stop: bool = False) -> Looked:
        """Run the model on a sample. Low values are emulated, as in :func:`onnxamp.numerics.check.check_run`.

        Args:
            step: number of the run, for its records.
            sample: arrays by input.
            ops: which op types can stop the run.
            stop: end with the first NaN or Inf of these that is no intention.

        Raises:
            ArgumentError: the sample does not fit the model. RuntimeFailure: the model does not run.
            ModelError, OpsetError, ExternalDataError: the model cannot be made ready.
        """
        feeds = check_inputs(self.model, sample)
        now = observe(
            self.model, self.folder, feeds, emulated=True, provider=self.provider, before=self._observed
        )  # fmt: skip
        if now is not self._observed or self._runner is None:
            self._observed, self._runner, self._rows = now, Runner(now.flow, self.provider), watched_values(now.flow)
        run = _Run(step, self._runner, self._rows)
        ops = ops or OpFilter()
        found: Looked | None = None
        for is_odd in run.parts(fitted(now.flow, feeds)):
            found = None
            if stop and is_odd:
                found = run.looked()
                if found.first_bad(ops) is not None:
                    break
        return found or run.looked()


@dataclass(slots=True)
class _Run:
    """One run: what was measured so far."""

    step: int
    runner: Runner
    rows: Sequence[Watched]
    measured: dict[str, Measurement] = field(default_factory=dict)
    inputs: dict[str, Measurement] = field(default_factory=dict)
    stats: dict[str, TensorStats] = field(default_factory=dict)

    def parts(self, feeds: Mapping[str, Feed]) -> Iterator[bool]:
        """Run a part of the nodes at a time; whether there has been NaN or Inf yet."""
        flow = self.runner.flow
        side = start(self.runner, feeds, Counter(name for row in self.rows for name in {row.value, row.exact}))
        for name, value in side.values.items():
            if value.is_tensor() and "float" in value.data_type():
                self.inputs[name] = measure(value, value, self.runner.provider)
                self.stats[name] = tensor_stats(np.asarray(from_value(value)))
        rows, odd = {row.value: row for row in self.rows}, any(not found.finite for found in self.stats.values())
        for part in parts_of(flow, range(len(flow.nodes)), BUDGET):
            side.run(part)
            mine = [row for node in part for name in flow.nodes[node].output if (row := rows.get(name))]
            self._measure(side, mine)
            self.runner.forget()
            odd = odd or any(not self.stats[row.value].finite for row in mine)
            yield odd

    def _measure(self, side: Side, rows: Collection[Watched]) -> None:
        for row in rows:
            exact, value = side.values[row.exact], side.values[row.value]
            self.measured[row.value] = measure(exact, value, self.runner.provider)
            self.stats[row.value] = tensor_stats(np.asarray(from_value(value)))
            side.used({row.value, row.exact})

    def looked(self) -> Looked:
        """The records so far."""
        flow = self.runner.flow
        checks = classify(flow, self.rows, self.measured, self.inputs)
        makers = sorted({flow.maker[name] for name in flow.own if name in flow.maker})
        ranks = {node: rank for rank, node in enumerate(makers)}  # emulation adds nodes of its own
        given = {name: self._input(name) for name in self.inputs}
        made = {row.value: self._record(row, ranks[flow.maker[row.value]]) for row in checks}
        return Looked(flow, given | made, {row.value: row.position for row in checks})

    def _input(self, name: str) -> ValueRecord:
        stats = self.stats[name]
        fault = "NaN" if stats.num_nan else None  # infinities may be meant: masks
        return ValueRecord(
            self.step, -1, "", "", name, dtype_of(self.runner.flow, name), stats, fault, inherited=False
        )  # fmt: skip

    def _record(self, row: ValueCheck, position: int) -> ValueRecord:
        return ValueRecord(
            self.step, position, row.op, row.node, row.value, _NUMPY.get(row.dtype, row.dtype), self.stats[row.value],
            row.fault, row.inherited,
        )  # fmt: skip


def dtype_of(flow: Flow, name: str) -> str:
    """The element type that a value has in the model as written."""
    dtype = ELEM_NAMES[flow.low[name]] if name in flow.low else (flow.types.get(name) or "")[len("tensor(") : -1]
    return _NUMPY.get(dtype, dtype)
