"""The door to the rooms apart from the core, such as training, language models and fleets.

``_data/extensions.toml`` lists what they offer. The core asks here for an offer and knows nothing but its interface;
the module behind it is imported when the offer is used.
"""

import itertools
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from onnxamp._base.optional import require
from onnxamp._base.records import record


@record(kw_only=True)
class Extension:
    """A row of the list, whose comments define each column."""

    module: str
    function: str = ""
    tables: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    package: str = ""
    title: str = ""
    extra: str = ""

    def load(self, needs: str = "") -> Any:
        """Return the module that makes the offer.

        Args:
            needs: the beginning of the message if its package is missing, as in "--cluster needs".

        Raises:
            MissingPackageError: its package is not installed.
        """
        if self.package:
            require(self.package, f"{needs} {self.title}", self.extra)
        return import_module(self.module)

    def is_for(self, inputs: Collection[str], outputs: Collection[str]) -> bool:
        """Return whether the offer is for a model with these inputs and outputs."""
        has_input = any(name in inputs for name in self.inputs)
        return has_input and any(name in outputs for name in self.outputs)

    def is_near(self, model: Path) -> bool:
        """Return whether one of the files that lie beside models of this offer is there."""
        folder = model.absolute().parent
        files = itertools.product((folder, folder.parent), self.beside)
        return any((home / name).is_file() for home, name in files)


def extensions(interface: str) -> Mapping[str, Extension]:
    """Return the offers that implement an interface, by name."""
    return all_extensions()[interface]


@cache
def all_extensions() -> Mapping[str, Mapping[str, Extension]]:
    """Return all offers by interface and name."""
    path = Path(__file__).parents[1] / "_data" / "extensions.toml"
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    offers = dict[str, Mapping[str, Extension]]()
    for interface, rows in table.items():
        offers[interface] = {name: _extension(row) for name, row in rows.items()}
    return offers


def _extension(row: Mapping[str, Any]) -> Extension:
    """Return the offer that a row describes."""
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in row.items()
    }
    return Extension(**values)
