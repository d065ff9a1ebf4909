"""Functions of the user, given as they are or by name: they judge results, or measure their errors."""

import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from onnxamp._base.errors import ArgumentError, ArgumentTypeError
from onnxamp._base.paths import as_path, reason_of
from onnxamp._base.state import fingerprint

if TYPE_CHECKING:
    from onnxamp._runtime.engines import Outputs

AcceptLike: TypeAlias = str | Callable[[dict[str, Any], dict[str, Any]], bool]
"""A function of the outputs of the original and of the result, by name; or its location, as "package:function" or
"file.py:function"."""


class Accept(NamedTuple):
    """A function that judges whether a result is good enough, and its name."""

    name: str
    function: Callable[[dict[str, Any], dict[str, Any]], bool]

    @classmethod
    def of(cls, given: AcceptLike) -> "Accept":
        """Return the function that an argument names.

        Raises:
            ArgumentError: it cannot be imported. ArgumentTypeError: it is no function.
        """
        if isinstance(given, str):
            return cls(given, imported("accept", given))
        if not callable(given):
            raise ArgumentTypeError(
                f"accept must be a function or 'package:function', not {type(given).__name__}."
            )
        return cls(name_of(given), given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Other processes load it by its name, if that contains its location."""
        if ":" in self.name:
            return Accept.of, (self.name,)
        return Accept, (self.name, self.function)

    @property
    def print(self) -> str:
        """A fingerprint: of its name, and of the file that it is in."""
        return fingerprint(self.name, source_print(self.function))

    def takes(self, reference: "Outputs", result: "Outputs") -> bool:
        """Return whether the function accepts a result.

        Raises:
            ArgumentError: it returns something else than True or False, or rejects even the reference itself.
        """
        if self._answer(reference, result):
            return True
        if not self._answer(reference, reference):
            raise ArgumentError(
                f"accept: {self.name!r} rejects the original's own outputs, so nothing can pass."
            )
        return False

    def _answer(self, reference: "Outputs", result: "Outputs") -> bool:
        answer = called("accept", self.name, self.function, reference, result)
        if not isinstance(answer, (bool, np.bool_)):
            raise ArgumentError(
                f"accept: {self.name!r} must return True or False, not {answer!r:.80}; a function that returns"
                " an error is a metric (--metric)."
            )
        return bool(answer)


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function of the user in messages."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def called(
    what: str,
    name: str,
    function: Callable[..., Any],
    reference: "Outputs",
    result: "Outputs",
) -> Any:
    """Return the result of a user's function. A function given by name raises only errors with a message.

    Raises:
        ArgumentError: it raises something. Exceptions of a function that was passed propagate.
    """
    try:
        return function(dict(reference), dict(result))
    except Exception as error:
        if ":" not in name:
            raise
        raise ArgumentError(f"{what}: {name!r} failed: {_told(error)}.") from error


def _told(error: Exception) -> str:
    """Return the error in words."""
    return f"{type(error).__name__}: {reason_of(error)}"


def imported(what: str, name: str) -> Callable[..., Any]:
    """Return the function "package:function" or "file.py:function".

    Raises:
        ArgumentError: it cannot be imported, or is no function.
    """
    module, _, attribute = name.rpartition(":")
    load = _from_file if module.endswith(".py") else import_module
    try:
        function = getattr(load(module), attribute)
    except Exception as error:  # its module runs, and may raise anything
        raise ArgumentError(
            f"The {what} {name!r} cannot be imported: {_told(error)}."
        ) from error
    if not callable(function):
        raise ArgumentError(f"The {what} {name!r} is not a function.")
    checked: Callable[..., Any] = function
    return checked


def _from_file(name: str) -> ModuleType:
    """Return the module in a file, which may import its neighbors."""
    path = as_path(name)
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.path.insert(0, str(path.absolute().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def source_print(function: Callable[..., Any]) -> str:
    """Return the fingerprint of the file that a function is in; of nothing if it is in none."""
    try:
        return fingerprint(Path(inspect.getfile(function)).read_bytes())
    except (OSError, TypeError):
        return fingerprint()
