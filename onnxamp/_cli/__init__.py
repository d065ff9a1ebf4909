"""The command line: one module per command, imported when the command runs."""

import os
import sys
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from onnxamp import __version__
from onnxamp._cli.door import door, note_words

_COMMANDS: Final = {
    "convert": "Convert MODEL to mixed precision, validate the result, and report.",
    "tune": "Convert as much of MODEL to low precision as its measured accuracy allows.",
    "diff": "Compare what two models compute: REFERENCE (the original) and RESULT (the converted model).",
    "check": "Check types, kernels, Casts and hazards; then run MODELS and name the first op of each that goes wrong.",
    "extract": "Cut the region around a node out of MODEL, with inputs that reproduce what happens there.",
    "bench": "Time MODELS in turns on the same inputs, compare them with the first, and explain slowdowns.",
    "train": "Train MODEL in mixed precision, and write the trained model.",
    "inspect": "Show what is in MODEL, what each level would do, and why.",
    "view": "Write an HTML page of what converting MODEL would do, without running it.",
    "lists": "Show the white and black lists of PRESETS [all], with the source of each entry.",
}
"""Command -> the first sentence of its help; ``_data/options.toml`` has the others."""


class _LazyGroup(click.Group):
    """Makes a command only when it is needed, which keeps ``--help`` quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names of the commands, in the order of a workflow."""
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name."""
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        from onnxamp._cli.command import make_command  # noqa: PLC0415 - reads the table of options

        return make_command(cmd_name, _COMMANDS[cmd_name])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that is called; what is misspelt is told with the nearest name."""
        typed = args[0]
        if typed not in _COMMANDS and typed[:1] != "-" and not ctx.resilient_parsing:
            from difflib import get_close_matches  # noqa: PLC0415 - few are misspelt

            for near in get_close_matches(typed, _COMMANDS, 1):
                ctx.fail(f"No such command {typed!r}. Did you mean {near!r}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what stands before the command."""
        note_words(ctx, args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Parse the command's own words, and run it."""
        with door():
            return super().invoke(ctx)

    def shell_complete(
        self, ctx: click.Context, incomplete: str
    ) -> list[CompletionItem]:
        """Return the commands that begin so, without making them, and the options."""
        commands = [
            CompletionItem(name, help=summary)
            for name, summary in _COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """The list of commands in ``--help``, without importing them."""
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    "onnxamp",
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
    try:
        group(prog_name="onnxamp")
    except OSError as error:  # of help, which is printed before there is a command
        click.echo(f"Error: Cannot print: {error.strerror}.", err=True)
        raise SystemExit(1) from None
    finally:
        try:
            sys.stdout.flush()
        except OSError:  # told by now; Python would try once more at the end, and change the exit code
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - it stays open
