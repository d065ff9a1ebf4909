"""``onnxamp lists``."""

from functools import partial

from onnxamp._cli.common import Given, show
from onnxamp._options.lists import PRESETS, preset
from onnxamp._report.inspect import lists_report
from onnxamp._report.machine import document


def run(given: Given) -> None:
    """Run ``onnxamp lists``."""
    chosen = [preset(name) for name in given.presets or PRESETS]
    facts = {
        p.name: {"white": p.white, "black": p.black, "names": p.names} for p in chosen
    }
    show(
        given,
        partial(lists_report, chosen),
        lambda: document("lists", {"presets": facts}),
    )
