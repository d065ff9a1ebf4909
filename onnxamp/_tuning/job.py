"""One model being tuned: what is measured of it, plans of candidates, and the models made of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Final

from onnx import ModelProto

from onnxamp._convert.analysis import Analysis, decided
from onnxamp._convert.convert import convert, rewritten
from onnxamp._convert.plan import Plan, make_plan
from onnxamp._decide.precision import Prices
from onnxamp._dtypes import LowType
from onnxamp._model.model import Model
from onnxamp._runtime.engines import OutputCache
from onnxamp._runtime.samples import Samples
from onnxamp._tuning.confirm import Place, confirm, device_noise
from onnxamp._tuning.local import Local, Told, local_of, measure_samples
from onnxamp._tuning.memory import Memory
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.results import Kept
from onnxamp._tuning.search import Candidate, Chooser
from onnxamp._tuning.units import UNSEEN, Space, prices_for

_NOTHING: Final = 5e-4
"""Share of the squared tolerance below which an error is none."""


@dataclass
class Job:
    """The model as it came and as it is analysed, what can be low of it, and on what it is judged."""

    model: Model
    prepared: ModelProto
    space: Space
    samples: Samples
    metric: Metric
    memory: Memory
    place: Place
    judged: dict[frozenset[str], float] = field(default_factory=dict)
    """Low nodes of a candidate -> error of the converted model."""
    references: OutputCache = field(default_factory=OutputCache)
    _planned: tuple[Plan, Analysis] | None = None
    """The last plan, and what it was made from."""
    _made: tuple[Mapping[str, bool], ModelProto] | None = None
    """The last converted model, and its decisions."""

    @property
    def low(self) -> LowType:
        """The low type."""
        return self.space.all_low.options.low

    @cached_property
    def everything(self) -> Plan:
        """The plan that lowers all that can be."""
        return make_plan(self.space.all_low)

    @cached_property
    def locals(self) -> list[Local]:
        """What the instrumented pass, which is over, showed of each unit."""
        return [local_of(unit, self.memory.tally.values, self.low) for unit in self.space.units]

    @cached_property
    def broken(self) -> dict[str, str]:
        """Units that go wrong on their own, with the reason."""
        rows = zip(self.space.units, self.locals, strict=True)
        return {unit.key: local.broken for unit, local in rows if local.broken}

    @cached_property
    def pins(self) -> dict[int, str]:
        """The same by node, and nodes that cannot be measured."""
        return {**self.space.pins, **{u.node: self.broken[u.key] for u in self.space.units if u.key in self.broken}}

    @cached_property
    def base(self) -> Analysis:
        """The model with its pins, and what they do to others."""
        if not self.broken and UNSEEN not in self.space.pins.values():
            return self.space.all_low  # its pins are the same
        return decided(self.space.all_low.problem, prices=Prices(self.pins))

    def measure_locally(self, told: Told) -> None:
        """The instrumented pass, as far as the memory lacks it."""
        if self.space.units and self.memory.tally.samples < len(self.samples):
            measure_samples(
                self.memory.tally, self.prepared, rewritten(self.space.all_low), self.space.units,
                self.samples, self.metric, told, self.memory.save, self.references,
            )  # fmt: skip

    def whole(self) -> dict[frozenset[str], float]:
        """The error with everything low, which the instrumented pass gives."""
        units = (*self.space.units, *self.space.followers)
        return {frozenset(unit.key for unit in units): self.memory.tally.worst} if self.space.units else {}

    def converted(self, plan: Plan) -> ModelProto:
        """The model as a plan has it."""
        decisions = plan.decisions()
        if self._made is None or self._made[0] != decisions:
            if self._planned is not None and self._planned[0] is plan and self._planned[1].edits:
                self._made = decisions, rewritten(self._planned[1])
            else:
                self._made = decisions, convert(self.model, plan.options, plan).embedded()
        return self._made[1]

    def error(self, found: Candidate, plan: Plan) -> float:
        """The converted model's error on all samples."""
        if found.low not in self.judged:
            if self.place.emulated and self.space.units and plan.decisions() == self.everything.decisions():
                self.judged[found.low] = self.memory.tally.worst
            else:
                model, where = self.converted(plan), self.place.called(self.low.name)
                self.judged[found.low] = self.memory.error(
                    found.low,
                    where,
                    lambda: confirm(self.prepared, model, self.samples, self.metric, self.place, self.references),
                )
        return self.judged[found.low]

    @cached_property
    def device_noise(self) -> float | None:
        """What a device alone does to the outputs of the float32 model, on the first sample."""
        if self.place.provider == "cpu":
            return None
        return device_noise(self.prepared, self.samples[0], self.metric, self.place)

    def plan(self, found: Candidate, kept: Sequence[Kept]) -> Plan:
        """The plan that lowers exactly these nodes, each float32 one with its measured reason."""
        units, space = self.space.units, self.space
        exact = [0.0 if unit.key in found.low else inf for unit in units]
        spared = {unit.node for unit in space.followers if unit.key not in found.low}
        analysis = decided(space.all_low.problem, prices=prices_for(units, exact, self.pins, spared))
        plan = make_plan(analysis)
        told = {row.node: f"{row.why}: {row.detail}" if row.detail else row.why for row in kept}
        why = {unit.node: told.get(unit.label) for unit in units}
        rows = [
            row if row.low or not (text := why.get(variable.node)) else replace(row, reason="measured", detail=text)
            for row, variable in zip(plan.rows, analysis.ports.variables, strict=True)
        ]
        self._planned = replace(plan, rows=tuple(rows)), analysis
        return self._planned[0]

    def kept(self, low: frozenset[str], prices: Sequence[float]) -> list[Kept]:
        """Why nodes stay float32, where measuring has to do with it; prices are of amplitudes."""
        nodes, found = self.space.all_low.graph.nodes, []
        for unit, cost in zip(self.space.units, prices, strict=True):
            share = cost / self.metric.amplitude(self.metric.tolerance) ** 2
            if unit.key in low:
                continue
            if unit.key in self.broken:
                found.append(Kept(unit.label, unit.op, "breaks on its own", self.broken[unit.key]))
            elif (tie := _tie(self.base, unit.node)) is not None:
                found.append(Kept(unit.label, unit.op, "goes with others", tie))
            elif cost == inf:
                found.append(Kept(unit.label, unit.op, "breaks the outputs", "with its block"))
            elif share < _NOTHING:
                found.append(Kept(unit.label, unit.op, "not worth its Casts", ""))
            else:
                text = f"it would use {share:.1%} of the squared error that is allowed"
                found.append(Kept(unit.label, unit.op, "costs accuracy", text))
        for index, why in self.space.pins.items():
            kind = "never run" if why == UNSEEN else "not measured"
            found.append(Kept(nodes[index].label, nodes[index].key, kind, why))
        return found

    def chooser(self) -> Chooser:
        """What solves the cut for prices."""
        return Chooser(self.space, self.base, self.broken)


def _tie(base: Analysis, node: int) -> str | None:
    """The pin to float32 that a node shares with others."""
    pins = (base.pins.verdicts.get(base.ports.root(variable)) for variable in base.ports.of_node.get(node, {}).values())
    return next((f"{pin.reason.value}: {pin.detail}" for pin in pins if pin is not None and not pin.low), None)
