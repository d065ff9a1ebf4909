"""Commands whose ``--help`` lists many options under headings."""

from collections.abc import Iterator, Sequence
from typing import Final

import click

from onnxamp._ops.tables import read_table
from onnxamp._options.options import COMMAND_LINE


def told_of_other_tools(arguments: Sequence[str], unknown: str | None) -> str | None:
    """Return what takes the place of an option that is another tool's; None if it is none.

    Args:
        arguments: what was typed.
        unknown: the option that is unknown; None if something else is wrong, as where "-ope" was taken for "-o pe".
    """
    typed = [text.partition("=")[0] for text in arguments]
    known = [text for text in typed if _is_word(text) and any(_meanings(text))]
    name = next(iter(known), unknown) if unknown is None or len(unknown) == len("-n") else unknown
    meanings: dict[str, list[str]] = {}
    for tool, meaning in _meanings(name or ""):
        meanings.setdefault(meaning, []).append(tool)
    if not meanings:
        return None
    return " ".join(_sentence(name or "", meaning, tools) for meaning, tools in meanings.items())


def _is_word(text: str) -> bool:
    """Whether a text is like "-ne", which is taken for two options of one letter."""
    return len(text) > len("-n") and text.startswith("-") and not text.startswith("--")


def _meanings(name: str) -> Iterator[tuple[str, str]]:
    for tool, row in read_table("other_tools").items():
        if name in row["options"]:
            yield tool, row["options"][name]


def _sentence(name: str, meaning: str, tools: Sequence[str]) -> str:
    *others, last = (f"{tool}'s" for tool in tools)
    owners = f"{', '.join(others)} and {last}" if others else last
    if meaning.startswith("nothing"):
        return f"{owners} {name} has no counterpart here{meaning.removeprefix('nothing')}."
    return f"{owners} {name} is onnxamp's {meaning}."


_FEW: Final = 15
"""Options that need no headings."""
_HEADINGS: Final = {
    **dict.fromkeys(COMMAND_LINE, "What becomes low precision"),
    **dict.fromkeys(
        ("inputs", "samples", "dims", "seed", "provider", "libraries", "jobs", "cluster", "budget"),
        "Inputs and runs",
    ),
    **dict.fromkeys(
        ("metric", "accept", "no_validate", "no_cure", "cure_time", "retry"), "Validation"
    ),
    **dict.fromkeys(
        (
            "save_plan",
            "external_data",
            "shard_size",
            "data_names",
            "html",
            "format",
            "quiet",
            "verbose",
            "help",
        ),
        "Files and report",
    ),
}
"""Parameter -> its heading; others are the command's own, and come first."""


class GroupedCommand(click.Command):
    """A command that lists its options by what they are for, and knows the names that other tools give them."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse what was typed.

        Raises:
            UsageError: an option is unknown; the message names what takes the place of other tools' options.
        """
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            unknown = error.option_name if isinstance(error, click.NoSuchOption) else None
            told = told_of_other_tools(typed, unknown)
            if told is None:
                raise
            raise click.UsageError(told, ctx) from None

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, under headings where there are many."""
        found: dict[str, list[tuple[str, str]]] = {
            heading: [] for heading in ("Options", *_HEADINGS.values())
        }
        for option in (
            parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)
        ):
            record = option.get_help_record(ctx)
            if record is not None:
                name = "help" if "--help" in option.opts else option.name or ""
                found[_HEADINGS.get(name, "Options")].append(record)
        if sum(map(len, found.values())) <= _FEW:
            super().format_options(ctx, formatter)
            return
        for heading, records in found.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
