"""Values of options that facts decide: opsets, targets, low-precision types, and functions of the user."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import click

from onnxamp._base.errors import OnnxAmpError, printable
from onnxamp._facts.dtypes import dtype_name
from onnxamp._facts.targets import check_target
from onnxamp._numerics.user_functions import Accept
from onnxamp._options.values import check_opset


@contextmanager
def _refused() -> Iterator[None]:
    """Report an invalid value as wrong usage of an option."""
    try:
        yield
    except OnnxAmpError as error:
        raise click.BadParameter(str(error)) from None


def _opset(text: str) -> int | str:
    """Return a number, or one of the words that an opset can be."""
    with _refused():
        return check_opset(int(text) if text.isdecimal() else text.lower())


def _target(text: str) -> str:
    """Return a target, possibly with a version of ONNX Runtime."""
    with _refused(), warnings.catch_warnings(record=True, action="always") as caught:
        target = check_target(text.lower())
    for warning in caught:
        click.echo(f"Warning: {printable(str(warning.message))}", err=True)
    return target


def _accept(name: str) -> Accept:
    """Return the function of a name, imported before anything runs."""
    if ":" not in name:
        raise click.BadParameter(f"{name!r} is not of the form PACKAGE:FUNCTION.")
    with _refused():
        return Accept.of(name)


VALUES: Final[Mapping[str, Callable[[str], Any]]] = {
    "opset": _opset,
    "target": _target,
    "dtype": dtype_name,
    "accept": _accept,
}
"""The kind of a value -> its conversion."""
