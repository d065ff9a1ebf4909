"""Options that other software wants, under one name."""

from collections.abc import Mapping
from typing import Any, Final

import click

from onnxamp._cli.options import option_group
from onnxamp._ops.tables import read_table

_PRESETS: Final[Mapping[str, Mapping[str, Any]]] = read_table("presets")


def _apply(context: click.Context, _: click.Parameter, preset: str | None) -> None:
    """Make the options of a preset the defaults; it is read before the others."""
    if preset is not None:
        context.default_map = {**(context.default_map or {}), **_PRESETS[preset]["options"]}


preset_options: Final = option_group(
    click.option("--preset", type=click.Choice([name for name, row in _PRESETS.items() if row["options"]]),
                 is_eager=True, expose_value=False, callback=_apply,
                 help="Options for other software; those that are given replace them. transformers.js: "
                      + _PRESETS["transformers.js"]["summary"] + "."),
    click.option("--data-names", type=click.Choice(list(_PRESETS)),
                 help="Whose names data files get: NAME.data of onnx, the default, or NAME_data of transformers.js."),
)  # fmt: skip
