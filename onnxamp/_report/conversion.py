"""Report of a conversion and its validation."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from onnxamp._audit import Audit
from onnxamp._base.state import as_data
from onnxamp._base.words import count, shortened
from onnxamp._convert.causes import sentence_of
from onnxamp._convert.plan import HazardRow, Plan
from onnxamp._decide.verdicts import title_of
from onnxamp._facts.dtypes import FORMATS
from onnxamp._job.worth import SLOWER
from onnxamp._job.writing import Conversion
from onnxamp._numerics.results import Cure, DiffReport
from onnxamp._report import as_sentence, detailed, percent, size, tally
from onnxamp._report.comparison import (
    beyond_usual,
    comparison_notes,
    comparison_sections,
    details_of,
    error_figures,
    first_bad_sentence,
    not_run,
    outputs_match,
    range_figures,
    says_nothing,
    status_of,
    steps_of,
    where_it_ran,
    within,
)
from onnxamp._report.parts import (
    LINES,
    Bars,
    Figure,
    Headline,
    NextStep,
    Part,
    Report,
    Section,
    Severity,
    Statement,
    Status,
    Table,
    expected_figures,
    expected_parts,
    hint,
    node_bar,
    node_figure,
    notes,
    quantized_sections,
    section,
    table,
    traffic_figures,
    weight_bar,
)

VARIABLES: Final = (
    "A node has one variable for each type that its op may choose (T, T1, ...): all inputs and outputs of that type share"
    " its precision."
)
_OPS: Final = 12
"""The number of op types that a sentence names."""
_SIZES: Final = 40
"""The longest list of input sizes, in characters, that a figure shows."""
_READERS: Final = 3
"""The number of readers of a weight that a table names."""


def conversion_report(conversion: Conversion, audit: Audit | None = None) -> Report:
    """Return the report of a conversion and its validation; ``audit`` is of the result."""
    plan = conversion.plan
    validation = conversion.validation
    figures = (
        *error_figures(validation),
        *expected_figures(plan.expected),
        *_figures(conversion),
        *_speed_up(conversion),
        *range_figures(validation),
    )
    return Report(
        task=f"convert, {plan.level} {plan.dtype} for {plan.target}",
        verdict=_verdict(conversion, validation),
        models=(str(conversion.source), str(conversion.target)),
        ran=where_it_ran(validation),
        figures=figures,
        sections=_sections(conversion, audit),
        steps=steps_of(validation.cure if validation else None),
        lines=LINES,
    )


def _sections(conversion: Conversion, audit: Audit | None) -> tuple[Section, ...]:
    """Return the sections of the report of a conversion, in the order in which they are read."""
    plan = conversion.plan
    validation = conversion.validation
    remarks = notes([*conversion_notes(conversion), *comparison_notes(validation)])
    causes = [cause for cause in conversion.causes if cause.casts]
    costs = (
        Statement(sentence_of(one), label=count(one.casts, "Cast")) for one in causes
    )
    return (
        section("Warnings", warning_items(plan), is_detail=True),
        section("Kept in float32 to pass validation", _healed(validation)),
        *comparison_sections(validation),
        section("Error to expect", expected_parts(plan.expected, validation)),
        section("What float32 costs", costs),
        section(_hazard_title(plan), _hazards(plan), on_page=False),
        *quantized_sections(plan),
        section("Large weights that stay in float32", _kept(conversion)),
        section("Weights that lost elements", _losses(conversion)),
        section("Nodes and weights", _sizes(conversion, audit), is_detail=True),
        section(
            "Decisions",
            hint(VARIABLES),
            decision_table(plan),
            is_detail=True,
            on_page=False,
        ),
        section("Notes", remarks),
    )


def preview_report(conversion: Conversion, audit: Audit, command: str) -> Report:
    """Return the report of a planned conversion; ``command`` runs it, and ``audit`` describes the model that it would
    write.
    """
    plan = conversion.plan
    nodes = _by_precision(conversion.summary.nodes, conversion.plan.dtype)
    low = nodes.get(plan.dtype, 0) + nodes.get("mixed", 0)
    floats = sum(nodes.values()) - nodes.get("no floats", 0)
    sentence = f"Level {plan.level} puts {low:,} of {count(floats, 'float node')} in {plan.dtype}."
    why = () if any(row.low for row in plan.rows) else (_why_nothing(conversion),)
    text = "This command converts the model and compares the result with the original."
    return conversion_report(conversion, audit)._replace(
        task=f"view, {plan.level} {plan.dtype} for {plan.target}",
        verdict=Headline(
            Status.UNKNOWN, sentence, (*why, "Nothing ran, and no model was written.")
        ),
        models=(str(conversion.source),),
        steps=(NextStep(text, command),),
        lines=None,
    )


def conversion_notes(conversion: Conversion) -> Iterator[str]:
    """Yield sentences that are worth knowing about a conversion."""
    yield from conversion.notes
    summary = conversion.summary
    target = conversion.plan.target
    if summary.fallbacks:
        subject = f"{len(summary.fallbacks):,} nodes have"
        verb = "they run"
        if len(summary.fallbacks) == 1:
            subject = "1 node has"
            verb = "it runs"
        ops = tally((op for _, op in summary.fallbacks), _OPS)
        yield f"{subject} no kernel on {target} in any precision, so {verb} on the CPU: {ops}."
    if summary.overridable:
        are = (
            "is also a graph input"
            if len(summary.overridable) == 1
            else "are also graph inputs"
        )
        yield (
            f"{count(len(summary.overridable), 'weight')} {are}, so callers can override them: each"
            " keeps the type of its input, and every run casts it where needed. --freeze-defaults makes them plain weights."
        )
    if summary.unknown:
        yield (
            f"No schema is known for {', '.join(summary.unknown)}: these nodes stay in float32. If they are custom ops,"
            " --custom-ops declares their types. Otherwise, check the spelling and the opset imports."
        )
    subnormal = sum(counts.subnormal for counts in conversion.weights.values())
    if subnormal:
        elements = sum(counts.elements for counts in conversion.weights.values())
        yield f"{subnormal:,} of {elements:,} converted weight elements became subnormal and lost digits."


def warning_items(plan: Plan) -> Iterator[Statement]:
    """Return messages that commands print at once, and that reports repeat only with -v."""
    return (Statement(text, Severity.WARNING) for text in plan.warnings)


def _by_precision(counts: Mapping[str, int], dtype: str) -> dict[str, int]:
    return {dtype if kind == "low" else kind: times for kind, times in counts.items()}


def decision_table(plan: Plan) -> Table:
    """Return every precision variable, its precision and the reason."""
    rows = (
        (row.key, row.op, plan.dtype if row.low else "float32", row.why)
        for row in plan.rows
    )
    return table("decisions", rows)


def _figures(conversion: Conversion) -> Iterator[Figure]:
    """Yield nodes in low precision, Casts and weights."""
    summary = conversion.summary
    dtype = conversion.plan.dtype
    after = summary.casts_after
    casts = f"{summary.casts_before:,} before, +{summary.casts_added:,} −{summary.casts_removed:,}"
    if summary.pairs_removed:
        casts += f"; {count(summary.pairs_removed, 'redundant Cast pair')} removed"
    yield Figure("Casts", f"{after:,}", casts, count(after, "Cast"))
    yield from node_figure(dtype, _by_precision(summary.nodes, dtype))
    if conversion.bytes_before:
        weights = size(conversion.bytes_after)
        share = f"{percent(conversion.bytes_after, conversion.bytes_before)} of {size(conversion.bytes_before)}"
        yield Figure("weights", weights, share, f"weights {weights}")


def _speed_up(conversion: Conversion) -> Iterator[Figure]:
    """Return the estimated gain of the conversion."""
    if (expected := conversion.speed_up) is None:
        return
    shapes = expected.shapes.items()
    sizes = ", ".join(
        f"{name} {'×'.join(map(str, dims)) or 'a scalar'}" for name, dims in shapes
    )
    shown = sizes if len(sizes) <= _SIZES else "the inputs' sizes"
    remark = f"estimate for {expected.device}, not measured, at {shown}"
    factor = f"{expected.factor:.2f}×"
    yield Figure("speed-up", factor, remark, f"estimated speed-up {factor}")


def _healed(validation: DiffReport | None) -> Iterator[Part]:
    """Return the fault of the requested conversion, and the fix."""
    cure = validation and validation.cure
    if not validation or not cure or not cure.applied:
        return
    yield Statement(f"The first result failed: {cure.failure}", Severity.WARNING)
    if cure.first_bad is not None:
        yield Statement(first_bad_sentence(cure.first_bad))
    sentence = cure.outcome
    if cure.confirmed:
        kept = "Known hazards stay in float32, see below"
        if cure.level:
            kept = cure.outcome.removesuffix(".")
        elif cure.nodes:
            stay = "stays" if len(cure.nodes) == 1 else "stay"
            kept = f"{count(len(cure.nodes), 'node')} {stay} in float32"
        trials = f"; found in {count(cure.trials, 'trial')}" if cure.trials else ""
        sentence = f"{kept}{_price(cure)}{trials}."
    yield Statement(sentence, members=cure.nodes)
    if validation.inputs.startswith("random"):
        yield Statement(
            "The inputs are random. The conversion may pass without this fix on real ones (--inputs)."
        )
    yield hint(
        "--no-cure writes the conversion as you asked for it, under another name."
    )


def _price(cure: Cure) -> str:
    """Return the cost of the fix in Casts."""
    if cure.casts is None:
        return ""
    literal, now = cure.casts
    return f", with {count(now, 'Cast')}{', as many as without' if now == literal else f' instead of {literal:,}'}"


def _verdict(conversion: Conversion, validation: DiffReport | None) -> Headline:
    plan = conversion.plan
    status = status_of(validation)
    verb = "Stored weights in" if plan.options.weights_only else "Converted to"
    head = f"{verb} {plan.dtype}"
    why = tuple[str, ...]()
    cure = validation and validation.cure
    if validation and cure:
        unconverted = _unconverted(conversion, validation, cure, status)
        if unconverted is not None:
            return unconverted
    if cure and cure.applied:
        kept = count(len(cure.nodes), "more node") if cure.nodes else "known hazards"
        with_what = (
            f"at level {cure.level}" if cure.level else f"with {kept} in float32"
        )
        head += f", {with_what} to pass validation"
    if conversion.drawback:
        head += f", {conversion.drawback}"
        # The clause alone says how much slower a result is.
        is_slow = conversion.drawback.startswith(SLOWER)
        why = (*(() if is_slow else (conversion.not_worth,)), *_better(conversion))
        if status is Status.PASSED:
            status = Status.NO_GAIN
    if not any(row.low for row in plan.rows):
        more = " more" if conversion.summary.nodes_before.get("low") else ""
        head = f"Nothing{more} was converted"
        why = (_why_nothing(conversion),)
        if status is Status.PASSED and conversion.is_float32 and plan.level != "O0":
            status = Status.NO_GAIN
    else:
        why = (*why, *_why_most(conversion))
    if validation is None:
        why = (*why, "The result was not compared with the original.")
        return Headline(status, f"{head}; not validated.", why)
    unknown = "not validated"
    if says_nothing(validation) and validation.passed:
        unknown = f"{outputs_match(validation)} the original"
    elif validation.unopened and validation.passed:
        unknown = f"{outputs_match(validation)} the original, but neither loads"
    matches = f"{outputs_match(validation)} the original"
    over = beyond_usual(validation)
    sentence = {
        Status.UNKNOWN: f"{head}; {unknown}.",
        Status.FAILED: f"{head}, but the result is {'wrong' if validation.failure else 'outside the limits'}.",
        Status.INEXACT: f"{head}, {_weakness(validation)}.",
        Status.PASSED: f"{head}; {matches}{_grade(validation)}{over}.",
        Status.NO_GAIN: f"{head}; {matches}{_grade(validation)}{over}.",
    }[status]
    return Headline(status, sentence, (*why, *details_of(validation)))


def _unconverted(
    conversion: Conversion, validation: DiffReport, cure: Cure, status: Status
) -> Headline | None:
    """Return the verdict on a model that a failed validation left in float32; None if it was converted."""
    if conversion.kept_original:
        sentence = "Not worth it: the original model was written as it is."
        last = not_run(validation)
    elif cure.applied and not cure.confirmed:
        sentence = "The model stays in float32: no conversion passed validation."
        last = validation.skipped
    else:
        return None
    if status is Status.PASSED:
        status = Status.NO_GAIN
    details = filter(None, (cure.failure, cure.outcome, last))
    return Headline(status, sentence, tuple(details))


def _better(conversion: Conversion) -> Iterator[str]:
    """Yield the options that give a better result, in a sentence."""
    if conversion.better:
        yield f"Better: {', '.join(map(str, conversion.better))}."


def _grade(validation: DiffReport) -> str:
    """Return what a verdict rests on besides the samples: a proof, or inputs that are made to be hard."""
    proof = validation.proof
    if proof is not None and proof.values and proof.is_complete:
        return f", and no input{within(proof)} overflows"
    has_hard = any(extra.is_hard for extra in validation.extras)
    if not has_hard and validation.sought is None:
        return ""
    # Random inputs are numbers of a few units. Yours may be prices in cents, which no stress within that range shows.
    is_random = validation.inputs.startswith("random")
    is_stated = proof is not None and proof.assumed
    kind = "random inputs" if is_random and not is_stated else "inputs"
    return f", also on {kind} made to be hard"


def _weakness(validation: DiffReport) -> str:
    """Return what keeps a result that passed from being as good as usual."""
    if validation.warnings:
        return "with a larger error than usual"
    return "but ONNX Runtime opens it only with options that are not its default"


def _why_nothing(conversion: Conversion) -> str:
    """Return the most frequent reason why nodes do not change."""
    plan = conversion.plan
    before = _by_precision(conversion.summary.nodes_before, conversion.plan.dtype)
    if plan.level == "O0":
        return "Level O0 keeps every precision as it is."
    float32 = before.get("float32", 0)
    kinds = [kind for kind in FORMATS if before.get(kind, 0) > float32]
    if kinds:
        others = before.keys() - {kinds[0], "no floats"}
        return f"{'Most' if others else 'All its float'} nodes are {kinds[0]} already."
    every = (row.reason for row in plan.rows)
    reasons = Counter(reason for reason in every if reason not in _FOLLOWING)
    if not plan.rows:
        return "The model does not compute in float32."
    if not reasons:
        return "Only constants are float32."
    ((reason, _),) = reasons.most_common(1)
    general = f"Most nodes stay in float32, each for this reason: {title_of(reason)}."
    return _NOTHING.get(reason, general)


def _why_most(conversion: Conversion) -> Iterator[str]:
    """Yield the hazard that keeps most nodes in float32, if one does."""
    plan = conversion.plan
    kept = {(row.reason, row.node) for row in _decisive_hazards(plan) if not row.low}
    reasons = Counter(reason for reason, _ in kept)
    nodes = conversion.summary.nodes
    floats = sum(nodes.values()) - nodes.get("no floats", 0)
    for reason, times in reasons.most_common(1):
        if 2 * times > floats:
            yield f"Most nodes stay in float32: {title_of(reason)}."


_FOLLOWING: Final = ("constant", "tie", "exact op")
"""Reasons that are none of their own: constants follow their readers, tied variables and exact ops their neighbors."""
_NOTHING: Final = {
    "cut": "Most nodes stay in float32 because the Casts around them would cost more than they gain.",
    "measured": "No conversion that was tried is both faster and within the tolerance: onnxamp tune shows them.",
}
"""The most frequent reason why nodes do not change -> the sentence about it, where its title is not enough."""


def _hazard_title(plan: Plan) -> str:
    hazards = _decisive_hazards(plan)
    low = {row.node for row in hazards if row.low}
    kept = {row.node for row in hazards} - low
    fates = []
    if kept:
        fates.append(f"{count(len(kept), 'node')} kept in float32")
    if low:
        fates.append(f"{count(len(low), 'node')} in {plan.dtype} anyway")
    reasons = Counter(row.node for row in hazards)
    twice = sum(times > 1 for times in reasons.values())
    several = f" ({twice:,} of them for more than one reason)" if twice else ""
    return f"Hazards: {', '.join(fates)}{several}"


def _hazards(plan: Plan) -> Iterator[Part]:
    """Yield one statement per kind of hazard, with its nodes."""
    hazards = _decisive_hazards(plan)
    for reason, _ in Counter(row.reason for row in hazards).most_common():
        mine = [row for row in hazards if row.reason == reason]
        level = Severity.WARNING if any(row.low for row in mine) else Severity.NOTE
        nodes = count(len({row.node for row in mine}), "node")
        yield Statement(as_sentence(title_of(reason)), level, nodes, detailed(mine))
    if hazards and plan.options.hazards:
        yield hint(
            "--force-low REGEX lowers some of these nodes anyway, with all that share their precision; --no-hazards"
            " lowers all."
        )


def _decisive_hazards(plan: Plan) -> Sequence[HazardRow]:
    """Return the hazards that decided something: at level auto, measurements replace those that samples show."""
    if plan.options.weights_only:
        return ()
    if plan.level != "auto":
        return plan.hazards
    reasons = {row.reason for row in plan.rows if not row.low}
    return [row for row in plan.hazards if row.reason in reasons]


def _losses(conversion: Conversion) -> list[Part]:
    """Return the weights with elements that lost more than digits."""
    # Subnormal elements keep some digits; a note counts them.
    weights = conversion.weights
    lost = [name for name, c in weights.items() if c.overflowed or c.flushed]
    if not lost:
        return []
    lost.sort(
        key=lambda name: (-weights[name].overflowed, -weights[name].flushed, name)
    )
    named = frozenset(lost)
    rows = []
    for name in lost:
        c = weights[name]
        counts = (c.elements, c.overflowed, c.flushed, c.subnormal)
        rows.append((name, *map("{:,}".format, counts)))
    lead = f"{len(lost):,} of {count(len(weights), 'converted tensor')}."
    if fewer := sum(c.subnormal for name, c in weights.items() if name not in named):
        lead += f" In the others, {count(fewer, 'element')} became subnormal."
    return [hint(lead), table("lost-weights", rows)]


def _kept(conversion: Conversion) -> Table:
    """Return the weights of more than 1 % of the result that stay in float32, and why."""
    rows = (
        (
            weight.name,
            f"{size(weight.size)}{', also stored low' if weight.copied else ''}",
            shortened([*weight.readers], _READERS),
            shortened([*dict.fromkeys(weight.readers.values())], 1),
        )
        for weight in conversion.summary.kept_weights
    )
    return table("kept-weights", rows)


def _sizes(conversion: Conversion, audit: Audit | None) -> Iterator[Part]:
    """Yield nodes and weights before and after."""
    summary = conversion.summary
    dtype = conversion.plan.dtype
    sizes: Mapping[str, int] = {"weights": conversion.bytes_after}
    if audit is not None:
        sizes = audit.weight_bytes
    nodes = {"before": summary.nodes_before, "after": summary.nodes}
    weights = {"before": {"weights": conversion.bytes_before}, "after": sizes}
    node_bars = (node_bar(k, _by_precision(v, dtype)) for k, v in nodes.items())
    yield Bars("nodes", tuple(node_bars))
    weight_bars = (weight_bar(label, bytes_) for label, bytes_ in weights.items())
    yield Bars("weights", tuple(weight_bars))
    yield from traffic_figures(audit)


def conversion_facts(conversion: Conversion) -> dict[str, Any]:
    """Return a conversion without its decisions (``--save-plan`` writes those), and its validation."""
    judged = {
        "verdict": status_of(conversion.validation),
        "validation": conversion.validation,
    }
    return conversion_data(conversion) | judged


def conversion_data(conversion: Conversion) -> dict[str, Any]:
    """Return a conversion in JSON's types, without its decisions and its validation."""
    facts: dict[str, Any] = as_data(
        replace(conversion, plan=replace(conversion.plan, rows=()), validation=None)
    )
    del facts["validation"]
    del facts["plan"]["rows"]
    return facts
