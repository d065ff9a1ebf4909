"""A reference and samples with which any number of results are compared: outputs and, if asked, all shared values."""

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from math import inf
from secrets import token_hex
from time import monotonic
from typing import Final, Literal, TypeAlias, get_args

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.executor import Memory
from onnxamp._base.state import Facts, Part
from onnxamp._facts.providers import emulated_arithmetic, sums_low
from onnxamp._facts.targets import check_target
from onnxamp._graph.quantized import without_grids
from onnxamp._model.model import Model
from onnxamp._numerics.beyond_samples import BeyondSamples, Passed
from onnxamp._numerics.differences.detections import listed_outputs
from onnxamp._numerics.judging import (
    closeness,
    limits_beyond,
    missed,
    misses_parts,
)
from onnxamp._numerics.limits import Limits
from onnxamp._numerics.results import DOES_NOT_RUN, Cost, DiffReport
from onnxamp._numerics.sample_diff import (
    REFERENCE,
    RESULT,
    DiffProbe,
    SampleDiff,
    reference_on,
    result_on,
)
from onnxamp._numerics.tally import Tally, finished
from onnxamp._numerics.unseen.excursions import Excursion
from onnxamp._numerics.unseen.stress import Stress
from onnxamp._options.values import DiffMetric
from onnxamp._runtime.engines import Engine, Session, choose_engine, progress_of_part
from onnxamp._runtime.fingerprints import SentModel, print_facts
from onnxamp._runtime.inputs.samples import Samples, further
from onnxamp._runtime.loop import (
    Kept,
    KeptSamples,
    input_failure,
    observe,
)
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.starting import active_libraries
from onnxamp._runtime.sessions.values import check_inputs

Extent: TypeAlias = Literal["compared", "named", "ignored"]
"""What happens to branches that no sample takes, and to sizes beyond those of the samples."""

_LOG: Final = logging.getLogger("onnxamp")


@dataclass(slots=True)
class Comparison:
    """A reference and samples with which any number of results can be compared.

    The reference is prepared once for all of them, and its outputs are reused as far as they fit in memory.

    Attributes:
        run: the samples, and how models run on them.
        engine: where results run.
        whole: whether each model runs in one session.
        selected: outputs that may list detections.
        beyond: what results that pass are compared on beyond the samples; None for nothing.
        is_hard: whether the samples were made to be hard.
    """

    run: Run
    reference: Session
    engine: Engine
    whole: bool
    limits: Limits
    selected: frozenset[str]
    beyond: BeyondSamples | None = None
    is_hard: bool = False
    _key: str = field(default_factory=token_hex)
    """The key under which processes remember the reference."""
    _result: Session | None = None
    """The result that is compared, if it ran on other inputs."""

    @classmethod
    def of(
        cls,
        reference: Model,
        run: Run,
        limits: Limits | None = None,
        *,
        whole: bool | None = None,
        metric: DiffMetric = "auto",
        target: str = "cuda",
        draw: Callable[[Session], Samples] | None = None,
        beyond: Extent = "ignored",
        stress: Stress | None = None,
    ) -> "Comparison":
        """Prepare a comparison; arguments and errors as :func:`diff_models`.

        Args:
            draw: gives the samples of a run that has none, which may depend on the reference as it is run.
            beyond: what happens to branches that no sample takes, and to other sizes.
            stress: how inputs are made that are hard for a result, on which it is compared as well; None to leave them
                out.
        """
        engine = choose_engine(run.provider)
        limits = limits or Limits()
        limits.check(entry.name for entry in reference.proto.graph.output)
        if engine.emulates:
            engine = replace(
                engine, arithmetic=emulated_arithmetic(check_target(target))
            )
        whole = not engine.emulates if whole is None else whole
        session = reference_on(engine, reference, run.budget, whole=whole)
        if metric not in get_args(DiffMetric):
            raise ArgumentError(
                f"Unknown metric {metric!r}: choose one of {', '.join(get_args(DiffMetric))}."
            )
        selected = listed_outputs(reference, metric)
        if draw is not None:
            run = replace(run, inputs=draw(session))
        # A function of the user may be meant for the samples only.
        runs = beyond == "compared" and limits.accept is None
        is_more = beyond != "ignored"
        return cls(
            run=replace(run, provider=engine.provider),
            reference=session,
            engine=engine,
            whole=whole,
            limits=limits,
            selected=selected,
            beyond=BeyondSamples(session, runs, stress) if is_more else None,
        )

    def try_reference(self) -> None:
        """Run the reference on given inputs, to learn whether they fit before anything else runs; :meth:`compare`
        reuses the results, as far as they fit in memory. Random inputs are skipped, and so are all but the first of
        those that workers will compare.

        Raises:
            ArgumentError: the reference does not run on them.
        """
        samples = self.run.samples
        model = self.reference.model
        if samples.made_up:
            return
        progress = self.run.progress("running the original")
        for number in range(len(samples) if self.run.sample_workers is None else 1):
            feeds = check_inputs(model.proto, samples[number])
            try:
                self.reference.run_sample(
                    number, feeds, progress_of_part(progress, number, len(samples))
                )
            except RuntimeFailure as error:
                input_failure("The model does not run", error, samples, number, model)

    def compare(
        self,
        result: Model,
        *,
        layers: bool | None,
        activity: str = "comparing",
        seconds: float = inf,
    ) -> DiffReport:
        """Compare a result with the reference; see :func:`diff_models`.

        Args:
            layers: compare layers; None to do so only if outputs miss their limits. Of several random samples, the
                worst one then has to do.
            activity: a description for progress reports.
            seconds: the time for layers in that case; as many samples as fit are compared, and at least one.
        """
        other = self._opened(result)
        probe = self._probe(result, layers=bool(layers))
        memory = {
            REFERENCE: (probe.key, self.reference),
            RESULT: (probe.result_key, other),
        }
        part, report, tally = self._measured(probe, other, activity, memory)
        if tally is not None and report.outputs and not report.passed:
            worst = tally.worst_sample(missed(report))
            report = replace(report, worst_sample=worst)
            groups = misses_parts(report)
            if layers is None or (layers and groups):
                thorough = replace(
                    probe, layers=True, groups=groups, generates=0, choices=False
                )
                compared = partial(self._compared, thorough, activity, part, memory)
                samples = self.run.samples
                is_enough = layers is None and samples.made_up and len(samples) > 1
                only = worst if is_enough else None
                deep = self._judged(*compared(only=only, until=monotonic() + seconds))
                report = _with_layers(report, deep, seconds, only)
        report = replace(
            report, inputs=self.run.samples.summary, samples=self.run.samples.taken
        )
        if self.beyond is None or not report.passed or tally is None:
            return report
        there = replace(self, _result=other)
        at = partial(there._compared_at, result, activity=activity, seconds=seconds)
        shallow = partial(at, layers=False)
        deeper = shallow if layers is False else partial(at, layers=None)
        passed = Passed(
            session=other,
            samples=self.run.samples,
            limits=self.limits,
            taken=tally.taken,
        )
        return self.beyond.extended(report, passed, deeper, shallow)

    def _measured(
        self, probe: DiffProbe, other: Session, activity: str, memory: Memory
    ) -> tuple[Part | None, DiffReport, Tally | None]:
        """Measure a result on the samples, and on further random ones where the verdict is close.

        Args:
            probe: the measurement.
            other: the result.
            activity: a description for progress reports.
            memory: both models.

        Returns:
            Where measurements are stored, the report, and the measurements; None if nothing was compared.
        """
        known = dict[int, SampleDiff]()
        while True:
            part = self._part(other)
            measured = self._compared(probe, activity, part, memory, known=known)
            report = self._judged(*measured)
            if self._allow_for_integers(report):
                report = self._judged(*measured)
            more = further(self.run.samples, closeness(report, self.limits))
            if more is None:
                return part, report, measured[1]
            self.run = replace(self.run, inputs=more)

    def _probe(self, result: Model, *, layers: bool) -> DiffProbe:
        """Return what measures a result on a sample."""
        samples = self.run.samples
        return DiffProbe(
            key=self._key,
            reference=SentModel.of(self.reference.model),
            result=SentModel.of(result),
            engine=self.engine,
            whole=self.whole,
            budget=self.reference.budget,
            selected=self.selected,
            accept=self.limits.accept,
            layers=layers,
            is_text=not samples.made_up,
            generates=samples.generates,
            choices=self.beyond is not None or self.is_hard,
        )

    def _opened(self, result: Model) -> Session:
        """Return a result on the engine. One that ran on other inputs is prepared already, if it takes any branches."""
        known = self._result
        is_bound = self.engine.arithmetic is not None  # its sums depend on sizes
        if known is not None and not is_bound and not self.reference.forced:
            session = known.alone()
            session.budget = self.reference.budget
            return session
        return result_on(self.engine, result, self.reference, whole=self.whole)

    def _compared_at(
        self,
        result: Model,
        excursion: Excursion,
        *,
        layers: bool | None,
        activity: str,
        seconds: float,
    ) -> DiffReport:
        """Compare a result with the reference beyond the samples; arguments as :meth:`compare`."""
        run = replace(self.run, inputs=excursion.samples, workers=None, state=None)
        assert self.beyond is not None
        limits = limits_beyond(self.limits, excursion, self.beyond.low)
        there = replace(
            self,
            run=run,
            reference=excursion.reference,
            limits=limits,
            beyond=None,
            is_hard=excursion.is_hard,
            _key=token_hex(),
        )
        title = f"{activity} with {excursion.what}"
        return there.compare(result, layers=layers, activity=title, seconds=seconds)

    def _allow_for_integers(self, report: DiffReport) -> bool:
        """Measure the cost of integers for the reference once, if a result misses its limits; return whether this
        loosens them.
        """
        is_asked = self.limits.tolerance is not None or self.limits.coarse is not None
        if report.passed or is_asked or report.lowest == "float32":
            return False
        # From now on it counts as measured, even if the measurement fails.
        self.limits = replace(self.limits, coarse=0.0)
        exact = without_grids(self.reference.model)
        if exact is None:
            return False
        # A result that is open from the samples is not the one that is compared here.
        run = replace(self.run, state=None)
        anew = replace(self, run=run, beyond=None, _result=None)
        integers = anew.compare(exact, layers=False, activity="measuring integers")
        self.limits = self.limits.allowing(integers.outputs)
        return bool(self.limits.coarse)

    def with_original(
        self, report: DiffReport, original: Model, result: Model
    ) -> DiffReport:
        """Add the errors of the quantized reference and of the result against the original to a comparison.

        Raises:
            ArgumentError: the original has other inputs, or lacks an output.
        """
        if not report.was_compared:
            return report
        budget = self.reference.budget
        anew = replace(
            self,
            reference=reference_on(self.engine, original, budget, whole=self.whole),
            run=replace(self.run, state=None),
            limits=Limits(tolerance=1.0),
            beyond=None,
            _key=token_hex(),
        )
        activity = "comparing with the original"
        quantized = anew.compare(self.reference.model, layers=False, activity=activity)
        low = anew.compare(result, layers=False, activity=activity)
        for comparison in (quantized, low):
            if not comparison.was_compared:
                why = comparison.skipped or comparison.failure
                text = f"The comparison with the original failed: {why}"
                return replace(report, original=original.label, skipped=text)
        errors = {diff.name: diff.rel_l2 for diff in low.outputs if diff.is_float}
        costs = (
            Cost(diff.name, diff.rel_l2, errors[diff.name])
            for diff in quantized.outputs
            if diff.name in errors
        )
        return replace(report, original=original.label, costs=tuple(costs))

    def _part(self, other: Session) -> Part | None:
        """Return the part of the state file that holds the measurements of a result; None if no file is kept."""
        state = self.run.state
        if state is None:
            return None
        return state.part("comparison", self._depends_on(other))

    def _depends_on(self, other: Session) -> Facts:
        """Return the fingerprints of everything that measurements depend on."""
        one = self.reference
        accept = self.limits.accept
        arithmetic = self.engine.arithmetic
        facts = print_facts(
            {"the reference": one.model, "the result": other.model},
            self.run.samples,
            self.engine.name(),
            self.whole,
            one.budget,
            sorted(self.selected),
            "" if arithmetic is None else arithmetic.name,
            active_libraries(),
            self.run.samples.generates,
        )
        return facts | {
            "the function that accepts": accept.print if accept is not None else ""
        }

    def _begun(self, result: Model) -> DiffReport:
        """Return a report on what is known before anything runs."""
        samples = self.run.samples
        engine = self.engine
        adds_low = engine.arithmetic is not None or sums_low(engine.provider)
        return DiffReport(
            reference=self.reference.model.label,
            result=result.label,
            ran_on=engine.name(),
            inputs=samples.description,
            samples=samples.taken,
            lowest="float32",
            drawn=samples.made_up and adds_low,
            redrawn=bool(samples.first),
        )

    def _compared(
        self,
        probe: DiffProbe,
        activity: str,
        part: Part | None,
        memory: Memory,
        *,
        known: dict[int, SampleDiff] | None = None,
        only: int | None = None,
        until: float = inf,
    ) -> tuple[DiffReport, Tally | None]:
        """Compare as many samples as fit before a time, and at least one.

        Args:
            probe: the measurement.
            activity: a description for progress reports.
            part: where measurements are stored.
            memory: both models.
            known: measurements that were made before, if they are not stored.
            only: the number of the one sample to compare; None for all.
            until: the time.

        Returns:
            The report, not yet judged, and the measurements of the samples; None if nothing was compared.
        """
        model = self.reference.model
        samples = self.run.samples
        report = self._begun(probe.result.opened())
        tally = Tally(self.limits.accept, samples.first)
        what = "layers of sample" if probe.layers else "sample"
        what = f"groups and {what}" if probe.groups else what
        kept: Kept[SampleDiff] | None = known
        if part is not None:
            kept = KeptSamples(
                part, samples, SampleDiff, what, lambda diff: diff.was_compared
            )
        with closing(
            observe(self.run, probe, activity, kept=kept, memory=memory, only=only)
        ) as results:
            for number, diff, trouble in results:
                if diff is None:
                    tally.alarms.append(
                        f"Sample {number} could not be compared. {trouble}"
                    )
                    continue
                if diff.facts is not None:
                    report = replace(report, **asdict(diff.facts))
                if diff.error is not None:
                    text = input_failure(
                        "The reference does not run",
                        diff.error,
                        samples,
                        number,
                        model,
                    )
                    return replace(report, skipped=text), None
                if diff.failure is not None:
                    failure = f"{DOES_NOT_RUN}{diff.failure}"
                    return replace(report, failure=failure), None
                if diff.noise is not None:
                    report = replace(
                        report, noise=max(diff.noise, report.noise or 0.0)
                    )
                tally.add(number, diff)
                _LOG.debug("compared sample %d of %d", number + 1, samples.taken)
                if monotonic() > until:
                    report = replace(report, samples=number + 1)
                    break
        return report, tally

    def _judged(self, report: DiffReport, tally: Tally | None) -> DiffReport:
        """Judge the measurements by the limits."""
        if tally is None:
            return report
        report = finished(report, tally, self.limits)
        _LOG.info(
            "compared %s with %s on %s: %s",
            report.result,
            report.reference,
            report.ran_on,
            "passed" if report.passed else report.failure or "outside the limits",
        )
        return report


def _with_layers(
    report: DiffReport, deep: DiffReport, seconds: float, only: int | None
) -> DiffReport:
    """Return a report with the layers of another one.

    Args:
        report: the report on the outputs.
        deep: that on the layers.
        seconds: the time that there was for it.
        only: the number of the one sample that it is about; None for all that there was time for.
    """
    report = replace(report, first_bad=deep.first_bad, layers=deep.layers)
    if only is not None:
        text = f"Layers were compared on sample {only}, the worst of {report.samples}."
        return replace(report, notes=(*report.notes, text))
    if deep.samples >= report.samples:
        return report
    text = f"Layers were compared on {deep.samples} of {report.samples} samples, in {seconds:.0f} s."
    return replace(report, notes=(*report.notes, text))
