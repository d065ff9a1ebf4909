"""The options that say on what, where and with whose help models run, and what they mean to the library."""

from typing import Any, Final

import click

from onnxamp._cli.options import given_samples, option_group, provider_of
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.run import Report, RunOptions
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


def run_options_of(options: dict[str, Any], report: Report) -> RunOptions:
    """Return how models run, as the options of a command ask for it.

    Raises:
        ArgumentError: the inputs cannot be read, or options for random ones are given as well.
    """
    return RunOptions(
        samples=given_samples(options),
        count=options["samples"],
        seed=options["seed"],
        dims=options["dims"],
        provider=provider_of(options),
        place=place_of(options),
        state=options["state"],
        report=report,
        budget=options["budget"] << 20 if "budget" in options else BUDGET,
    )
