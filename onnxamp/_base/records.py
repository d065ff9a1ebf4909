"""Records: frozen values with named fields, cheap to declare and to create.

The package has hundreds of them, and one command loads half. ``@dataclass(frozen=True)`` compiles six methods for each
class, which together take longer than the conversion of a small model; a record compiles one and shares the others.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from operator import attrgetter
from typing import Any, TypeVar, cast, dataclass_transform, overload

T = TypeVar("T")


@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(cls: type[T], /) -> type[T]: ...
@overload
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(*, kw_only: bool) -> Callable[[type[T]], type[T]]: ...
def record(cls: Any = None, /, *, kw_only: bool = False) -> Any:
    """Decorate as ``@dataclass(frozen=True, slots=True)`` does, but only type checkers see that it is frozen.

    Creating a value then takes a quarter of the time: Python sets each field of a frozen dataclass by a call. Values of
    public classes are frozen for Python as well, and stay dataclasses.
    """
    if cls is None:
        return partial(_made, kw_only=kw_only)
    return _made(cls, kw_only=kw_only)


def _made(cls: type[T], *, kw_only: bool) -> type[T]:
    own = vars(cls)
    decorated: Any = dataclass(slots=True, eq=False, repr=False, kw_only=kw_only)(cls)
    rows = fields(decorated)
    compared = _values_of([row.name for row in rows if row.compare])
    if "__eq__" not in own:
        decorated.__eq__ = _equal(compared)
    if "__hash__" not in own:
        decorated.__hash__ = _hashed(compared)
    if "__repr__" not in own:
        decorated.__repr__ = _shown([row.name for row in rows if row.repr])
    return cast(type[T], decorated)


def _values_of(names: list[str]) -> Callable[[Any], Any]:
    """Return what reads these fields: as a tuple, or the value itself if there is one."""
    return attrgetter(*names) if names else lambda _value: ()


def _equal(values: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def is_equal(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    return is_equal


def _hashed(values: Callable[[Any], Any]) -> Callable[[Any], int]:
    def hashed(self: Any) -> int:
        return hash(values(self))

    return hashed


def _shown(names: list[str]) -> Callable[[Any], str]:
    def shown(self: Any) -> str:
        parts = (f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({', '.join(parts)})"

    return shown
