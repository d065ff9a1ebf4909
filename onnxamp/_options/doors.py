"""The doors of the package: functions and constructors that users of other frameworks call with the names they know.

``_data/other_arguments.toml`` lists the names of arguments in MindSpore, Paddle and PyTorch. A door takes those whose
meaning is clear, and names what to write instead of the others. Every error about arguments is one of the package's
own.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache, wraps
from inspect import Parameter, Signature
from typing import Any, Final, NoReturn, TypeVar, cast

from onnxamp._base.errors import ArgumentTypeError, MissingNameError, suggestion
from onnxamp._base.numbers import NUMBERS
from onnxamp._base.records import record
from onnxamp._facts.tables import read_table

T = TypeVar("T", bound=Callable[..., Any])

_NAMELESS: Final = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_BY_POSITION: Final = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@record(kw_only=True)
class _Others:
    """Arguments of other frameworks for some functions; ``other_arguments.toml`` explains the fields."""

    of: Sequence[str]
    source: str
    same: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    needless: Sequence[str] = ()
    neutral: Mapping[str, Any] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)
    first: Mapping[str, Sequence[str]] = field(default_factory=dict)
    positional: str = ""


@cache
def _table() -> Mapping[str, Any]:
    return read_table("other_arguments")


@cache
def _others_of(name: str) -> tuple[_Others, ...]:
    """Return the rows of the table for a function."""
    rows = _table()["arguments"]
    return tuple(_Others(**row) for row in rows if name in row["of"])


def autocast_types() -> Mapping[str, str]:
    """Return the default type of ``torch.amp.autocast`` by device type."""
    types: Mapping[str, str] = _table()["autocast_types"]
    return types


def door(target: T) -> T:
    """Make a function, or the constructor and the methods of a class, take arguments by the names of other frameworks.

    Raises, when called:
        ArgumentTypeError: an argument is unknown, missing or given twice. The message names what to write.
        MissingNameError: an object of the class has no attribute of a name.
    """
    if not isinstance(target, type):
        return cast(T, _guarded(target, target.__name__))
    owner: Any = target
    for name, member in list(vars(owner).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(owner, name, _guarded(member, f"{owner.__name__}.{name}", 1))
    owner.__init__ = _guarded(owner.__init__, owner.__name__, 1)
    owner.__getattr__ = _refuse_name
    return target


def _refuse_name(self: object, name: str) -> NoReturn:
    """Refuse an attribute that an object does not have.

    Raises:
        MissingNameError: always. The message names what to write.
    """
    kind = type(self)
    said = f"{kind.__name__} has no attribute {name!r}"
    if name.startswith("_"):  # Python itself asks for these
        raise MissingNameError(f"{said}.", name=name, obj=self)
    classes = {base.__name__ for base in kind.__mro__}
    for row in _table()["attributes"]:
        if name in row["instead"] and not classes.isdisjoint(row["of"]):
            raise MissingNameError(
                f"{said}: {row['instead'][name]}.", name=name, obj=self
            )
    near = suggestion([item for item in dir(kind) if item[0] != "_"], name)
    raise MissingNameError(f"{said}.{near}", name=name, obj=self)


def _guarded(
    function: Callable[..., Any], name: str, skipped: int = 0
) -> Callable[..., Any]:
    """Return a function that translates its arguments; the first ``skipped`` ones are not the caller's."""

    # On first use, because reading all signatures takes longer than importing all else here.
    @cache
    def call() -> _Call:
        signature = inspect.signature(function)
        return _Call(name, signature, tuple(signature.parameters.values())[skipped:])

    @wraps(function)
    def guarded(*given: Any, **named: Any) -> Any:
        own, rest = given[:skipped], given[skipped:]
        rest, named = call().translated(rest, named)
        call().check((*own, *rest), len(rest), named)
        return function(*own, *rest, **named)

    return guarded


@record
class _Call:
    """Calls of a function; ``parameters`` are those that the caller gives."""

    qualified: str
    signature: Signature
    parameters: tuple[Parameter, ...]

    @property
    def name(self) -> str:
        """The name of the function as callers write it."""
        return self.qualified.rpartition(".")[2]

    @property
    def names(self) -> list[str]:
        """The names of the parameters."""
        return [item.name for item in self.parameters if item.kind not in _NAMELESS]

    @property
    def ordered(self) -> list[str]:
        """The names of the parameters that may be given by position."""
        return [item.name for item in self.parameters if item.kind in _BY_POSITION]

    def translated(
        self, given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments by the function's own names."""
        rows = _others_of(self.qualified)
        own = self.names
        if not rows or (not given and named.keys() <= set(own)):
            return given, dict(named)
        keywords = dict[str, Any]()
        order = self._order(rows, given)
        if order:
            self._add(keywords, zip(order, given, strict=False))
            given = given[len(order) :]
        self._add(keywords, named.items())
        by_position = set(self.ordered[: len(given)])
        for theirs, value in list(keywords.items()):
            if theirs in own:
                continue
            del keywords[theirs]
            pairs = list(self._meant(rows, theirs, value))
            if twice := [name for name, _ in pairs if name in by_position]:
                self._refuse_twice(theirs, twice[0])
            self._add(keywords, pairs, theirs)
        return given, keywords

    def _order(
        self, rows: Iterable[_Others], given: Sequence[Any]
    ) -> Sequence[str] | None:
        """Return the names of positional arguments, if the first of them shows whose order they have."""
        if not given:
            return None
        kind = _kind(given[0])
        for row in rows:
            if kind in row.first:
                return row.first[kind][: len(given)]
        return None

    def _meant(
        self, rows: Iterable[_Others], theirs: str, value: Any
    ) -> Iterator[tuple[str, Any]]:
        """Yield the function's own arguments that an argument of another framework stands for."""
        for row in rows:
            if theirs in row.same:
                yield row.same[theirs], value
                return
            if theirs in row.parts:
                yield from self._parts(theirs, row.parts[theirs], value)
                return
            if theirs in row.needless or _is_neutral(row, theirs, value):
                return
            if theirs in row.instead:
                # Another value of a neutral argument would have been taken.
                said = f"argument {theirs!r}"
                if theirs in row.neutral:
                    said = f"{theirs}={value!r:.40}"
                raise ArgumentTypeError(
                    f"{self.name} takes no {said}: {row.instead[theirs]}."
                )
        yield theirs, value

    def _parts(
        self, theirs: str, own: Sequence[str], value: Any
    ) -> Iterator[tuple[str, Any]]:
        """Yield the items of an argument that holds several of the function's own."""
        if not isinstance(value, (tuple, list)) or len(value) != len(own):
            raise ArgumentTypeError(
                f"{theirs} must hold {' and '.join(own)}, not {value!r}."
            )
        yield from zip(own, value, strict=True)

    def _add(
        self,
        keywords: dict[str, Any],
        pairs: Iterable[tuple[str, Any]],
        theirs: str | None = None,
    ) -> None:
        """Add arguments, none of which may be there already."""
        for name, value in pairs:
            if name in keywords:
                self._refuse_twice(theirs or name, name)
            keywords[name] = value

    def _refuse_twice(self, theirs: str, own: str) -> None:
        also = f" as {own!r}" if theirs != own else ""
        raise ArgumentTypeError(
            f"{self.name} got the argument {theirs!r} twice{also}: pass it once."
        )

    def check(
        self, given: tuple[Any, ...], positional: int, named: Mapping[str, Any]
    ) -> None:
        """Check that the function takes these arguments; ``positional`` counts those that the caller gives by position.

        Raises:
            ArgumentTypeError: it does not.
        """
        try:
            self.signature.bind(*given, **named)
        except TypeError:
            raise ArgumentTypeError(self._trouble(positional, named)) from None

    def _trouble(self, positional: int, named: Mapping[str, Any]) -> str:
        """Return the fault of arguments that the function does not take."""
        names = self.names
        known = ", ".join(names) if names else "none"
        ordered = self.ordered
        if positional > len(ordered):
            advice = [row.positional for row in _others_of(self.qualified)]
            text = next(filter(None, advice), f"its arguments are {known}")
            if not ordered:
                return f"{self.name} takes no positional arguments: {text}."
            plural = "s" * (len(ordered) > 1)
            most = f"at most {len(ordered)} positional argument{plural}"
            return f"{self.name} takes {most}, not {positional}: {text}."
        for name in named:
            if name not in names:
                near = suggestion(names, name)
                return f"{self.name} takes no argument {name!r}: its arguments are {known}.{near}"
        for name in ordered[:positional]:
            if name in named:
                return f"{self.name} got the argument {name!r} twice: pass it once."
        given = {*ordered[:positional], *named}
        missing = [
            item.name
            for item in self.parameters
            if item.default is Parameter.empty and item.kind not in _NAMELESS
        ]
        needed = [name for name in missing if name not in given]
        return f"{self.name} needs {' and '.join(needed)}: its arguments are {known}."


def _kind(value: Any) -> str:
    """Return the kind of a first argument, as ``other_arguments.toml`` names it; "" for others."""
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, str):
        return "text"
    if isinstance(value, NUMBERS):
        return "number"
    return "function" if inspect.isfunction(value) else ""


def _is_neutral(row: _Others, theirs: str, value: Any) -> bool:
    """Return whether an argument has the value that changes nothing; "none" in the table is None."""
    if theirs not in row.neutral:
        return False
    expected = row.neutral[theirs]
    if expected == "none":
        return value is None
    # Such as devices, which may have a number: "cuda:1".
    if isinstance(expected, list):
        return str(value).partition(":")[0] in expected
    # In Python, False equals 0.
    is_alike = isinstance(value, bool) == isinstance(expected, bool)
    return is_alike and isinstance(value, (*NUMBERS, str)) and value == expected
