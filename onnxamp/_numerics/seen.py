"""Checking a model on an engine that computes low precision itself: what each op makes of inputs that are fine.

Each op of the model runs on the engine with the exact values of the float32 model behind it, which the CPU computes. So
nothing is emulated, and an op that goes wrong there, such as a sum that is kept in float16, is named even where float32
accumulation would be right.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

from onnxamp._errors import OnnxAmpError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._numerics.measure import Measurement, measure
from onnxamp._numerics.pairing import Pairing, pair
from onnxamp._numerics.results import ValueCheck
from onnxamp._numerics.sample_check import CheckedSample
from onnxamp._numerics.walk import SideBySide
from onnxamp._numerics.watch import classify, watched_values
from onnxamp._runtime.emulate import without_rounding
from onnxamp._runtime.engines import Executable, Progress
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Sample
from onnxamp._runtime.sent import Made, SampleWork, SentModel
from onnxamp._runtime.session import Provider
from onnxamp._runtime.values import Feed, to_value
from onnxamp._workers.executor import Memory


def _replayed(reference: Flow, result: Flow) -> Pairing:
    return replace(pair(reference, result), accumulated=False)


@dataclass(slots=True)
class SeenRun:
    """A model checked on an engine, sample by sample; what was measured adds up."""

    result: Executable
    walk: SideBySide
    values: dict[str, Measurement] = field(default_factory=dict)
    inputs: dict[str, Measurement] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model, provider: Provider, budget: int) -> "SeenRun":
        """Raises ModelError or OpsetError if there is no float32 model behind the model."""
        exact = Model(without_rounding(model.embedded()))
        result = Executable(model, provider, emulated=False, whole=False, budget=budget)
        return cls(result, SideBySide(Executable(exact, "cpu", True, False, budget), result, _replayed))

    def prepare(self, sample: Sample) -> None:
        """Prepare the models for a sample, as the first one does it for all; what is wrong with it, it tells itself."""
        with suppress(OnnxAmpError):
            feeds = check_inputs(self.result.model.proto, sample)
            self.walk.reference.prepare(feeds)
            self.result.prepare(feeds)

    def run(self, feeds: Mapping[str, Feed], progress: Progress | None) -> CheckedSample:
        """Run a sample.

        Raises:
            RuntimeFailure: the model does not run in float32 on the CPU, or none of its ops runs on the engine.
        """
        walked, flow = self.walk.run(feeds, progress), self.result.prepare(feeds).flow
        values = {name: compared.local for name, compared in walked.compared.items() if compared.local is not None}
        notes = (walked.failure, *(compared.note for compared in walked.compared.values()))
        if not values and (note := next(filter(None, notes), None)) is not None:
            raise RuntimeFailure(f"None of its ops runs by itself. {note}")
        inputs = {name: to_value(feeds[name], flow.types.get(name)) for name in flow.inputs}
        floats = {name: value for name, value in inputs.items() if value.is_tensor() and "float" in value.data_type()}
        return CheckedSample((), values, {name: measure(value, value) for name, value in floats.items()})

    def check(self, sample: Sample, progress: Progress | None = None) -> CheckedSample | RuntimeFailure:
        """:meth:`run`, or why the model does not run."""
        try:
            return self.run(check_inputs(self.result.model.proto, sample), progress)
        except RuntimeFailure as error:
            return error

    def add(self, sample: CheckedSample) -> None:
        """Add what a sample showed."""
        for into, more in ((self.values, sample.values), (self.inputs, sample.inputs)):
            for name, measured in more.items():
                into[name] = into[name] + measured if name in into else measured

    def checks(self, feeds: Mapping[str, Feed]) -> tuple[ValueCheck, ...]:
        """The values that were measured, in execution order, with their faults; ``feeds`` are the last sample."""
        flow = self.result.prepare(feeds).flow
        rows = [row for row in watched_values(flow) if row.value in self.values]
        return classify(flow, rows, self.values, self.inputs)


@dataclass(frozen=True, slots=True)
class SeenWork(SampleWork):
    """:meth:`SeenRun.check` in worker processes."""

    model: SentModel
    provider: Provider
    budget: int

    def made(self, _: Memory) -> Made:
        """As :meth:`SampleWork.made`."""
        run = SeenRun.of(self.model.opened(), self.provider, self.budget)
        return run.prepare, lambda item: run.check(item.read())
