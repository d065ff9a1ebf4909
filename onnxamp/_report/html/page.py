"""The facts of the three reports, gathered into one :class:`Page` each."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Final

from onnxamp._audit import Audit
from onnxamp._convert.convert import Conversion
from onnxamp._dtypes import LOW_TYPES
from onnxamp._numerics.results import DiffReport, FirstBad, RunCheck
from onnxamp._report.advice import advice, fallbacks
from onnxamp._report.html.facts import (
    OUTPUT_COLUMNS,
    action_of,
    bad_sentence,
    budget_of,
    conversion_figures,
    limit_rows,
    node_figures,
    output_rows,
    shared_limit,
    worst_figure,
)
from onnxamp._report.html.front import front_of, tuned_figures, tuned_verdict
from onnxamp._report.html.records import (
    Budget,
    Figure,
    Level,
    NodeRow,
    Page,
    Status,
    Verdict,
    Window,
    named,
    said,
    window_of,
)
from onnxamp._report.html.rows import Rows, make_rows, of_checks, of_layers
from onnxamp._tuning.results import Tuned

_NOT_COMPARED: Final = Verdict(Status.UNKNOWN, "The models were not compared.")


def conversion_page(
    made: Conversion | None, diff: DiffReport | None, audit: Audit | None, tuned: Tuned | None = None
) -> Page:
    """The page of a conversion.

    Args:
        made: what was done; without it the page is that of the comparison.
        diff: the result against the original, None where nothing was compared.
        audit: of the result.
        tuned: what level auto had to choose from.
    """
    if made is None:
        return diff_page(diff, audit)
    rows = make_rows(
        audit, made.plan, of_layers(diff.layers if diff else (), shared_limit(diff)), diff.first_bad if diff else None
    )
    plan = made.plan
    figures = [*node_figures(rows.nodes), *conversion_figures(made), *(worst_figure(diff) if diff else ())]
    figures += tuned_figures(tuned) if tuned else []
    models = (named(str(made.source)), named(str(made.target)))
    lacking = fallbacks(made)
    notes = (*made.notes, *plan.warnings, *advice(made), *([f"{lacking}."] if lacking else ()))
    verdict = tuned_verdict(tuned) if tuned and diff is None else _conversion_verdict(made, diff)
    page = _page(
        f"{'convert' if diff or not tuned else 'tune'}, {plan.level} {plan.dtype} for {plan.target}", models, verdict,
        rows, figures, diff=diff, window=window_of(LOW_TYPES[plan.dtype]), notes=notes,
        budget=budget_of(made, audit, rows.nodes),
    )  # fmt: skip
    if tuned is None:
        return page
    ran = page.ran or _places(tuned.ran_on, tuned.inputs, tuned.samples)
    return replace(page, front=front_of(tuned), ran=ran)


def diff_page(report: DiffReport | None, audit: Audit | None = None) -> Page:
    """The page of a comparison of two models; ``audit`` is of the result."""
    if report is None:
        return replace(check_page(audit, None), task="diff", title="onnxamp diff", verdict=_NOT_COMPARED)
    rows = make_rows(audit, None, of_layers(report.layers, shared_limit(report)), report.first_bad)
    low = LOW_TYPES.get(report.lowest)
    return _page(
        f"diff, {report.lowest}", (named(report.reference), named(report.result)), _diff_verdict(report), rows,
        worst_figure(report), diff=report, window=window_of(low) if low else None,
        budget=budget_of(None, audit, rows.nodes),
    )  # fmt: skip


def check_page(audit: Audit | None, run: RunCheck | None, model: str = "") -> Page:
    """The page of a check: what is known of a model before it runs, and what running it showed.

    Args:
        audit: of the model.
        run: of the same model, None where it was not run.
        model: how the page calls it.
    """
    rows = make_rows(audit, None, of_checks(run.values if run else ()), run.first_bad if run else None)
    precisions = {row.precision for row in rows.nodes} | {value.dtype for value in rows.values}
    low = next((low for name, low in LOW_TYPES.items() if name in precisions), None)
    figures = [*node_figures(rows.nodes), *_trouble(rows)]
    return _page(
        f"check for {audit.target}" if audit else "check", (named(model),) if model else (), _check_verdict(rows, run),
        rows, figures, run=run, window=window_of(low) if low else None, budget=budget_of(None, audit, rows.nodes),
    )  # fmt: skip


def _page(
    task: str,
    models: tuple[str, ...],
    verdict: Verdict,
    rows: Rows,
    figures: Sequence[Figure],
    *,
    diff: DiffReport | None = None,
    run: RunCheck | None = None,
    window: Window | None,
    notes: Iterable[str] = (),
    budget: Budget,
) -> Page:
    ran = diff or run
    cure = ran.cure if ran else None
    bad = ran.first_bad if ran else None
    told = (*diff.notes, *(diff.warnings if verdict.status is not Status.INEXACT else ())) if diff else ()
    names = [PurePath(model).name or model for model in models]
    return Page(
        title=": ".join(filter(None, (f"onnxamp {task.partition(' ')[0].strip(',')}", " → ".join(names)))),
        task=task,
        models=models,
        ran=_ran(ran),
        verdict=verdict,
        action=action_of(cure, is_options=run is not None),
        figures=tuple(figures),
        window=window,
        limit=shared_limit(diff),
        first_bad=rows.first_bad,
        first_bad_text=said(f"{bad.op}: {bad.alarm}") if bad else "",
        reasons=_reasons(rows.nodes),
        output_columns=OUTPUT_COLUMNS if diff and diff.outputs else (),
        outputs=output_rows(diff) if diff else (),
        limits=limit_rows(diff) if diff else (),
        findings=tuple(sorted(rows.unplaced, key=lambda message: -message.level)),
        notes=tuple(dict.fromkeys(map(said, (*notes, *told)))),
        budget=budget,
        nodes=rows.nodes,
        values=rows.values,
    )


def _ran(ran: DiffReport | RunCheck | None) -> tuple[str, ...]:
    if ran is None:
        return ()
    return _places(ran.ran_on, ran.inputs, ran.samples)


def _places(ran_on: str, inputs: str, samples: int) -> tuple[str, ...]:
    return tuple(map(named, filter(None, (ran_on, inputs, _count(samples, "sample") if samples else ""))))


def _conversion_verdict(made: Conversion, diff: DiffReport | None) -> Verdict:
    plan = made.plan
    head = f"Converted to {plan.dtype}"
    if not any(row.low for row in plan.rows):
        head = "Nothing became low"
    if diff is None:
        return Verdict(Status.UNKNOWN, f"{head}, not validated.", ("The result was not run against the original.",))
    if diff.skipped:
        return Verdict(Status.UNKNOWN, f"{head}, not validated.", (said(diff.skipped),))
    if diff.failure:
        return Verdict(Status.FAILED, f"{head}, but the result fails.", _failure(diff.failure, diff.first_bad))
    if _breaks_limits(diff):
        return Verdict(Status.FAILED, f"{head}, but outside the limits.", _inexact(diff))
    if diff.warnings:
        return Verdict(Status.INEXACT, f"{head}, with more error than usual.", _inexact(diff))
    return Verdict(Status.GOOD, f"{head}: {_outputs(diff)} the original.")


def _diff_verdict(report: DiffReport) -> Verdict:
    if report.skipped:
        return Verdict(Status.UNKNOWN, "The models were not compared.", (said(report.skipped),))
    if report.failure:
        return Verdict(Status.FAILED, "The models differ.", _failure(report.failure, report.first_bad))
    if _breaks_limits(report):
        return Verdict(Status.FAILED, "The models differ by more than the limits.", _inexact(report))
    if report.warnings:
        return Verdict(Status.INEXACT, "The models agree roughly.", _inexact(report))
    return Verdict(Status.GOOD, f"The models agree: {_outputs(report)} the reference.")


def _breaks_limits(diff: DiffReport) -> bool:
    return any(not judgement.passed for judgement in diff.judgements)


def _inexact(diff: DiffReport) -> tuple[str, ...]:
    """What is inexact, and where it starts."""
    return (*map(said, diff.warnings), *((bad_sentence(diff.first_bad),) if diff.first_bad else ()))


def _outputs(diff: DiffReport) -> str:
    count = len(diff.outputs)
    return "the output agrees with" if count == 1 else f"all {count:,} outputs agree with"


def _failure(failure: str, bad: FirstBad | None) -> tuple[str, ...]:
    return (said(failure), bad_sentence(bad)) if bad else (said(failure),)


def _check_verdict(rows: Rows, run: RunCheck | None) -> Verdict:
    levels = Counter(row.level for row in rows.nodes) + Counter(message.level for message in rows.unplaced)
    errors, warnings = levels[Level.ERROR], levels[Level.WARNING]
    trouble = f"{_count(errors, 'error')} and {_count(warnings, 'warning')} in {len(rows.nodes):,} nodes."
    if run is not None and run.first_bad is not None:
        return Verdict(Status.FAILED, "A value breaks when the model runs.", (bad_sentence(run.first_bad),))
    if errors:
        return Verdict(Status.FAILED, "The model will not load, or breaks.", (trouble, *_worst(rows)))
    if run is None or run.skipped:
        skipped = said(run.skipped) if run is not None and run.skipped else "The model was not run."
        details = (skipped, trouble) if warnings else (skipped,)
        return Verdict(Status.UNKNOWN, "Nothing is known to break, but nothing was run.", details)
    if warnings:
        return Verdict(Status.INEXACT, "Nothing breaks, with reservations.", (trouble,))
    return Verdict(Status.GOOD, "Nothing breaks: no NaN, no overflow, no value lost.")


def _worst(rows: Rows) -> list[str]:
    """The first error, as a sentence of its own."""
    every = (*rows.unplaced, *(message for row in rows.nodes for message in row.messages))
    return [message.text for message in every if message.level is Level.ERROR][:1]


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def _trouble(rows: Rows) -> list[Figure]:
    """How many nodes have trouble."""
    levels = Counter(row.level for row in rows.nodes)
    return [
        Figure("nodes with errors", f"{levels[Level.ERROR]:,}", f"of {len(rows.nodes):,}"),
        Figure("nodes with warnings", f"{levels[Level.WARNING]:,}"),
    ]


def _reasons(nodes: Iterable[NodeRow]) -> tuple[tuple[str, int], ...]:
    kept = Counter(row.why for row in nodes if row.why and row.precision in ("float32", "mixed"))
    return tuple(sorted(kept.items(), key=lambda item: (-item[1], item[0])))
