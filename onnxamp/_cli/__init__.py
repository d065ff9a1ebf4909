"""The command line: one small module per command, imported when it is called."""

import signal
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

_COMMANDS = {
    "convert": "convert",
    "tune": "tune",
    "diff": "diff",
    "check": "check",
    "extract": "extract",
    "bench": "bench",
    "train": "train",
    "inspect": "inspect_model",
    "lists": "lists",
}
"""Command -> module of this package."""


class _Lazy(click.Group):
    """Imports a command's module when it is needed, so that ``--help`` is quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of their use."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(f"onnxamp._cli.{_COMMANDS[cmd_name]}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in ``--help``, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_SUMMARIES.items()))


_SUMMARIES = {
    "convert": "Convert a model to mixed precision, validate the result, and report.",
    "tune": "Lower as much of a model as its accuracy allows: measured, not guessed.",
    "diff": "Compare what two models compute, output by output and layer by layer.",
    "check": "Check types, kernels and hazards; run, and name the first op that goes wrong.",
    "extract": "Cut the region around a node into a small model, with its inputs.",
    "bench": "Time models beside each other, and say why one is slower than it should be.",
    "train": "Train a model in mixed precision; the step is one ONNX graph.",
    "inspect": "Show what is in a model, and what each level would do and why.",
    "lists": "Show the white and black lists of a preset, with the source of each entry.",
}


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="onnxamp")
def group() -> None:
    """Mixed precision for ONNX models: decide for every float in which precision it lives."""


def _terminate(number: int, frame: Any) -> NoReturn:
    """End as an interrupt does, so that nothing half-written stays."""
    del frame
    raise SystemExit(128 + number)


def main() -> None:
    """Entry point of the ``onnxamp`` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names from models meet terminals of any encoding
    signal.signal(signal.SIGTERM, _terminate)
    group(prog_name="onnxamp")
