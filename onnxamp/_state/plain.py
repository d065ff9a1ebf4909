"""Records as what JSON knows, and back: reports name their fields, states leave the names out."""

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


def as_data(item: Any, *, named: bool = True) -> Any:
    """Dataclasses, mappings and tuples as what JSON knows; infinities and NaN as strings.

    ``named``: a dataclass is an object; else the list of its fields.
    """
    if is_dataclass(item) and not isinstance(item, type):
        values = {
            field.name: as_data(getattr(item, field.name), named=named) for field in fields(item)
        }
        return values if named else list(values.values())
    if isinstance(item, Mapping):
        return {
            " ".join(key) if isinstance(key, tuple) else str(key): as_data(value, named=named)
            for key, value in item.items()
        }
    if isinstance(item, (list, tuple, set, frozenset)):
        return [as_data(value, named=named) for value in item]
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return str(item) if isinstance(item, Path) else item


def from_data(kind: Any, data: Any) -> Any:
    """The inverse of :func:`as_data` for a dataclass of dataclasses, mappings, tuples, sets, texts and numbers.

    Raises:
        TypeError, KeyError, ValueError: the data are no such record.
    """
    options = get_args(kind) if get_origin(kind) is UnionType else (kind,)
    if data is None and type(None) in options:
        return None
    # Where a string is possible beside a number it stays one: worst elements may be either.
    kind = str if isinstance(data, str) and str in options else options[0]
    if is_dataclass(kind) and isinstance(kind, type):
        hints = _hints(kind)
        values = dict(zip(hints, data, strict=True)) if isinstance(data, list) else data
        return kind(**{name: from_data(hint, values[name]) for name, hint in hints.items()})
    if get_origin(kind) is not None:
        return _collection(kind, data)
    if kind is float and isinstance(data, (str, int, float)):
        number = float(data)
        return (
            number if isinstance(data, str) else data
        )  # an integer stays one, and is written as such again
    if kind is not Any and not isinstance(data, kind):
        raise TypeError(kind)
    return data


def _collection(kind: Any, data: Any) -> Any:
    """A tuple, a set or a mapping."""
    inside = get_args(kind)
    if get_origin(kind) is frozenset:
        return frozenset(from_data(inside[0], item) for item in data)
    if get_origin(kind) is tuple:
        kinds = inside[:1] * len(data) if inside[-1] is Ellipsis else inside
        return tuple(from_data(one, item) for one, item in zip(kinds, data, strict=True))
    return {name: from_data(inside[1], item) for name, item in data.items()}


@cache
def _hints(kind: type[Any]) -> Mapping[str, Any]:
    """The fields of a dataclass, with their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}
