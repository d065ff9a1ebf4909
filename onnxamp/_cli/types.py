"""The types of what is given on the command line."""

import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import click

from onnxamp._cli.common import IN_FOLDER
from onnxamp._dtypes import FORMATS, dtype_name
from onnxamp._errors import ArgumentError, MissingPackageError, OnnxAmpError
from onnxamp._options.checks import check_opset
from onnxamp._paths.paths import as_path, is_remote
from onnxamp._printable import printable
from onnxamp._target.kernels import check_target


class _File(click.Path):
    """A path of a file here, or a URL. Whoever reads it says what is wrong with it."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. "-" is none: results are validated and then put in their place, which streams are not."""
        if value == "-":
            self.fail(
                "'-' would be a stream, and onnxamp reads and writes files: name one ('./-' for this name)."
            )
        try:
            path = as_path(value)
        except MissingPackageError as error:
            raise click.ClickException(str(error)) from None
        except OnnxAmpError as error:
            self.fail(str(error), param, ctx)
        return path if is_remote(path) else super().convert(os.fspath(path), param, ctx)


FILE: Final = _File(path_type=Path, readable=False)
"""The type of every option that names a file."""


class OutputPath(_File):
    """A file, or a folder, which a path that ends with a separator means even if it does not exist."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path; that of a folder with a placeholder for the name of the file."""
        is_folder = isinstance(value, str) and value.endswith(("/", os.sep))
        path: Path = super().convert(value, param, ctx)
        return path / IN_FOLDER if is_folder else path


class Words(click.Choice[str]):
    """Words in either case, and the usual short names of types."""

    def __init__(self, words: Iterable[str], named: str | None = None) -> None:
        super().__init__(list(words), case_sensitive=False)
        self.named = named

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The word as it is listed; one that names follow as it stands."""
        if self.named is not None and isinstance(value, str) and value.startswith(f"{self.named}:"):
            return value
        if not FORMATS.keys().isdisjoint(self.choices) and isinstance(value, str):
            value = dtype_name(value)
        if self.named is not None and str(value).lower() not in self.choices:
            self.fail(
                f"{value!r} is not one of {', '.join(self.choices)} and {self.named}:NAME,....",
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


class LevelChoice(click.Choice[str]):
    """Levels, in either case, and O1 to O3 as numbers, too."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The level as it is listed."""
        words = {word.lower(): word for word in self.choices}
        text = str(value).lower()
        found = words.get(text) or words.get(f"o{text}")
        return found or self.fail(
            f"{value!r} is not a level: choose one of {', '.join(self.choices)}.", param, ctx
        )


class OpsetType(click.types.StringParamType):
    """A number, or one of the words that an opset can be."""

    name = "opset"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number or the word."""
        try:
            return check_opset(int(value) if str(value).isdecimal() else str(value).lower())
        except ArgumentError as error:
            self.fail(str(error), param, ctx)


class Target(click.types.StringParamType):
    """A target, perhaps with a version of ONNX Runtime."""

    name = "target"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The target that is meant."""
        try:
            with warnings.catch_warnings(record=True, action="always") as caught:
                target = check_target(str(value).lower())
        except ArgumentError as error:
            self.fail(str(error), param, ctx)
        for warning in caught:
            click.echo(f"Warning: {printable(str(warning.message))}", err=True)
        return target
