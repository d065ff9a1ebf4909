"""The errors of the parts that outputs join (:mod:`onnxamp._runtime.joined`)."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np

from onnxamp._numerics.compare import measure
from onnxamp._numerics.metrics import PartError
from onnxamp._numerics.paired import exponents_between
from onnxamp._runtime.flow import DataflowGraph
from onnxamp._runtime.joined import joined_parts
from onnxamp._runtime.values import to_value

_LEAST: Final = 16
"""Elements of a part that is judged: few numbers may be small by chance."""


def worst_parts(
    flows: tuple[DataflowGraph, DataflowGraph],
    reference: Mapping[str, Any],
    result: Mapping[str, Any],
) -> Iterator[tuple[str, PartError]]:
    """Yield the part with the largest relative L2 error of each output that joins several.

    Args:
        flows: both models.
        reference: values of the reference, by name.
        result: those of the result.
    """
    exponents = exponents_between(*flows)
    for output, names in flows[0].ask(joined_parts).items():
        known = [name for name in names if name in reference and name in result]
        sizes = sum(np.size(reference[name]) for name in known)
        if output not in reference or sizes > np.size(reference[output]):
            continue  # something of the parts is left out
        errors = []
        for name in known:
            factor = 2.0 ** exponents.get(name, 0)
            error = _error(reference[name], result[name], factor)
            if error is not None:
                errors.append(PartError(error, name))
        if errors:
            yield output, max(errors)


def _error(reference: Any, result: Any, factor: float) -> float | None:
    """Return the relative L2 error of a part; None if it has few elements, or is zero."""
    one = np.asarray(reference)
    other = np.asarray(result)
    is_float = one.dtype.kind not in "biuUSO" and other.dtype.kind not in "biuUSO"
    if not is_float or one.shape != other.shape or one.size < _LEAST:
        return None
    if factor != 1:
        other = np.asarray(other * np.float32(factor))
    measured = measure(to_value(one), to_value(other))
    return measured.rel_l2 if measured.reference_energy else None
