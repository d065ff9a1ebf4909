"""Sphinx: pages from Markdown, the reference from docstrings and rows of options; scripts/docs.py builds."""

import re
from collections.abc import Iterable, Iterator, Sequence

import click
from sphinx.application import Sphinx

from onnxamp import Options, __version__
from onnxamp._cli.command import group
from onnxamp._cli.options import full_help
from onnxamp._options.command_line import option_rows, option_table, spelled_fields

project = "onnxamp"
release = __version__
copyright = "the onnxamp authors"  # noqa: A001 - Sphinx's name for it
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes are described once, by the docstring or by themselves


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = (head, ["---"] * len(head), *rows)
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def marked(text: str) -> str:
    """A text with the flags in it as code: quotation marks and dashes would be set in it."""
    return re.sub(r"--[a-z][\w-]*", r"`\g<0>`", text)


def options_text() -> str:
    """A table of the options of a conversion, in Python and on the command line."""
    rows = (
        (f"`{name}`", f"`{row.flags}`", f"`{getattr(Options, name)!r}`", marked(full_help(row)))
        for name, row in spelled_fields().items()
    )
    return table(["keyword", "command line", "default", "the command line's option"], rows)


def command_text(name: str) -> Iterator[str]:
    """What ``--help-all`` shows: the usage of a command, what is said about it, and its options by group."""
    command = group.get_command(click.Context(group), name)
    context = click.Context(command, info_name=f"onnxamp {name}")
    usual = option_table()["command"][name]["usual"]
    params = {item.name: item for item in command.params}
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```"
    yield marked(command.help)
    yield "`--help` shows the options with their flags in bold, and `--help-all` all of them."
    for heading in option_table()["groups"]:
        rows = [row for row in option_rows() if name in row.commands and row.group == heading]
        records = [(row, *params[row.name].get_help_record(context)) for row in rows]
        if records:
            yield f"## {heading}"
            yield table(
                ["option", "what it does"],
                (
                    [f"**`{flags}`**" if row.name in usual else f"`{flags}`", marked(text)]
                    for row, flags, text in records
                ),
            )


def insert_options(_: Sphinx, page: str, source: list[str]) -> None:
    """Write what the rows of options say into pages of the reference."""
    if page == "reference/options":
        source[0] = source[0].replace("(options)", options_text())
    elif page.startswith("reference/commands/"):
        source[0] = source[0].replace("(command)", "\n\n".join(command_text(page.rpartition("/")[2])))


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", insert_options)
