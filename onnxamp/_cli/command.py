"""The group of all commands. Each is made from its rows in ``_data/options.toml``; its module is imported when it
runs.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import click
from click.shell_completion import CompletionItem

from onnxamp import _base
from onnxamp._base.errors import suggestion
from onnxamp._base.extensions import extensions
from onnxamp._base.public import no_collections
from onnxamp._base.words import enumerated
from onnxamp._cli.door import door, note_words
from onnxamp._cli.options import DataOption, parameter_of
from onnxamp._cli.summary import COMMANDS, HELP, VERSION
from onnxamp._facts.tables import read_table
from onnxamp._options.command_line import option_rows, option_table

_COLUMN: Final = 28
"""Columns for flags and values; help is to the right."""

_ALL: Final = "onnxamp all options"
"""The key in a context that marks help with every option."""


def make_command(name: str, summary: str) -> click.Command:
    """Return a command with the options of its rows."""
    table = option_table()["command"][name]
    params = [parameter_of(row) for row in option_rows() if name in row.commands]
    count = sum(isinstance(item, DataOption) for item in params)
    return _DataCommand(
        name,
        usual=table["usual"],
        help=f"{summary}\n\n{table['more']}",
        params=[*params, _help_all(count)],
        callback=partial(run_command, name),
    )


def run_command(command: str, /, **words: Any) -> None:
    """Import the module of a command, and run it with the custom ops that its options name."""
    with no_collections():  # modules stay, so that there is nothing to collect
        from onnxamp._cli.setting import begin, setting  # noqa: PLC0415 - imports onnx
    with door(), setting(words):
        begin(words)
        _module_of(command).run(SimpleNamespace(**words))


@no_collections()
def _module_of(command: str) -> Any:
    """Return the module of a command: that of a room apart which offers it, or else one of this room."""
    offer = extensions("commands").get(command)
    return import_module(f"onnxamp._cli.{command}") if offer is None else offer.load()


def _help_all(count: int) -> click.Option:
    """Return the option that shows all options."""

    def show(context: click.Context, _: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            context.meta[_ALL] = True
            click.echo(context.get_help(), color=context.color)
            context.exit()

    return click.Option(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help=f"Show {f'all {count} options' if count > 1 else 'everything'} in full, and exit.",
    )


class _DataCommand(click.Command):
    """A command whose help shows the usual options, and which recognizes the options of other tools."""

    def __init__(self, name: str, *, usual: Sequence[str], **form: Any) -> None:
        super().__init__(name, **form)
        self.usual = usual

    @no_collections()
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what was typed, for which numpy and onnx are imported.

        Raises:
            UsageError: an option is unknown; the message names the equivalents of other tools' options.
        """
        typed = list(args)
        ctx.allow_extra_args = True
        try:
            rest = super().parse_args(ctx, args)
            if rest and not ctx.resilient_parsing:
                ctx.fail(self._unexpected(ctx, rest[0]))
        except click.UsageError as error:
            unknown = None
            if isinstance(error, click.NoSuchOption):
                unknown = error.option_name
            hint = told_of_other_tools(typed, unknown)
            hint = hint or self._one_dash(typed, unknown)
            if hint is None and unknown is not None:
                raise _no_such_option(unknown, self.params, ctx) from None
            if hint is None:
                raise
            raise click.UsageError(hint, ctx) from None
        return rest

    @staticmethod
    def _unexpected(ctx: click.Context, word: str) -> str:
        """Return what to say about a word after all arguments, which may be the name of the result."""
        lacks_output = ctx.params.get("output", "") is None
        hint = f" To write the result there, pass '-o {word}'." if lacks_output else ""
        return f"Unexpected argument {word!r}.{hint}"

    def _one_dash(self, typed: Sequence[str], unknown: str | None) -> str | None:
        """Return what to say about a long option with one dash, as in "-level", which click parses letter by letter."""
        flags = set[str]().union(*(item.opts for item in self.params))
        for word in (text.partition("=")[0] for text in typed):
            if unknown == word[:2] and _is_word(word) and f"-{word}" in flags:
                return f"No such option {word!r}. Did you mean '-{word}'?"
        return None

    def format_help_text(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write the first sentence or, with all options, everything that is said about the command."""
        text = self.help or ""
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text if _ALL in ctx.meta else text.split("\n\n")[0])

    def format_options(
        self, ctx: click.Context, formatter: click.HelpFormatter
    ) -> None:
        """Write options below the headings of their groups: the usual ones in a line each, or all of them in full."""
        sections: dict[str, list[tuple[str, str]]] = {
            group: [] for group in option_table()["groups"]
        }
        for item in self.get_params(ctx):
            if isinstance(item, DataOption) and _ALL not in ctx.meta:
                record = item.line(ctx) if item.name in self.usual else None
            else:
                record = item.get_help_record(ctx)
            if record is not None and isinstance(item, click.Option):
                group = item.row.group if isinstance(item, DataOption) else "Help"
                sections.setdefault(group, []).append(record)
        every = chain.from_iterable(sections.values())
        width = min(max(len(flags) for flags, _ in every), _COLUMN)
        for heading, rows in sections.items():
            if rows:
                # Padded, the columns of all sections are equally wide.
                padded = [(flags.ljust(width), text) for flags, text in rows]
                with formatter.section(heading):
                    formatter.write_dl(padded, col_max=_COLUMN)


def told_of_other_tools(arguments: Sequence[str], unknown: str | None) -> str | None:
    """Return the equivalent of another tool's option; None if it is none.

    Args:
        arguments: what was typed.
        unknown: the option that is unknown; None if something else is wrong, as where "-ope" was taken for "-o pe".
    """
    typed = [text.partition("=")[0] for text in arguments]
    known = [text for text in typed if _is_word(text) and any(_meanings(text))]
    # click names one letter of "-ope", so that the word itself must be found.
    name = unknown
    if unknown is None or len(unknown) == len("-n"):
        name = next(iter(known), unknown)
    meanings: dict[str, list[str]] = {}
    for tool, meaning in _meanings(name or ""):
        meanings.setdefault(meaning, []).append(tool)
    if not meanings:
        return None
    rows = meanings.items()
    return " ".join(_sentence(name or "", meaning, tools) for meaning, tools in rows)


def _is_word(text: str) -> bool:
    """Return whether a text looks like "-ne", which click parses as two one-letter options."""
    return len(text) > len("-n") and text.startswith("-") and not text.startswith("--")


def _meanings(name: str) -> Iterator[tuple[str, str]]:
    """Yield the tools that have an option, each with its meaning here."""
    for tool, row in read_table("other_tools").items():
        if name in row["options"]:
            yield tool, row["options"][name]


def _sentence(name: str, meaning: str, tools: Sequence[str]) -> str:
    """Return a sentence about the counterpart of an option."""
    owners = enumerated([f"{tool}'s" for tool in tools])
    if meaning.startswith("nothing"):
        return f"{owners} {name} has no counterpart here{meaning.removeprefix('nothing')}."
    return f"{owners} {name} is onnxamp's {meaning}."


def _no_such_option(
    typed: str, known: Iterable[click.Parameter], ctx: click.Context
) -> click.NoSuchOption:
    """Return the error about an unknown option, which proposes the nearest one."""
    names = [name for item in known for name in item.opts if name[:2] == "--"]
    message = f"No such option {typed!r}.{suggestion(names, typed)}"
    return click.NoSuchOption(typed, message, ctx=ctx)


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
        return make_command(cmd_name, COMMANDS[cmd_name])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that is called. The error about a misspelled one suggests the nearest name."""
        typed = args[0]
        if typed not in COMMANDS and typed[:1] != "-" and not ctx.resilient_parsing:
            near = suggestion(COMMANDS, typed)
            if typed.endswith(".onnx") or Path(typed).exists():
                near = f" To convert it: onnxamp convert {shlex.quote(typed)}"
            if near:
                ctx.fail(f"No such command {typed!r}.{near}")
        return super().resolve_command(ctx, args)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words before the command."""
        note_words(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _no_such_option(error.option_name, self.params, ctx) from None

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
@click.version_option(_base.VERSION, message=VERSION)
def group() -> None:
    """Run the command that is named."""
