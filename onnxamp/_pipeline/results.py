"""What tuning a pipeline returns."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Final

from onnxamp._convert.plan import Plan, plan_json, plan_of
from onnxamp._options.levels import Level
from onnxamp._pipeline.choices import Choice, written
from onnxamp._pipeline.manifest import Pipeline
from onnxamp._public import Shown
from onnxamp._runtime.fingerprints import model_print, source_print, versions
from onnxamp._state.state import Facts, Part, as_data, fingerprint, from_data


@dataclass(frozen=True, slots=True)
class Trial:
    """A run of the pipeline with some models converted.

    ``model`` is the one that was tried, and ``choice`` its level and type; ``others`` are models that were low already;
    ``error`` is by how much the pipeline was worse than in float32, infinite if it broke, and ``failure`` says how.
    ``time`` is that of the model per run of the pipeline, in estimated microseconds.
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
    """A model of a pipeline, and what was decided about it.

    ``choice`` is "float32", or the level and the low type; ``exponents`` are values that are stored with one. ``alone``
    is the error of the pipeline with this model alone as decided, None if it was never so; ``error`` that with all
    models that were decided before, too. ``gain`` is the time that it saves. Times are estimated microseconds per run
    of the pipeline, in which the model is called ``calls`` times; weights are in bytes.
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
        """Whether nothing of it is low."""
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
        order: their names in the order in which they were decided: the least error per time saved first.
        source: the manifest; None if there is none.
        output: the folder that the models were written to; None if nothing was written.
        function: name of the function that runs them.
        metric: how its outputs are compared; "" if it returns a number.
        better: which of two numbers is the better one, "lower" or "higher".
        tolerance: by how much the pipeline may be worse than in float32.
        reference: the number that the function returned in float32; None for outputs.
        value: the number that it returned at last.
        error: by how much the pipeline is worse than in float32, with all models as decided.
        held: whether that is within the tolerance.
        noise: by how much a second run in float32 was worse than the first.
        ran_on: what ran the converted models.
        written_error: the error of a run with the written files as ONNX Runtime loads them; None if there was none.
        note: why there was none.
        runs: runs of the pipeline that were made. recalled: those that were taken from the state file.
        stopped: whether the search ended because its time or its runs were over.
        device: the device that times are for.
        trials: all choices that were tried.
        warnings: about options that match nothing or cannot be obeyed, in sentences.

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
        """The model of that name."""
        return next(model for model in self.models if model.name == name)

    @property
    def time_before(self) -> float:
        """Estimated microseconds per run of the pipeline in float32, in its models."""
        return sum(model.time_before for model in self.models)

    @property
    def time(self) -> float:
        """The same with all models as decided."""
        return sum(model.time for model in self.models)


PART: Final = "tuning of a pipeline"
"""Part of the state file."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a run of the pipeline showed: the number that its function returned, None for outputs; the error against
    float32; and why the function failed, "" if it did not.
    """

    value: float | None
    error: float
    failure: str = ""


@dataclass(slots=True)
class PipelineState:
    """What is known of one tuning. ``part`` is where it is kept; None if it is not."""

    part: Part | None = None
    runs: dict[str, Measured] = field(default_factory=dict)
    tuned: dict[str, tuple[Plan, float]] = field(default_factory=dict)
    """Choices of level "auto": the plan, and the error of the model's own outputs."""
    known: frozenset[str] = frozenset()
    """Keys of the runs that were loaded."""
    recalled: set[str] = field(default_factory=set)
    """Those of them that were needed again."""
    made: int = 0
    """Runs that were made."""

    @classmethod
    def of(cls, part: Part | None) -> "PipelineState":
        """What a part holds."""
        runs, tuned = dict[str, Measured](), dict[str, tuple[Plan, float]]()
        for key in part or ():
            assert part is not None
            kind, _, name = key.partition(" ")
            if kind == "run":
                runs[name] = from_data(Measured, part[key])
            else:
                plan, error = part[key]
                tuned[name] = plan_of(plan), float(error)
        return cls(part, runs, tuned, frozenset(runs))

    def run(
        self, chosen: Mapping[str, Choice], measure: Callable[[], Measured]
    ) -> Measured:
        """What is known of the pipeline with these choices, or a new measurement."""
        key = key_of(chosen)
        if key not in self.runs:
            self.runs[key], self.made = measure(), self.made + 1
            self._keep(f"run {key}", as_data(self.runs[key], named=False))
        if key in self.known:
            self.recalled.add(key)
        return self.runs[key]

    def plan(
        self, words: str, find: Callable[[], tuple[Plan, float]]
    ) -> tuple[Plan, float]:
        """The known choice of level "auto" of a model at some tolerance, or a new one."""
        key = fingerprint(words)
        if key not in self.tuned:
            self.tuned[key] = find()
            plan, error = self.tuned[key]
            self._keep(f"plan {key}", [plan_json(plan), as_data(float(error))])
        return self.tuned[key]

    def _keep(self, key: str, value: object) -> None:
        if self.part is not None:
            self.part[key] = value


def key_of(chosen: Mapping[str, Choice]) -> str:
    """What identifies choices: those of models that stay float32 say nothing."""
    low = sorted(
        (name, choice.key) for name, choice in chosen.items() if not choice.is_float32
    )
    return fingerprint(repr(low))


def facts_of(pipeline: Pipeline, metric: str, backend: str) -> Facts:
    """All that measurements depend on: the models, the function and its file, the metric, what computes."""
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


BROKEN: Final = Measured(None, inf)
"""A run that gives no result."""
