"""Measurements of a pipeline in its part of a state file: an interrupted tuning resumes, and no run is made twice."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from onnxamp._convert.plan import Plan, plan_json, plan_of
from onnxamp._options.levels import Level
from onnxamp._pipeline.choices import Choice, written
from onnxamp._pipeline.manifest import Pipeline
from onnxamp._runtime.fingerprints import model_print, source_print, versions
from onnxamp._state.plain import as_data, from_data
from onnxamp._state.state import Facts, Part, fingerprint

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

    def run(self, chosen: Mapping[str, Choice], measure: Callable[[], Measured]) -> Measured:
        """What is known of the pipeline with these choices, or a new measurement."""
        key = key_of(chosen)
        if key not in self.runs:
            self.runs[key], self.made = measure(), self.made + 1
            self._keep(f"run {key}", as_data(self.runs[key], named=False))
        if key in self.known:
            self.recalled.add(key)
        return self.runs[key]

    def plan(self, words: str, find: Callable[[], tuple[Plan, float]]) -> tuple[Plan, float]:
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
    low = sorted((name, choice.key) for name, choice in chosen.items() if not choice.is_float32)
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
