"""Reports as JSON: the same facts as the terminal's, with stable names."""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from onnxamp.convert import Conversion
from onnxamp.numerics.validate import Validation


def conversion_json(made: Conversion, validation: Validation | None) -> str:
    """One JSON object: the conversion without its verdicts (``--save-plan`` writes those), and the validation."""
    facts = as_data(replace(made, plan=replace(made.plan, rows=())))
    del facts["plan"]["rows"]
    facts["validation"] = as_data(validation)
    return json.dumps(facts, indent=1, allow_nan=False)


def as_data(item: Any) -> Any:
    """Dataclasses, mappings and tuples as what JSON knows; infinities and NaN as strings."""
    if is_dataclass(item) and not isinstance(item, type):
        return {field.name: as_data(getattr(item, field.name)) for field in fields(item)}
    if isinstance(item, Mapping):
        return {" ".join(key) if isinstance(key, tuple) else str(key): as_data(value) for key, value in item.items()}
    if isinstance(item, (list, tuple, set, frozenset)):
        return [as_data(value) for value in item]
    if isinstance(item, float) and not math.isfinite(item):
        return str(item)
    return str(item) if isinstance(item, Path) else item
