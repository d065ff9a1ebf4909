"""What a conversion measures by running models: it compares results, and searches as its options ask."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from onnxamp._base.optional import has_runtime
from onnxamp._convert.raising import reference_of
from onnxamp._job import Job, Request
from onnxamp._job.refusals import RefusedError
from onnxamp._job.validation import Validator, comparison_for
from onnxamp._model.model import Model
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._numerics.results import DiffReport
from onnxamp._runtime.engines import choose_engine
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import Run

if TYPE_CHECKING:
    from onnxamp._base.executor import Workers
    from onnxamp._base.state import Part
    from onnxamp._job.writing import Conversion, Sink, StagedConversion


@dataclass(slots=True)
class Measures:
    """The measurements of a request.

    Attributes:
        request: the conversion as a user asks for it.
        run: its samples.
        comparison: compares results with the original; None if they are not validated.
    """

    request: Request
    run: Run
    comparison: Comparison | None

    @property
    def gpus(self) -> int:
        """The GPUs that each worker of a cluster needs."""
        return choose_engine(self.run.provider).reference.gpus

    def share(self, workers: "Workers | None") -> None:
        """Let workers share the comparison of samples."""
        if self.comparison is not None:
            self.comparison.run = replace(self.comparison.run, workers=workers)

    def measured(self, job: Job) -> Job:
        """Return a conversion with the measurements that its options ask for: level auto, ranges, rounded weights.

        Raises:
            ArgumentError: a sample does not fit the model. RuntimeFailure: the model does not run.
        """
        if self.request.needs_measurements or self.request.is_rounded:
            from onnxamp._job.searching import searched  # noqa: PLC0415 - few options ask for it

            return searched(job, self.request, self.comparison)
        if self.comparison is not None:
            self.comparison.try_reference()
        return job

    def validator(self, sink: "Sink", kept: "Part | None") -> Validator | None:
        """Return the validator of results that go to a sink; None if they are not validated."""
        if self.comparison is None:
            return None
        return Validator(self.comparison, sink, UpgradeProof(self.comparison), kept)

    def healed(
        self, job: Job, validator: Validator, refused: RefusedError
    ) -> "Conversion":
        """Return the result that replaces one that failed its validation."""
        from onnxamp._job.healing import healed  # noqa: PLC0415 - few results fail

        validation = self.request.validation
        assert validation is not None
        return healed(job, validator, validation, refused)

    def compared(self, job: Job, staged: "StagedConversion") -> DiffReport | None:
        """Compare a result that is not validated with the original, which it may replace; None if not asked for."""
        layers = self.request.compares
        if layers is None:
            return None
        run = replace(job.run, workers=None, state=None)
        reference = reference_of(job.model, job.options)
        comparison = Comparison.of(reference, run, target=job.options.target)
        with staged.saved.stage.shown() as written:
            result = Model.read(written)
            activity = "comparing values"
            return comparison.compare(result, layers=layers, activity=activity)


def measures_of(request: Request, run: Run) -> Measures:
    """Return the measurements of a request, with its samples drawn.

    Raises:
        ArgumentError: no result can meet the tolerance, or the samples do not fit the model.
    """
    validation = request.validation
    if validation is not None and has_runtime():
        comparison = comparison_for(request, validation, run)
        run = replace(run, inputs=comparison.run.samples)
        return Measures(request, run, comparison)
    ranges = dict(request.options.input_ranges)
    samples = requested_samples(request.run, request.model, ranges=ranges)
    return Measures(request, replace(run, inputs=samples), None)
