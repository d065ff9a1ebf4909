"""Conversions are validated before they are put in their place.

A result is written to a temporary name, loaded, built if the target has a builder, and compared with the original.
:mod:`onnxamp._job.healing` repairs what fails.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import TYPE_CHECKING, Any, Final

from onnxamp._base.errors import ArgumentError, OnnxAmpError, RuntimeFailure
from onnxamp._base.records import record
from onnxamp._base.state import Part
from onnxamp._base.threads import beside
from onnxamp._convert.float16_only import as_float16
from onnxamp._convert.raising import reference_of
from onnxamp._facts.providers import computes_low
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import older_installed, target_of, version_meant
from onnxamp._job import Job, Request, Validation
from onnxamp._job.refusals import NotWorthError, RefusedError
from onnxamp._job.writing import Conversion, Sink, staged_conversion
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.differences.metrics import TOLERANCES, from_decibels
from onnxamp._numerics.limits import Limits, make_limits
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._numerics.results import DiffReport
from onnxamp._numerics.unseen.stress import Stress
from onnxamp._options.options import Options
from onnxamp._options.values import TOLERANCE, Level
from onnxamp._runtime.building import build_engine, can_build
from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.loading import OPENED, Loaded, load_file, the_loader
from onnxamp._runtime.piecewise.memory import LOADING, free_bytes
from onnxamp._runtime.requested import requested_samples
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.session import Provider, make_session, run
from onnxamp._runtime.sessions.values import check_inputs, shapes_of

if TYPE_CHECKING:
    from onnxamp._tuning.metric import MetricLike

_MARGIN: Final = 0.2
"""Share of the default limits that is reserved for unseen inputs, if errors are random."""


def limits_of(
    validation: Validation, dtype: str, *, tuned_by: "MetricLike | None" = None
) -> Limits:
    """Return the limits that a validation sets for results in a low-precision type.

    Args:
        validation: how results are validated.
        dtype: the low-precision type.
        tuned_by: the metric of the tolerance to which the model was tuned; the default limit is accepted as well then.
            None if it was not.

    Raises:
        ArgumentError: no result can meet the tolerance.
    """
    tolerance = validation.tolerance
    accept = validation.accept
    if tuned_by is not None:
        tuned_to = _relative_error(tuned_by, tolerance)
        largest = max(tuned_to, TOLERANCES[dtype])
        return Limits(tolerance=largest, accept=accept)
    if tolerance is None:
        return Limits(margin=_MARGIN, accept=accept, otherwise=validation.limits)
    checked = make_limits({"rel_l2": tolerance})
    if accept:
        return replace(checked, accept=accept)
    return Limits(tolerance=tolerance, asked=True)


def _relative_error(metric: "MetricLike", tolerance: float | None) -> float:
    """Return the relative L2 error that belongs to the tolerance of a metric of level auto.

    For metrics that have nothing to do with it, that is the tolerance itself.
    """
    if metric == "snr":
        return TOLERANCE if tolerance is None else from_decibels(tolerance)
    largest = TOLERANCE if tolerance is None else tolerance
    # The cosine of a vector and one that is off by a small share e, at a right angle, is about 1 - e² / 2.
    return min(sqrt(2 * largest), _WORST) if metric == "cosine" else largest


_WORST: Final = 0.5
"""The largest relative error for which the cosine stands: beyond that, it is no small share any more."""


def stress_of(validation: Validation, options: Options) -> Stress | None:
    """Return how results are stressed; None if the range of their low-precision type is that of float32."""
    if not options.low.is_narrow:
        return None
    return Stress(options.low, validation.stress, options.input_ranges, options.target)


def comparison_for(request: Request, validation: Validation, run: Run) -> Comparison:
    """Return the comparison of results with the original, on the samples of a request.

    Args:
        request: the conversion.
        validation: how results are validated.
        run: where models run.

    Raises:
        ArgumentError: no result can meet the tolerance, or the samples do not fit the model.
    """
    # Another process imports ONNX Runtime meanwhile. It loads the result, and may crash.
    the_loader().start()
    options = request.options

    def draw(reference: Session) -> Samples:
        ranges = dict(options.input_ranges)
        return requested_samples(
            request.run, request.model, options.target, reference, ranges
        )

    return Comparison.of(
        reference_of(request.model, options),
        run,
        limits_of(validation, options.dtype, tuned_by=request.tuned_by),
        metric=validation.metric,
        target=options.target,
        draw=draw,
        beyond="compared",
        stress=stress_of(validation, options),
    )


def _casts(model: Model) -> int:
    return sum(node.op_type == "Cast" for node in all_nodes(model.proto.graph.node))


@record
class Validator:
    """Converts a model, and puts the result in its place if it passes.

    Attributes:
        comparison: compares results with the original.
        sink: where the result goes.
        proof: judges upgrades to a newer opset.
        kept: the work of an interrupted run of the same conversion.
    """

    comparison: Comparison
    sink: Sink
    proof: UpgradeProof
    kept: Part | None = None

    def convert(
        self, job: Job, layers: bool | None, *, must_pay: bool = False
    ) -> Conversion:
        """Convert, and write the result if it passes or cannot be compared; its validation comes with it.

        Args:
            job: the conversion.
            layers: compare all values; None to do so only if outputs miss their limits.
            must_pay: write nothing that is larger than the original and no faster, nor, at level auto, anything slower.

        Raises:
            RefusedError: the result fails. NotWorthError: it is not worth it.
        """
        samples = self.comparison.run.samples
        shapes = shapes_of(samples[0]) if samples.has(0) else None
        with (
            staged_conversion(
                job, self.sink, kept=self.kept, proof=self.proof
            ) as staged,
            staged.saved.stage.shown() as written,
        ):
            result = Model.read(written)
            report = self._judge(job, result, layers)
            worth = staged.worth(result, shapes)
            is_slow = job.tuned is not None and worth.is_slower
            if must_pay and (worth.is_pointless or is_slow):
                raise NotWorthError(worth.sentence())
        return replace(staged.judged(worth, shapes), validation=report)

    def _judge(self, job: Job, result: Model, layers: bool | None) -> DiffReport:
        """Compare a result under a temporary name.

        Raises:
            RefusedError: it fails.
        """
        loads = partial(load_result, result, job.model, self._place(job))
        compares = partial(self._compare, job.options, result, layers)
        if self._is_apart(result):
            opened = beside(loads)
            try:
                report = compares()
            except OnnxAmpError:
                self._load(job, result, opened())  # a failure to load says more
                raise
            loaded, ran_in = self._load(job, result, opened())
        else:
            loaded, ran_in = self._load(job, result, loads())
            report = compares()
        report = replace(
            report,
            result=str(self.sink.target),
            loaded=ran_in,
            unopened=unopened(loaded),
            types_only=loaded.limit,
            disabled=loaded.disabled,
        )
        if report.passed or report.skipped:
            return report
        if job.options.level != Level.O0 or self.comparison.engine.is_reference:
            raise RefusedError(report, _casts(result))
        why = report.failure or next(iter(report.warnings), "")
        return replace(
            report,
            failure=None,
            skipped=f"The float32 model is wrong there as well: {why}",
        )

    def _compare(
        self, options: Options, result: Model, layers: bool | None
    ) -> DiffReport:
        """Compare a result with the original."""
        # Such a device ignores types, so it computes the float32 nodes of the result in float16 as well.
        everywhere = computes_low(options.target)
        compared = as_float16(result) if everywhere else result
        report = self.comparison.compare(
            compared, layers=layers, activity="validating"
        )
        if everywhere:
            report = replace(report, ran_on=f"{report.ran_on} everywhere")
        return report

    def _place(self, job: Job) -> Provider | None:
        """Return the provider that results run on, if they are meant for it."""
        provider = self.comparison.reference.engine.provider
        return provider if provider == device_of(job.options.target) else None

    def _is_apart(self, result: Model) -> bool:
        """Return whether a result is compared without a session of it in this process, which may end the process, and
        there is memory enough to load it in another one meanwhile.
        """
        fits = LOADING * result.stock.size <= free_bytes() // 2
        return fits and self.comparison.engine.emulates

    def _load(self, job: Job, result: Model, opened: Loaded) -> tuple[Loaded, str]:
        """Build a result if the target has a builder, and run it if nothing else shows whether it runs.

        Args:
            job: the conversion.
            result: the result.
            opened: the outcome of loading it.

        Returns:
            The outcome of the last of these steps, and the names of the software that loaded or built it.

        Raises:
            RefusedError: it fails, and the original does not.
        """
        target = job.options.target
        reference = self.comparison.reference
        samples = self.comparison.run.samples
        place = self._place(job)
        loaded = opened
        ran_in = "" if loaded.original else loaded.where(place)
        # A fault that the original has as well does not end the steps.
        is_fine = not loaded.fault or bool(loaded.original)
        if is_fine and target_of(target).builds and can_build():
            loaded = build_result(result, job.model, samples[0])
            ran_in = " and ".join(filter(None, (ran_in, loaded.by)))
            if loaded.by and opened.limit:  # the builder did more than check types
                opened = opened._replace(limit="")
                ran_in = loaded.by
            is_fine = not loaded.fault
        # On the CPU, a comparison emulates low precision, and does not run the kernels of the result itself.
        fits = result.stock.size <= reference.budget
        if is_fine and fits and place == "cpu" and samples.has(0):
            loaded = run_result(result, job.model, samples[0])
        if loaded.fault and not loaded.original:
            raise RefusedError(
                self._unloadable(job.options, loaded), _casts(result), loaded.fault
            )
        if not loaded.fault:
            loaded = opened
        return loaded, ran_in

    def _unloadable(self, options: Options, loaded: Loaded) -> DiffReport:
        samples = self.comparison.run.samples
        failure = f"{loaded.by} does not {loaded.does} the result: {loaded.fault.removesuffix('.')}."
        here = older_installed(options.target)
        if here:
            failure += f" It was converted for ONNX Runtime {version_meant(options.target)} (--target {here} is this one)."
        return DiffReport(
            reference=self.comparison.reference.model.label,
            result=str(self.sink.target),
            ran_on=loaded.by,
            inputs=samples.description,
            samples=len(samples),
            lowest=options.dtype,
            failure=failure,
            disabled=loaded.disabled,
        )


def load_result(result: Model, original: Model, place: Provider | None) -> Loaded:
    """Load the file of a result as a session with default options does.

    A fault that the original has as well does not come from the conversion: it is in :attr:`Loaded.original`.

    Args:
        result: the result, read from its file.
        original: the model that it was converted from, also read from a file.
        place: the provider, if the result is meant for it; kernels that another one lacks are no fault.
    """
    loaded = load_file(result, place, whole=result.stock.size <= OPENED)
    if loaded.fault and original.path is not None:
        before = load_file(
            original,
            place,
            in_text=original.in_text,
            whole=original.stock.size <= OPENED,
        )
        if before.limit:  # the provider cannot judge either model
            return Loaded(loaded.by, limit=before.limit)
        return loaded._replace(original=before.fault)
    return loaded


def unopened(loaded: Loaded) -> str:
    """Return a sentence if neither a result nor its original loads, or else ""."""
    if not loaded.original:
        return ""
    alone = loaded.original == loaded.fault
    more = "" if alone else f" And the result: {loaded.fault}."
    return f"Neither the original nor the result loads in {loaded.by}: {loaded.original}.{more}"


def run_result(result: Model, original: Model, feeds: Mapping[str, Any]) -> Loaded:
    """Run a result on ONNX Runtime's CPU provider, whose kernels may fail although the session loads.

    A failure counts only if the original runs.
    """
    fault = _failure_of(result, feeds)
    if fault and _failure_of(original, feeds):
        return Loaded()
    return Loaded("ONNX Runtime", fault, "run")


def _failure_of(model: Model, feeds: Mapping[str, Any]) -> str:
    """Return why ONNX Runtime's CPU provider does not run a model, as a clause; "" if it does."""
    try:
        run(
            make_session(model.path or model.embedded(), lean=True),
            check_inputs(model.proto, feeds),
        )
    except (ArgumentError, RuntimeFailure) as error:
        return str(error).removesuffix(".")
    return ""


def build_result(result: Model, original: Model, feeds: Mapping[str, Any]) -> Loaded:
    """Build an engine of a result. Refusals count only if the original can be built."""
    built = build_engine(result, feeds)
    if built.refusals and build_engine(original, feeds).refusals:
        return Loaded()
    texts = []
    for refusal in built.refusals:
        where = f" ({refusal.node})" if refusal.node else ""
        texts.append(f"{refusal.text}{where}")
    return Loaded(built.by, "; ".join(texts), "build")
