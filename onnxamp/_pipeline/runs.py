"""Runs of a pipeline: in float32, which records the inputs of each model, and with any of its models converted."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from math import inf, isfinite
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxamp._convert.convert import carried_out
from onnxamp._convert.plan import Plan, plan_json, plan_of
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._options.values import Level
from onnxamp._pipeline.choices import Calls, Choice, PipelineModel, written
from onnxamp._pipeline.manifest import Pipeline
from onnxamp._public import Shown
from onnxamp._runtime import BUDGET
from onnxamp._runtime.engines import Engine, Outputs
from onnxamp._runtime.fingerprints import model_print, source_print, versions
from onnxamp._runtime.run import Run
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.values import Feed
from onnxamp._state import Facts, Part, fingerprint, from_data
from onnxamp._tuning.job import converted_model
from onnxamp._tuning.metric import Metric, make_metric
from onnxamp._tuning.runs import Measurements, converted_error, session_on


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of the pipeline with some models converted.

    ``model`` is the model that was tried, and ``choice`` its level and type; ``others`` are models that were already
    low; ``error`` is how much worse the pipeline was than in float32, infinite if it failed, and ``failure`` is the
    reason. ``time`` is the estimated time of the model per run of the pipeline, in microseconds.
    """

    model: str
    choice: str
    others: tuple[str, ...]
    error: float
    held: bool
    time: float
    failure: str = ""


@dataclass(frozen=True, slots=True)
class TunedMember:
    """A model of a pipeline, and its choice.

    ``choice`` is "float32", or the level and the low type; ``exponents`` is the number of values that are stored with
    an exponent. ``alone`` is the error of the pipeline with only this model converted as decided, None if that was
    never measured; ``error`` is the error with all earlier decisions as well. ``gain`` is the time that the choice
    saves. Times are estimated microseconds per run of the pipeline, in which the model is called ``calls`` times;
    weights are in bytes.
    """

    name: str
    source: str
    target: Path | None
    plan: Plan
    choice: str
    exponents: int
    calls: int
    alone: float | None
    error: float
    time_before: float
    time: float
    weights_before: int
    weights: int
    nodes: int

    @property
    def is_float32(self) -> bool:
        """Whether the whole model is in float32."""
        return self.choice == "float32"

    @property
    def gain(self) -> float:
        """The time that its choice saves."""
        return self.time_before - self.time


@dataclass(frozen=True, slots=True, repr=False)
class TunedPipeline(Shown):
    """The outcome of tuning a pipeline.

    Attributes:
        models: the models in the order of the manifest, each with its plan.
        order: their names in the order of decisions: the least error per time saved first.
        source: the manifest; None if there is none.
        output: the folder that the models were written to; None if nothing was written.
        function: the name of the function that runs them.
        metric: how the outputs of the function are compared; "" if it returns a number.
        better: which of two numbers is the better one, "lower" or "higher".
        tolerance: by how much the pipeline may be worse than in float32.
        reference: the number that the function returned in float32; None for outputs.
        value: the number that the function returned in the last run.
        error: by how much the pipeline is worse than in float32 with all decisions applied.
        held: whether this error is within the tolerance.
        noise: by how much a second run in float32 was worse than the first.
        ran_on: the engine that ran the converted models.
        written_error: the error of a run with the written files in ONNX Runtime's sessions; None if there was no such
            run.
        note: why there was no such run.
        runs: the number of runs of the pipeline. recalled: how many of them came from the state file.
        stopped: whether the search reached its time limit or its maximum number of runs.
        device: the device that times are estimated for.
        trials: all choices that were tried.
        warnings: sentences about options that match nothing or cannot be followed.

    Example:
        >>> import onnxamp
        >>> tuned = onnxamp.tune_pipeline("models/speech/pipeline.toml", provider="cpu")
        >>> tuned.held, [model.name for model in tuned.models if model.is_float32]
        (True, ['vocoder'])
    """

    models: tuple[TunedMember, ...]
    order: tuple[str, ...]
    source: Path | None
    output: Path | None
    function: str
    metric: str
    better: str
    tolerance: float
    reference: float | None
    value: float | None
    error: float
    held: bool
    noise: float
    ran_on: str
    written_error: float | None
    note: str
    runs: int
    recalled: int
    stopped: bool
    device: str
    trials: tuple[Trial, ...]
    warnings: tuple[str, ...]

    def __getitem__(self, name: str) -> TunedMember:
        """Return the model of this name."""
        return next(model for model in self.models if model.name == name)

    @property
    def time_before(self) -> float:
        """The estimated microseconds that models take per run of the pipeline in float32."""
        return sum(model.time_before for model in self.models)

    @property
    def time(self) -> float:
        """The same time with all decisions applied."""
        return sum(model.time for model in self.models)


PART: Final = "tuning of a pipeline"
"""The name of the part of the state file."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of a run of the pipeline: the number that its function returned (None for outputs), the error relative
    to float32, and the failure of the function ("" if there was none).
    """

    value: float | None
    error: float
    failure: str = ""


class PipelineState(Measurements):
    """Measurements of one tuning of a pipeline.

    Attributes:
        recalled: keys of stored runs that were needed again.
        made: the number of new runs.
    """

    def __init__(self, part: Part | None = None) -> None:
        super().__init__(part)
        self._before = frozenset(part or ())
        self.recalled = set[str]()
        self.made = 0

    def run(
        self, chosen: Mapping[str, Choice], measure: Callable[[], Measured]
    ) -> Measured:
        """Return the stored measurement of the pipeline with these choices, or a new one."""
        key = f"run {key_of(chosen)}"
        if key in self._before:
            self.recalled.add(key)
        self.made += key not in self._known
        measured: Measured = from_data(Measured, self.known(key, measure))
        return measured

    def plan(
        self, words: str, find: Callable[[], tuple[Plan, float]]
    ) -> tuple[Plan, float]:
        """Return the stored choice of level "auto" of a model at some tolerance, or a new one: the plan, and the error
        of the model's own outputs.
        """

        def found() -> tuple[Any, float]:
            plan, error = find()
            return plan_json(plan), float(error)

        plan, error = self.known(f"plan {fingerprint(words)}", found)
        return plan_of(plan), float(error)


def key_of(chosen: Mapping[str, Choice]) -> str:
    """Return the key of choices, omitting models that stay in float32."""
    low = sorted(
        (name, choice.key) for name, choice in chosen.items() if not choice.is_float32
    )
    return fingerprint(repr(low))


def facts_of(pipeline: Pipeline, metric: str, backend: str) -> Facts:
    """Return the fingerprints of everything that measurements depend on: the models, the function and its file, the
    metric, and versions.
    """
    members = pipeline.members
    return {
        "a model": fingerprint(
            *(text for one in members for text in (one.name, model_print(one.model)))
        ),
        "the function": fingerprint(pipeline.called, source_print(pipeline.run)),
        "the metric": fingerprint(metric, pipeline.better),
        "the options": fingerprint(
            backend, *(written(one.asked(Level.O2, "float16")) for one in members)
        ),
        "the version of onnxamp or ONNX Runtime": versions(),
    }


Runs = Callable[[Mapping[str, Feed]], Outputs]
"""A function that runs a model on a sample."""

_LONGEST: Final = 300
"""The maximum number of characters of a failure in reports."""


@dataclass(slots=True)
class PipelineRuns:
    """Runs a pipeline, and measures how much worse it is than in float32.

    ``metric`` compares outputs; for a number, the error is how much worse it is than that of the float32 pipeline.
    """

    pipeline: Pipeline
    engines: Mapping[str, Engine]
    """The engine of each model; engines differ in the target whose sums they emulate."""
    metric: Metric
    folder: Path
    budget: int = BUDGET
    state: PipelineState = field(default_factory=PipelineState)
    reference: Any = None
    """The result of the function in float32: outputs, or a number."""
    calls: dict[str, Calls] = field(default_factory=dict)
    _float32: dict[str, Runs] = field(default_factory=dict)
    _converted: dict[str, tuple[str, Model, Runs]] = field(default_factory=dict)
    """Model -> its last choice, and the function that runs it as converted."""

    def start(self) -> None:
        """Run the pipeline in float32, and record the inputs of its models.

        Raises:
            RuntimeFailure: the function fails, or its result cannot be compared.
            ArgumentError: the function returns neither a number nor outputs, or never runs a model.
        """
        self.calls = {member.name: Calls() for member in self.pipeline.members}
        for member in self.pipeline.members:
            engine = self.engines[member.name].reference
            self._float32[member.name] = session_on(
                engine, member.model, self.budget
            ).run
        self.reference = self._called(self._models({}, self.calls), "in float32")
        value = self.value
        if value is not None and not isfinite(value):
            raise RuntimeFailure(
                f"The function {self.pipeline.called!r} returned {value} in float32, so no conversion can pass."
            )
        if never := [name for name, calls in self.calls.items() if not calls.count]:
            raise ArgumentError(
                f"The function {self.pipeline.called!r} never runs the model {never[0]!r}: remove it from the"
                " pipeline, or run it."
            )

    @property
    def engine(self) -> Engine:
        """The common engine; those of the models differ only in the emulated arithmetic."""
        return next(iter(self.engines.values()))

    @property
    def value(self) -> float | None:
        """The number that the function returned in float32; None if it returned outputs."""
        return None if isinstance(self.reference, Mapping) else float(self.reference)

    def samples(self, name: str) -> Samples:
        """Return the recorded feeds of a model."""
        calls = self.calls[name]
        readers: list[Callable[[], Sample]] = [
            partial(dict, sample) for sample in calls.samples
        ]
        title = f"{len(readers)} of {calls.count} calls of {name} in the pipeline"
        return Samples(title, readers)

    def measure(self, chosen: Mapping[str, Choice]) -> Measured:
        """Return the measurement of the pipeline with these models converted, and the others in float32: the stored
        one, or that of a new run.
        """

        def measured() -> Measured:
            runs = {name: self._runs(name, choice) for name, choice in chosen.items()}
            return self.judged(self._models(runs))

        return self.state.run(chosen, measured)

    def judged(self, models: Mapping[str, PipelineModel]) -> Measured:
        """Run the function on models, and compare its result with that in float32."""
        try:
            result = self._called(models, "with converted models")
        except RuntimeFailure as error:
            return Measured(None, inf, str(error)[:_LONGEST])
        if isinstance(result, Mapping) != isinstance(self.reference, Mapping):
            raise ArgumentError(
                f"The function {self.pipeline.called!r} sometimes returns a number and sometimes outputs:"
                " always return the same kind."
            )
        if isinstance(result, Mapping):
            if result.keys() != self.reference.keys():
                text = "The function did not return the same outputs as in float32."
                return Measured(None, inf, text)
            return Measured(None, self.metric.error(self.reference, result))
        value = float(result)
        if not isfinite(value):
            return Measured(None, inf)
        worse = value - float(self.reference)
        loss = worse if self.pipeline.better == "lower" else -worse
        return Measured(value, max(loss, 0.0))

    def own_error(self, name: str, choice: Choice) -> float:
        """Return the error of a converted model's own outputs on its recorded inputs."""
        self._runs(name, choice)
        member = self.pipeline[name]
        made = self._converted[name][1]
        run = Run(inputs=self.samples(name), budget=self.budget)
        metric = make_metric("auto", 1.0)
        return converted_error(member.model, made, run, metric, self.engines[name])

    def written(self, paths: Mapping[str, Path]) -> Measured:
        """Run the pipeline on files, each in an ONNX Runtime session, as it will run later."""
        load = cache(self.engine.load)  # by name: the files are about to be renamed

        def run(path: Path, feeds: Mapping[str, Feed]) -> Outputs:
            return self.engine.run(load(path), feeds)

        runs = {name: partial(run, path) for name, path in paths.items()}
        return self.judged(self._models(runs))

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
        """Return the function that runs a model in some precision; the last choice of each model is cached."""
        if choice.is_float32:
            return self._float32[name]
        if self._converted.get(name, ("",))[0] != choice.key:
            member = self.pipeline[name]
            plan = choice.plan
            model = member.model
            size = member.model.stock.size
            path = self.folder / str(self.pipeline.members.index(member))
            path.mkdir(exist_ok=True)
            made = carried_out(
                model,
                plan.options,
                plan,
                None,
                lambda _, found: converted_model(found, size, path / "converted.onnx"),
            )
            session = session_on(self.engines[name], made, self.budget)
            self._converted[name] = choice.key, made, session.run
        return self._converted[name][2]

    def _called(self, models: Mapping[str, PipelineModel], where: str) -> Any:
        """Return the result of the function: a dict of arrays, or a number.

        Raises:
            RuntimeFailure: the function fails. ArgumentError: it returns something else.
        """
        name = self.pipeline.called
        try:
            result = self.pipeline.run(models)
        except (
            Exception
        ) as error:  # low precision may make a user's function raise anything
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
