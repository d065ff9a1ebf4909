"""Loss scalers as in MindSpore, which scale numbers themselves, and the test whether gradients are finite."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from onnxamp._base.errors import ArgumentTypeError
from onnxamp._options.doors import door
from onnxamp._options.values import checked_array
from onnxamp.train._scale_values import (
    checked_count,
    checked_scale,
)
from onnxamp.train._scaling import (
    LossScaleManager,
    ScaleMover,
    ScaleState,
    ScaleUpdate,
    keeps_methods,
)


class LossScaler(LossScaleManager, ABC):
    """Base class of ``mindspore.amp.LossScaler``: scales a loss, unscales gradients, and adjusts its scale.

    :func:`build_train_network` accepts one as ``loss_scale_manager``, including one of your own class.

    Example:
        >>> from onnxamp.train import LossScaler, StaticLossScaler
        >>> isinstance(StaticLossScaler(8), LossScaler)
        True
    """

    @abstractmethod
    def scale(self, inputs: Any) -> Any:
        """Return the inputs, multiplied by the scale."""

    @abstractmethod
    def unscale(self, inputs: Any) -> Any:
        """Return the inputs, divided by the scale."""

    @abstractmethod
    def adjust(self, grads_finite: bool) -> bool:
        """Adjust the scale after an update, and return whether the scale is dynamic."""

    def get_loss_scale(self) -> float:
        """Return the scale of the next step."""
        return float(self.scale(np.float32(1)))

    def update_loss_scale(self, overflow: bool) -> None:
        """Call :meth:`adjust`."""
        self.adjust(not overflow)


@door
class StaticLossScaler(LossScaler):
    """A constant loss scale, like ``mindspore.amp.StaticLossScaler``.

    Inputs are arrays, or tuples, lists and dicts of them, and keep their types.

    Args:
        scale_value: the factor of the loss, at least 1.

    Raises:
        ArgumentError, ArgumentTypeError: ``scale_value`` is less than 1, or is not a number.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import StaticLossScaler
        >>> scaler = StaticLossScaler(scale_value=2**10)
        >>> scaler.scale(np.float32([1.0]))
        array([1024.], dtype=float32)
        >>> scaler.unscale((np.float16([1.5, 1.0]), np.float16([1.2])))
        (array([0.001465, 0.000977], dtype=float16), array([0.001172], dtype=float16))
    """

    def __init__(self, scale_value: float) -> None:
        self._scale_state = ScaleState.of(checked_scale("scale_value", scale_value))

    @property
    def scale_value(self) -> NDArray[np.float32]:
        """The current scale, a float32 scalar."""
        return self._scale_state.arrays()[0]

    def scale(self, inputs: Any) -> Any:
        """Return the inputs, multiplied by the scale."""
        return _multiplied(inputs, self.scale_value)

    def unscale(self, inputs: Any) -> Any:
        """Return the inputs, divided by the scale."""
        return _multiplied(inputs, np.reciprocal(self.scale_value))

    def adjust(self, grads_finite: bool) -> bool:  # noqa: ARG002
        """Change nothing."""
        return False


@door
class DynamicLossScaler(StaticLossScaler):
    """A loss scale that falls at each overflow and rises after a window without overflows.

    The counterpart of ``mindspore.amp.DynamicLossScaler``.

    Args:
        scale_value: the initial scale, at least 1.
        scale_factor: the factor by which the scale is divided or multiplied, a positive whole number.
        scale_window: updates in a row without overflow before the scale rises.

    Raises:
        ArgumentError, ArgumentTypeError: a value is out of range, or is not a number.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import DynamicLossScaler, all_finite
        >>> scaler = DynamicLossScaler(scale_value=2**10, scale_factor=2, scale_window=1)
        >>> gradients = scaler.unscale((np.float16([np.nan, 1.0]), np.float16([0.2])))
        >>> scaler.adjust(all_finite(gradients)), float(scaler.scale_value)
        (True, 512.0)
    """

    def __init__(
        self, scale_value: float, scale_factor: int, scale_window: int
    ) -> None:
        super().__init__(scale_value)
        self.scale_factor = checked_count("scale_factor", scale_factor)
        self.scale_window = checked_count("scale_window", scale_window)

    def adjust(self, grads_finite: bool) -> bool:
        """Adjust the scale after an update, depending on whether its gradients were finite, and return True."""
        self._scale_state = self._scale_state.after(
            self.get_update_cell(), not grads_finite
        )
        return True

    def get_update_cell(self) -> ScaleUpdate:
        """Return how the graph of a step changes the scale."""
        factor = self.scale_factor
        return ScaleUpdate(factor, 1 / factor, self.scale_window, 1)

    def _note(self, overflow: bool) -> None:
        """Record nothing: the state counts."""

    def _mover(self) -> ScaleMover | None:
        names = (
            "adjust",
            "get_loss_scale",
            "scale",
            "scale_value",
            "update_loss_scale",
        )
        return self if keeps_methods(self, DynamicLossScaler, *names) else None


@door
def all_finite(
    inputs: Iterable[ArrayLike] | Mapping[str, ArrayLike],
    status: object = None,  # noqa: ARG001
) -> np.bool_:
    """Return whether arrays contain neither NaN nor Inf, like ``mindspore.amp.all_finite``.

    Args:
        inputs: an array, several, or a dict of them, such as the ``gradients`` of a step.
        status: the result of :func:`init_status`; not needed.

    Raises:
        ArgumentTypeError: ``inputs`` are not arrays of real numbers.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import all_finite
        >>> bool(all_finite((np.array([np.nan, 1.0]), np.array([1.0]))))
        False
    """
    if not isinstance(inputs, Iterable):
        raise ArgumentTypeError(
            f"inputs must be arrays or a dict of arrays, not {type(inputs).__name__}."
        )
    given = inputs.values() if isinstance(inputs, Mapping) else inputs
    # An array without axes cannot be iterated. One of objects holds arrays.
    is_one = isinstance(inputs, np.ndarray) and inputs.dtype != object
    whole = [inputs] if is_one else given
    arrays = [checked_array("inputs", item) for item in whole]
    if wrong := [array for array in arrays if not _is_real(array)]:
        raise ArgumentTypeError(
            f"inputs must hold arrays of real numbers, not of {wrong[0].dtype}."
        )
    return np.bool_(all(np.isfinite(array).all() for array in arrays))


def _is_real(array: NDArray[Any]) -> bool:
    # NumPy marks types that packages register, such as those of ml_dtypes, by a 2.
    return array.dtype.kind in "biuf" or array.dtype.isbuiltin == 2


@door
def init_status() -> NDArray[np.float32]:
    """Return eight zeros, as ``mindspore.amp.init_status`` does on a CPU or GPU: overflows are detected without it.

    Example:
        >>> from onnxamp.train import init_status
        >>> init_status().shape
        (8,)
    """
    return np.zeros(8, np.float32)


def _multiplied(inputs: Any, factor: Any) -> Any:
    """Return arrays multiplied by a number, which is first cast to their types."""
    if isinstance(inputs, Mapping):
        return {name: _multiplied(item, factor) for name, item in inputs.items()}
    if isinstance(inputs, (tuple, list)):
        return type(inputs)(_multiplied(item, factor) for item in inputs)
    array = np.asarray(inputs)
    if not _is_real(array):
        raise ArgumentTypeError(
            f"inputs must be numbers, arrays, or tuples, lists and dicts of them, not {type(inputs).__name__}."
        )
    return array * factor.astype(array.dtype)
