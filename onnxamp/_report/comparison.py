"""Report of a comparison of two models."""

from collections.abc import Iterator, Sequence
from math import isnan
from typing import Final, Protocol

from onnxamp._base.words import count
from onnxamp._facts.dtypes import FORMATS
from onnxamp._numerics.differences.metrics import Perplexity, TensorDiff, metric_of
from onnxamp._numerics.limits import TYPICAL
from onnxamp._numerics.results import (
    Cure,
    DiffReport,
    Extra,
    FirstBad,
    LayerDiff,
    Parting,
    RunCheck,
)
from onnxamp._numerics.unseen.stressed import Proof
from onnxamp._report import change, magnitude, number, percent, shape
from onnxamp._report.choices import choices_section
from onnxamp._report.headroom import headroom_section
from onnxamp._report.parts import (
    LINES,
    Figure,
    Headline,
    NextStep,
    Part,
    Report,
    Section,
    Status,
    Table,
    TableRow,
    hint,
    notes,
    section,
    table,
)
from onnxamp._runtime.sessions.starting import disabled_sentence

_CLAUSES: Final = 3
"""The number of parts of a model that were not run and that the head names."""
_ROWS: Final = 12
"""The number of outputs that the terminal shows without -v."""


class TextResults(Protocol):
    """What texts show about two language models: the fields that comparisons and rows of folders share."""

    @property
    def outputs(self) -> Sequence[TensorDiff]:
        """The differences of outputs."""

    @property
    def tokens(self) -> Sequence[Parting]:
        """Sequences of tokens that both chose."""

    @property
    def perplexity(self) -> Perplexity | None:
        """How well both predicted the tokens; None if no text was read."""


def diff_report(diff: DiffReport) -> Report:
    """Return a comparison."""
    layers = section(
        "Layers with the largest local errors", _layers(diff), on_page=False
    )
    remarks = section("Notes", notes(comparison_notes(diff)))
    return Report(
        task=f"diff, {diff.lowest}",
        verdict=diff_verdict(diff),
        models=(diff.reference, diff.result),
        ran=where_it_ran(diff),
        figures=(*error_figures(diff), *range_figures(diff)),
        sections=(*comparison_sections(diff), layers, remarks),
        steps=steps_of(diff.cure),
        lines=None if diff.layers else LINES,  # who asks for layers wants to see them
    )


def status_of(diff: DiffReport | None) -> Status:
    """Return the verdict on a comparison in one word."""
    if diff is None or diff.skipped:
        return Status.UNKNOWN
    if not diff.passed:
        return Status.FAILED
    if diff.unopened or says_nothing(diff):
        return Status.UNKNOWN
    return Status.INEXACT if diff.warnings or diff.disabled else Status.PASSED


def diff_verdict(diff: DiffReport) -> Headline:
    """Return the verdict on a comparison, with the first bad value."""
    status = status_of(diff)
    unknown = f"{outputs_match(diff)} the reference"
    if diff.skipped:
        unknown = "The models were not compared."
    elif says_nothing(diff):
        unknown = f"Nothing is known: {unknown}."
    else:
        unknown = f"{unknown[0].upper()}{unknown[1:]}, but neither model loads."
    sentence = {
        Status.UNKNOWN: unknown,
        Status.FAILED: f"The models differ{'' if diff.failure else ' by more than the limits allow'}."
        if diff.was_compared
        else "The models could not be compared.",
        Status.INEXACT: "The models agree, but less closely than usual.",
        Status.PASSED: f"The models agree: {outputs_match(diff)} the reference{beyond_usual(diff)}.",
    }[status]
    return Headline(status, sentence, details_of(diff))


def details_of(diff: DiffReport) -> tuple[str, ...]:
    """Return the fault, where it starts, and what was not run."""
    if diff.skipped:
        return (diff.skipped,)
    opens = disabled_sentence(diff.disabled, f"opens {diff.result}")
    start = first_bad_sentence(diff.first_bad) if diff.first_bad else None
    faults = (diff.unopened, opens, diff.failure, *diff.warnings, start)
    return tuple(filter(None, (*faults, not_run(diff))))


def not_run(diff: DiffReport | RunCheck) -> str | None:
    """Return a sentence about everything that neither the samples nor other runs reached."""
    clauses = [*diff.not_run[:_CLAUSES]]
    if more := len(diff.not_run) - len(clauses):
        clauses.append(f"and {more:,} more (--format json lists them)")
    return f"Not run: {'; '.join(clauses)}." if clauses else None


def first_bad_sentence(bad: FirstBad) -> str:
    """Return the op that goes wrong first, or the value at which the accumulated error becomes too large."""
    # An unnamed node is called by its output.
    where = bad.op
    if bad.node != bad.value:
        where = f"output of {bad.op} node {bad.node!r}"
    value = f"{bad.value!r} ({where})"
    if bad.breaks:
        return f"The first bad value is {value}: {bad.alarm}."
    return f"No single op is at fault: errors accumulate, and stay above the limit from {value} on: {bad.alarm}."


def outputs_match(diff: DiffReport) -> str:
    """Return the start of a clause: ``all 3 outputs match``. Outputs without a number to compare are not counted."""
    every = len(diff.outputs)
    compared = sum(not _is_blank(output) for output in diff.outputs)
    if not compared:
        return "no output holds numbers to compare with"
    if compared < every:
        subject = f"the {compared:,} of {every:,} outputs that contain numbers match"
        if compared == 1:
            subject = f"the one of {every:,} outputs that contains numbers matches"
        return subject
    if every == 1:
        return "the output matches"
    return f"{'both' if every == 2 else f'all {every:,}'} outputs match"


def says_nothing(diff: DiffReport) -> bool:
    """Return whether no output holds a number to compare."""
    return bool(diff.outputs) and all(map(_is_blank, diff.outputs))


def _is_blank(output: TensorDiff) -> bool:
    """Return whether the reference is empty, or NaN or infinite throughout, so that agreement means nothing."""
    return output.size == output.reference_nan + output.reference_inf


def where_it_ran(ran: DiffReport | RunCheck | None) -> tuple[str, ...]:
    """Return provider and inputs, if anything ran."""
    if ran is None:
        return ()
    loaded = _loads(ran) if isinstance(ran, DiffReport) else ""
    facts = (ran.ran_on, ran.inputs, loaded)
    return tuple(filter(None, facts))


def _loads(diff: DiffReport) -> str:
    """Return what is known about loading the file of the result."""
    if not diff.loaded:
        return ""
    if diff.types_only:
        return f"types checked by {diff.loaded}"
    without = f" without {', '.join(diff.disabled)}" if diff.disabled else ""
    return f"loads in {diff.loaded}{without}"


def steps_of(cure: Cure | None, *, is_options: bool = False) -> tuple[NextStep, ...]:
    """Return the outcome of the search for options that fix the failure, if there was one."""
    if cure is None or cure.applied:
        return ()
    return (
        NextStep(cure.outcome, cure.command, cure.nodes, cure.confirmed, is_options),
    )


def error_figures(diff: DiffReport | None) -> tuple[Figure, ...]:
    """Return the error of the output that is farthest from the reference, and the metrics of language models."""
    if diff is None or diff.skipped or not diff.outputs:
        return ()
    if diff.detections:
        list_ = max(diff.detections, key=lambda detections: detections.error)
        label = "largest error of a detection"
        output = list_.outputs[0]
        error = list_.error
    else:
        # Ids and labels that differ say nothing as numbers. NaN compares with nothing, and is the worst error.
        floats = [one for one in diff.outputs if one.is_float] or diff.outputs
        worst = max(floats, key=lambda one: (isnan(one.rel_l2), one.rel_l2))
        label = "largest relative L2 error"
        output = worst.name
        error = worst.rel_l2
    text = number(error)
    figure = Figure(label, text, f"output {output}", f"error {text}")
    return (figure, *text_figures(diff))


def range_figures(diff: DiffReport | None) -> Iterator[Figure]:
    """Yield how many values no input brings out of range, and how far inputs that were made to be hard get."""
    if diff is None or diff.skipped or not diff.outputs:
        return
    proof = diff.proof
    if proof is not None and proof.values:
        share = f"{proof.proven:,} of {proof.values:,}"
        remark = f"{diff.lowest} values, for every input{within(proof)}"
        if not proof.proven and not proof.assumed:
            remark = (
                f"{diff.lowest} values (--input-range states the ranges of inputs)"
            )
        yield Figure("proven in range", share, remark)
    headroom = diff.headroom
    if headroom is not None:
        remark = f"of {diff.lowest}'s range, value {headroom.value}, on inputs made to be hard"
        yield Figure("largest magnitude", percent(headroom.share, 1.0), remark)
    if diff.sought is not None:
        tried = count(diff.sought.inputs, "input")
        remark = f"the largest on {tried} made to be hard"
        yield Figure("error sought", number(diff.sought.error), remark)


def within(proof: Proof) -> str:
    """Return a phrase for the inputs that a proof covers, after the word "input"; "" if it covers all."""
    if proof.sampled == proof.assumed:
        return " in the range of the samples" if proof.assumed else ""
    also = " and that of the samples" if proof.sampled else ""
    return f" in the given ranges{also}"


def text_figures(diff: TextResults) -> Iterator[Figure]:
    """Yield metrics of language models: next tokens, the prediction of texts, and generated tokens."""
    for output in diff.outputs:
        if output.kl_divergence is not None:
            where = f"output {output.name}"
            divergence = number(output.kl_divergence)
            yield Figure("KL divergence", divergence, f"nats, {where}")
            agreed = _share(output.argmax_agreement)
            yield Figure("top-1 agreement", agreed, f"of rows, {where}")
    if (text := diff.perplexity) is not None:
        both = f"{number(text.reference, 5)} → {number(text.result, 5)}"
        remark = f"reference → result, {count(text.tokens, 'token')} of the texts"
        yield Figure("perplexity", both, remark)
    for one in diff.tokens:
        if not one.output:
            remark = f"generated greedily after {count(one.sequences, 'prompt')}"
            diverge = "diverges" if one.parted == 1 else "diverge"
            remark += f"; {one.parted:,} of them {diverge}" if one.parted else ""
            yield Figure("same tokens", f"{one.same:,}", remark)


def comparison_sections(diff: DiffReport | None) -> tuple[Section, ...]:
    """Return the outputs of both models side by side, their other metrics, and the limits."""
    if diff is None or diff.skipped:
        return ()
    return (
        section("Outputs", _outputs(diff)),
        section("Detections", _detections(diff)),
        section("Cost of quantization and of low precision", _costs(diff)),
        headroom_section(diff.rooms, diff.lowest)._replace(is_detail=True),
        choices_section(diff)._replace(is_detail=True),
        section("More metrics", _more_metrics(diff), is_detail=True),
        section("Limits", _limits(diff), is_detail=True),
    )


def comparison_notes(diff: DiffReport | None) -> Iterator[str]:
    """Yield notes about the numbers."""
    if diff is None:
        return
    yield from diff.notes
    if diff.types_only:
        yield f"{diff.loaded} checked the types of the result, and did not open it here: {diff.types_only}."
    yield from partings(diff)
    if diff.extras:
        runs = "; ".join(map(_extra, diff.extras))
        yield f"The models were also compared beyond these inputs: with {runs}."
    for output in diff.outputs:
        differing = round(output.differing * output.size)
        if differing and not output.is_float and output.detections is None:
            those = f"{differing:,} of {count(output.size, 'element')}"
            yield f"Output {output.name!r}: {those} {'differs' if differing == 1 else 'differ'}."
    if diff.redrawn:
        yield (
            f"Errors are close to their limits, so {diff.samples} random inputs were compared{_widened(diff)}. Real"
            " inputs (--inputs) may have larger or smaller errors."
        )
    if diff.noise is not None:
        engine = diff.ran_on.split()[0]
        differs = f"the reference on {engine} differs from itself on the CPU by {number(diff.noise)}"
        yield f"Noise floor: in float32, {differs}."
    low = FORMATS.get(diff.lowest)
    if low is not None and not diff.skipped and "emulated" in diff.ran_on:
        yield (
            "Low precision is emulated: every low-precision value is rounded, but sums run in the CPU's order. A different"
            f" order alone moves outputs by up to {low.moved_by_order}."
        )


def _widened(diff: DiffReport) -> str:
    """Return in a clause how far errors may exceed the limit of the first samples; "" if they may not."""
    usual = [j for j in diff.judgements if j.metric == "usual_rel_l2" and j.limit]
    if not usual:
        return ""
    single = next(
        j.limit / usual[0].limit
        for j in diff.judgements
        if (j.output, j.metric) == (usual[0].output, "rel_l2")
    )
    return f": their typical error may be {TYPICAL:g} times the limit, a single one {single:.0f} times"


def beyond_usual(diff: DiffReport) -> str:
    """Return in a phrase how large the typical error is, if it exceeds the limit of the first samples; "" if not."""
    usual = {j.output: j.limit for j in diff.judgements if j.metric == "usual_rel_l2"}
    typical = (j for j in diff.judgements if j.metric == "typical_rel_l2")
    over = [one for one in typical if one.found > usual[one.output]]
    if not over:
        return ""
    worst = max(over, key=lambda one: one.found / usual[one.output])
    limit = number(usual[worst.output])
    return f", with a typical error of {number(worst.found)} (usual limit {limit})"


def _extra(extra: Extra) -> str:
    """Return what was compared beyond the samples, and the largest error there."""
    errors = [output.rel_l2 for output in extra.outputs if output.is_float]
    if not errors:
        return extra.what
    note = ", of outputs that mean nothing" if extra.is_empty else ""
    return f"{extra.what} (error {number(max(errors))}{note})"


def partings(diff: TextResults) -> Iterator[str]:
    """Yield where sequences of tokens differ first."""
    return (_parting(parting) for parting in diff.tokens if parting.parted)


def _parting(parting: Parting) -> str:
    if not parting.output:
        where = f"The first token that differs is number {parting.position + 1} after prompt {parting.sample // 2 + 1}"
        return f"{where}: {_change(parting)}."
    where = f"position {parting.position}"
    where += f" of sequence {parting.sequence}" if parting.sequences > 1 else ""
    where += f" of sample {parting.sample}" if parting.sample else ""
    parted = f"{parting.parted:,} of {count(parting.sequences, 'sequence')} of tokens"
    diverge = "diverges" if parting.parted == 1 else "diverge"
    return f"Output {parting.output!r}: {parted} {diverge}, the first at {where}: {_change(parting)}."


def _change(parting: Parting) -> str:
    """Return the tokens where sequences diverge, and how close they are."""
    gap = ""
    if parting.gap is not None:
        gap = f", where the reference's logits are {number(parting.gap)} apart"
    return f"{parting.result} instead of {parting.reference}{gap}"


def _outputs(diff: DiffReport) -> Table:
    missed = {
        judgement.output for judgement in diff.judgements if not judgement.passed
    }
    rows = [
        _output(output, is_missed=output.name in missed) for output in diff.outputs
    ]
    if len(rows) > _ROWS:  # rows with faults must be among those that are shown
        rows.sort(key=lambda row: row.status is Status.PASSED)
    return table("outputs", rows)


def _output(d: TensorDiff, *, is_missed: bool) -> TableRow:
    """Return the metrics of one output, with a status that combines its alarm and its limits."""
    status = Status.UNKNOWN if _is_blank(d) else Status.PASSED
    if d.alarm or is_missed:
        status = Status.FAILED if d.alarm else Status.INEXACT
    shapes = map(shape, (d.reference_shape, d.result_shape))
    cells = (
        d.name,
        " → ".join(dict.fromkeys(shapes)),
        " → ".join(dict.fromkeys((d.reference_dtype, d.result_dtype))),
        *map(number, (d.rel_l2, d.max_abs, d.max_rel)),
        number(d.snr_db, 4),
        number(d.cosine, 7),
        _top(d),
        change(d.reference_nan, d.result_nan),
        change(d.reference_inf, d.result_inf),
        change(d.reference_zero, d.result_zero),
    )
    return TableRow(cells, status, d.alarm or _worst(d))


def _worst(d: TensorDiff) -> str:
    if d.worst_index is None or not d.max_abs:
        return ""
    where = f" at {list(d.worst_index)}" if d.worst_index else ""
    where += f" of sample {d.worst_sample}" if d.worst_sample else ""
    return f"Worst{where}: {_scalar(d.worst_result)} instead of {_scalar(d.worst_reference)}."


def _scalar(x: float | str | None) -> str:
    return repr(x) if isinstance(x, str) else number(x, 6)


def _share(share: float | None) -> str:
    """Return a share in percents, and 0 or 100 only if exact."""
    if share is None:
        return "–"
    text = f"{100 * share:.4g}"
    if share < 1 and text == "100":
        return ">99.99 %"
    return f"{text} %"


def _top(d: TensorDiff) -> str:
    """Return the top-1 agreement of floats, and the share of equal elements of ids, labels and the like."""
    is_listed = not d.is_float and d.reference_dtype != "string"
    is_listed = is_listed and d.reference_shape[-1:] > (1,)
    return _share(1 - d.differing if is_listed else d.argmax_agreement)


def _costs(diff: DiffReport) -> list[Part]:
    """Return the errors of both models against the original before quantization."""
    if not diff.costs:
        return []
    rows = [
        TableRow(
            (cost.output, *map(number, (cost.quantized, cost.result, cost.limit))),
            Status.of(cost.passed),
        )
        for cost in diff.costs
    ]
    lead = f"Relative L2 errors against {diff.original}."
    return [hint(lead), table("costs", rows, dtype=diff.lowest)]


def _detections(diff: DiffReport) -> list[Part]:
    """Return the table of matched, lost and new detections."""
    if not diff.detections:
        return []
    rows = []
    for d in diff.detections:
        counts = [f"{n:,}" for n in (d.rows, d.matched, d.lost, d.new)]
        errors = map(number, (d.worst_overlap, d.worst_score, d.error))
        rows.append((", ".join(d.outputs), *counts, *errors))
    lead = (
        "These outputs list what the model selected by value. onnxamp matches rows before it compares them,"
        " because near-equal ones may swap places (--metric elements compares them in place)."
    )
    return [hint(lead), table("detections", rows)]


def _more_metrics(diff: DiffReport) -> Table:
    """Return the metrics that the table of outputs leaves out."""
    rows = (
        (
            d.name,
            *map(number, (d.mean_abs, d.rmse, d.required_tolerance)),
            _share(d.top5_agreement),
            f"{_share(d.differing)} of {d.size:,}",
        )
        for d in diff.outputs
    )
    return table("more-metrics", rows)


def _limits(diff: DiffReport) -> Table:
    """Return the limits, broken ones first."""
    rows = []
    outputs = {output.name: output for output in diff.outputs}
    for one in sorted(diff.judgements, key=lambda judgement: judgement.passed):
        # Cosines are near 1, where three digits would all be nines.
        measured = number(one.found, 7 if one.metric == "cosine" else 3)
        metric = metric_of(one.metric, outputs.get(one.output))
        cells = (one.output, metric, measured, number(one.limit, 7))
        rows.append(TableRow(cells, Status.of(one.passed)))
    return table("limits", rows)


def _layers(diff: DiffReport) -> list[Part]:
    """Return the values that both models share, those with the largest local error first."""
    if not diff.layers:
        return []
    rows = map(_layer, sorted(diff.layers, key=_badness, reverse=True))
    values = count(len(diff.layers), "value")
    lead = f"{values} in both models. Errors are relative L2; a local error is that of the op alone."
    return [hint(lead), table("layers", rows)]


def _layer(row: LayerDiff) -> tuple[str, ...]:
    local = row.local
    accumulated = row.accumulated
    alarms = (side.alarm for side in (local, accumulated) if side and side.alarm)
    peak = "–"
    if accumulated:
        peak = magnitude(accumulated.reference_max, accumulated.reference_zero)
    errors = (
        number(measured.rel_l2 if measured else None)
        for measured in (local, accumulated)
    )
    return row.value, row.op, row.dtype, *errors, peak, next(alarms, row.note or "")


def _badness(row: LayerDiff) -> list[float]:
    return [error.rel_l2 if error else -1.0 for error in (row.local, row.accumulated)]
