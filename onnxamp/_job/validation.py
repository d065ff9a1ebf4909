"""Conversions are validated before they are put in their place, and repaired if they fail.

A result is written to a temporary name, loaded, built if the target has a builder, and compared with the original. If
it fails, the search finds nodes that must stay in float32, and the conversion with these is written instead. It also
tries level O1 and level auto, and writes the float32 model as a last resort. A failing result never replaces another
file.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Final, NamedTuple

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.paths import made_folder
from onnxamp._base.state import Part
from onnxamp._convert.plan import Plan
from onnxamp._facts.providers import computes_low
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import older_installed, target_of, version_meant
from onnxamp._job import Job, Validation, failed_name
from onnxamp._job.writing import Conversion, Sink, staged_conversion, write_conversion
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes
from onnxamp._numerics.cure import (
    NO_ISLANDS,
    Recipe,
    Trial,
    as_float16,
    cure_conversion,
)
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.judging import is_broken
from onnxamp._numerics.limits import Limits, make_limits
from onnxamp._numerics.metrics import TOLERANCES
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._options.options import Options
from onnxamp._options.values import TOLERANCE, Level
from onnxamp._runtime.building import (
    OPENED,
    Loaded,
    build_engine,
    can_build,
    load_file,
)
from onnxamp._runtime.session import Provider, make_session, run
from onnxamp._runtime.values import check_inputs, shapes_of

_MARGIN: Final = 0.2
"""Share of the default limits that is reserved for unseen inputs, if errors are random."""
_LOG: Final = logging.getLogger("onnxamp")
_SEARCH: Final = 3 / 4
"""Share of the time in which nodes are looked for; the rest is for level O1."""
_MEASURING: Final = 1 / 2
"""Share of the time that level auto gets at least, even if it is over."""


class RefusedError(Exception):
    """A result that failed its validation, before it was put in its place; ``fault`` is why it does not load."""

    def __init__(self, report: DiffReport, casts: int, fault: str = "") -> None:
        super().__init__()
        self.report = report
        self.casts = casts
        self.fault = fault


class NotWorthError(Exception):
    """A result that passes, but is larger than the original and no faster; ``why`` says so in a sentence."""

    def __init__(self, why: str) -> None:
        super().__init__()
        self.why = why


def limits_of(validation: Validation, dtype: str, *, is_tuned: bool) -> Limits:
    """Return the limits that a validation sets for results in a low-precision type.

    Args:
        validation: how results are validated.
        dtype: the low-precision type.
        is_tuned: whether the model was tuned to the tolerance; the default limit is accepted as well then.

    Raises:
        ArgumentError: no result can meet the tolerance.
    """
    tolerance = validation.tolerance
    accept = validation.accept
    if is_tuned:
        tuned_to = TOLERANCE if tolerance is None else tolerance
        return Limits(tolerance=max(tuned_to, TOLERANCES[dtype]), accept=accept)
    if tolerance is None:
        return Limits(margin=_MARGIN, accept=accept, otherwise=validation.limits)
    asked = make_limits({"rel_l2": tolerance})  # checks it
    return replace(asked, accept=accept) if accept else Limits(tolerance=tolerance)


def _casts(model: Model) -> int:
    return sum(node.op_type == "Cast" for node in all_nodes(model.proto.graph.node))


@dataclass(frozen=True, slots=True)
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
    ) -> tuple[Conversion, DiffReport]:
        """Convert, and write the result if it passes or cannot be compared.

        Args:
            job: the conversion.
            layers: compare all values; None to do so only if outputs miss their limits.
            must_pay: write nothing that is larger than the original and no faster.

        Raises:
            RefusedError: the result fails. NotWorthError: it does not pay.
        """
        samples = self.comparison.run.samples
        shapes = shapes_of(samples[0]) if samples.has(0) else None
        with (
            staged_conversion(
                job, self.sink, kept=self.kept, proof=self.proof
            ) as made,
            made.saved.stage.shown() as written,
        ):
            result = Model.read(written)
            report = self._judge(job, result, layers)
            why = made.not_worth(result, shapes)
            if why and must_pay:
                raise NotWorthError(why)
        return replace(made.outcome(shapes), not_worth=why), report

    def _judge(self, job: Job, result: Model, layers: bool | None) -> DiffReport:
        """Compare a result under a temporary name.

        Raises:
            RefusedError: it fails.
        """
        loaded, ran_in = self._load(job, result)
        if loaded.fault and not loaded.original:
            raise RefusedError(
                self._unloadable(job.options, loaded), _casts(result), loaded.fault
            )
        everywhere = computes_low(job.options.target)
        report = self.comparison.compare(
            as_float16(result) if everywhere else result,
            layers=layers,
            activity="validating",
        )
        ran_on = f"{report.ran_on} everywhere" if everywhere else report.ran_on
        report = replace(
            report,
            ran_on=ran_on,
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
            report, failure=None, skipped=f"Float32 itself is wrong there: {why}"
        )

    def _load(self, job: Job, result: Model) -> tuple[Loaded, str]:
        """Load a result, build it if the target has a builder, and run it if nothing else shows whether it runs.

        Returns:
            The outcome of the last of these steps, and the names of the software that loaded or built it.
        """
        target = job.options.target
        reference = self.comparison.reference
        samples = self.comparison.run.samples
        provider = reference.engine.provider
        place = provider if provider == device_of(target) else None
        loaded = opened = load_result(result, job.model, place)
        ran_in = "" if loaded.original else loaded.where(place)
        is_fine = not loaded.fault or bool(loaded.original)
        if is_fine and target_of(target).builds and can_build():
            loaded = build_result(result, job.model, samples[0])
            ran_in = " and ".join(filter(None, (ran_in, loaded.by)))
            if loaded.by and opened.limit:  # the builder did more than check types
                opened = opened._replace(limit="")
                ran_in = loaded.by
            is_fine = not loaded.fault
        if (
            is_fine
            and place == "cpu"
            and samples.has(0)
            and result.stock.size <= reference.budget
        ):
            loaded = run_result(result, job.model, samples[0])
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
        )


def load_result(result: Model, original: Model, place: Provider | None) -> Loaded:
    """Load the file of a result as a session with default options does.

    A fault that the original has as well is none of the conversion: :attr:`Loaded.original` tells it.

    Args:
        result: the result, read from its file.
        original: the model that it was converted from, also read from a file.
        place: the provider, if the result is meant for it; kernels that another one lacks are no fault.
    """
    found = load_file(result, place, whole=result.stock.size <= OPENED)
    if found.fault and original.path is not None:
        before = load_file(
            original,
            place,
            in_text=original.in_text,
            whole=original.stock.size <= OPENED,
        )
        if before.limit:  # the provider cannot judge either
            return Loaded(found.by, limit=before.limit)
        return found._replace(original=before.fault)
    return found


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
    told = (
        f"{refusal.text} ({refusal.node})" if refusal.node else refusal.text
        for refusal in built.refusals
    )
    return Loaded(built.by, "; ".join(told), "build")


def healed(
    job: Job, validator: Validator, validation: Validation, refused: RefusedError
) -> tuple[Conversion, DiffReport]:
    """Convert a model whose result failed its validation in other ways, and write a result that passes.

    That is one with more nodes in float32, one at level O1, one at level auto, or the float32 model.

    With a plan, which must not change, if ``validation.heals`` is False, and for devices that ignore types, the failed
    conversion is written to ``validation.failed`` instead.

    Args:
        job: the conversion.
        validator: converts and judges.
        validation: what happens to a result that fails.
        refused: why the original conversion failed.

    Raises:
        As :func:`onnxamp._job.writing.write_conversion` and :meth:`Comparison.compare`.
    """
    failure = refused.report
    why = failure.failure or next(iter(failure.warnings), "")
    _LOG.info("the result failed its validation: %s", why)
    if (
        job.plan is not None
        or not validation.heals
        or computes_low(job.options.target)
    ):
        return _write_failed(job, validator, validation, failure)
    if validator.proof.has_refused:
        job = replace(job, options=replace(job.options, opset="keep"))
    not_worth = ""
    reasons = list[str]()
    for way in _ways(job, validator, validation, refused, reasons):
        is_last = way.options.level == Level.O0
        layers = False if is_last else validation.layers
        try:
            conversion, report = validator.convert(
                replace(job, options=way.options, plan=way.plan),
                layers,
                must_pay=not is_last,
            )
        except RefusedError:
            reasons.append("")
            continue
        except NotWorthError as found:
            not_worth = found.why
            reasons.append(not_worth)
            continue
        cure = replace(
            way.cure,
            applied=True,
            failure=why,
            first_bad=failure.first_bad,
            level=way.level,
            casts=(refused.casts, conversion.summary.casts_after),
        )
        if is_last and not_worth:
            conversion = replace(conversion, not_worth=not_worth, kept_original=True)
            told = f"A conversion passes, but does not pay. {not_worth}"
            cure = replace(cure, outcome=told)
        return conversion, replace(report, cure=cure)
    raise RuntimeFailure(
        "Two runs of the float32 model disagree, so no result can be validated (--no-validate skips validation)."
    )


def _write_failed(
    job: Job, validator: Validator, validation: Validation, failure: DiffReport
) -> tuple[Conversion, DiffReport]:
    """Write a result that failed under another name."""
    target = validation.failed or failed_name(validator.sink.target)
    made_folder(target.parent)
    sink = replace(validator.sink, target=target, stage=None)
    written = write_conversion(job, sink, kept=validator.kept, proof=validator.proof)
    cure = NO_ISLANDS if computes_low(job.options.target) else failure.cure
    return written.outcome(), replace(failure, result=str(target), cure=cure)


def _ways(
    job: Job,
    validator: Validator,
    validation: Validation,
    refused: RefusedError,
    reasons: Sequence[str],
) -> Iterator["_Way"]:
    """Yield the conversions to try in place of one that failed, the best first.

    If an op breaks, the op stays in float32. If ops lose precision, more of them than the first may have to stay, and
    measurements show which cause the most error.

    Args:
        reasons: receives, for each way that was tried in vain, why it does not pay; "" if it fails.
    """
    options = job.options
    recipe = Recipe(replace(options, hazards=True), validation.sampling)
    search = _Fallbacks(
        job=job,
        validator=validator,
        validation=validation,
        recipe=recipe,
        refused=refused,
        is_tried=recipe.options == options,
        reasons=reasons,
    )
    if options.level not in (Level.O2, Level.O3):
        yield from search.cured(1.0)
    elif refused.fault or is_broken(refused.report):
        yield from search.cured(_SEARCH)
        yield from search.lower()
        if not refused.fault:
            yield from search.measured()
    else:
        yield from search.measured()
        yield from search.cured(_SEARCH)
        yield from search.lower()
    last = Options(
        Level.O0,
        dtype=options.dtype,
        from_dtype=options.from_dtype,
        keep_io_types=options.keep_io_types,
        target=options.target,
    )
    yield _Way(last, search.told(), Level.O0.value)


class _Way(NamedTuple):
    """A conversion to try: its decisions, if already made, the reason, and the level that it falls back to."""

    options: Options
    cure: Cure
    level: str = ""
    plan: Plan | None = None


@dataclass(slots=True)
class _Fallbacks:
    """Tries one conversion after the other; ``outcomes`` describe those that did not pass."""

    job: Job
    validator: Validator
    validation: Validation
    recipe: Recipe
    refused: RefusedError
    is_tried: bool
    """Whether this very recipe was refused."""
    reasons: Sequence[str]
    """As for :func:`_ways`."""
    until: float = field(init=False)
    outcomes: list[str] = field(default_factory=list)
    nodes: tuple[str, ...] = ()
    trials: int = 0

    def __post_init__(self) -> None:
        self.until = monotonic() + self.validation.seconds

    @property
    def command(self) -> tuple[str, str]:
        """The source and the target in suggested commands."""
        return str(self.job.model.path), str(self.validator.sink.target)

    def told(self, outcome: str = "", command: str = "") -> Cure:
        """The final outcome of the search."""
        nodes = () if command else self.nodes
        text = " ".join(filter(None, (*self.outcomes, outcome)))
        return Cure(command, nodes, text, bool(command), self.trials)

    def cured(self, share: float) -> Iterator[_Way]:
        """Return a conversion with more nodes in float32, found in a share of the time."""
        compared = self.validator.comparison
        seconds = self.validation.seconds
        trial = Trial(
            run=compared.run,
            limits=compared.limits,
            seconds=seconds * share,
            activity=f"looking for a fix (at most {seconds:.0f} s)",
        )
        fault = self.refused.fault
        if fault:
            cure = _named_in(fault, self.job.model)
        else:
            cure = cure_conversion(
                self.job.model,
                self.command,
                self.recipe,
                trial,
                tried=self.is_tried,
                comparison=compared,
                advice="",
                failed=self.refused.report if self.is_tried else None,
                rounder=self.job.rounder,
            )
        _LOG.info("looked for a fix in %d trials: %s", cure.trials, cure.outcome)
        self.nodes = cure.nodes
        self.trials = cure.trials
        if cure.confirmed:
            yield _Way(self.recipe.keeping(cure.nodes), cure)
        is_refused = cure.confirmed and not fault
        fails = self.in_vain("The fix that was found", "fails the final validation")
        self.outcomes.append(fails if is_refused else cure.outcome)

    def in_vain(self, what: str, fails: str) -> str:
        """Return a sentence about the last conversion that was tried."""
        is_worthless = self.reasons and self.reasons[-1]
        return f"{what} {'passes, but does not pay' if is_worthless else fails}."

    def lower(self) -> Iterator[_Way]:
        """Level O1, if there is time."""
        if monotonic() < self.until:
            lower = replace(
                self.recipe, options=replace(self.recipe.options, level=Level.O1)
            )
            told = self.told("Level O1 passes.", lower.command(*self.command, ()))
            yield _Way(lower.options, told, Level.O1.value)
            self.outcomes.append(self.in_vain("Level O1", "fails as well"))

    def measured(self) -> Iterator[_Way]:
        """Return the result of level auto."""
        job = self.job
        options = self.recipe.options
        seconds = self.validation.seconds
        if job.search is None or not seconds:
            return
        from onnxamp._tuning.tune import measured_plan  # noqa: PLC0415 - few results fail

        tolerance = _tolerance(self.refused.report)
        rounding = options.rounding if options.compensates else "nearest"
        auto = replace(
            self.recipe, options=replace(options, level=Level.AUTO, rounding=rounding)
        )
        search = replace(
            job.search,
            tolerance=tolerance,
            seconds=max(self.until - monotonic(), seconds * _MEASURING),
        )
        plan = measured_plan(
            job.model, auto.options, search, replace(job.run, state=None), job.rounder
        )
        if plan is not None:
            samples = job.run.samples
            command = auto.tuning(
                *self.command, tolerance, len(samples) if samples.made_up else 0
            )
            told = self.told(
                "Level auto, which measures the error of each op, passes.", command
            )
            yield _Way(plan.options, told, Level.AUTO.value, plan)
        self.outcomes.append("Level auto finds no result that passes.")


def _tolerance(failed: DiffReport) -> float:
    """Return the limits that every output has to meet."""
    limits = (
        one.limit
        for one in failed.judgements
        if one.metric in ("rel_l2", "detections")
    )
    return min(limits, default=TOLERANCES[failed.lowest])


def _named_in(fault: str, model: Model) -> Cure:
    """Return the nodes of the original that errors of loading or building name, to keep them in float32."""
    names = {node.name for node in all_nodes(model.proto.graph.node) if node.name}
    named = sorted(n for n in names if f"({n})" in fault or f"'{n}'" in fault)
    outcome = "The message names no node."
    if named:
        outcome = "The result still fails when the nodes listed above stay in float32."
    return Cure("", tuple(named), outcome, bool(named), len(named))
