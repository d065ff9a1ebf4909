"""The options of conversion on the command line, derived from :class:`onnxamp._options.options.Options`."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

from onnxamp._options.options import COMMAND_LINE, CommandLine, Level, Options, default_of

F = TypeVar("F", bound=Callable[..., Any])


def conversion_options(function: F) -> F:
    """Add an option for each field that the command line can spell."""
    for name, spelled in reversed(list(COMMAND_LINE.items())):
        function = _option(name, spelled)(function)
    return function


def _option(name: str, spelled: CommandLine) -> Callable[[F], F]:
    default = default_of(name)
    if spelled.words is not None:
        word = next(word for word, value in spelled.words.items() if value == default)
        choice = click.Choice(list(spelled.words))
        return click.option(spelled.flag, name, type=choice, default=word, show_default=True, help=spelled.help)
    if isinstance(default, bool):
        return click.option(spelled.flag, name, flag_value=not default, default=default, help=spelled.help)
    if spelled.many:
        return click.option(spelled.flag, name, multiple=True, metavar=spelled.metavar, help=spelled.help)
    return click.option(spelled.flag, name, type=click.IntRange(1), metavar=spelled.metavar, help=spelled.help)


def keywords_of(given: dict[str, Any]) -> dict[str, Any]:
    """The options of :func:`conversion_options` as keyword arguments of :func:`onnxamp.convert_model`."""
    values = ((name, spelled.words, given[name]) for name, spelled in COMMAND_LINE.items())
    return {name: value if words is None else words[value] for name, words, value in values}


def options_of(given: dict[str, Any], level: str | None = None) -> Options:
    """The same as :class:`Options`, at ``level`` or the one that is given.

    Raises:
        ArgumentError, ContradictionError: a value is wrong.
    """
    return Options.of(level or given.get("level", Level.O2), keywords_of(given))
