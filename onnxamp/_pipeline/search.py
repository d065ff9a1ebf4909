"""The search: one model after another, ordered by the effect on the pipeline per time saved.

1. For each model alone, with all others in float32, find the fastest choice with which the pipeline meets the
  tolerance. If a faster choice misses it, level auto searches between the two, with a tolerance for the model's own
  outputs that is scaled from the error of the pipeline with that choice.
2. Sort the models: the least error per microsecond saved first, and models that save no time last.
3. In this order, give each model the fastest choice with which the pipeline meets the tolerance, given all earlier
  decisions.

The tolerance is thus one budget for all models, and the first may use all of it. The last run of step 3 that passed is
a run with the final choices of all models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from time import monotonic
from typing import Final

from onnxamp._convert.convert import analyse_safely
from onnxamp._convert.plan import Plan
from onnxamp._options.values import Level
from onnxamp._pipeline.choices import Choice, Clock, rank, written
from onnxamp._pipeline.runs import PipelineRuns, Trial
from onnxamp._runtime.run import Run, RunOptions
from onnxamp._tuning.results import Search, is_slower
from onnxamp._tuning.tune import tune

PIPELINE_SECONDS: Final = 600.0
"""The default time limit of a search, because a run of a pipeline may take many seconds."""

RUNS: Final = 32
"""The default number of runs of the pipeline."""

_ALONE: Final = 0.6
"""The share of time and runs after which no further model is measured alone, because the other steps need the rest."""

_REFINEMENTS: Final = 3
"""The number of tolerances at which level auto is tried for a model, each time that it is considered."""

_AIM: Final = 0.7
"""The share of the tolerance that level auto aims at, because errors do not scale exactly."""

_STEP: Final = 0.5
"""The largest ratio of successive tolerances of level auto."""

_FIRST: Final = 1e-3
"""The first tolerance of level auto if no choice gave a finite error."""


@dataclass(slots=True)
class PipelineSearch:
    """Decides the choice of each model; ``float32`` and ``choices`` are by model, and ``choices`` are fastest first."""

    float32: Mapping[str, Choice]
    choices: dict[str, list[Choice]]
    refined: frozenset[str]
    """Models for which level auto may be tried."""
    asked: Search
    """The tolerance of all models together, the limits of the search, and whether slower choices are allowed."""
    runs: PipelineRuns
    clocks: Mapping[str, Clock]
    """Estimate the times of each model."""
    options: RunOptions
    decided: dict[str, Choice] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    """The error of the pipeline when each model was decided, with all earlier decisions, in the order of decisions."""
    alone: dict[str, tuple[Choice, float]] = field(default_factory=dict)
    """The fastest choice of a model with which the pipeline passes if all others are in float32, and its error."""
    trials: list[Trial] = field(default_factory=list)
    stopped: bool = False
    started: float = field(default_factory=monotonic)

    def search(self) -> None:
        """Decide all models."""
        for name in self.choices:
            if self._spent() > _ALONE:
                self.stopped = True
                break
            if (found := self.fit(name, {})) is not None:
                self.alone[name] = found
        error = 0.0
        for name in sorted(self.float32, key=self.rank):
            found = self.alone.get(name)
            is_first = all(choice.is_float32 for choice in self.decided.values())
            if (
                self.stopped if found is None else not is_first
            ):  # otherwise, there is nothing new to find
                found = self.fit(name, self.decided)
            self.decided[name], error = found or (self.float32[name], error)
            self.errors[name] = error

    def rank(self, name: str) -> tuple[int, float]:
        """Return the sort key of a model: the least error per time saved first, then models that only save bytes, then
        others.
        """
        if name not in self.alone:
            return 2, 0.0
        choice, error = self.alone[name]
        before = self.float32[name]
        if (gain := before.time - choice.time) > 0:
            return 0, error / gain
        return 1, error / max(before.weights - choice.weights, 1)

    def fit(
        self, name: str, decided: Mapping[str, Choice]
    ) -> tuple[Choice, float] | None:
        """Return the fastest choice of a model with which the pipeline passes, given the other decisions, and the
        error.
        """
        missed: list[tuple[Choice, float]] = []
        held: tuple[Choice, float] | None = None
        for choice in self._able(name, decided):
            error = self.tried(name, choice, decided)
            if error is None:
                return held
            if error <= self.asked.tolerance:
                held = choice, error
                break
            missed.append((choice, error))
        if not missed or name not in self.refined:
            return held
        return self._refined(name, decided, missed, held)

    def _able(self, name: str, decided: Mapping[str, Choice]) -> Sequence[Choice]:
        """Return the choices to try: if other models are low, none that is faster than the one that passed alone."""
        choices = self.choices.get(name, [])
        if name not in self.alone or all(
            choice.is_float32 for choice in decided.values()
        ):
            return choices
        fastest = self.alone[name][0]
        return [choice for choice in choices if rank(choice) >= rank(fastest)]

    def tried(
        self, name: str, choice: Choice, decided: Mapping[str, Choice]
    ) -> float | None:
        """Return the error of the pipeline with one more model converted; None if no more runs are allowed."""
        if self._spent() >= 1:
            self.stopped = True
            return None
        done = len(self.trials)
        self.options.report(
            f"trying {name}: {choice.label}", done, max(self.asked.runs, done + 1)
        )
        found = self.runs.measure({**decided, name: choice})
        trial = Trial(
            model=name,
            choice=choice.label,
            others=tuple(
                other for other, one in decided.items() if not one.is_float32
            ),
            error=found.error,
            held=found.error <= self.asked.tolerance,
            time=choice.time,
            failure=found.failure,
        )
        self.trials.append(trial)
        return found.error

    def _refined(
        self,
        name: str,
        decided: Mapping[str, Choice],
        missed: Sequence[tuple[Choice, float]],
        held: tuple[Choice, float] | None,
    ) -> tuple[Choice, float] | None:
        """Return the better of the choice that passed and one of level auto between it and the one that missed."""
        nearest, error = min(missed, key=lambda pair: pair[1])
        own: float | None = inf
        last = inf
        if isfinite(error):
            own = self.runs.own_error(name, nearest)
        for _ in range(_REFINEMENTS):
            scaled = _FIRST
            if own is not None and isfinite(own) and isfinite(error):
                scaled = own * _AIM * self.asked.tolerance / error
            last = min(scaled, _STEP * last)
            choice = self.refine(name, nearest, last) if last > 0 else None
            if choice is None:
                return held
            is_refused = is_slower(choice, self.float32[name])
            if is_refused and not self.asked.allow_slower:
                return held
            if held is not None and rank(choice) >= rank(held[0]):
                return held
            found = self.tried(name, choice, decided)
            if found is None:
                return held
            if found <= self.asked.tolerance:
                self.choices[name] = sorted([*self.choices[name], choice], key=rank)
                return choice, found
            own = choice.own_error
            error = found
        return held

    def refine(self, name: str, like: Choice, tolerance: float) -> Choice | None:
        """Return the choice of level auto for a model, with the type and exponents of ``like``, at a tolerance for its
        own outputs, stored or new; None if it lowers nothing.
        """
        member = self.runs.pipeline[name]
        options = like.plan.options
        exponents = {"rescale": True, "rescaling": options.rescaling}
        more = exponents if options.rescale else {}
        asked = member.asked(Level.AUTO, options.dtype, **more)
        self.options.report(
            f"tuning {name} at {tolerance:.2g}",
            len(self.trials),
            self.asked.runs,
        )

        def find() -> tuple[Plan, float]:
            search = Search(
                tolerance=tolerance,
                device=self.asked.device,
                allow_slower=self.asked.allow_slower,
            )
            run = Run(
                inputs=self.runs.samples(name),
                provider=self.options.provider,
                budget=self.options.budget,
            )
            tuned = tune(member.model, asked, search, run)
            return tuned.plan, tuned.error

        words = f"{name} {tolerance!r} {written(asked)} {self.asked.device} {self.asked.allow_slower}"
        plan, error = self.runs.state.plan(words, find)
        _, analysis = analyse_safely(member.model, plan.options, plan)
        choice = self.clocks[name].choice(
            analysis, tolerance=tolerance, error=error, plan=plan
        )
        return choice if choice.nodes else None

    def _spent(self) -> float:
        """Return the share of time or runs that is used up."""
        limit = self.asked.seconds
        runs = len(self.trials) / self.asked.runs
        return max((monotonic() - self.started) / limit if limit else inf, runs)
