"""All errors that onnxamp raises deliberately, all warnings that it issues when it deviates from a request, and the
helpers that build their messages.

    OnnxAmpError
    ├── ArgumentError (ValueError)         an argument has an impossible value
    │   ├── ContradictionError             two options exclude each other
    │   ├── EmptyStateError                a state holds nothing to continue from (RuntimeError)
    │   └── MissingFileError               it names a file that does not exist (FileNotFoundError)
    ├── ArgumentTypeError (TypeError)      an argument has the wrong type
    ├── ModelError                         the model cannot be read, or is not valid
    │   ├── MissingModelError              its file does not exist (FileNotFoundError)
    │   ├── ExternalDataError              its weights are missing, or outside its folder
    │   │   └── MissingDataError           their file does not exist (FileNotFoundError)
    │   ├── SourceChangedError             its file was replaced or written to while it was read
    │   └── OpsetError                     its opset is too old or too new
    ├── GradientError                      a loss cannot be differentiated: an op has no rule
    ├── OutputError                        the result cannot be written
    ├── MissingPackageError (ImportError)  an optional package is not installed
    ├── MissingNameError (AttributeError)  an object has no method or attribute of this name
    ├── CallOrderError (RuntimeError)      a method was called before or after its time
    ├── RuntimeFailure                     ONNX Runtime could not load or run a model
    ├── NumericsError (RuntimeError)       a checked value holds NaN or Inf
    └── InternalError                      a bug: the result would be wrong

    OnnxAmpWarning (UserWarning)
    ├── OptionWarning                      an option matches nothing, cannot be followed, or breaks something
    └── HazardWarning                      a level would lower nodes that are known to break; they stay in float32

Each message says what is wrong, where, and what to do. Files on disk are intact when an error is raised.
"""

import sys
import warnings
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final


def printable(text: str) -> str:
    """Return a text with control and direction characters, such as terminal escapes in names, written out.

    Names in a model are not trusted, so all terminal output passes through here.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class OnnxAmpError(Exception):
    """Base class of all errors that onnxamp raises."""

    def __str__(self) -> str:
        return printable(super().__str__())


class ArgumentError(OnnxAmpError, ValueError):
    """An argument has an unknown or meaningless value."""


class ContradictionError(ArgumentError):
    """Two options or overrides exclude each other; the message names both."""


class EmptyStateError(ArgumentError, RuntimeError):
    """A state holds nothing to continue from."""


class MissingFileError(ArgumentError, FileNotFoundError):
    """An argument names a file that does not exist: inputs, a plan, a comparison, ..."""


class ArgumentTypeError(OnnxAmpError, TypeError):
    """An argument has a type that the function does not accept."""


class ModelError(OnnxAmpError):
    """The model cannot be read, or breaks a rule of ONNX that onnxamp depends on."""


class MissingModelError(ModelError, FileNotFoundError):
    """The file of the model does not exist."""


class ExternalDataError(ModelError):
    """Weights stored outside the model file are missing, too short, or outside the model's folder."""


class MissingDataError(ExternalDataError, FileNotFoundError):
    """A data file that the model names does not exist."""


class SourceChangedError(ModelError):
    """The file of a model or of its weights was replaced or written to while it was read; nothing was written."""


class OpsetError(ModelError):
    """The model's opset lacks the low-precision type, or the installed onnx does not know the opset."""


class GradientError(OnnxAmpError):
    """A loss cannot be differentiated: the message names the op between a weight and the loss that prevents it."""


class OutputError(OnnxAmpError):
    """The result cannot be written; an existing file is untouched."""


class MissingPackageError(OnnxAmpError, ImportError):
    """An optional package is not installed; the message says how to install it."""


class MissingNameError(OnnxAmpError, AttributeError):
    """An object has no method or attribute of this name; if it is one of another framework, the message says what to
    write.
    """


class CallOrderError(OnnxAmpError, RuntimeError):
    """A method was called twice, or before another method that it needs."""


class RuntimeFailure(OnnxAmpError):  # noqa: N818 - "error" would say that onnxamp itself is at fault
    """ONNX Runtime could not load or run a model.

    Attributes:
        loaded: whether the model had loaded, in which case its inputs may be at fault.
    """

    def __init__(self, message: str, *, loaded: bool = False) -> None:
        super().__init__(message)
        self.loaded = loaded


class NumericsError(OnnxAmpError, RuntimeError):
    """A checked value holds NaN or Inf; raised by checks that are set to abort.

    Attributes:
        value: name of the value.
        node: name, or else first output, of the node that produces it; "" for a tensor or an input of the model.
        op: op type of that node.
    """

    def __init__(
        self, message: str, value: str = "", node: str = "", op: str = ""
    ) -> None:
        super().__init__(message)
        self.value = value
        self.node = node
        self.op = op


class InternalError(OnnxAmpError):
    """onnxamp detected a bug of its own before it did harm; please report the model.

    Conversions catch it: the nodes around the fault, or the whole model, stay in float32, and a warning says why.

    Attributes:
        nodes: outputs of the nodes around the fault, if it can be located.
    """

    def __init__(self, message: str, nodes: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.nodes = nodes


class OnnxAmpWarning(UserWarning):
    """Base class of all warnings about conversions.

    Example:
        >>> import onnxamp, warnings
        >>> with warnings.catch_warnings(action="ignore", category=onnxamp.OnnxAmpWarning):
        ...     model16 = onnxamp.convert_model("models/encoder.onnx", white_list=["Sofmax"])
    """


class OptionWarning(OnnxAmpWarning):
    """An option matches nothing in the model, cannot be followed, or breaks something. ``plan.warnings`` holds the
    same sentences.

    Example:
        >>> import onnxamp, warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     model16 = onnxamp.convert_model("models/encoder.onnx", white_list=["Sofmax"])
        >>> print(caught[0].message)
        The op type 'Sofmax' in your lists does not occur in the model. Did you mean 'Softmax'?
    """


class HazardWarning(OnnxAmpWarning):
    """Nodes that a level of ``mindspore.amp`` would lower stay in float32, since low precision is known to break them.

    Example:
        >>> import onnxamp, warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     model16 = onnxamp.amp.auto_mixed_precision("models/encoder.onnx", "O2")
        >>> {item.category for item in caught} <= {onnxamp.HazardWarning}
        True
    """


for _class in [value for value in list(globals().values()) if isinstance(value, type)]:
    if issubclass(_class, (OnnxAmpError, OnnxAmpWarning)):
        _class.__module__ = "onnxamp"  # where users import them from


_NEAR: Final = 0.76
"""The share of letters that a proposed name has in common with what was typed: "Floor" is not what "Foo" means."""
_ENOUGH: Final = 4
"""Letters of a word in which one wrong letter leaves enough: "gpu" is no misspelled "cpu"."""
_LIKELY: Final = 20
"""Number of names that are compared letter by letter."""


def first_of(names: Collection[str]) -> str:
    """Return the first of some names, quoted, and the number of the others."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"{next(iter(names))!r}{more}"


def nearest(names: Iterable[str], text: str) -> str | None:
    """Return the name that a text is most likely meant to be; None if none is near. Complexity: linear in names.

    A name is near if it shares :data:`_NEAR` of its letters, in their order, or if one typing error leads to it. Case
    and separators do not count.
    """
    from heapq import nlargest  # noqa: PLC0415 - few names are misspelled

    typed = _letters(text)
    wanted = _triples(typed)
    likely = nlargest(
        _LIKELY, names, key=lambda name: len(wanted & _triples(_letters(name)))
    )
    # Of equally near names, the one that has more of the typed characters as they are.
    ranked = [
        (_nearness(typed, _letters(name)), _share(text, name)) for name in likely
    ]
    best = max(range(len(likely)), key=ranked.__getitem__, default=None)
    return None if best is None or ranked[best][0] < _NEAR else likely[best]


def _nearness(typed: str, name: str) -> float:
    """Return how much of its letters a name shares with what was typed: 1 if all."""
    if not typed or not name:
        return 0.0
    shared = _share(typed, name)
    return max(shared, _NEAR) if _is_one_error(typed, name) else shared


def _share(one: str, other: str) -> float:
    from difflib import SequenceMatcher  # noqa: PLC0415 - as above

    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def _is_one_error(typed: str, name: str) -> bool:
    """Return whether two words differ by one letter, or by the order of two neighbors."""
    if min(len(typed), len(name)) < _ENOUGH:
        return False
    while typed and name and typed[0] == name[0]:
        typed, name = typed[1:], name[1:]
    while typed and name and typed[-1] == name[-1]:
        typed, name = typed[:-1], name[:-1]
    return max(len(typed), len(name)) <= 1 or (typed == name[::-1] and len(typed) == 2)


def suggestion(names: Iterable[str], text: str) -> str:
    """Return a question that suggests the nearest name, to follow a sentence; "" if none is near."""
    near = nearest(names, text)
    return "" if near is None else f" Did you mean {near!r}?"


def _letters(text: str) -> str:
    """Return a name without case and separators: --keep-io-types is near keep_io_types."""
    return "".join(filter(str.isalnum, text.lower()))


def _triples(letters: str) -> frozenset[str]:
    """Return all sequences of three letters in a text, whose ends count as letters."""
    padded = f"  {letters}  "
    return frozenset(padded[at : at + 3] for at in range(len(padded) - 2))


_PACKAGE: Final = str(Path(__file__).parents[1])


def warn(messages: Iterable[str], category: type[UserWarning] = OptionWarning) -> None:
    """Issue warnings that point at the line that called onnxamp."""
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (_PACKAGE, _CONTEXTS)
    ):
        level = level + 1
        frame = frame.f_back
    for message in messages:
        warnings.warn(printable(message), category, stacklevel=level)


_CONTEXTS: Final = str(Path(sys.modules["contextlib"].__file__ or "contextlib"))
"""The module that runs generator-based contexts, which is not the user's code."""
