"""``onnxamp lists``."""

from functools import partial

import click

from onnxamp._cli.common import Given, new_command, show
from onnxamp._cli.options import format_option
from onnxamp._options.lists import PRESETS, preset
from onnxamp._report.inspect import lists_report
from onnxamp._report.machine import document


@new_command("lists")
@click.argument("presets", metavar="[PRESETS]...", nargs=-1, type=click.Choice(PRESETS))
@format_option("lists")
def command(given: Given) -> None:
    """Show the white and black lists of PRESETS [all], with the source of each entry.

    Below them are the names of MindSpore and Paddle that your own lists may hold, with the op types that they
    mean, and what they mean besides: biases, squares, and ops that exporters write out.

    Exit codes: 0 the lists were printed; 2 wrong usage.
    """
    chosen = [preset(name) for name in given.presets or PRESETS]
    fields = "white", "black", "names", "forms"
    facts = {
        one.name: {field: getattr(one, field) for field in fields} for one in chosen
    }
    show(
        given,
        partial(lists_report, chosen),
        lambda: document("lists", {"presets": facts}),
    )
