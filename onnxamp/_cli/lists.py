"""``onnxamp lists``."""

import click

from onnxamp._cli.common import new_command
from onnxamp._options.lists import PRESETS, preset
from onnxamp._report.inspect import lists_report
from onnxamp._report.machine import document
from onnxamp._report.terminal import print_report


@new_command("lists")
@click.argument("presets", nargs=-1, type=click.Choice(PRESETS))
@click.option("--json", "as_json", is_flag=True, help="Print the lists as JSON.")
def command(presets: tuple[str, ...], *, as_json: bool) -> None:
    """Show the white and black lists of PRESETS [all], with the source of each entry.

    Below them are the names of MindSpore and Paddle that your own lists may hold, with the op types that they mean.

    Exit codes: 0 the lists were printed; 2 wrong usage.
    """
    chosen = [preset(name) for name in presets or PRESETS]
    if as_json:
        presets_json = {p.name: {"white": p.white, "black": p.black, "names": p.names} for p in chosen}
        click.echo(document("lists", {"presets": presets_json}))
    else:
        print_report(lists_report(chosen))
