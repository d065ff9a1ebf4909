"""What checking a model found: by looking at it, and by running it."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Final

from onnxamp._audit.findings import Audit, Engine, Finding, LoadsFrom
from onnxamp._dtypes import FLOAT16, LOWEST_FIRST
from onnxamp._numerics.results import RunCheck, ValueCheck
from onnxamp._ops.facts import op_facts
from onnxamp._ops.targets import device_of
from onnxamp._report import parts
from onnxamp._report.comparison import first_bad_sentence, steps_of, where_it_ran
from onnxamp._report.machine import document
from onnxamp._report.parts import node_bar, node_figure, traffic_figures, weight_bar
from onnxamp._report.text import count, magnitude, number, opset_text, size, tally

_ROWS: Final = 12
"""Values, and kinds of nodes, that the terminal shows without -v."""
LEVELS: Final = {
    "error": parts.Level.ERROR,
    "warning": parts.Level.WARNING,
    "note": parts.Level.NOTE,
}
"""Severities of findings."""


def check_report(audit: Audit | None, run: RunCheck | None = None, model: str = "") -> parts.Report:
    """What a check found; ``run`` is None where the model was not run."""
    findings = finding_items(audit) if audit else []
    return parts.Report(
        f"check for {audit.target}" if audit else "check",
        _verdict(audit, run),
        (model,) if model else (),
        where_it_ran(run),
        _figures(audit) if audit else (),
        (
            parts.section("Findings", findings),
            parts.section(
                "Device placement",
                [_placement(audit)] if audit and _is_placed(audit) else [],
                on_page=False,
            ),
            parts.section("Beyond float16", _out_of_range(run)),
            parts.section(
                "Values", _values(run) if run else [], is_detail=not _bad_values(run), on_page=False
            ),
            parts.section("Nodes and weights", _sizes(audit) if audit else [], is_detail=True),
        ),
        (*_exponents_step(run), *steps_of(run.cure if run else None, is_options=True)),
    )


def _is_placed(audit: Audit) -> bool:
    """Whether anything is known of where nodes run."""
    return any(node.provider for node in audit.nodes)


def run_report(run: RunCheck) -> parts.Report:
    """What running a model showed."""
    return check_report(None, run)


def check_status(audit: Audit | None, run: RunCheck | None) -> parts.Status:
    """The verdict of a check in one word."""
    severities = {finding.severity for finding in audit.findings} if audit else set()
    if "error" in severities or (run is not None and run.first_bad is not None):
        return parts.Status.FAILED
    if run is None or run.skipped:
        return parts.Status.UNKNOWN
    return parts.Status.INEXACT if "warning" in severities else parts.Status.PASSED


def _verdict(audit: Audit | None, run: RunCheck | None) -> parts.Verdict:
    status = check_status(audit, run)
    counts = Counter(finding.severity for finding in audit.findings) if audit else Counter[str]()
    told = " and ".join(
        count(counts[severity], severity) for severity in ("error", "warning") if counts[severity]
    )
    found = (f"The check found {told}.",) if told else ()
    if run is not None and run.first_bad is not None:
        return parts.Verdict(
            status,
            "A value goes wrong when the model runs.",
            (first_bad_sentence(run.first_bad), *found, *_fits(run)),
        )
    if status is parts.Status.FAILED and audit is not None:
        worst = next(finding for finding in audit.findings if finding.severity == "error")
        where = f"{worst.op} {worst.node!r}: " if worst.node else ""
        found = (*found, f"{where}{finding_text(worst)}")
        return parts.Verdict(status, "The model fails to load or is known to break.", found)
    if run is None or run.skipped:
        skipped = run.skipped if run is not None and run.skipped else "The model was not run."
        return parts.Verdict(
            status, "Nothing is known to break, but nothing was run.", (skipped, *found)
        )
    seen = f"{count(len(run.values), 'value')} checked: no NaN, no overflow, nothing lost."
    found = (*found, *_fits(run))
    if status is parts.Status.INEXACT:
        return parts.Verdict(status, "Nothing breaks, but there are warnings.", (*found, seen))
    return parts.Verdict(status, "Nothing breaks.", (seen, *found))


def finding_text(finding: Finding) -> str:
    """A finding and what to do about it, as sentences."""
    text = finding.text if finding.text.endswith((".", ":")) else f"{finding.text}."
    return f"{text} {finding.action}".strip()


def finding_items(audit: Audit) -> list[parts.Item]:
    """Findings, worst first: one item for those that differ only by their node, and an action behind all it is for."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in audit.findings:
        groups.setdefault(
            (finding.severity, finding.kind, finding.text, finding.action), []
        ).append(finding)
    items = []
    for (severity, kind, text, action), members in groups.items():
        ops = tally(finding.op for finding in members if finding.op)
        names = tuple(finding.node for finding in members if finding.node)
        level = LEVELS.get(severity, parts.Level.NOTE)
        items.append(parts.Item(f"{ops}: {text}" if ops else text, level, kind, names, action))
    items.sort(key=lambda item: (-item.level, item.label, item.action))
    for position, (item, behind) in enumerate(pairwise(items)):
        if (item.label, item.action) == (behind.label, behind.action):
            items[position] = replace(item, action="")
    return items


def _figures(audit: Audit) -> tuple[parts.Figure, ...]:
    counted = Counter(node.precision for node in audit.nodes if node.op not in op_facts().uncounted)
    dtype = next((name for name in LOWEST_FIRST if counted[name]), FLOAT16.name)
    weights = ", ".join(
        f"{size(bytes_)} {name}" for name, bytes_ in audit.weight_bytes.items() if bytes_
    )
    return (
        *node_figure(dtype, counted),
        *(traffic_figures(audit) if audit.nodes else ()),
        parts.Figure("weights", size(sum(audit.weight_bytes.values())), weights),
        *_providers(audit),
        _opset(audit.opsets),
        *([_since(audit.loads_from)] if audit.loads_from else []),
        *([_engine(audit.engine)] if audit.engine else []),
    )


def _opset(opsets: Mapping[str, int]) -> parts.Figure:
    """The opset of ONNX, and those of other domains, of which there may be many."""
    entries = sorted(opsets.items(), key=lambda entry: entry[0] != "")
    return parts.Figure("opset", opset_text(entries[:1]), opset_text(entries[1:]))


def _engine(engine: Engine) -> parts.Figure:
    return parts.Figure(
        "engine",
        size(engine.bytes) if engine.built else "not built",
        f"strongly typed, {engine.by}",
    )


def _since(found: LoadsFrom) -> parts.Figure:
    because = f"not on {found.because}" if found.because else "the oldest that is known"
    return parts.Figure("loads from ONNX Runtime", found.version, because)


def _providers(audit: Audit) -> Iterator[parts.Figure]:
    """Where the nodes run, Casts and control flow among them."""
    placed = [node for node in audit.nodes if node.provider]
    providers, home = Counter(node.provider for node in placed), device_of(audit.target).upper()
    if placed:
        others = [
            f"{times:,} without a kernel" if name == "none" else f"{times:,} on {name}"
            for name, times in providers.most_common()
            if name != home
        ]
        uncounted = Counter(node.op == "Cast" for node in placed if node.op in op_facts().uncounted)
        told = [count(uncounted[True], "Cast")] if uncounted[True] else []
        told += [f"{count(uncounted[False], 'node')} of control flow"] if uncounted[False] else []
        others += [f"counting {' and '.join(told)}"] if told else []
        yield parts.Figure(f"nodes on {home}", f"{providers[home]:,}", ", ".join(others))


def _placement(audit: Audit) -> parts.Table:
    """Where op types run, and in which precision; those that the target does not run come first."""
    rows = Counter(
        (node.op, node.provider, node.precision) for node in audit.nodes if node.provider
    )
    home = device_of(audit.target).upper()
    ranked = sorted(rows.items(), key=lambda row: (row[0][1] == home, -row[1], row[0]))
    cells = ((op, provider, precision, f"{n:,}") for (op, provider, precision), n in ranked)
    return parts.table(
        ("op", "runs on", "precision", "nodes"), cells, right=(3,), shown=_ROWS, drop=()
    )


def _sizes(audit: Audit) -> list[parts.Part]:
    counted = Counter(node.precision for node in audit.nodes if node.op not in op_facts().uncounted)
    groups = (
        parts.Bars("nodes", (node_bar("", counted),)),
        parts.Bars("weights", (weight_bar("", audit.weight_bytes),)),
    )
    return [group for group in groups if group.bars[0].shares]


def _fits(run: RunCheck) -> tuple[str, ...]:
    """How many values do not fit float16, and how many of them do with exponents."""
    if run.fit is None:
        return ()
    values, fitting = run.fit.values, run.fit.fitting
    largest = max(values, key=lambda row: row.largest)
    one = len(values) == 1
    text = f"{count(len(values), 'value')} {'does' if one else 'do'} not fit float16: {largest.value!r} reaches"
    text = f"{text} {number(largest.largest)}."
    if not fitting:
        return (
            text,
            "No exponent brings it into range." if one else "No exponents bring them into range.",
        )
    inputs = " on these made-up inputs" if run.fit.made_up else ""
    if len(fitting) == len(values):
        return (
            text,
            f"{'It fits' if one else 'All fit'} with exponents{inputs}: onnxamp convert --rescale.",
        )
    return (
        text,
        f"{len(fitting):,} of them fit with exponents{inputs}: onnxamp convert --rescale.",
    )


def _out_of_range(run: RunCheck | None) -> list[parts.Part]:
    """The values that do not fit float16, and what exponents do to them."""
    if run is None or run.fit is None:
        return []
    rows = (
        (
            row.value,
            row.op or "input",
            number(row.largest),
            f"{number(row.largest * 2.0**-row.exponent)}, stored times 2^{-row.exponent}"
            if row.exponent
            else f"does not fit: {row.why}",
        )
        for row in run.fit.values
    )
    columns = ("value", "op", "reaches", "with exponents")
    return [parts.table(columns, rows, right=(2,), shown=_ROWS, drop=(1,))]


def _exponents_step(run: RunCheck | None) -> tuple[parts.Step, ...]:
    """Exponents as the way out, where they were seen to help."""
    told = run is not None and run.cure is not None and run.cure.command == "--rescale"
    if run is None or run.fit is None or not run.fit.tried or run.first_bad is None or told:
        return ()
    if run.cure is not None and run.cure.command == "--rescale":
        return ()
    text = "Tried: no fault is left with exponents. Convert the original again with"
    return (parts.Step(text, "--rescale", is_options=True),)


def _values(run: RunCheck) -> list[parts.Part]:
    """The values that go wrong, or pass on what did, and then all others."""
    columns = (
        "value",
        "op",
        "type",
        "max |x|",
        "exact max |x|",
        "NaN",
        "Inf",
        "flushed",
        "problem",
    )
    bad = _bad_values(run)
    good = [row for row in run.values if not row.fault and not row.inherited]
    shown = min(len(bad), _ROWS)
    rows = map(_value, (*bad, *good))
    return (
        [parts.table(columns, rows, right=range(3, 8), shown=shown, drop=(2, 7, 4, 6, 5))]
        if run.values
        else []
    )


def _bad_values(run: RunCheck | None) -> list[ValueCheck]:
    return [row for row in run.values if row.fault or row.inherited] if run else []


def _value(row: ValueCheck) -> parts.Row:
    m = row.measured
    peaks = magnitude(m.found_max, m.found_zero), magnitude(m.reference_max, m.reference_zero)
    counts = (str(n or "") for n in (m.found_nan, m.found_inf, m.flushed))
    problem = row.fault or ("inherited" if row.inherited else "")
    return parts.Row(
        (row.value, row.op, row.dtype, *peaks, *counts, problem),
        parts.Status.FAILED if row.fault else None,
    )


def check_json(audit: Audit | None, run: RunCheck | None) -> str:
    """What a check found."""
    return document("check", {"verdict": check_status(audit, run), "static": audit, "run": run})
