"""Runs of a pipeline: in float32, which records what each model is fed, and with any of its models converted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxamp._convert.convert import carried_out
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._pipeline.choices import Calls, Choice, PipelineModel, recorded
from onnxamp._pipeline.manifest import Pipeline
from onnxamp._pipeline.results import BROKEN, Measured
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.engines import Engine, Executable, Outputs
from onnxamp._runtime.run import Run
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.values import Feed
from onnxamp._tuning.job import converted_model
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.runs import converted_error

Runs = Callable[[Mapping[str, Feed]], Outputs]
"""Runs a model on a sample."""

_LONGEST: Final = 300
"""Letters of a failure that reports say."""


@dataclass(slots=True)
class PipelineRuns:
    """Runs a pipeline and measures how much worse than in float32 it is.

    ``metric`` compares outputs; of a number, the error is by how much it is worse than the float32 pipeline's.
    """

    pipeline: Pipeline
    engines: Mapping[str, Engine]
    """By model: they differ in the target whose sums are emulated."""
    metric: Metric
    folder: Path
    budget: int = BUDGET
    reference: Any = None
    """What the function returned in float32: outputs, or a number."""
    calls: dict[str, Calls] = field(default_factory=dict)
    _float32: dict[str, Runs] = field(default_factory=dict)
    _converted: dict[str, tuple[str, Model, Runs]] = field(default_factory=dict)
    """Model -> its last choice, converted, and what runs it."""

    def start(self) -> None:
        """Run the pipeline in float32, and record what its models are fed.

        Raises:
            RuntimeFailure: the function fails, or what it returns cannot be compared.
            ArgumentError: it returns neither a number nor outputs, or never runs a model.
        """
        self.calls = {member.name: Calls() for member in self.pipeline.members}
        for member in self.pipeline.members:
            engine = self.engines[member.name].reference
            self._float32[member.name] = self._executable(member.model, engine).run
        self.reference = self._called(self._models({}, self.calls), "in float32")
        value = self.value
        if value is not None and not isfinite(value):
            raise RuntimeFailure(
                f"The function {self.pipeline.called!r} returned {value} in float32: nothing can hold."
            )
        if never := [name for name, calls in self.calls.items() if not calls.count]:
            raise ArgumentError(
                f"The function {self.pipeline.called!r} never runs the model {never[0]!r}: take it out of the pipeline,"
                " or run it."
            )

    @property
    def engine(self) -> Engine:
        """Where all models run; they differ in the arithmetic of emulations alone."""
        return next(iter(self.engines.values()))

    @property
    def value(self) -> float | None:
        """The number that the function returned in float32; None if it returned outputs."""
        return None if isinstance(self.reference, Mapping) else float(self.reference)

    def samples(self, name: str) -> Samples:
        """What a model was fed."""
        return recorded(self.calls[name], name)

    def measure(self, chosen: Mapping[str, Choice]) -> Measured:
        """Run the pipeline with these models converted, and the others in float32."""
        return self.judged(
            self._models(
                {name: self._runs(name, choice) for name, choice in chosen.items()}
            )
        )

    def judged(self, models: Mapping[str, PipelineModel]) -> Measured:
        """Run the function on models, and compare what it returns with float32."""
        try:
            result = self._called(models, "with converted models")
        except RuntimeFailure as error:
            return Measured(None, inf, str(error)[:_LONGEST])
        if isinstance(result, Mapping) != isinstance(self.reference, Mapping):
            raise ArgumentError(
                f"The function {self.pipeline.called!r} returns now a number, now outputs."
            )
        if isinstance(result, Mapping):
            if result.keys() != self.reference.keys():
                return Measured(
                    None, inf, "The function returned other outputs than in float32."
                )
            return Measured(None, self.metric.error(self.reference, result))
        value = float(result)
        if not isfinite(value):
            return BROKEN
        worse = value - float(self.reference)
        return Measured(
            value, max(worse if self.pipeline.better == "lower" else -worse, 0.0)
        )

    def own_error(self, name: str, choice: Choice, metric: Metric) -> float:
        """The error of a converted model's own outputs on what the pipeline feeds to it."""
        self._runs(name, choice)
        member = self.pipeline[name]
        made = self._converted[name][1]
        run = Run(inputs=self.samples(name), budget=self.budget)
        return converted_error(member.model, made, run, metric, self.engines[name])

    def written(self, paths: Mapping[str, Path]) -> Measured:
        """Run the pipeline on files, each in a session of ONNX Runtime, as it will run later."""
        return self.judged(
            self._models(
                {name: self.engine.load(path).run for name, path in paths.items()}
            )
        )

    def _models(
        self, runs: Mapping[str, Runs], calls: Mapping[str, Calls] | None = None
    ) -> dict[str, PipelineModel]:
        return {
            member.name: PipelineModel(
                member.name,
                member.model.proto,
                runs.get(member.name, self._float32[member.name]),
                None if calls is None else calls[member.name],
            )
            for member in self.pipeline.members
        }

    def _runs(self, name: str, choice: Choice) -> Runs:
        """What runs a model in some precision; the last choice of each model is kept."""
        if choice.is_float32:
            return self._float32[name]
        if self._converted.get(name, ("",))[0] != choice.key:
            member, plan = self.pipeline[name], choice.plan
            model, size = member.model, member.model.stock.size
            path = self.folder / str(self.pipeline.members.index(member))
            path.mkdir(exist_ok=True)
            made = carried_out(
                model,
                plan.options,
                plan,
                None,
                lambda _, found: converted_model(found, size, path / "converted.onnx"),
            )
            self._converted[name] = (
                choice.key,
                made,
                self._executable(made, self.engines[name]).run,
            )
        return self._converted[name][2]

    def _executable(self, model: Model, engine: Engine) -> Executable:
        return Executable(model, engine, whole=not engine.emulates, budget=self.budget)

    def _called(self, models: Mapping[str, PipelineModel], where: str) -> Any:
        """What the function returns: a dict of arrays, or a number.

        Raises:
            RuntimeFailure: it fails. ArgumentError: it returns something else.
        """
        name = self.pipeline.called
        try:
            result = self.pipeline.run(models)
        except (
            Exception
        ) as error:  # it is not ours, and low precision may lead it anywhere
            text = f"{type(error).__name__}: {error}".rstrip(".")
            raise RuntimeFailure(
                f"The function {name!r} failed {where}: {text}."
            ) from error
        if isinstance(result, Mapping) and result:
            return {str(key): np.asarray(output) for key, output in result.items()}
        if isinstance(result, (bool, np.bool_)):
            raise ArgumentError(
                f"The function {name!r} returned {result}: it must return a number, or outputs."
            )
        try:
            return float(result)
        except (TypeError, ValueError):
            raise ArgumentError(
                f"The function {name!r} must return a number, or a dict of arrays by name, not {result!r:.80}."
            ) from None
