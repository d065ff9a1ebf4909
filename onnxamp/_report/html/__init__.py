"""The page as data: a report, with the nodes in execution order, and the plot of a tuning's candidates."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePath

from onnxamp._audit import Audit
from onnxamp._base.records import record
from onnxamp._convert.plan import Plan
from onnxamp._facts.dtypes import FORMATS, Format
from onnxamp._job.writing import Conversion
from onnxamp._numerics.judging import usual_limits
from onnxamp._numerics.results import DiffReport, FirstBad, RunCheck
from onnxamp._report.check import check_report, finding_items
from onnxamp._report.comparison import diff_report
from onnxamp._report.conversion import conversion_report, preview_report
from onnxamp._report.html.nodes import Measured, NodeRow, ValueRow, node_rows
from onnxamp._report.html.plot import Plot, plot_of
from onnxamp._report.parts import Report, section
from onnxamp._report.tuning import tuning_report
from onnxamp._tuning.results import Tuned


@record
class Page:
    """All that the page shows. Sections without data are left out of it.

    ``low`` is the low-precision type whose range the figures show, ``limit`` the limit of the relative L2 error if all
    outputs share it, ``first_bad`` the number of the node that goes wrong first.
    """

    report: Report
    nodes: tuple[NodeRow, ...] = ()
    values: tuple[ValueRow, ...] = ()
    low: Format | None = None
    limit: float | None = None
    first_bad: int | None = None
    first_bad_text: str = ""
    plot: Plot | None = None

    @property
    def title(self) -> str:
        """The command and the names of its models."""
        command = f"onnxamp {self.report.task.partition(' ')[0].strip(',')}"
        models = self.report.models
        names = " → ".join(PurePath(model).name or model for model in models)
        return f"{command}: {names}" if names else command

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Reason -> nodes that stay in float32 for it, most frequent first."""
        rows = [row for row in self.nodes if row.precision in ("float32", "mixed")]
        kept = Counter(row.why for row in rows if row.why)
        return sorted(kept.items(), key=lambda item: (-item[1], item[0]))


def _joined(
    report: Report,
    audit: Audit | None,
    measured: Iterable[Measured],
    *,
    bad: FirstBad | None,
    limit: float | None = None,
    plan: Plan | None = None,
    low: Format | None = None,
) -> Page:
    """Return the page with everything that is known about nodes; the arguments are those of :func:`node_rows`."""
    nodes, values, first_bad = node_rows(
        audit, measured, bad=bad, limit=limit, plan=plan
    )
    return Page(
        report=report,
        nodes=nodes,
        values=values,
        low=low,
        limit=limit,
        first_bad=first_bad,
        first_bad_text=f"{bad.op}: {bad.alarm}" if bad else "",
    )


def conversion_page(
    conversion: Conversion,
    diff: DiffReport | None,
    audit: Audit | None,
    tuned: Tuned | None = None,
    compared: DiffReport | None = None,
) -> Page:
    """Return the page of a conversion.

    Args:
        conversion: what was done.
        diff: the result against the original, None if nothing was compared.
        audit: of the result.
        tuned: the candidates of level auto.
        compared: the result against the original if it was not judged: its values, and the figures of texts.
    """
    conversion = replace(conversion, validation=diff)
    measured = diff or compared
    if tuned is None:
        report = conversion_report(conversion, audit)
        return _page(report, audit, measured, diff, conversion.plan)
    report = tuning_report(conversion, tuned, audit=audit, compared=compared)
    page = _page(report, audit, measured, diff, conversion.plan)
    return replace(page, plot=plot_of(tuned))


def preview_page(conversion: Conversion, audit: Audit, command: str) -> Page:
    """Return the page of a conversion that was only planned. ``audit`` is of the model that ``command`` would write."""
    return _page(
        preview_report(conversion, audit, command), audit, None, None, conversion.plan
    )


def diff_page(diff: DiffReport, audit: Audit | None = None) -> Page:
    """Return the page of a comparison of two models; ``audit`` is of the result."""
    return _page(diff_report(diff), audit, diff, diff)


def _page(
    report: Report,
    audit: Audit | None,
    measured: DiffReport | None,
    judged: DiffReport | None,
    plan: Plan | None = None,
) -> Page:
    """Return the page of a result, with the findings about it.

    Args:
        report: its report.
        audit: of the result.
        measured: the comparison whose values are shown.
        judged: the comparison that decides whether the result is good.
        plan: of the conversion that made it.
    """
    faults = audit.findings if audit else ()
    findings = section("Findings in the result", finding_items(faults))
    lowest = measured.lowest if measured else ""
    if plan is not None:
        lowest = plan.dtype
    return _joined(
        report._replace(sections=(*report.sections, findings)),
        audit,
        measured.layers if measured else (),
        bad=judged.first_bad if judged else None,
        limit=_shared_limit(judged) if judged else None,
        plan=plan,
        low=FORMATS.get(lowest),
    )


def check_page(audit: Audit | None, run: RunCheck | None, model: str = "") -> Page:
    """Return the page of a check: facts about a model before it runs, and measurements.

    Args:
        audit: of the model.
        run: of the same model, None if it did not run.
        model: its name on the page.
    """
    page = _joined(
        check_report(audit, run, model),
        audit,
        run.values if run else (),
        bad=run.first_bad if run else None,
    )
    seen = {row.precision for row in page.nodes} | {row.dtype for row in page.values}
    low = next((low for name, low in FORMATS.items() if name in seen), None)
    return replace(page, low=low)


def _shared_limit(diff: DiffReport) -> float | None:
    """Return the limit of the relative L2 error, if there is just one."""
    # The plots of all values show one limit.
    limits = set(usual_limits(diff.judgements))
    return limits.pop() if len(limits) == 1 else None
