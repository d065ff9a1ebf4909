"""The report of all that is known of an op."""

from collections.abc import Sequence

from onnxamp._audit.op_view import OpView
from onnxamp._report.parts import Report, section, table


def op_report(view: OpView) -> Report:
    """Return all that is known of an op."""
    return ops_report([view])


def ops_report(views: Sequence[OpView]) -> Report:
    """Return all that is known of some ops: a row for each fact."""
    return Report(
        "lists",
        models=tuple(view.op for view in views),
        sections=tuple(
            section(
                view.op,
                table(
                    "op-facts",
                    (
                        (fact.topic, fact.target, fact.text, fact.file, fact.source)
                        for fact in view.facts
                    ),
                ),
            )
            for view in views
        ),
    )
