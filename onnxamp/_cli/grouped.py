"""Commands whose ``--help`` lists many options under headings."""

from typing import Final

import click

from onnxamp._cli.other_tools import told_of_other_tools
from onnxamp._options.options import COMMAND_LINE

_FEW: Final = 15
"""Options that need no headings."""
_HEADINGS: Final = {
    **dict.fromkeys(COMMAND_LINE, "What becomes low precision"),
    **dict.fromkeys(
        ("inputs", "samples", "dims", "seed", "provider", "libraries", "jobs", "cluster", "budget"), "Inputs and runs"
    ),
    **dict.fromkeys(("metric", "accept", "no_validate", "no_cure", "cure_time", "retry"), "Validation"),
    **dict.fromkeys(
        ("save_plan", "external_data", "shard_size", "data_names", "html", "format", "quiet", "verbose", "help"),
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
        found: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Options", *_HEADINGS.values())}
        for option in (parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)):
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
