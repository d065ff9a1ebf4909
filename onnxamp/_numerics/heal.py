"""Conversions that are cured where they fail their validation.

Nodes are looked for that must stay float32, and that conversion is written instead; level O1 is tried, too, and what
level auto measures to be within the limits; at last the float32 model is written. A failing result never takes the
place of another file.
"""

import logging
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import Final

from onnxamp._convert.convert import Conversion, Sink, convert_to_file
from onnxamp._convert.plan import Plan
from onnxamp._errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes
from onnxamp._numerics.cure import Recipe, Trial, cure_conversion
from onnxamp._numerics.metrics import TOLERANCES
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._numerics.validation import RefusedError, Validation, convert_and_compare
from onnxamp._numerics.whole import NO_ISLANDS
from onnxamp._ops.profiles import computes_low
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._runtime.loading import the_loader

_LOG: Final = logging.getLogger("onnxamp")
_SEARCH: Final = 3 / 4
"""Share of the time in which nodes are looked for; the rest is for level O1."""
_MEASURING: Final = 1 / 2
"""Share of the time that level auto gets at least, even if it is over."""


def convert_validated(
    model: Model, sink: Sink, options: Options, validation: Validation, plan: Plan | None = None
) -> tuple[Conversion, DiffReport]:
    """Convert a model, and write what passes.

    That is the conversion, one with more nodes in float32, one at level O1, one at level auto, or the float32 model.

    With a plan, which is not to be changed, where ``validation.heals`` is False, and for devices that honour no types,
    a conversion that fails is written to ``validation.failed``.

    Raises:
        As :func:`onnxamp._convert.convert.convert_to_file` and :meth:`Comparison.compare`.
    """
    the_loader().start()
    proof = UpgradeProof(validation.comparison, partial(validation.progress, "checking the upgrade"))
    try:
        return convert_and_compare(model, sink, options, validation, plan, proof)
    except RefusedError as error:
        refused = error
    failure = refused.report
    why = failure.failure or next(iter(failure.warnings), "")
    _LOG.info("the result failed its validation: %s", why)
    everywhere = computes_low(options.target)
    if plan is not None or everywhere or not validation.heals:
        validation.failed.parent.mkdir(parents=True, exist_ok=True)
        made = convert_to_file(model, replace(sink, target=validation.failed), options, plan, proof, validation.rounder)
        return made, replace(failure, result=str(validation.failed), cure=NO_ISLANDS if everywhere else failure.cure)
    if proof.has_refused:
        options = replace(options, opset="keep")
    for way in _ways(model, sink, options, validation, refused):
        how = replace(validation, layers=False) if way.options.level == Level.O0 else validation
        with suppress(RefusedError):
            made, report = convert_and_compare(model, sink, way.options, how, way.plan, proof)
            told = replace(
                way.cure, applied=True, failure=why, first_bad=failure.first_bad, level=way.level,
                casts=(refused.casts, made.summary.casts_after),
            )  # fmt: skip
            return made, replace(report, cure=told)
    raise RuntimeFailure(
        "The float32 model does not agree with itself in a second run: no result can be validated (--no-validate)."
    )


def _ways(
    model: Model, sink: Sink, options: Options, validation: Validation, refused: RefusedError
) -> Iterator["_Way"]:
    """What may pass in place of a conversion that failed, the best first.

    Where an op breaks, that is one with it in float32. Where errors add up, none is at fault, and measurements tell
    which cause the most.
    """
    command = (str(model.path), str(sink.target))
    recipe = Recipe(replace(options, hazards=True), validation.sampling)
    search = _Fallbacks(model, recipe, command, validation, refused, recipe.options == options)
    if options.level not in (Level.O2, Level.O3):
        yield from search.cured(1.0)
    elif refused.fault or (refused.report.first_bad is not None and refused.report.first_bad.breaks):
        yield from search.cured(_SEARCH)
        yield from search.lower()
        if not refused.fault:
            yield from search.measured()
    else:
        yield from search.measured()
        yield from search.cured(_SEARCH)
        yield from search.lower()
    last = Options(
        Level.O0, dtype=options.dtype, from_dtype=options.from_dtype, keep_io_types=options.keep_io_types,
        target=options.target,
    )  # fmt: skip
    yield _Way(last, search.told(), Level.O0.value)


@dataclass(frozen=True, slots=True)
class _Way:
    """A conversion to try: with which decisions, if they are made already, why, and the level that it falls back to."""

    options: Options
    cure: Cure
    level: str = ""
    plan: Plan | None = None


@dataclass(slots=True)
class _Fallbacks:
    """Tries one thing after the other; ``outcomes`` tell of those that did not pass."""

    model: Model
    recipe: Recipe
    command: tuple[str, str]
    validation: Validation
    refused: RefusedError
    is_tried: bool
    """Whether the recipe is what was refused."""
    until: float = field(init=False)
    outcomes: list[str] = field(default_factory=list)
    nodes: tuple[str, ...] = ()
    trials: int = 0

    def __post_init__(self) -> None:
        self.until = monotonic() + self.validation.seconds

    def told(self, outcome: str = "", command: str = "") -> Cure:
        """What was found at last, or that nothing was."""
        nodes, text = () if command else self.nodes, " ".join(filter(None, (*self.outcomes, outcome)))
        return Cure(command, nodes, text, bool(command), self.trials)

    def cured(self, share: float) -> Iterator[_Way]:
        """More nodes in float32, found in a share of the time."""
        compared, seconds = self.validation.comparison, self.validation.seconds
        trial = Trial(
            compared.samples, compared.limits, compared.provider, compared.reference.budget, seconds=seconds * share,
            progress=lambda done, total: self.validation.progress(_looking(seconds), done, total),
        )  # fmt: skip
        fault = self.refused.fault
        cure = _named_in(fault, self.model) if fault else cure_conversion(
            self.model, self.command, self.recipe, trial, tried=self.is_tried, comparison=compared, advice="",
            failed=self.refused.report if self.is_tried else None, rounder=self.validation.rounder,
        )  # fmt: skip
        _LOG.info("looked for a cure in %d trials: %s", cure.trials, cure.outcome)
        self.nodes, self.trials = cure.nodes, cure.trials
        if cure.confirmed:
            yield _Way(self.recipe.keeping(cure.nodes), cure)
            cure = replace(cure, outcome=cure.outcome if fault else "The cure that was found does not pass in the end.")
        self.outcomes.append(cure.outcome)

    def lower(self) -> Iterator[_Way]:
        """Level O1, if there is time."""
        if monotonic() < self.until:
            lower = replace(self.recipe, options=replace(self.recipe.options, level=Level.O1))
            told = self.told("Level O1 passes.", lower.command(*self.command, ()))
            yield _Way(lower.options, told, Level.O1.value)
            self.outcomes.append("So does level O1.")

    def measured(self) -> Iterator[_Way]:
        """What level auto finds."""
        tune, options, seconds = self.validation.tune, self.recipe.options, self.validation.seconds
        if tune is None or not seconds:
            return
        tolerance = _tolerance(self.refused.report)
        rounding = options.rounding if options.compensates else "nearest"
        auto = replace(self.recipe, options=replace(options, level=Level.AUTO, rounding=rounding))
        plan = tune(auto.options, tolerance, max(self.until - monotonic(), seconds * _MEASURING))
        if plan is not None:
            samples = self.validation.comparison.samples
            command = auto.tuning(*self.command, tolerance, len(samples) if samples.made_up else 0)
            told = self.told("Level auto measures what each op costs, and passes.", command)
            yield _Way(plan.options, told, Level.AUTO.value, plan)
        self.outcomes.append("Level auto finds nothing that passes.")


def _tolerance(failed: DiffReport) -> float:
    """What every output has to hold."""
    limits = (one.limit for one in failed.judgements if one.metric in ("rel_l2", "detections"))
    return min(limits, default=TOLERANCES[failed.lowest])


def _looking(seconds: float) -> str:
    return f"looking for a fix (at most {seconds:.0f} s)"


def _named_in(fault: str, model: Model) -> Cure:
    """The nodes of the original that are named where the result is not loaded or built, as what may cure it."""
    names = {node.name for node in all_nodes(model.proto.graph.node) if node.name}
    named = tuple(sorted(name for name in names if f"({name})" in fault or f"'{name}'" in fault))
    outcome = "It is refused with the nodes in float32 that are named, too." if named else "No node is named."
    return Cure("", named, outcome, bool(named), len(named))
