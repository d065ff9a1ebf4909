"""What workers do for a tuning: measure ops on a sample, and judge a converted model on it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from secrets import token_hex
from typing import Any, Final

from onnxamp._errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._numerics.accept import Accept
from onnxamp._numerics.rounding import WeightRounder
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.advice import input_failure
from onnxamp._runtime.engines import Executable, OutputCache
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.kept import KeptSamples
from onnxamp._runtime.samples import Sample, Samples
from onnxamp._runtime.sent import Made, SampleWork, SentModel, SentSample, run_samples, sent_samples
from onnxamp._runtime.session import Provider
from onnxamp._tuning.metric import Metric, MetricLike, accepted, make_metric
from onnxamp._tuning.runs import Backend
from onnxamp._tuning.sensitivity import LocalSample, Progress, local_sample, side_by_side
from onnxamp._workers.executor import Crash, Memory, Workers, run_in_order


@dataclass(frozen=True, slots=True)
class Judge:
    """What a metric is made from: its function need not be importable."""

    metric: MetricLike
    tolerance: float
    selected: frozenset[str]
    accept: Accept | None

    def made(self) -> Metric:
        """The metric."""
        return accepted(make_metric(self.metric, self.tolerance, self.selected), self.accept)


@dataclass(frozen=True, slots=True)
class LocalWork(SampleWork):
    """Measuring each op on one sample."""

    model: SentModel
    lowered: SentModel
    names: frozenset[str]
    judge: Judge
    budget: int
    arithmetic: Profile | None

    def made(self, _: Memory) -> Made:
        """As :meth:`SampleWork.made`."""
        model, metric = self.model.opened(), self.judge.made()
        walk = side_by_side(model, self.lowered.opened(), self.names, self.budget, self.arithmetic)

        def prepare(sample: Sample) -> None:
            walk.together(check_inputs(model.proto, sample), ())

        def measured(item: SentSample) -> LocalSample | RuntimeFailure:
            try:
                return local_sample(walk.run(check_inputs(model.proto, item.read())), metric)
            except RuntimeFailure as error:
                return error

        return prepare, measured


_REFERENCE: Final = "tuning reference"
"""Where a worker remembers the original, for the next candidate."""


@dataclass(frozen=True, slots=True)
class ErrorWork(SampleWork):
    """The error of a converted model on one sample; infinite if it does not run. The original serves all candidates."""

    key: str
    """Stands for the original and how it is run."""
    original: SentModel
    result: SentModel
    judge: Judge
    backend: Backend
    budget: int

    def made(self, memory: Memory) -> Made:
        """As :meth:`SampleWork.made`."""
        backend, metric = self.backend, self.judge.made()
        if memory.get(_REFERENCE, ("",))[0] != self.key:
            model = self.original.opened()
            made = _executable(model, backend.reference, backend, self.budget)
            memory[_REFERENCE] = self.key, made, OutputCache()
        _, before, cache = memory[_REFERENCE]
        result = self.result.opened()
        after = _executable(result, backend.provider, backend, self.budget)

        def prepare(sample: Sample) -> None:
            feeds = check_inputs(before.model.proto, sample)
            for executable in (before, after):
                if not executable.runs_whole(feeds):
                    executable.prepare(feeds)

        def error(item: SentSample) -> float:
            feeds = check_inputs(before.model.proto, item.read())
            reference = cache.kept.get(item.number)
            if reference is None:
                reference = before.run(feeds)
                cache.keep(item.number, reference)
            try:
                return float(metric.error(reference, after.run(feeds)))
            except RuntimeFailure:
                return inf

        return prepare, error


def _executable(model: Model, provider: Provider, backend: Backend, budget: int) -> Executable:
    emulated = backend.emulated
    return Executable(model, provider, emulated, not emulated, budget, None, backend.arithmetic if emulated else None)


@dataclass(slots=True)
class Shared:
    """What workers do in common for a tuning. ``workers`` is None where this process does it all."""

    workers: Workers | None
    judge: Judge
    samples: Samples
    rounder: WeightRounder | None = None
    _sent: tuple[Model, str] | None = None
    """The original that workers have, and what stands for it."""

    def measure(
        self, missing: Sequence[int], model: Model, lowered: Model, names: frozenset[str], budget: int,
        arithmetic: Profile | None, progress: Progress, add: Callable[[int, LocalSample], None],
    ) -> None:  # fmt: skip
        """As :func:`onnxamp._tuning.sensitivity.measure_samples`; ``add`` is called as soon as a sample is done.

        Raises:
            RuntimeFailure: the model does not run, or a sample ends the processes that run it.
        """
        assert self.workers is not None
        samples, first = self.samples, next(sent_samples(self.samples))
        work = LocalWork(SentModel.of(model), SentModel.of(lowered), names, self.judge, budget, arithmetic, first=first)
        before = len(samples) - len(missing)

        def done(position: int, found: Any) -> None:
            if isinstance(found, LocalSample):
                add(missing[position], found)
            nonlocal before
            before += 1
            progress("measuring each op", before, len(samples))

        items = sent_samples(samples, missing, self.workers)
        for number, found in zip(missing, run_in_order(self.workers, work, items, done=done), strict=True):
            if isinstance(found, Crash):
                which = f"Sample {number + 1} of {len(samples)}"
                raise RuntimeFailure(f"{which} cannot be measured. {found} Leave it out of the inputs.")
            if isinstance(found, RuntimeFailure):
                raise RuntimeFailure(input_failure("The model does not run", found, samples, number, model)) from found

    def error(
        self, original: Model, result: Model, backend: Backend, budget: int, kept: KeptSamples[float] | None = None
    ) -> float:
        """As :func:`onnxamp._tuning.runs.converted_error`.

        Raises:
            RuntimeFailure: the original does not run, or a sample ends the processes that run it.
        """
        assert self.workers is not None
        if self._sent is None or self._sent[0] is not original:
            self._sent = original, token_hex()
        work = ErrorWork(
            self._sent[1], SentModel.of(original), SentModel.of(result), self.judge, backend, budget,
            first=next(sent_samples(self.samples)),
        )  # fmt: skip
        worst = 0.0
        for number, found in enumerate(run_samples(self.workers, work, self.samples, kept=kept)):
            if isinstance(found, Crash):
                raise RuntimeFailure(f"Sample {number + 1} cannot be run. {found} Leave it out of the inputs.")
            worst = max(worst, found)
        return worst
