"""Report of a check, static and with runs."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from onnxamp._audit import Audit, Finding
from onnxamp._base.words import count
from onnxamp._facts.dtypes import FLOAT16, LOWEST_FIRST
from onnxamp._facts.ops import op_facts
from onnxamp._facts.tables import device_of
from onnxamp._numerics.results import OutOfRange, RunCheck, ValueCheck
from onnxamp._report import magnitude, number, opset_text, size, tally
from onnxamp._report.comparison import (
    first_bad_sentence,
    not_run,
    steps_of,
    where_it_ran,
)
from onnxamp._report.parts import (
    Bars,
    Figure,
    Headline,
    NextStep,
    Part,
    Report,
    Severity,
    Statement,
    Status,
    Table,
    TableRow,
    node_bar,
    node_figure,
    section,
    table,
    traffic_figures,
    weight_bar,
)

_ROWS: Final = 12
"""The number of values that go wrong and that the terminal shows without -v."""


def check_report(
    audit: Audit | None, run: RunCheck | None = None, model: str = ""
) -> Report:
    """Return the report of a check; ``run`` is None if the model was not run."""
    values = run.values if run else ()
    bad = [row for row in values if row.fault or row.inherited]
    fit = run.fit.values if run and run.fit else ()
    sections = [
        section("Beyond float16", table("beyond-float16", map(_out_of_range, fit))),
        section("Values", _values(bad, values), is_detail=not bad, on_page=False),
    ]
    if audit:
        sections = [
            section("Findings", finding_items(audit.findings)),
            section("Scales at risk", _scales(audit)),
            section("Device placement", _placement(audit), on_page=False),
            *sections,
            section("Nodes and weights", _sizes(audit), is_detail=True),
        ]
    cure = run.cure if run else None
    return Report(
        f"check for {audit.target}" if audit else "check",
        _verdict(audit, run),
        models=(model,) if model else (),
        ran=where_it_ran(run),
        figures=_figures(audit) if audit else (),
        sections=tuple(sections),
        steps=(*_exponents_step(run), *steps_of(cure, is_options=True)),
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


def _verdict(audit: Audit | None, run: RunCheck | None) -> Headline:
    status = check_status(audit, run)
    findings = audit.findings if audit else ()
    counts = Counter(finding.severity for finding in findings)
    kinds = [kind for kind in ("error", "warning") if counts[kind]]
    totals = " and ".join(count(counts[kind], kind) for kind in kinds)
    details = (f"The check found {totals}.",) if totals else ()
    left = not_run(run) if run is not None else None
    if left is not None:
        details = (*details, left)
    if run is not None and run.first_bad is not None:
        first_bad = first_bad_sentence(run.first_bad)
        sentence = "A value goes wrong when the model runs."
        return Headline(status, sentence, (first_bad, *details, *_fits(run)))
    if status is Status.FAILED:
        worst = next(finding for finding in findings if finding.severity == "error")
        where = f"{worst.op} {worst.node!r}: " if worst.node else ""
        fault = f"{where}{finding_text(worst)}"
        sentence = "The model fails to load or is known to break."
        return Headline(status, sentence, (*details, fault))
    if run is None or run.skipped:
        skipped = "The model was not run."
        if run is not None and run.skipped:
            skipped = run.skipped
        sentence = "Nothing is known to break, but nothing was run."
        return Headline(status, sentence, (skipped, *details))
    seen = f"{count(len(run.values), 'value')} checked: no NaN, no overflow, nothing lost."
    details = (*details, *_fits(run))
    if status is Status.INEXACT:
        sentence = "Nothing breaks, but there are warnings."
        return Headline(status, sentence, (*details, seen))
    return Headline(status, "Nothing breaks.", (seen, *details))


def finding_text(finding: Finding) -> str:
    """Return a finding and its remedy, as sentences."""
    text = finding.text if finding.text.endswith((".", ":")) else f"{finding.text}."
    return f"{text} {finding.action}".strip()


def finding_items(findings: Iterable[Finding]) -> list[Statement]:
    """Return findings, worst first: one statement for those that differ only by their node."""
    groups: dict[tuple[str, str, str, str], list[Finding]] = {}
    for finding in findings:
        key = finding.severity, finding.kind, finding.text, finding.action
        groups.setdefault(key, []).append(finding)
    items = []
    for (severity, kind, text, action), members in groups.items():
        ops = tally(finding.op for finding in members if finding.op)
        names = tuple(finding.node for finding in members if finding.node)
        level = Severity[severity.upper()]
        sentence = f"{ops}: {text}" if ops else text
        items.append(Statement(sentence, level, kind, names, action))
    # Neighbors with the same action show it once (listed_parts).
    items.sort(key=lambda item: (-item.level, item.label, item.action))
    return items


def _figures(audit: Audit) -> tuple[Figure, ...]:
    counted = _precisions(audit)
    dtype = next((name for name in LOWEST_FIRST if counted[name]), FLOAT16.name)
    weights = [f"{size(n)} {name}" for name, n in audit.weight_bytes.items() if n]
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
        because = "the oldest version that onnxamp knows"
        if since.because:
            because = f"not on {since.because}"
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
        TableRow(
            (scale.node, scale.op, scale.type, scale.stored, scale.why),
            Status.FAILED if scale.stored == scale.low else None,
        )
        for scale in ranked
    )
    return table("scales", rows)


def _precisions(audit: Audit) -> Counter[str]:
    """Return nodes by precision."""
    return Counter(
        node.precision for node in audit.nodes if node.op not in op_facts().uncounted
    )


def _providers(audit: Audit) -> Iterator[Figure]:
    """Return where the nodes run, including Casts and control flow."""
    placed = [node for node in audit.nodes if node.provider]
    providers = Counter(node.provider for node in placed)
    home = device_of(audit.target).upper()
    if placed:
        others = [
            f"{times:,} without a kernel" if name == "none" else f"{times:,} on {name}"
            for name, times in providers.most_common()
            if name != home
        ]
        uncounted = [node for node in placed if node.op in op_facts().uncounted]
        casts = sum(node.op == "Cast" for node in uncounted)
        inner = []
        if casts:
            inner.append(count(casts, "Cast"))
        if bodies := len(uncounted) - casts:
            inner.append(f"{count(bodies, 'node')} of control flow")
        if inner:
            others.append(f"including {' and '.join(inner)}")
        yield Figure(f"nodes on {home}", f"{providers[home]:,}", ", ".join(others))


def _placement(audit: Audit) -> Table:
    """Return where op types run, and in which precision; op types that the target does not run come first."""
    placed = [node for node in audit.nodes if node.provider]
    counts = Counter((node.op, node.provider, node.precision) for node in placed)
    home = device_of(audit.target).upper()

    def rank(kind: tuple[str, str, str]) -> tuple[bool, int, tuple[str, str, str]]:
        _, provider, _ = kind
        return provider == home, -counts[kind], kind

    cells = ((*kind, f"{counts[kind]:,}") for kind in sorted(counts, key=rank))
    return table("placement", cells)


def _sizes(audit: Audit) -> list[Part]:
    return [
        Bars("nodes", (node_bar("", _precisions(audit)),)),
        Bars("weights", (weight_bar("", audit.weight_bytes),)),
    ]


def _fits(run: RunCheck) -> tuple[str, ...]:
    """Return how many values do not fit float16, and how many of them fit with exponents."""
    if run.fit is None:
        return ()
    values = run.fit.values
    fitting = len(run.fit.fitting)
    largest = max(values, key=lambda row: row.largest)
    one = len(values) == 1
    which = repr(largest.value) if one else f"the largest, {largest.value!r},"
    text = f"{count(len(values), 'value')} {'does' if one else 'do'} not fit float16"
    if run.first_bad is None:
        # Or else it would be infinite.
        text += f", and {'is' if one else 'are'} float32"
    text += f": {which} reaches {number(largest.largest)}."
    if not fitting:
        return text, f"--rescale cannot bring {'it' if one else 'them'} into range."
    inputs = " on these random inputs" if run.fit.made_up else ""
    which = f"{fitting:,} of them fit"
    if fitting == len(values):
        which = "It fits" if one else "All fit"
    return text, f"{which} with onnxamp convert --rescale{inputs}."


def _out_of_range(row: OutOfRange) -> tuple[str, ...]:
    """Return a value that does not fit float16, with the effect of exponents."""
    effect = f"does not fit: {row.why}"
    if row.exponent:
        effect = f"{number(row.largest * 2.0**-row.exponent)}, stored times 2^{-row.exponent}"
    return row.value, row.op or "input", number(row.largest), effect


def _exponents_step(run: RunCheck | None) -> tuple[NextStep, ...]:
    """Return the step that suggests exponents, if a trial showed that they help."""
    if run is None or run.fit is None or not run.fit.tried or run.first_bad is None:
        return ()
    if run.cure is not None and run.cure.command == "--rescale":
        return ()
    text = "Tried: no fault is left with --rescale. Convert the original again with"
    return (NextStep(text, "--rescale", is_options=True),)


def _values(bad: Sequence[ValueCheck], values: Iterable[ValueCheck]) -> Table:
    """Return the values that go wrong or inherit a fault, followed by all others."""
    good = (row for row in values if not row.fault and not row.inherited)
    rows = map(_value, (*bad, *good))
    return table("checked-values", rows, shown=min(len(bad), _ROWS))


def _value(row: ValueCheck) -> TableRow:
    m = row.measured
    peaks = (
        magnitude(m.found_max, m.found_zero),
        magnitude(m.reference_max, m.reference_zero),
    )
    counts = (str(n or "") for n in (m.found_nan, m.found_inf, m.flushed))
    problem = row.fault or ("inherited" if row.inherited else "")
    cells = (row.value, row.op, row.dtype, *peaks, *counts, problem)
    return TableRow(cells, Status.FAILED if row.fault else None)


def check_facts(
    checks: Mapping[str, tuple[Audit | None, RunCheck | None]],
) -> Mapping[str, Any]:
    """Return the verdict of a check and its results in JSON; for several models, those of each file."""
    facts = {
        model: {"verdict": check_status(audit, run), "static": audit, "run": run}
        for model, (audit, run) in checks.items()
    }
    return next(iter(facts.values())) if len(facts) == 1 else {"models": facts}
