"""``onnxamp lists``."""

from functools import partial

from onnxamp._cli.common import Given, show
from onnxamp._options.lists import PRESETS, preset
from onnxamp._report.inspect import lists_report


def run(given: Given) -> None:
    """Run ``onnxamp lists``."""
    chosen = [preset(name) for name in given.presets or PRESETS]
    fields = "white", "black", "names", "forms"
    facts = {
        one.name: {field: getattr(one, field) for field in fields} for one in chosen
    }
    show(
        given,
        partial(lists_report, chosen),
        "lists",
        lambda: {"presets": facts},
    )
