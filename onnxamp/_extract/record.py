"""Running a model as far as some values need, and telling whether another run reproduces them bit for bit."""

from collections.abc import Mapping, Sequence
from math import inf, isfinite

import numpy as np
from onnx import helper

from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import Array
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.run import Run
from onnxamp._runtime.side import Side, run_alone
from onnxamp._runtime.values import Feed


def values_of(
    flow: Flow, feeds: Mapping[str, Feed], wanted: Sequence[str], run: Run
) -> dict[str, Array | None]:
    """Run the nodes that some values need, and no others.

    Args:
        feeds: as the model takes them.
        wanted: names of values of the main graph.

    Returns:
        Arrays by name, with the dtypes of the model as written; None for values that are not tensors.

    Raises:
        RuntimeFailure: one of these nodes does not load or run.
    """
    side = run_alone(
        Runner(flow, run.engine.provider), feeds, wanted, run.budget, run.progress("running")
    )
    return {name: _as_written(side, name) for name in wanted}


def _as_written(side: Side, name: str) -> Array | None:
    value, low = side.values.get(name), side.flow.low.get(name)
    if value is not None and not (value.has_value() and value.is_tensor()):
        return None
    array: Array = side.output(name)
    # The copy is needed: the memory goes with the run.
    return array.copy() if low is None else array.astype(helper.tensor_dtype_to_np_dtype(low))


def is_finite(array: Array) -> bool:
    """Whether an array is free of NaN and infinities, as all arrays but floats are."""
    return "float" not in array.dtype.name or bool(np.isfinite(_as_double(array)).all())


def _as_double(array: Array) -> Array:
    """For element types that NumPy's functions do not know."""
    return array.astype(np.float64)


def differences(
    flow: Flow, feeds: Mapping[str, Array], expected: Mapping[str, Array], run: Run
) -> dict[str, float]:
    """Outputs of a model that differ from what is expected in any bit.

    Returns:
        By name: the largest difference relative to the largest element; infinite if shapes, NaN or infinities differ.
    """
    results = values_of(flow, feeds, list(expected), run)
    pairs = ((name, value, results[name]) for name, value in expected.items())
    return {
        name: inf if b is None else _distance(a, b)
        for name, a, b in pairs
        if b is None or not same(a, b)
    }


def same(one: Array, other: Array) -> bool:
    """Whether two arrays are equal bit for bit, apart from the bits of NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if "float" not in one.dtype.name:
        return bool(np.array_equal(one, other))
    a, b = _as_double(one), _as_double(other)
    zero = a == 0
    return bool(
        np.array_equal(a, b, equal_nan=True)
        and np.array_equal(np.signbit(a[zero]), np.signbit(b[zero]))
    )


def _distance(one: Array, other: Array) -> float:
    if one.shape != other.shape or one.dtype.kind in "OUS":
        return inf
    a, b = _as_double(one), _as_double(other)
    with np.errstate(invalid="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest, worst = np.max(np.abs(a[np.isfinite(a)]), initial=0.0), np.max(error, initial=0.0)
    return float(worst / largest) if isfinite(worst) and largest else inf
