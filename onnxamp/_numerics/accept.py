"""Functions of the user that judge outputs: ``accept`` says yes or no, a metric says how large the error is."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._paths.reading import reason_of
from onnxamp._runtime.engines import Outputs
from onnxamp._runtime.fingerprints import source_print
from onnxamp._state.state import fingerprint

AcceptLike: TypeAlias = str | Callable[[dict[str, Any], dict[str, Any]], bool]
"""A function of the outputs of the original and of the result, by name; or where it is, as "package:function" or
"file.py:function"."""


@dataclass(frozen=True, slots=True)
class Accept:
    """A function that says whether a result is good enough, and its name."""

    name: str
    function: Callable[[dict[str, Any], dict[str, Any]], bool]

    @classmethod
    def of(cls, given: AcceptLike) -> "Accept":
        """The function that an argument means.

        Raises:
            ArgumentError: it cannot be imported. ArgumentTypeError: it is no function.
        """
        if isinstance(given, str):
            return cls(given, imported("accept", given))
        if not callable(given):
            raise ArgumentTypeError(
                f"accept must be a function or 'package:function', not {type(given).__name__}."
            )
        return cls(getattr(given, "__qualname__", type(given).__name__), given)

    def __reduce__(self) -> tuple[Any, ...]:
        """To other processes it goes by its name, if that says where it is."""
        return (
            (Accept.of, (self.name,)) if ":" in self.name else (Accept, (self.name, self.function))
        )

    @property
    def print(self) -> str:
        """A fingerprint: of its name, and of the file that it is in."""
        return fingerprint(self.name, source_print(self.function))

    def takes(self, reference: Outputs, result: Outputs) -> bool:
        """Whether the function accepts a result.

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

    def _answer(self, reference: Outputs, result: Outputs) -> bool:
        answer = called("accept", self.name, self.function, reference, result)
        if not isinstance(answer, (bool, np.bool_)):
            raise ArgumentError(
                f"accept: {self.name!r} must return True or False, not {answer!r:.80}; what returns an error is a"
                " metric (--metric)."
            )
        return bool(answer)


def called(
    what: str, name: str, function: Callable[..., Any], reference: Outputs, result: Outputs
) -> Any:
    """What a function of the user returns. One that was named, and not passed, raises nothing but sentences.

    Raises:
        ArgumentError: it raises something. Whatever a function that was passed raises goes through.
    """
    try:
        return function(dict(reference), dict(result))
    except Exception as error:
        if ":" not in name:
            raise
        raise ArgumentError(f"{what}: {name!r} failed: {_told(error)}.") from error


def _told(error: Exception) -> str:
    """What was raised, and why."""
    return f"{type(error).__name__}: {reason_of(error)}"


def imported(what: str, name: str) -> Callable[..., Any]:
    """The function "package:function" or "file.py:function".

    Raises:
        ArgumentError: it cannot be imported, or is no function.
    """
    module, _, attribute = name.rpartition(":")
    try:
        function = getattr(
            _from_file(Path(module)) if module.endswith(".py") else import_module(module), attribute
        )
    except Exception as error:  # its module runs, and may raise anything
        raise ArgumentError(f"The {what} {name!r} cannot be imported: {_told(error)}.") from error
    if not callable(function):
        raise ArgumentError(f"The {what} {name!r} is not a function.")
    found: Callable[..., Any] = function
    return found


def _from_file(path: Path) -> ModuleType:
    """The module in a file, which may import its neighbours."""
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
