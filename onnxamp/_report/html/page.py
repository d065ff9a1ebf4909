"""The page: a report, and what the page draws and lists besides."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath

from onnxamp._audit.findings import Audit
from onnxamp._convert.plan import Plan
from onnxamp._dtypes import FORMATS, Format
from onnxamp._job.writing import Conversion
from onnxamp._numerics.results import DiffReport, LayerDiff, RunCheck
from onnxamp._report.check import check_report, finding_items
from onnxamp._report.comparison import diff_report
from onnxamp._report.conversion import conversion_report, preview_report
from onnxamp._report.html.nodes import Measured, NodeRow, ValueRow, join_nodes
from onnxamp._report.html.plot import Plot, plot_of
from onnxamp._report.parts import Report, section
from onnxamp._report.tuning import tuning_report
from onnxamp._tuning.results import Tuned


@dataclass(frozen=True, slots=True)
class Page:
    """All that the page shows. Sections without data are left out of it.

    ``low`` is the low-precision type whose range the figures show, ``limit`` the limit of the relative L2 error where
    all outputs share one, ``first_bad`` the number of the node that goes wrong first.
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
        """What was done to which models."""
        command = f"onnxamp {self.report.task.partition(' ')[0].strip(',')}"
        names = " → ".join(PurePath(model).name or model for model in self.report.models)
        return f"{command}: {names}" if names else command

    @property
    def reasons(self) -> list[tuple[str, int]]:
        """Reason -> nodes that stay float32 for it, most frequent first."""
        kept = Counter(row.why for row in self.nodes if row.why and row.precision in ("float32", "mixed"))
        return sorted(kept.items(), key=lambda item: (-item[1], item[0]))


def conversion_page(
    made: Conversion | None,
    diff: DiffReport | None,
    audit: Audit | None,
    tuned: Tuned | None = None,
    layers: Iterable[LayerDiff] = (),
) -> Page:
    """The page of a conversion.

    Args:
        made: what was done; without it the page is that of the comparison.
        diff: the result against the original, None where nothing was compared.
        audit: of the result.
        tuned: what level auto had to choose from.
        layers: measured values, if there is no ``diff`` that holds them.
    """
    if made is None:
        return diff_page(diff, audit)
    made = replace(made, validation=diff)
    report = tuning_report(made, tuned, audit=audit) if tuned else conversion_report(made, audit)
    page = _page(_with_findings(report, audit), audit, diff.layers if diff else layers, diff, made.plan)
    return replace(page, low=FORMATS[made.plan.dtype], plot=plot_of(tuned) if tuned else None)


def preview_page(made: Conversion, audit: Audit, command: str) -> Page:
    """The page of a conversion that was not made. ``audit`` is of the model that ``command`` would write."""
    page = _page(_with_findings(preview_report(made, audit, command), audit), audit, (), None, made.plan)
    return replace(page, low=FORMATS[made.plan.dtype])


def diff_page(diff: DiffReport | None, audit: Audit | None = None) -> Page:
    """The page of a comparison of two models; ``audit`` is of the result."""
    page = _page(_with_findings(diff_report(diff), audit), audit, diff.layers if diff else (), diff)
    return replace(page, low=FORMATS.get(diff.lowest) if diff else None)


def check_page(audit: Audit | None, run: RunCheck | None, model: str = "") -> Page:
    """The page of a check: what is known of a model before it runs, and what running it showed.

    Args:
        audit: of the model.
        run: of the same model, None where it was not run.
        model: how the page calls it.
    """
    page = _page(check_report(audit, run, model), audit, run.values if run else (), run)
    precisions = {row.precision for row in page.nodes} | {value.dtype for value in page.values}
    return replace(page, low=next((low for name, low in FORMATS.items() if name in precisions), None))


def _page(
    report: Report,
    audit: Audit | None,
    measured: Iterable[Measured],
    ran: DiffReport | RunCheck | None,
    plan: Plan | None = None,
) -> Page:
    bad, limit = ran.first_bad if ran else None, _shared_limit(ran) if isinstance(ran, DiffReport) else None
    joined = join_nodes(audit, plan, measured, limit, bad)
    told = f"{bad.op}: {bad.alarm}" if bad else ""
    return Page(report, joined.nodes, joined.values, None, limit, joined.first_bad, told)


def _shared_limit(diff: DiffReport) -> float | None:
    """The limit of the relative L2 error, where there is just one."""
    limits = {judgement.limit for judgement in diff.judgements if judgement.metric == "rel_l2"}
    return limits.pop() if len(limits) == 1 else None


def _with_findings(report: Report, audit: Audit | None) -> Report:
    """The report with what looking at the result found."""
    found = section("Findings in the result", finding_items(audit) if audit else [])
    return replace(report, sections=(*report.sections, found))
