"""The group of all commands."""

from typing import Any

import click
from click.shell_completion import CompletionItem

from onnxamp import __version__
from onnxamp._cli.door import door, note_words
from onnxamp._cli.summary import COMMANDS, HELP, VERSION


class _LazyGroup(click.Group):
    """Makes a command when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return names of the commands, in the order of a workflow."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command of that name."""
        del ctx
        if cmd_name not in COMMANDS:
            return None
        from onnxamp._cli.command import make_command  # noqa: PLC0415 - reads the table of options

        return make_command(cmd_name, COMMANDS[cmd_name])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called. The error about a misspelled one suggests the nearest name."""
        typed = args[0]
        if typed not in COMMANDS and typed[:1] != "-" and not ctx.resilient_parsing:
            from difflib import get_close_matches  # noqa: PLC0415 - few are misspelled

            for near in get_close_matches(typed, COMMANDS, 1):
                ctx.fail(f"No such command {typed!r}. Did you mean {near!r}?")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before the command."""
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
            for name, summary in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*commands, *click.Command.shell_complete(self, ctx, incomplete)]

    def get_help(self, ctx: click.Context) -> str:
        """Return the help that is also printed without click."""
        del ctx
        return HELP


@click.group(
    "onnxamp",
    cls=_LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 100,
    },
)
@click.version_option(__version__, message=VERSION)
def group() -> None:
    """Run the command that is named."""
