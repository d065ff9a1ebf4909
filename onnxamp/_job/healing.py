"""Repairs conversions that fail their validation: with more nodes in float32, level O1, level auto, or in float32.

A failing result never replaces another file.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Final, NamedTuple

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.paths import made_folder
from onnxamp._convert.causes import Cause
from onnxamp._convert.plan import Plan
from onnxamp._convert.summary import KeptWeight
from onnxamp._decide.kinds import hazards_for
from onnxamp._decide.proofs import undisproved
from onnxamp._decide.verdicts import Reason, title_of
from onnxamp._facts.providers import computes_low
from onnxamp._graph.graph import graph_of
from onnxamp._job import Job, Validation, failed_name
from onnxamp._job.refusals import NotWorthError, RefusedError
from onnxamp._job.validation import Validator
from onnxamp._job.writing import Conversion, write_conversion
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes
from onnxamp._numerics.differences.metrics import TOLERANCES
from onnxamp._numerics.judging import is_broken, usual_limits
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._runtime.inputs.samples import further
from onnxamp._runtime.sessions.starting import disabled_sentence
from onnxamp._tuning.cure import NO_ISLANDS, Recipe, cure_conversion
from onnxamp._tuning.tune import measured_plan

_LOG: Final = logging.getLogger("onnxamp")
_SEARCH: Final = 3 / 4
"""Share of the time limit for the search for nodes; level O1 gets the rest."""
_NEEDED: Final = "needed to pass validation"
"""The reason for nodes that the search keeps in float32."""
_MEASURING: Final = 1 / 2
"""Share of the time limit that level auto gets at least, even if the limit has passed."""


def healed(
    job: Job, validator: Validator, validation: Validation, refused: RefusedError
) -> Conversion:
    """Convert a model whose result failed its validation in other ways, and write a result that passes.

    That is one with more nodes in float32, one at level O1, one at level auto, or the float32 model.

    A result of level auto keeps its measured decisions, apart from the nodes that have to be in float32.

    With a plan of the user, which must not change, with ``validation.no_cure``, and for devices that ignore types, the
    failed conversion is written to ``validation.failed`` instead.

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
    opens = disabled_sentence(failure.disabled, "opens it")
    why = " ".join(filter(None, (why, opens)))
    _LOG.info("the result failed its validation: %s", why)
    is_settled = job.plan is not None and job.tuned is None
    if is_settled or validation.no_cure or computes_low(job.options.target):
        return _write_failed(job, validator, validation, failure)
    # The float32 model itself differs at the newer opset, so no other precision would help.
    if validator.proof.has_refused:
        job = replace(job, options=replace(job.options, opset="keep"))
    not_worth = ""
    fault = ""
    fallbacks = _Fallbacks(job, validator, validation, refused)
    for way in fallbacks.ways():
        is_last = way.options.level == Level.O0
        layers = False if is_last else validation.layers
        attempt = replace(job, options=way.options, plan=way.plan)
        try:
            conversion = validator.convert(attempt, layers, must_pay=not is_last)
        except RefusedError as error:
            fault = error.fault
            fallbacks.outcomes.append(f"{way.what} {way.fails}.")
            continue
        except NotWorthError as error:
            not_worth = error.why
            fallbacks.outcomes.append(f"{way.what} passes, but is not worth it.")
            continue
        cure = replace(
            way.cure,
            applied=True,
            failure=why,
            first_bad=failure.first_bad,
            level=way.level,
            casts=(refused.casts, conversion.summary.casts_after),
        )
        conversion = _explained(conversion, job.options)
        if way.plan is not None:
            conversion = _with_reasons_of(conversion, way.plan)
        if is_last and not_worth:
            conversion = replace(conversion, not_worth=not_worth, kept_original=True)
            outcome = f"A conversion passes, but is not worth it. {not_worth}"
            cure = replace(cure, outcome=outcome)
        return _with_cure(conversion, cure)
    raise _hopeless(fault)


def _hopeless(fault: str) -> RuntimeFailure:
    """Return the error about a model that fails in float32 as well.

    Args:
        fault: why it does not load; "" if it does.
    """
    why = "Two runs of the float32 model disagree"
    if fault:
        why = f"The float32 model does not load either ({fault.removesuffix('.')})"
    return RuntimeFailure(
        f"{why}, so no result can be validated: --no-validate skips the validation."
    )


def _with_reasons_of(conversion: Conversion, plan: Plan) -> Conversion:
    """Return a conversion whose repeated decisions have the reasons that the plan has for them."""
    reasons = {row.key: row for row in plan.rows}
    rows = (
        reasons.get(row.key, row) if row.reason == Reason.PLAN.value else row
        for row in conversion.plan.rows
    )
    return replace(conversion, plan=replace(conversion.plan, rows=tuple(rows)))


def _with_cure(conversion: Conversion, cure: Cure) -> Conversion:
    """Return a conversion whose validation names the cure that it owes its success to."""
    assert conversion.validation is not None
    return replace(conversion, validation=replace(conversion.validation, cure=cure))


def _explained(conversion: Conversion, asked: Options) -> Conversion:
    """Return a conversion whose reasons say "needed" instead of names that the user did not give."""
    if asked.keep_nodes or asked.keep_high:
        return conversion
    plan = conversion.plan
    rows = (
        replace(row, reason=_NEEDED, detail="")
        if row.reason == Reason.PATTERN.value and not row.low
        else row
        for row in plan.rows
    )
    summary = conversion.summary
    weights = (
        replace(weight, readers=_needed(weight)) for weight in summary.kept_weights
    )
    return replace(
        conversion,
        plan=replace(plan, rows=tuple(rows)),
        summary=replace(summary, kept_weights=tuple(weights)),
        causes=_causes(conversion),
    )


def _needed(weight: KeptWeight) -> Mapping[str, str]:
    """Return why the readers of a weight are in float32, with names that the user did not give replaced by "needed"."""
    named = title_of(Reason.PATTERN.value)
    return {
        reader: _NEEDED if why.startswith(named) else why
        for reader, why in weight.readers.items()
    }


def _causes(conversion: Conversion) -> tuple[Cause, ...]:
    """Return the reasons that keep nodes in float32, with the same replacement."""
    causes = list[Cause]()
    for cause in conversion.causes:
        is_named = cause.reason == Reason.PATTERN.value
        causes.append(replace(cause, reason=_NEEDED, advice="") if is_named else cause)
    return tuple(causes)


def _write_failed(
    job: Job, validator: Validator, validation: Validation, failure: DiffReport
) -> Conversion:
    """Write a result that failed its validation to another file."""
    target = validation.failed or failed_name(validator.sink.target)
    made_folder(target.parent)
    sink = replace(validator.sink, target=target, stage=None)
    written = write_conversion(job, sink, kept=validator.kept, proof=validator.proof)
    cure = NO_ISLANDS if computes_low(job.options.target) else failure.cure
    report = replace(failure, result=str(target), cure=cure)
    return replace(written.outcome(), validation=report)


class _Way(NamedTuple):
    """A conversion to try.

    Attributes:
        what: the subject of a sentence about it.
        options: its options.
        cure: what is said of it if it passes.
        level: the level that it falls back to; "" for that of the original conversion.
        plan: its decisions, if they are made already.
        fails: the predicate if it does not pass.
    """

    what: str
    options: Options
    cure: Cure
    level: str = ""
    plan: Plan | None = None
    fails: str = "fails the final validation"


@dataclass(slots=True)
class _Fallbacks:
    """The conversions to try in place of one that failed.

    Attributes:
        outcomes: sentences about what did not pass, to which the caller adds one for each conversion that it tried.
        nodes: the nodes that the search kept in float32 at last.
        trials: the conversions that it tried.
    """

    job: Job
    validator: Validator
    validation: Validation
    refused: RefusedError
    recipe: Recipe = field(init=False)
    until: float = field(init=False)
    outcomes: list[str] = field(default_factory=list)
    nodes: tuple[str, ...] = ()
    trials: int = 0

    def __post_init__(self) -> None:
        options = self.job.options
        # The decisions of a plan already weigh the hazards.
        if self.job.plan is None:
            options = replace(options, hazards=True)
        self.recipe = Recipe(options, self.validation.sampling, self.job.plan)
        self.until = monotonic() + self.validation.cure_time

    def ways(self) -> Iterator[_Way]:
        """Yield the conversions, the best first.

        If an op breaks, the op stays in float32. If ops lose precision, more of them than the first may have to stay,
        and measurements show which cause the most error.
        """
        options = self.job.options
        refused = self.refused
        if self.job.plan is not None:
            yield from self.cured(_SEARCH)
            yield from self.lower()
        elif options.weights_only:
            self.outcomes.append("All nodes compute in float32 already.")
        elif options.level not in (Level.O2, Level.O3):
            yield from self.cured(1.0)
        elif refused.fault or is_broken(refused.report):
            yield from self.cured(_SEARCH)
            yield from self.lower()
            if not refused.fault:
                yield from self.measured()
        else:
            # Many small errors add up, so measuring all nodes finds more than a search for single ones.
            yield from self.measured()
            yield from self.cured(_SEARCH)
            yield from self.lower()
        last = Options(
            Level.O0,
            dtype=options.dtype,
            from_dtype=options.from_dtype,
            keep_io_types=options.keep_io_types,
            target=options.target,
            opset=options.opset,
        )
        yield _Way("Float32", last, self.outcome(), Level.O0.value)

    @property
    def paths(self) -> tuple[str, str]:
        """The source and the target in suggested commands."""
        return str(self.job.model.path), str(self.validator.sink.target)

    def outcome(self, last: str = "", command: str = "") -> Cure:
        """Return the outcome of the whole search."""
        nodes = () if command else self.nodes
        text = " ".join(filter(None, (*self.outcomes, last)))
        return Cure(command, nodes, text, bool(command), self.trials)

    def cured(self, share: float) -> Iterator[_Way]:
        """Yield a conversion with more nodes in float32, found in a share of the time."""
        seconds = self.validation.cure_time
        fault = self.refused.fault
        is_tried = self.recipe.options == self.job.options
        if fault:
            cure = _named_in(fault, self.job.model)
        else:
            cure = cure_conversion(
                self.job.model,
                self.paths,
                self.recipe,
                self.validator.comparison,
                tried=is_tried,
                seconds=seconds * share,
                activity=f"looking for a fix (at most {seconds * share:.0f} s)",
                failed=self.refused.report if is_tried else None,
                rounder=self.job.rounder,
                advice="",
            )
        _LOG.info("looked for a fix in %d trials: %s", cure.trials, cure.outcome)
        self.nodes = cure.nodes
        self.trials = cure.trials
        if cure.confirmed:
            options = self.recipe.keeping(cure.nodes)
            yield _Way("The fix", options, cure, plan=self.recipe.plan)
        else:
            self.outcomes.append(cure.outcome)

    def lower(self) -> Iterator[_Way]:
        """Yield level O1, if there is time."""
        if monotonic() < self.until:
            options = replace(self.recipe.options, level=Level.O1)
            lower = replace(self.recipe, options=options, plan=None)
            cure = self.outcome("Level O1 passes.", lower.command(*self.paths, ()))
            level = Level.O1.value
            yield _Way("Level O1", options, cure, level, fails="fails as well")

    def measured(self) -> Iterator[_Way]:
        """Yield the result of level auto, if it finds one."""
        job = self.job
        options = self.recipe.options
        seconds = self.validation.cure_time
        if job.search is None or not seconds:
            return
        if job.run.samples.made_up:
            kept = _known_to_break(job.model, options)
            options = replace(options, keep_nodes=(*options.keep_nodes, *kept))
        tolerance = _tolerance(self.refused.report)
        rounding = options.rounding if options.compensates else "nearest"
        auto = replace(
            self.recipe, options=replace(options, level=Level.AUTO, rounding=rounding)
        )
        # Its result is close to the limit, so the verdict takes as many.
        compared = self.validator.comparison.run.samples
        samples = further(compared, share=1.0) or compared
        search = replace(
            job.search,
            tolerance=tolerance,
            seconds=max(self.until - monotonic(), seconds * _MEASURING),
            only=(self.refused.report.worst_sample or 0) if samples.made_up else None,
        )
        run = replace(job.run, inputs=samples, state=None)
        plan = measured_plan(job.model, auto.options, search, run, job.rounder)
        if plan is not None:
            count = len(samples) if samples.made_up else 0
            command = auto.tuning(*self.paths, tolerance, count)
            passes = "Level auto, which measures the error of each op, passes."
            cure = self.outcome(passes, command)
            yield _Way("Level auto", plan.options, cure, Level.AUTO.value, plan)
        else:
            self.outcomes.append("Level auto finds no result that passes.")


def _known_to_break(model: Model, options: Options) -> Iterator[str]:
    """Yield the outputs of nodes with hazards that level auto would measure: on random samples it cannot see them."""
    graph = model.ask(graph_of)
    all_hazards = hazards_for(graph, options.low, options.target)
    measured = {
        hazard.node
        for hazard in undisproved(graph, options, all_hazards)
        if hazard.reason.is_measurable and not hazard.reason.ends_by_folding
    }
    for node in graph.at(measured):
        if node.first_output:
            yield node.first_output


def _tolerance(failed: DiffReport) -> float:
    """Return the error that every output may have."""
    limits = usual_limits(failed.judgements)
    limits += [
        judgement.limit
        for judgement in failed.judgements
        if judgement.metric == "detections"
    ]
    return min(limits, default=TOLERANCES[failed.lowest])


def _named_in(fault: str, model: Model) -> Cure:
    """Return the nodes of the original that errors of loading or building name, to keep them in float32."""
    names = {node.name for node in all_nodes(model.proto.graph.node) if node.name}
    # Errors of ONNX Runtime and of builders show the name of a node in parentheses or quotes.
    named = sorted(n for n in names if f"({n})" in fault or f"'{n}'" in fault)
    outcome = "The message names no node."
    if named:
        outcome = "The message names the nodes listed above."
    return Cure("", tuple(named), outcome, bool(named), len(named))
