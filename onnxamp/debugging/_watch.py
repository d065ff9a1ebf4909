"""Running a model op by op with all its floats looked at: the records of one run."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from onnx import ModelProto

from onnxamp._numerics.check import OpFilter
from onnxamp._numerics.results import ValueCheck
from onnxamp._numerics.watch import Watched, WatchedRun, watched_values
from onnxamp._runtime.flow import Flow, dtype_of
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.observe import Observed, observe
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.session import Provider
from onnxamp._runtime.side import BUDGET
from onnxamp._runtime.values import Feed, from_value
from onnxamp.debugging._records import ValueRecord
from onnxamp.debugging._tensors import TensorStats, tensor_stats

if TYPE_CHECKING:
    import onnxruntime as ort

_NAMED: Final = 6
"""Values that an error names per level."""


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
    budget: int = BUDGET
    """Bytes of values and weights that may be held at a time besides the model itself."""
    _observed: Observed | None = None
    _runner: Runner | None = None
    _rows: list[Watched] = field(default_factory=list)

    def look(self, step: int, sample: Mapping[str, Feed], ops: OpFilter | None = None, *, stop: bool = False) -> Looked:
        """Run the model on a sample. Low values are emulated, as in :func:`onnxamp._numerics.check.check_run`.

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
        run = _Run(step, WatchedRun(self._runner, self._rows, self.budget))
        ops = ops or OpFilter()
        found: Looked | None = None
        for is_odd in run.parts(feeds):
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
    measured: WatchedRun
    stats: dict[str, TensorStats] = field(default_factory=dict)

    def parts(self, feeds: Mapping[str, Feed]) -> Iterator[bool]:
        """Run a part of the nodes at a time; whether there has been NaN or Inf yet."""
        odd = False

        def see(name: str, value: "ort.OrtValue") -> None:
            nonlocal odd
            self.stats[name] = found = tensor_stats(np.asarray(from_value(value)))
            odd = odd or not found.finite

        for _ in self.measured.parts(feeds, see):
            yield odd

    def looked(self) -> Looked:
        """The records so far."""
        flow, checks = self.measured.runner.flow, self.measured.checks()
        makers = sorted({flow.maker[name] for name in flow.own if name in flow.maker})
        ranks = {node: rank for rank, node in enumerate(makers)}  # emulation adds nodes of its own
        given = {name: self._input(name) for name in self.measured.inputs}
        made = {row.value: self._record(row, ranks[flow.maker[row.value]]) for row in checks}
        return Looked(flow, given | made, {row.value: row.position for row in checks})

    def _input(self, name: str) -> ValueRecord:
        stats = self.stats[name]
        fault = "NaN" if stats.num_nan else None  # infinities may be meant: masks
        dtype = dtype_of(self.measured.runner.flow, name)
        return ValueRecord(self.step, -1, "", "", name, dtype, stats, fault, inherited=False)

    def _record(self, row: ValueCheck, position: int) -> ValueRecord:
        dtype, stats = dtype_of(self.measured.runner.flow, row.value), self.stats[row.value]
        names = (row.op, row.node, row.value)
        return ValueRecord(self.step, position, *names, dtype, stats, row.fault, row.inherited)
