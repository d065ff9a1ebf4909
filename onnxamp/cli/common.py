"""What the commands share: options for the wishes of a conversion, and how errors end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import click

from onnxamp.errors import ArgumentError, ArgumentTypeError, OnnxAmpError
from onnxamp.kernels import TARGETS
from onnxamp.policy import PRESETS
from onnxamp.report.terminal import printable

F = TypeVar("F", bound=Callable[..., Any])

LEVELS = ("O0", "O1", "O2", "O3", "auto")


def wishes(function: F) -> F:
    """Add the options that say what shall become low."""
    options = (
        click.option("--dtype", type=click.Choice(["float16", "bfloat16"]), default="float16", show_default=True,
                     help="The low type."),
        click.option("--lists", type=click.Choice(PRESETS), default="default", show_default=True,
                     help="Preset of white and black lists; 'onnxamp lists' shows them."),
        click.option("--white", metavar="OP", multiple=True, help="Op type to lower, too. Repeatable."),
        click.option("--black", metavar="OP", multiple=True,
                     help="Op type to keep in float32, besides the preset's. Repeatable."),
        click.option("--keep-fp32", "keep_high", metavar="REGEX", multiple=True,
                     help="Keep nodes with such names in float32 (the whole name must match). Repeatable."),
        click.option("--force-low", metavar="REGEX", multiple=True,
                     help="Lower nodes with such names whatever lists and hazards say. Repeatable."),
        click.option("--io-types", type=click.Choice(["keep", "low"]), default="keep", show_default=True,
                     help="Types of the model's inputs and outputs."),
        click.option("--target", type=click.Choice(TARGETS), default="cuda", show_default=True,
                     help="Where the result will run: its kernels decide what may be low."),
        click.option("--strict", is_flag=True, help="At O2, lower every op that is not black-listed."),
        click.option("--no-hazards", is_flag=True, help="Do not keep what is known to break in low precision."),
        click.option("--freeze-defaults", is_flag=True, help="Treat weights that are graph inputs, too, as weights."),
        click.option("--keep-functions", is_flag=True, help="Do not inline model-local functions."),
        click.option("--opset", type=click.IntRange(1), help="Upgrade the model to this opset first."),
    )  # fmt: skip
    for option in reversed(options):
        function = option(function)
    return function


def as_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The options of :func:`wishes` as keyword arguments of :func:`onnxamp.convert_file`."""
    return {
        "dtype": options["dtype"],
        "lists": options["lists"],
        "white_list": options["white"],
        "black_list": options["black"],
        "keep_high": options["keep_high"],
        "force_low": options["force_low"],
        "keep_io_types": options["io_types"] == "keep",
        "target": options["target"],
        "strict": options["strict"],
        "hazards": not options["no_hazards"],
        "freeze_defaults": options["freeze_defaults"],
        "keep_functions": options["keep_functions"],
        "opset": options["opset"],
    }


@contextmanager
def errors_end_here(*, verbose: bool) -> Iterator[None]:
    """Show onnxamp's errors as one sentence, and exit with 2 if an option is wrong, else with 1.

    ``verbose`` lets the traceback through.
    """
    try:
        yield
    except OnnxAmpError as error:
        if verbose:
            raise
        kind = click.UsageError if isinstance(error, (ArgumentError, ArgumentTypeError)) else click.ClickException
        raise kind(printable(str(error))) from None


def parse_dims(pairs: tuple[str, ...]) -> dict[str, int]:
    """``NAME=N`` options as a mapping.

    Raises:
        click.BadParameter: one is not of that form.
    """
    dims = {}
    for pair in pairs:
        name, _, number = pair.rpartition("=")
        if not name or not number.isdecimal():
            raise click.BadParameter(f"{pair!r} is not of the form NAME=N.", param_hint="--dim")
        dims[name] = int(number)
    return dims
