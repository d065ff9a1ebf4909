"""The exponents of values that a model stores as multiples, in its metadata."""

import json
from collections.abc import Mapping
from typing import Final

from onnx import ModelProto

EXPONENTS: Final = "onnxamp.exponents"
"""Key of the metadata: JSON, the exponent by name of a value that is stored as ``value * 2**-exponent``."""
_LARGEST: Final = 300
"""Exponents beyond are none: float32 has no such numbers."""


def stored_exponents(model: ModelProto) -> dict[str, int]:
    """Return value -> exponent for values stored as ``value * 2**-exponent``; malformed entries are left out."""
    texts = (entry.value for entry in model.metadata_props if entry.key == EXPONENTS)
    try:
        rows = json.loads(next(texts, "{}"))
    except ValueError:
        return {}
    if not isinstance(rows, dict):
        return {}
    # True is an int of Python as well, but no number of JSON.
    return {
        name: number
        for name, number in rows.items()
        if type(number) is int and 0 < abs(number) <= _LARGEST
    }


def exponents_between(
    one: Mapping[str, int], other: Mapping[str, int]
) -> dict[str, int]:
    """Return value -> e, where another model stores it as a multiple by 2^-e of what one does; both have exponents."""
    names = (*one, *other)
    differences = {name: other.get(name, 0) - one.get(name, 0) for name in names}
    return {name: exponent for name, exponent in differences.items() if exponent}


def store_exponents(model: ModelProto, exponents: Mapping[str, int]) -> None:
    """Add exponents to those that the model has, and write them to its metadata."""
    total = stored_exponents(model)
    for name, exponent in exponents.items():
        total[name] = total.get(name, 0) + exponent
    nonzero = {name: exponent for name, exponent in sorted(total.items()) if exponent}
    entries = (entry for entry in model.metadata_props if entry.key == EXPONENTS)
    entry = next(entries, None) or model.metadata_props.add(key=EXPONENTS)
    entry.value = json.dumps(nonzero, ensure_ascii=False)
