"""The report of all that is known of an op."""

from collections.abc import Sequence

from onnxamp._audit.op_view import OpView
from onnxamp._report.parts import Report, hint, section, table


def op_report(view: OpView) -> Report:
    """Return all that is known of an op."""
    return ops_report([view])


def ops_report(views: Sequence[OpView]) -> Report:
    """Return all that is known of some ops: a row for each fact."""
    sections = []
    for view in views:
        rows = (
            (fact.topic, fact.target, fact.text, fact.file, fact.source)
            for fact in view.facts
        )
        lead = hint("Files are in onnxamp/_data, unless they name a module.")
        sections.append(section(view.op, lead, table("op-facts", rows)))
    names = tuple(view.op for view in views)
    return Report("lists", models=names, sections=tuple(sections))
