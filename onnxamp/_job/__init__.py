"""Jobs that do all of it for one model: measure, convert, write, validate, heal. Here: what a user requests of one."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from onnxamp._base.errors import warn
from onnxamp._base.records import record
from onnxamp._convert.plan import Plan
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._options.values import DiffMetric, Level
from onnxamp._runtime import CURE_SECONDS, STRESS
from onnxamp._runtime.run import Run, RunOptions
from onnxamp._tuning.results import Search

if TYPE_CHECKING:
    from onnxamp._numerics.user_functions import Accept
    from onnxamp._tuning.metric import MetricLike
    from onnxamp._tuning.results import Tuned
    from onnxamp._tuning.rounding import WeightRounder


TUNING_SAMPLES: Final = 4
"""The number of random samples that level auto uses by default, as the command line does."""


def samples_of_level(options: Options) -> int:
    """Return how many random samples measurements use."""
    return TUNING_SAMPLES if options.level == Level.AUTO else 1


def failed_name(target: Path) -> Path:
    """Return the path for a result that fails its validation."""
    return target.with_name(f"{target.stem}.failed{target.suffix}")


@record(kw_only=True)
class Validation:
    """The validation of a result before it is written, and the reaction to a failure.

    Attributes:
        tolerance: the largest relative L2 error; None for the default of the low-precision type.
        limits: limits of single outputs by metric: an output that misses the default tolerance passes if it meets its
            own.
        accept: judges outputs in place of the default limits.
        metric: how outputs are compared.
        layers: compare all values; None to do so only if outputs miss their limits.
        no_cure: if the result fails, do not search for a conversion that passes.
        cure_time: approximate limit of that search, in seconds.
        stress: steps toward inputs that are hard for the result; 0 to compare it only on the samples, and beyond them.
        failed: the path for a result that fails and is not healed; None for NAME.failed.onnx beside the target.
        sampling: command-line options with which another command runs on the same inputs.
    """

    tolerance: float | None = None
    limits: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    accept: "Accept | None" = None
    metric: DiffMetric = "auto"
    layers: bool | None = None
    no_cure: bool = False
    cure_time: float = CURE_SECONDS
    stress: int = STRESS
    failed: Path | None = None
    sampling: tuple[str, ...] = ()


def search_of(
    tolerance: float | None, metric: "MetricLike", accept: "Accept | None" = None
) -> Search:
    """Return the search of level auto for the tolerance and the metric of a request, which its validation shares."""
    return Search(
        tolerance=tolerance,
        metric="rel-l2" if metric == "elements" else metric,
        accept=accept,
    )


def validation_metric(metric: "MetricLike") -> DiffMetric:
    """Return how the validation compares outputs for the metric of a request, which may also be one of level auto."""
    if metric == "rel-l2":
        return "elements"
    return next((name for name in get_args(DiffMetric) if name == metric), "auto")


def say_nothing(warnings: Iterable[str]) -> None:
    """Ignore warnings that the user reads elsewhere, such as in a report."""
    del warnings


@record(kw_only=True)
class Request:
    """A conversion as a user asks for it.

    Attributes:
        model: the model to convert; it is not changed.
        asked: the options of the conversion.
        plan: decisions to repeat; its options replace those.
        run: samples, engine and workers, if models have to run.
        search: how level auto searches: at that level, and if nothing else passes the validation. None for the defaults
            at level auto, and to leave it out of a validation.
        validation: how the result is validated; None to leave that out.
        expects: whether plans contain the expected error.
        explains: find out what keeps nodes in float32, and which options would save Casts.
        compares: compare a result of level auto that is not validated with the original, with all values or without;
            None to leave that out.
        warn: receives warnings: early ones before anything runs, the others at the end.
    """

    model: Model
    asked: Options = field(default_factory=Options)
    plan: Plan | None = None
    run: RunOptions = field(default_factory=RunOptions)
    search: Search | None = None
    validation: Validation | None = None
    expects: bool = False
    explains: bool = True
    compares: bool | None = None
    warn: Callable[[Iterable[str]], None] = warn

    @property
    def options(self) -> Options:
        """The options that hold."""
        return self.asked if self.plan is None else self.plan.options

    @property
    def is_tuned(self) -> bool:
        """Whether measurements decide."""
        return self.options.level == Level.AUTO and self.plan is None

    @property
    def tuned_by(self) -> "MetricLike | None":
        """The metric of the measurements that decide; None if none do."""
        if not self.is_tuned:
            return None
        return "auto" if self.search is None else self.search.metric

    @property
    def is_rounded(self) -> bool:
        """Whether weights may be rounded on samples. A plan may have been made for other than random samples."""
        return self.options.may_compensate and (
            self.plan is None or self.run.samples is not None
        )

    @property
    def needs_measurements(self) -> bool:
        """Whether the options ask for measurements on samples."""
        if self.plan is None:
            return self.options.measures
        return self.options.compensates and self.is_rounded


@record(kw_only=True)
class Job:
    """A model, and everything that determines its conversion.

    Attributes:
        model: the model to convert.
        options: the options, with exponents and names of nodes in place of the requested ranges.
        plan: decisions to repeat; None to decide.
        run: samples, engine and workers.
        rounder: rounds weights with compensation if the options ask for it.
        tuned: the outcome of level auto, if that was the level.
        search: how level auto searches if nothing else passes the validation.
        explains: as :attr:`Request.explains`.
    """

    model: Model
    options: Options
    plan: Plan | None = None
    run: Run = field(default_factory=Run)
    rounder: "WeightRounder | None" = None
    tuned: "Tuned | None" = None
    search: Search | None = None
    explains: bool = True
