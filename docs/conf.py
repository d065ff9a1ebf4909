"""Sphinx: pages from Markdown, the reference from docstrings and options; scripts/docs.py builds."""

from collections.abc import Iterator
from dataclasses import fields

from sphinx.application import Sphinx

from onnxamp import Options, __version__

project = "onnxamp"
release = __version__
copyright = "the onnxamp authors"  # noqa: A001 - Sphinx's name for it
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
html_theme = "furo"
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes are described once, by the docstring or by themselves


def option_rows() -> Iterator[tuple[str, ...]]:
    """The cells of a row for each option that the command line can spell."""
    for item in fields(Options):
        if cli := item.metadata.get("cli"):
            value = cli.metavar or "|".join(cli.words or ())
            yield f"`{item.name}`", f"`{f'{cli.flag} {value}'.strip()}`", f"`{item.default!r}`", cli.help


def insert_options(_: Sphinx, page: str, source: list[str]) -> None:
    """Write the table of options into its page."""
    if page == "reference/options":
        rows = [("keyword", "command line", "default", "the command line's option"), ("---",) * 4, *option_rows()]
        table = "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in row) + " |" for row in rows)
        source[0] = source[0].replace("(options)", table)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", insert_options)
