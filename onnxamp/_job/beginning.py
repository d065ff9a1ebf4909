"""The beginning of every conversion: early warnings, samples, the state, and worker processes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from onnxamp._base.optional import has_runtime
from onnxamp._base.public import no_collections
from onnxamp._base.state import opened
from onnxamp._convert.misspelled import early_warnings, refuse_misspelled
from onnxamp._facts.signature import declared_ops
from onnxamp._job import Job, Request
from onnxamp._runtime.run import Run

if TYPE_CHECKING:
    from onnxamp._job.measuring import Measures


def issue_early_warnings(request: Request) -> list[str]:
    """Issue the warnings that are known before anything slow runs, and return them.

    Raises:
        ArgumentError: a name matches nothing, and the options are strict about names.
    """
    if request.plan is not None:
        # They were printed when the plan was made.
        return list(request.plan.warnings)
    with declared_ops(request.options.custom_ops):
        if not request.needs_measurements and request.validation is None:
            refuse_misspelled(request.model, request.options)
            return []
        early = early_warnings(request.model, request.options)
    request.warn(early)
    return early


class Begun(NamedTuple):
    """A conversion before any measurement, and its measurements; None if it runs no model."""

    job: Job
    measures: "Measures | None"

    def measured(self) -> Job:
        """Return the conversion with the measurements that its options ask for.

        Raises:
            As :meth:`onnxamp._job.measuring.Measures.measured`.
        """
        return self.job if self.measures is None else self.measures.measured(self.job)


@contextmanager
def begun(request: Request) -> Iterator[Begun]:
    """Draw samples, open the state, and start the worker processes that a request asks for.

    Yields:
        The conversion.
    """
    asked = request.run
    with declared_ops(request.options.custom_ops):
        run = Run(
            provider=asked.provider,
            renews=asked.renews,
            report=asked.report,
            budget=asked.budget,
        )
        measures = _measures(request, run)
        gpus = 0
        if measures is not None:
            run = measures.run
            gpus = measures.gpus
        with (
            opened(asked.state, renew=asked.renews) as state,
            asked.place.sharing(gpus=gpus) as workers,
        ):
            if measures is not None:
                measures.share(workers)
            job = Job(
                model=request.model,
                options=request.options,
                plan=request.plan,
                run=replace(run, workers=workers, state=state),
                search=request.search,
                explains=request.explains,
            )
            yield Begun(job, measures)


def _measures(request: Request, run: Run) -> "Measures | None":
    """Return the measurements of a request; None if it runs no model, or none can run here."""
    validates = request.validation is not None and has_runtime()
    expects = request.expects and has_runtime()
    if not (validates or request.needs_measurements or expects):
        return None
    # The door to all that runs models, which a conversion without measurements does not load.
    with no_collections():  # modules stay, so that there is nothing to collect
        from onnxamp._job.measuring import measures_of  # noqa: PLC0415

    return measures_of(request, run)
