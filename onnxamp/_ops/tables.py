"""The tables of facts in ``onnxamp/_data``."""

import tomllib
from importlib import resources
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    """The table in a file of ``_data``, named by its path there without the suffix: "ops", "oplists/default"."""
    return tomllib.loads(
        resources.files("onnxamp").joinpath(f"_data/{name}.toml").read_text(encoding="utf-8")
    )
