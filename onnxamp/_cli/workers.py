"""The options that say which worker processes to use."""

from typing import Any, Final

import click

from onnxamp._cli.options import option_group
from onnxamp._workers.place import Place

place_options: Final = option_group(
    click.option("--jobs", metavar="N", type=click.IntRange(1),
                 help="Worker processes, for models of a folder, samples and data files [a folder: one per core; else"
                 " none]."),
    click.option("--cluster", metavar="local|ADDRESS",
                 help="Let the worker processes be those of a Ray cluster; local starts one on this machine."),
)  # fmt: skip
"""The options that say which worker processes to use."""


def place_of(options: dict[str, Any]) -> Place:
    """The worker processes that are asked for.

    Raises:
        ArgumentError: a value is wrong.
    """
    return Place(options["jobs"], options["cluster"])
