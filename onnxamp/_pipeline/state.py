"""Measurements of a pipeline in a file, so that an interrupted tuning resumes and nothing is measured twice."""

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from math import inf
from pathlib import Path
from typing import Any, Final

from onnxamp._convert.plan import Plan, plan_json, plan_of
from onnxamp._errors import ArgumentError
from onnxamp._model.storage import write_file
from onnxamp._options.options import Level
from onnxamp._pipeline.choices import Choice, written
from onnxamp._pipeline.manifest import Pipeline
from onnxamp._runtime.samples import Samples
from onnxamp._tuning.state import fingerprint

_FORMAT: Final = 1


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
    """What is known of one tuning; ``path`` is None if nothing is saved."""

    signature: str
    path: Path | None = None
    runs: dict[str, Measured] = field(default_factory=dict)
    tuned: dict[str, tuple[Plan, float]] = field(default_factory=dict)
    """Choices of level "auto": the plan, and the error of the model's own outputs."""
    known: frozenset[str] = frozenset()
    """Keys of the runs that were loaded."""
    recalled: set[str] = field(default_factory=set)
    """Those of them that were needed again."""
    made: int = 0
    """Runs that were made."""

    def run(self, chosen: Mapping[str, Choice], measure: Callable[[], Measured]) -> Measured:
        """What is known of the pipeline with these choices, or a new measurement."""
        key = key_of(chosen)
        if key not in self.runs:
            self.runs[key], self.made = measure(), self.made + 1
            self.save()
        if key in self.known:
            self.recalled.add(key)
        return self.runs[key]

    def plan(self, words: str, find: Callable[[], tuple[Plan, float]]) -> tuple[Plan, float]:
        """The known choice of level "auto" of a model at some tolerance, or a new one."""
        key = _digest(words)
        if key not in self.tuned:
            self.tuned[key] = find()
            self.save()
        return self.tuned[key]

    def save(self) -> None:
        """Write everything to the file.

        Raises:
            OutputError: the file cannot be written.
        """
        if self.path is None:
            return
        facts: dict[str, Any] = {
            "onnxamp": "tune pipeline",
            "format": _FORMAT,
            "signature": self.signature,
            "runs": {key: [one.value, str(one.error), one.failure] for key, one in self.runs.items()},
            "tuned": {key: [plan_json(plan), str(error)] for key, (plan, error) in self.tuned.items()},
        }
        write_file(self.path, (json.dumps(facts) + "\n").encode())


def key_of(chosen: Mapping[str, Choice]) -> str:
    """What identifies choices: those of models that stay float32 say nothing."""
    low = sorted((name, choice.key) for name, choice in chosen.items() if not choice.is_float32)
    return _digest(repr(low))


def load_state(signature: str, path: Path | None) -> PipelineState:
    """The state in a file if it belongs to the same tuning, else an empty one.

    Raises:
        ArgumentError: the file exists, but is no such state.
    """
    if path is None or not path.exists():
        return PipelineState(signature, path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        kind = data["onnxamp"], data["format"]
        runs = {key: Measured(value, float(error), failure) for key, (value, error, failure) in data["runs"].items()}
        tuned = {key: (plan_of(plan), float(error)) for key, (plan, error) in data["tuned"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArgumentError(
            f"{str(path)!r} is not the state of a pipeline's tuning ({error}): name another file."
        ) from None
    if kind != ("tune pipeline", _FORMAT):
        raise ArgumentError(f"{str(path)!r} is not a state that this version of onnxamp reads: name another file.")
    if data.get("signature") != signature:
        return PipelineState(signature, path)
    return PipelineState(signature, path, runs, tuned, frozenset(runs))


def signature_of(pipeline: Pipeline, metric: str, backend: str) -> str:
    """A hash of all that measurements depend on: the models, the function and its file, the metric, what computes."""
    words = [pipeline.called, _source(pipeline), metric, pipeline.better, backend]
    parts = [
        fingerprint([member.name, written(member.asked(Level.O2, "float16"))], member.model, Samples("", ()))
        for member in pipeline.members
    ]
    return _digest("\n".join([*words, *parts]))


def _source(pipeline: Pipeline) -> str:
    """The text of the file that the function is in; "" if it is in none."""
    try:
        return Path(inspect.getfile(pipeline.run)).read_text(encoding="utf-8", errors="replace")
    except (OSError, TypeError):
        return ""


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()[:24]


BROKEN: Final = Measured(None, inf)
"""A run that gives no result."""
