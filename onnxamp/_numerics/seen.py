"""Checking a model on an engine that computes low precision itself: what each op makes of inputs that are fine.

Each op of the model runs on the engine with the exact values of the float32 model behind it, which the CPU computes. So
nothing is emulated, and an op that goes wrong there, such as a sum that is kept in float16, is named even where float32
accumulation would be right.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from onnxamp._model.model import Model
from onnxamp._numerics.measure import Measurement, measure
from onnxamp._numerics.pairing import Pairing, pair
from onnxamp._numerics.results import ValueCheck
from onnxamp._numerics.walk import SideBySide
from onnxamp._numerics.watch import classify, watched_values
from onnxamp._runtime.emulate import without_rounding
from onnxamp._runtime.engines import Executable, Progress
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.session import Provider
from onnxamp._runtime.values import Feed, to_value


def _replayed(reference: Flow, result: Flow) -> Pairing:
    return replace(pair(reference, result), accumulated=False)


@dataclass(slots=True)
class SeenRun:
    """A model checked on an engine, sample by sample; what was measured adds up."""

    result: Executable
    walk: SideBySide
    values: dict[str, Measurement] = field(default_factory=dict)
    inputs: dict[str, Measurement] = field(default_factory=dict)
    flow: Flow | None = None

    @classmethod
    def of(cls, model: Model, provider: Provider, budget: int) -> "SeenRun":
        """Raises ModelError or OpsetError if there is no float32 model behind the model."""
        exact = Model(without_rounding(model.embedded()))
        result = Executable(model, provider, emulated=False, whole=False, budget=budget)
        return cls(result, SideBySide(Executable(exact, "cpu", True, False, budget), result, _replayed))

    def run(self, feeds: Mapping[str, Feed], progress: Progress | None) -> None:
        """Run a sample.

        Raises:
            RuntimeFailure: the model does not run in float32 on the CPU.
        """
        walked = self.walk.run(feeds, progress)
        self.flow = self.result.prepare(feeds).flow
        for name, compared in walked.compared.items():
            if compared.local is not None:
                _add(self.values, name, compared.local)
        for name in self.flow.inputs:
            value = to_value(feeds[name], self.flow.types.get(name))
            if value.is_tensor() and "float" in value.data_type():
                _add(self.inputs, name, measure(value, value))

    def checks(self) -> tuple[ValueCheck, ...]:
        """The values that were measured, in execution order, with their faults."""
        if self.flow is None:
            return ()
        rows = [row for row in watched_values(self.flow) if row.value in self.values]
        return classify(self.flow, rows, self.values, self.inputs)


def _add(into: dict[str, Measurement], name: str, measured: Measurement) -> None:
    into[name] = into[name] + measured if name in into else measured
