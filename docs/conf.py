"""Sphinx: how-tos and architecture from Markdown, the reference from the docstrings; scripts/docs.py builds."""

from onnxamp import __version__

project = "onnxamp"
release = __version__
copyright = "the onnxamp authors"  # noqa: A001 - Sphinx's name for it
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_click"]
html_theme = "furo"
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
napoleon_use_ivar = True  # attributes are described once, by the docstring or by themselves
