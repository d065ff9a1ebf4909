"""Report of a check, static and with runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from onnxamp._audit.findings import Audit, Finding
from onnxamp._dtypes import FLOAT16, LOWEST_FIRST
from onnxamp._numerics.results import RangeFit, RunCheck, ValueCheck
from onnxamp._ops.facts import op_facts
from onnxamp._ops.targets import device_of
from onnxamp._report.comparison import first_bad_sentence, steps_of, where_it_ran
from onnxamp._report.formats import document
from onnxamp._report.parts import (
    Bars,
    Figure,
    Item,
    Level,
    Part,
    Report,
    Row,
    Status,
    Step,
    Table,
    Verdict,
    node_bar,
    node_figure,
    section,
    table,
    traffic_figures,
    weight_bar,
)
from onnxamp._report.text import count, magnitude, number, opset_text, size, tally

_ROWS: Final = 12
"""Values, and kinds of nodes, that the terminal shows without -v."""


def check_report(
    audit: Audit | None, run: RunCheck | None = None, model: str = ""
) -> Report:
    """Return the report of a check; ``run`` is None if the model was not run."""
    values = run.values if run else ()
    bad = [row for row in values if row.fault or row.inherited]
    return Report(
        f"check for {audit.target}" if audit else "check",
        _verdict(audit, run),
        (model,) if model else (),
        where_it_ran(run),
        _figures(audit) if audit else (),
        (
            section("Findings", finding_items(audit)),
            section("Scales at risk", _scales(audit) if audit else ()),
            section(
                "Device placement", _placement(audit) if audit else (), on_page=False
            ),
            section(
                "Beyond float16", _out_of_range(run.fit) if run and run.fit else ()
            ),
            section("Values", _values(bad, values), is_detail=not bad, on_page=False),
            section(
                "Nodes and weights", _sizes(audit) if audit else (), is_detail=True
            ),
        ),
        (*_exponents_step(run), *steps_of(run.cure if run else None, is_options=True)),
    )


def run_report(run: RunCheck) -> Report:
    """Return the part about running the model."""
    return check_report(None, run)


def check_status(audit: Audit | None, run: RunCheck | None) -> Status:
    """Return the verdict of a check in one word."""
    severities = {finding.severity for finding in audit.findings} if audit else set()
    if "error" in severities or (run is not None and run.first_bad is not None):
        return Status.FAILED
    if run is None or run.skipped:
        return Status.UNKNOWN
    return Status.INEXACT if "warning" in severities else Status.PASSED


def _verdict(audit: Audit | None, run: RunCheck | None) -> Verdict:
    status = check_status(audit, run)
    counts = (
        Counter(finding.severity for finding in audit.findings)
        if audit
        else Counter[str]()
    )
    told = " and ".join(
        count(counts[severity], severity)
        for severity in ("error", "warning")
        if counts[severity]
    )
    found = (f"The check found {told}.",) if told else ()
    if run is not None and run.first_bad is not None:
        return Verdict(
            status,
            "A value goes wrong when the model runs.",
            (first_bad_sentence(run.first_bad), *found, *_fits(run)),
        )
    if status is Status.FAILED and audit is not None:
        worst = next(
            finding for finding in audit.findings if finding.severity == "error"
        )
        where = f"{worst.op} {worst.node!r}: " if worst.node else ""
        found = (*found, f"{where}{finding_text(worst)}")
        return Verdict(status, "The model fails to load or is known to break.", found)
    if run is None or run.skipped:
        skipped = (
            run.skipped if run is not None and run.skipped else "The model was not run."
        )
        return Verdict(
            status, "Nothing is known to break, but nothing was run.", (skipped, *found)
        )
    seen = (
        f"{count(len(run.values), 'value')} checked: no NaN, no overflow, nothing lost."
    )
    found = (*found, *_fits(run))
    if status is Status.INEXACT:
        return Verdict(
            status, "Nothing breaks, but there are warnings.", (*found, seen)
        )
    return Verdict(status, "Nothing breaks.", (seen, *found))


def finding_text(finding: Finding) -> str:
    """Return a finding and its remedy, as sentences."""
    text = finding.text if finding.text.endswith((".", ":")) else f"{finding.text}."
    return f"{text} {finding.action}".strip()


def finding_items(audit: Audit | None) -> list[Item]:
    """Findings, worst first: one item for those that differ only by their node."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in audit.findings if audit else ():
        key = finding.severity, finding.kind, finding.text, finding.action
        groups.setdefault(key, []).append(finding)
    items = []
    for (severity, kind, text, action), members in groups.items():
        ops = tally(finding.op for finding in members if finding.op)
        names = tuple(finding.node for finding in members if finding.node)
        level = Level[severity.upper()]
        items.append(
            Item(f"{ops}: {text}" if ops else text, level, kind, names, action)
        )
    items.sort(key=lambda item: (-item.level, item.label, item.action))
    return items


def _figures(audit: Audit) -> tuple[Figure, ...]:
    counted = _precisions(audit)
    dtype = next((name for name in LOWEST_FIRST if counted[name]), FLOAT16.name)
    weights = [
        f"{size(bytes_)} {name}"
        for name, bytes_ in audit.weight_bytes.items()
        if bytes_
    ]
    domains = sorted(audit.opsets.items(), key=lambda entry: entry[0] != "")
    figures = [
        *node_figure(dtype, counted),
        *_quantized(audit),
        *(traffic_figures(audit) if audit.nodes else ()),
        Figure("weights", size(sum(audit.weight_bytes.values())), ", ".join(weights)),
        *_providers(audit),
        Figure("opset", opset_text(domains[:1]), opset_text(domains[1:])),
    ]
    if since := audit.loads_from:
        because = (
            f"not on {since.because}"
            if since.because
            else "the oldest version that onnxamp knows"
        )
        figures.append(Figure("loads from ONNX Runtime", since.version, because))
    if engine := audit.engine:
        built = size(engine.bytes) if engine.built else "not built"
        figures.append(Figure("engine", built, f"strongly typed, {engine.by}"))
    return tuple(figures)


def _quantized(audit: Audit) -> Iterator[Figure]:
    """Yield nodes of a quantized network, by type and role."""
    counts = Counter(node.quantized for node in audit.nodes if node.quantized)
    if counts:
        kinds = ", ".join(f"{times:,} {kind}" for kind, times in counts.most_common())
        yield Figure("quantized nodes", f"{counts.total():,}", kinds)


def _scales(audit: Audit) -> Table:
    """Return scales that do not fit low precision; those that are low come first."""
    ranked = sorted(audit.scales, key=lambda scale: scale.stored != scale.low)
    rows = (
        Row(
            (scale.node, scale.op, scale.type, scale.stored, scale.why),
            Status.FAILED if scale.stored == scale.low else None,
        )
        for scale in ranked
    )
    columns = ("node", "op", "type", "scale", "why it is at risk")
    return table(columns, rows, shown=_ROWS, prose=(4,), drop=(1, 2))


def _precisions(audit: Audit) -> Counter[str]:
    """Return nodes by precision."""
    return Counter(
        node.precision for node in audit.nodes if node.op not in op_facts().uncounted
    )


def _providers(audit: Audit) -> Iterator[Figure]:
    """Return where the nodes run, including Casts and control flow."""
    placed = [node for node in audit.nodes if node.provider]
    providers, home = (
        Counter(node.provider for node in placed),
        device_of(audit.target).upper(),
    )
    if placed:
        others = [
            f"{times:,} without a kernel" if name == "none" else f"{times:,} on {name}"
            for name, times in providers.most_common()
            if name != home
        ]
        uncounted = Counter(
            node.op == "Cast" for node in placed if node.op in op_facts().uncounted
        )
        told = [count(uncounted[True], "Cast")] if uncounted[True] else []
        told += (
            [f"{count(uncounted[False], 'node')} of control flow"]
            if uncounted[False]
            else []
        )
        others += [f"counting {' and '.join(told)}"] if told else []
        yield Figure(f"nodes on {home}", f"{providers[home]:,}", ", ".join(others))


def _placement(audit: Audit) -> Table:
    """Return where op types run, and in which precision; op types that the target does not run come first."""
    rows = Counter(
        (node.op, node.provider, node.precision)
        for node in audit.nodes
        if node.provider
    )
    home = device_of(audit.target).upper()
    ranked = sorted(rows.items(), key=lambda row: (row[0][1] == home, -row[1], row[0]))
    cells = (
        (op, provider, precision, f"{n:,}") for (op, provider, precision), n in ranked
    )
    return table(
        ("op", "runs on", "precision", "nodes"), cells, right=(3,), shown=_ROWS, drop=()
    )


def _sizes(audit: Audit) -> list[Part]:
    return [
        Bars("nodes", (node_bar("", _precisions(audit)),)),
        Bars("weights", (weight_bar("", audit.weight_bytes),)),
    ]


def _fits(run: RunCheck) -> tuple[str, ...]:
    """Return how many values do not fit float16, and how many of them fit with exponents."""
    if run.fit is None:
        return ()
    values, fitting = run.fit.values, len(run.fit.fitting)
    largest = max(values, key=lambda row: row.largest)
    one = len(values) == 1
    which = repr(largest.value) if one else f"the largest, {largest.value!r},"
    text = (
        f"{count(len(values), 'value')} {'does' if one else 'do'} not fit float16: {which} reaches"
        f" {number(largest.largest)}."
    )
    if not fitting:
        none = (
            "No exponent brings it into range."
            if one
            else "No exponents bring them into range."
        )
        return text, none
    inputs = " on these random inputs" if run.fit.made_up else ""
    which = f"{fitting:,} of them fit"
    if fitting == len(values):
        which = "It fits" if one else "All fit"
    return text, f"{which} with exponents{inputs}: onnxamp convert --rescale."


def _out_of_range(fit: RangeFit) -> Table:
    """Return the table of values that do not fit float16, with the effect of exponents."""
    rows = []
    for row in fit.values:
        stored = f"{number(row.largest * 2.0**-row.exponent)}, stored times 2^{-row.exponent}"
        told = stored if row.exponent else f"does not fit: {row.why}"
        rows.append((row.value, row.op or "input", number(row.largest), told))
    columns = ("value", "op", "reaches", "with exponents")
    return table(columns, rows, right=(2,), shown=_ROWS, drop=(1,))


def _exponents_step(run: RunCheck | None) -> tuple[Step, ...]:
    """Return the step that suggests exponents, if a trial showed that they help."""
    if run is None or run.fit is None or not run.fit.tried or run.first_bad is None:
        return ()
    if run.cure is not None and run.cure.command == "--rescale":
        return ()
    text = "Tried: no fault is left with exponents. Convert the original again with"
    return (Step(text, "--rescale", is_options=True),)


def _values(bad: Sequence[ValueCheck], values: Iterable[ValueCheck]) -> Table:
    """Return the values that go wrong or inherit a fault, followed by all others."""
    columns = [
        "value",
        "op",
        "type",
        "max |x|",
        "exact max |x|",
        "NaN",
        "Inf",
        "flushed",
    ]
    rows = map(
        _value, (*bad, *(row for row in values if not row.fault and not row.inherited))
    )
    shown = min(len(bad), _ROWS)
    drop = (2, 7, 4, 6, 5)
    return table([*columns, "problem"], rows, right=range(3, 8), shown=shown, drop=drop)


def _value(row: ValueCheck) -> Row:
    m = row.measured
    peaks = (
        magnitude(m.found_max, m.found_zero),
        magnitude(m.reference_max, m.reference_zero),
    )
    counts = (str(n or "") for n in (m.found_nan, m.found_inf, m.flushed))
    problem = row.fault or ("inherited" if row.inherited else "")
    cells = (row.value, row.op, row.dtype, *peaks, *counts, problem)
    return Row(cells, Status.FAILED if row.fault else None)


def check_json(checks: Mapping[str, tuple[Audit | None, RunCheck | None]]) -> str:
    """Return the report of a check; for several models, one for each file."""
    facts = {
        model: {"verdict": check_status(audit, run), "static": audit, "run": run}
        for model, (audit, run) in checks.items()
    }
    only = next(iter(facts.values()))
    return document("check", only if len(facts) == 1 else {"models": facts})
