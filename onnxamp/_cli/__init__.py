"""The command line: one module per command, imported when the command is called."""

import sys
from importlib import import_module
from typing import Any, Final

import click

from onnxamp import __version__
from onnxamp._cli.door import door, note_words
from onnxamp._graph.collecting import no_collections

_COMMANDS: Final = {
    "convert": "Convert MODEL to mixed precision, validate the result, and report.",
    "tune": "Convert as much of MODEL to low precision as its measured accuracy allows.",
    "diff": "Compare what two models compute: REFERENCE (the original) and RESULT (the converted model).",
    "check": "Check types, kernels, Casts and hazards; then run MODEL and name the first op that goes wrong.",
    "extract": "Cut the region around a node out of MODEL, with inputs that reproduce what happens there.",
    "bench": "Time MODELS in turns on the same inputs, compare them with the first, and explain slowdowns.",
    "train": "Train MODEL in mixed precision, and write the trained model.",
    "inspect": "Show what is in MODEL, what each level would do, and why.",
    "view": "Write an HTML page of what converting MODEL would do, without running it.",
    "lists": "Show the white and black lists of PRESETS [all], with the source of each entry.",
}
"""Command -> the first sentence of its help, known without importing it."""

_MODULES: Final = {"inspect": "inspect_model"}
"""Commands whose module has another name."""


class _LazyGroup(click.Group):
    """Imports the module of a command only when it is needed, which keeps ``--help`` quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of a workflow."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        with no_collections():  # modules stay, so that there is nothing to collect
            command: click.Command = import_module(
                f"onnxamp._cli.{_MODULES.get(cmd_name, cmd_name)}"
            ).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is called; what is misspelt is told with the nearest name."""
        if args[0] not in _COMMANDS and not args[0].startswith("-"):
            from difflib import get_close_matches  # noqa: PLC0415 - few runs need it

            for near in get_close_matches(args[0], _COMMANDS, 1):
                ctx.fail(f"No such command {args[0]!r}. Did you mean {near!r}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before the command."""
        note_words(ctx, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Parse the command's own words, and run it."""
        with door():
            return super().invoke(ctx)

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """The list of commands in ``--help``, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=_LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.version_option(__version__, prog_name="onnxamp")
def group() -> None:
    """Mixed precision for ONNX models: choose the precision of every floating-point value."""


def main() -> None:
    """Read the command line, and do what it says."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(
                errors="backslashreplace"
            )  # not every terminal can print every name
    group(prog_name="onnxamp")
