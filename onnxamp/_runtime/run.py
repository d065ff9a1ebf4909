"""The setting in which a job runs models: samples, engine, workers, and listeners to its progress."""

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._base.place import Place
from onnxamp._base.records import record
from onnxamp._runtime import BUDGET

if TYPE_CHECKING:
    from onnxamp._base.executor import Workers
    from onnxamp._base.state import State, StateLike
    from onnxamp._runtime.engines import Progress
    from onnxamp._runtime.inputs.samples import Samples, SamplesLike
    from onnxamp._runtime.sessions.session import Provider


Report: TypeAlias = Callable[[str, int, int], None]
"""Receives the activity of a job, the amount done, and the total (0 if unknown)."""


def silent(activity: str, done: int, total: int) -> None:
    """Ignore the progress of a job."""
    del activity, done, total


def reported_to(progress: "Progress | None") -> Report:
    """Return a report that passes on the progress of a job with one activity."""
    if progress is None:
        return silent
    return lambda _, done, total: progress(done, total)


@record(kw_only=True)
class Run:
    """A running job. Everything that runs a model for it uses these settings.

    Attributes:
        inputs: samples of the model's inputs; None for a job that runs no model.
        provider: where results run; None for CUDA if there is a device.
        workers: the processes that share the work; None for this process alone.
        state: stores results, so that an interrupted job can resume.
        renews: start over if the state belongs to another job, instead of refusing it.
        report: the progress callback.
        budget: bytes of values and weights to hold at once.
    """

    inputs: "Samples | None" = None
    provider: "Provider | None" = None
    workers: "Workers | None" = None
    state: "State | None" = None
    renews: bool = False
    report: Report = silent
    budget: int = BUDGET

    @property
    def samples(self) -> "Samples":
        """The samples that models run on."""
        assert self.inputs is not None, "this job runs no model"
        return self.inputs

    @property
    def bare(self) -> "Run":
        """Return the same run without a state and progress, for secondary work of a job."""
        return replace(self, state=None, report=silent)

    @property
    def sample_workers(self) -> "Workers | None":
        """The processes that share samples; None where there is one sample at most."""
        return None if self.samples.counted in (0, 1) else self.workers

    def progress(self, activity: str) -> "Progress":
        """Return a callback that reports the progress of one activity."""
        return partial(self.report, activity)


@record(kw_only=True)
class RunOptions:
    """The user's wishes for a run, before the model's inputs are known.

    Attributes:
        samples: inputs of the model, in any form that public functions take; None for random ones.
        count: how many random ones; None for as many as a verdict takes.
        seed: seed of random inputs.
        dims: sizes of named dimensions of random inputs.
        provider: as for :class:`Run`, and so are ``report`` and ``budget``.
        place: the worker processes to use.
        state: the file that stores progress.
        renews: replace a state that belongs to another job.
    """

    samples: "SamplesLike | None" = None
    count: int | None = 1
    seed: int = 0
    dims: Mapping[str, int] = field(default_factory=dict)
    provider: "Provider | None" = None
    place: Place = field(default_factory=Place)
    state: "StateLike" = None
    renews: bool = False
    report: Report = silent
    budget: int = BUDGET

    def __post_init__(self) -> None:
        what = "a whole number of bytes"
        checked_number("budget", self.budget, what, lambda _: True, WHOLE)
