"""``onnxamp lists``."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from onnxamp._audit.op_view import describe_op
from onnxamp._base.errors import ArgumentError
from onnxamp._cli.common import Given, show
from onnxamp._options.lists import PRESETS, Preset, preset
from onnxamp._report.inspect import lists_report
from onnxamp._report.ops import ops_report


def run(given: Given) -> None:
    """Run ``onnxamp lists``."""
    if given.op:
        _show_ops(given, given.op)
        return
    chosen = [preset(name) for name in given.presets or PRESETS]
    facts = {one.name: _facts(one) for one in chosen}
    report = partial(lists_report, chosen)
    show(given, report, "lists", lambda: {"presets": facts})


def _facts(preset: Preset) -> dict[str, Any]:
    """Return the lists of a preset for JSON."""
    fields = ("white", "black", "black_at", "names", "forms")
    return {field: getattr(preset, field) for field in fields}


def _show_ops(given: Given, ops: Sequence[str]) -> None:
    """Show everything that is known about some ops.

    Raises:
        ArgumentError: there is no such op, or presets are given as well.
    """
    if given.presets:
        raise ArgumentError(
            "--op shows an op in all presets: leave the names of presets out."
        )
    views = [describe_op(op) for op in ops]
    facts = {view.op: view.facts for view in views}
    show(given, partial(ops_report, views), "lists", lambda: {"ops": facts})
