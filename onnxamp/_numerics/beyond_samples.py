"""Comparisons beyond the samples: on other branches and sizes, and on inputs that are made to be hard.

They follow the comparison on samples, and end with the first that fails.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from onnxamp._graph.graph import graph_of
from onnxamp._numerics.differences.detections import selected_outputs
from onnxamp._numerics.judging import with_extra
from onnxamp._numerics.limits import Limits, is_plain
from onnxamp._numerics.results import DiffReport, Extra
from onnxamp._numerics.unseen.beyond import Beyond, find_beyond
from onnxamp._numerics.unseen.errors_sought import Pair
from onnxamp._numerics.unseen.excursions import Excursion, NotRun
from onnxamp._numerics.unseen.stress import Stress
from onnxamp._numerics.unseen.stressed import ErrorSought
from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.samples import Samples, held_samples
from onnxamp._runtime.piecewise.choices import Branch

Compares: TypeAlias = Callable[[Excursion], DiffReport]
"""Compares a result on further inputs."""

_OFF: Final = "an input made to be hard for precision"
"""The name, in reports, of an input on which the result is far off."""


class Passed(NamedTuple):
    """A result that passes on samples.

    Attributes:
        session: the result, prepared for the samples.
        samples: the samples.
        limits: what it was judged by.
        taken: the branches that the reference took.
    """

    session: Session
    samples: Samples
    limits: Limits
    taken: Iterable[Branch]


@dataclass(slots=True)
class BeyondSamples:
    """What results are compared on beyond the samples.

    Attributes:
        reference: the original.
        runs: whether branches that no sample takes and larger random inputs are compared as well; if not, branches are
            only named.
        stress: how inputs are made that are hard for a result; None to leave them out.
    """

    reference: Session
    runs: bool
    stress: Stress | None = None
    _beyond: Beyond | None = None
    """Other branches and sizes, once they are known: all results are compared on the same."""
    _hard: list[Excursion] = field(default_factory=list)
    """Inputs that were made for results before: what mends one failure must hold on all of them."""

    @property
    def low(self) -> str:
        """The low-precision type for which inputs are made hard; float32 if none are."""
        return "float32" if self.stress is None else self.stress.low.name

    def extended(
        self, report: DiffReport, passed: Passed, compared: Compares, shallow: Compares
    ) -> DiffReport:
        """Return the report of a result that passes, with all further comparisons.

        Args:
            report: the report.
            passed: the result.
            compared: compares it; what fails may be blamed on layers.
            shallow: compares its outputs alone.
        """
        report = self._elsewhere(report, passed, compared)
        if report.passed and self.stress is not None:
            report = self._stressed(report, self.stress, passed, compared)
            report = self._with_large_error(report, self.stress, passed, compared)
            # Choices that differ there are no fault, so nothing is blamed for them.
            report = self._with_tie(report, self.stress, passed, shallow)
        return report

    def _elsewhere(
        self, report: DiffReport, passed: Passed, compared: Compares
    ) -> DiffReport:
        """Return a report with the comparisons on other branches and sizes."""
        if self._beyond is None:
            self._beyond = find_beyond(
                self.reference, passed.samples, passed.taken, runs=self.runs
            )
        report = replace(report, not_run=self._beyond.not_run)
        for excursion in self._beyond.excursions:
            comparison = compared(excursion)
            if comparison.passed or not excursion.alone:
                report = with_extra(report, excursion, comparison)
            else:
                report = _one_by_one(report, excursion.alone, compared)
            if not report.passed:
                break
        return report

    def _stressed(
        self,
        report: DiffReport,
        stress: Stress,
        passed: Passed,
        compared: Compares,
    ) -> DiffReport:
        """Return a report that passes with what is proven of the result, and comparisons on inputs that are hard."""
        stressed = stress.of(
            self.reference.model, passed.session.model, passed.samples
        )
        report = replace(
            report,
            proof=stressed.proof,
            headroom=stressed.headroom,
            rooms=stressed.rooms,
        )
        if stressed.why:
            left = NotRun("inputs made to overflow", stressed.why)
            report = replace(report, not_run=(*report.not_run, left.clause))
        if stressed.samples is not None:
            what = stressed.samples.description
            session = self.reference.alone()
            self._hard.append(Excursion(what, stressed.samples, session, is_hard=True))
        return _one_by_one(report, self._hard, compared)

    def _with_large_error(
        self,
        report: DiffReport,
        stress: Stress,
        passed: Passed,
        compared: Compares,
    ) -> DiffReport:
        """Return a report with the largest error that a search finds, and the comparison there if it is too large."""
        reference = self.reference.model
        enough = passed.limits.hard(stress.low.name).tolerance
        is_low = report.lowest != "float32"
        # Elsewhere, float32 may be off as well, and each session may take long to build.
        is_sought = passed.session.engine.is_reference and passed.limits.accept is None
        if not (report.passed and is_low and enough and is_sought):
            return report
        # What is selected depends on ties, which no precision gets right.
        selected = reference.ask(graph_of).ask(selected_outputs)
        plain = frozenset(diff.name for diff in report.outputs if is_plain(diff))
        one = replace(self.reference.alone(), parts=False)
        pair = Pair(one, passed.session.alone(), plain - selected)
        sought = stress.far_off(passed.samples, pair, enough)
        if sought is None:
            return report
        noted = replace(report, sought=ErrorSought(sought.error, sought.runs))
        if sought.error < enough:
            return noted
        samples = held_samples(_OFF, [sought.inputs])
        excursion = Excursion(_OFF, samples, self.reference.alone(), is_hard=True)
        comparison = compared(excursion)
        if any(calls.differ for calls in comparison.choices):
            # The error is that of a choice, so it says nothing of the result.
            return _with_choices(report, _OFF, comparison)
        self._hard.append(excursion)
        return with_extra(noted, excursion, comparison)

    def _with_tie(
        self,
        report: DiffReport,
        stress: Stress,
        passed: Passed,
        compared: Compares,
    ) -> DiffReport:
        """Return a report with the choices near a tie. They are counted, and what they do to outputs is not judged."""
        names = [calls.node for calls in report.choices]
        tie = None
        if names and report.passed:
            tie = stress.near_tie(self.reference.model, passed.samples, names)
        if tie is None:
            return report
        what = tie.description
        excursion = Excursion(what, tie, self.reference.alone(), is_hard=True)
        return _with_choices(report, what, compared(excursion))


def _one_by_one(
    report: DiffReport, excursions: Iterable[Excursion], compared: Compares
) -> DiffReport:
    """Return a report that passes with comparisons up to the first that fails."""
    for excursion in excursions:
        report = with_extra(report, excursion, compared(excursion))
        if not report.passed:
            break
    return report


def _with_choices(report: DiffReport, what: str, comparison: DiffReport) -> DiffReport:
    """Return a report with the choices on other inputs, if there are any; their outputs are not judged."""
    if not comparison.choices:
        return report
    extra = Extra(what, choices=comparison.choices)
    return replace(report, extras=(*report.extras, extra))
