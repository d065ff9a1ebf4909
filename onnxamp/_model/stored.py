"""How a model stores its values, as its metadata tell: some are multiples of what they stand for, by powers of two.

Whoever compares such a model with its original would find errors in every value of that kind otherwise.
"""

import json
from collections.abc import Mapping
from typing import Final

from onnx import ModelProto

EXPONENTS: Final = "onnxamp.exponents"
"""Key of the metadata: JSON, the exponent by name of a value that is stored as ``value * 2**-exponent``."""
_LARGEST: Final = 300
"""Exponents beyond are none: float32 has no such numbers."""


def stored_exponents(model: ModelProto) -> dict[str, int]:
    """Value -> its exponent, for values that are stored as ``value * 2**-exponent``. What is malformed is none."""
    text = next((entry.value for entry in model.metadata_props if entry.key == EXPONENTS), "{}")
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    rows = found.items() if isinstance(found, dict) else ()
    return {name: number for name, number in rows if type(number) is int and 0 < abs(number) <= _LARGEST}


def store_exponents(model: ModelProto, exponents: Mapping[str, int]) -> None:
    """Add exponents to those that the model has, and write them to its metadata."""
    total = stored_exponents(model)
    for name, exponent in exponents.items():
        total[name] = total.get(name, 0) + exponent
    text = json.dumps({name: exponent for name, exponent in sorted(total.items()) if exponent}, ensure_ascii=False)
    entry = next((entry for entry in model.metadata_props if entry.key == EXPONENTS), None)
    (entry or model.metadata_props.add(key=EXPONENTS)).value = text
