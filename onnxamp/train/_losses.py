"""Losses as graphs: they map an output of the model and labels to the value that training minimizes.

Losses with names from ``mindspore.nn`` and ``paddle.nn`` have the arguments, defaults and formulas of both.
"""

from collections.abc import Callable, Mapping
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    suggestion,
)
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._base.words import count
from onnxamp._gradients.writer import Tensor
from onnxamp._graph.shapes import Dims
from onnxamp._options.doors import door
from onnxamp._options.values import checked_flag, checked_word
from onnxamp.train._loss import Loss, LossFunction, float_array

Reduction: TypeAlias = Literal["mean", "sum", "none"]

_FLOAT = TensorProto.FLOAT
_INT64 = TensorProto.INT64
_SMALLEST: Final = 1e-12
"""The value that smaller probabilities are raised to, so that their logarithms are finite."""


@door
def SoftmaxCrossEntropyWithLogits(  # noqa: N802
    sparse: bool = False, reduction: Reduction = "none"
) -> Loss:
    """Return the cross entropy of logits [batch, classes], like ``mindspore.nn.SoftmaxCrossEntropyWithLogits``.

    Args:
        sparse: whether labels are classes [batch]; otherwise they are one-hot, in the shape of the logits.
        reduction: "mean", "sum" or "none", which leaves one loss per sample.

    Raises:
        ArgumentError, ArgumentTypeError: a value is unknown, or has the wrong type.

    Example:
        >>> from onnxamp.train import SoftmaxCrossEntropyWithLogits
        >>> loss = SoftmaxCrossEntropyWithLogits(sparse=True)
        >>> loss([[3, 5, 6, 9, 12, 33, 42, 12, 32, 72]], [1])
        array([67.], dtype=float32)
    """
    checked_flag("sparse", sparse)
    return _entropy(_log_softmax(-1), -1, reduction, is_soft=not sparse)


@door
def CrossEntropyLoss(  # noqa: N802
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    soft_label: bool = False,
    axis: int = -1,
    use_softmax: bool = True,
    label_smoothing: float = 0.0,
) -> Loss:
    """Return the cross entropy of logits and classes, like ``paddle.nn.CrossEntropyLoss``.

    ``mindspore.nn.CrossEntropyLoss`` expects the classes of images on axis 1 instead of the last axis.

    Args:
        weight: a factor for each class.
        ignore_index: a label to ignore.
        reduction: "mean" over the labels that are not ignored, by their weights; "sum"; or "none", one loss per label.
        soft_label: whether labels are probabilities in the shape of the logits.
        axis: the axis of the classes.
        use_softmax: False if the model outputs probabilities.
        label_smoothing: the share of each label to spread over all classes.

    Raises:
        ArgumentError, ArgumentTypeError: a value is unknown, or has the wrong type.

    Example:
        >>> from onnxamp.train import CrossEntropyLoss
        >>> loss = CrossEntropyLoss(ignore_index=255)
        >>> round(float(loss([[1.0, 3.0], [2.0, 2.0]], [1, 255])), 4)
        0.1269
    """
    checked_flag("soft_label", soft_label)
    checked_flag("use_softmax", use_softmax)
    checked_number("axis", axis, "a whole number", lambda _: True, WHOLE)
    checked_number(
        "ignore_index", ignore_index, "a whole number", lambda _: True, WHOLE
    )
    checked_number(
        "label_smoothing",
        label_smoothing,
        "a number from 0 to 1",
        lambda n: 0 <= n <= 1,
    )
    return _entropy(
        _log_softmax(axis) if use_softmax else _safe_log,
        axis,
        reduction,
        is_soft=soft_label,
        weight=weight,
        ignored=ignore_index,
        smoothing=label_smoothing,
    )


@door
def NLLLoss(  # noqa: N802
    weight: ArrayLike | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
) -> Loss:
    """Return the negative log likelihood of log-probabilities [batch, classes, ...] and classes [batch, ...].

    The counterpart of ``mindspore.nn.NLLLoss`` and ``paddle.nn.NLLLoss``. It has the arguments of
    :func:`CrossEntropyLoss`.

    Example:
        >>> from onnxamp.train import NLLLoss
        >>> float(NLLLoss()([[-0.5, -2.0]], [1]))
        2.0
    """
    return _entropy(
        lambda output: output, 1, reduction, weight=weight, ignored=ignore_index
    )


@door
def MSELoss(reduction: Reduction = "mean") -> Loss:  # noqa: N802
    """Return the squared difference of output and labels, like ``MSELoss`` of MindSpore and Paddle.

    Example:
        >>> from onnxamp.train import MSELoss
        >>> float(MSELoss()([1.0, 2.0, 3.0], [1.0, 1.0, 1.0]))
        1.6666666269302368
    """

    def squares(output: Tensor, labels: Tensor) -> Tensor:
        difference = output - labels
        return difference * difference

    return _reducing(squares, reduction)


@door
def L1Loss(reduction: Reduction = "mean") -> Loss:  # noqa: N802
    """Return the absolute difference of output and labels, like ``L1Loss`` of MindSpore and Paddle.

    Example:
        >>> from onnxamp.train import L1Loss
        >>> L1Loss("none")([1.0, 2.0, 3.0], [1.0, 2.0, 2.0])
        array([0., 0., 1.], dtype=float32)
    """
    return _reducing(lambda output, labels: (output - labels).op("Abs"), reduction)


@door
def BCELoss(  # noqa: N802
    weight: ArrayLike | None = None, reduction: Reduction = "mean"
) -> Loss:
    """Return the binary cross entropy of probabilities and labels in [0, 1], like ``BCELoss`` of MindSpore and Paddle.

    Args:
        weight: a factor, in a shape that broadcasts to that of the labels.
        reduction: "mean", "sum" or "none".

    Example:
        >>> from onnxamp.train import BCELoss
        >>> round(float(BCELoss()([0.5, 0.6, 0.7], [1.0, 0.0, 1.0])), 4)
        0.6554
    """

    def losses(output: Tensor, labels: Tensor) -> Tensor:
        right = _safe_log(output)
        wrong = _safe_log(1.0 - output)
        return -(labels * right + (1.0 - labels) * wrong)

    return _reducing(losses, reduction, weight)


@door
def BCEWithLogitsLoss(  # noqa: N802
    *,
    weight: ArrayLike | None = None,
    reduction: Reduction = "mean",
    pos_weight: ArrayLike | None = None,
) -> Loss:
    """Return the binary cross entropy of logits and labels in [0, 1], like ``BCEWithLogitsLoss`` of both frameworks.

    MindSpore and Paddle order its arguments differently, so pass them by name.

    Args:
        weight: a factor, in a shape that broadcasts to that of the labels.
        reduction: "mean", "sum" or "none".
        pos_weight: a factor for positive labels, in a shape that broadcasts.

    Example:
        >>> from onnxamp.train import BCEWithLogitsLoss
        >>> round(float(BCEWithLogitsLoss()([5.0, 1.0, 3.0], [1.0, 0.0, 1.0])), 4)
        0.4562
    """
    positive = None if pos_weight is None else float_array("pos_weight", pos_weight)

    def losses(output: Tensor, labels: Tensor) -> Tensor:
        if positive is None:
            return output.op("Softplus") - output * labels
        _check_factors("pos_weight", positive, output.dims)
        factors = labels * (output.like(positive) - 1.0) + 1.0
        negatives = output * (1.0 - labels)
        return negatives + factors * (-output).op("Softplus")

    return _reducing(losses, reduction, weight)


def _entropy(
    logarithms: Callable[[Tensor], Tensor],
    axis: int,
    reduction: Reduction,
    *,
    is_soft: bool = False,
    weight: ArrayLike | None = None,
    ignored: int | None = None,
    smoothing: float = 0.0,
) -> Loss:
    """Return the cross entropy of labels and the logarithms of probabilities.

    With soft labels, which only Paddle has, class weights are applied as in Paddle. With labels that are classes,
    MindSpore and Paddle agree except for label smoothing, which follows MindSpore.
    """
    table = None if weight is None else float_array("weight", weight)
    if table is not None and table.ndim != 1:
        raise ArgumentError(
            f"weight must be a list with a factor for each class, not an array of shape {list(table.shape)}."
        )

    def hard(output: Tensor, labels: Tensor) -> Tensor:
        _check_table(table, output.dims, axis)
        logs = logarithms(output)
        factors = None
        skipped = None
        if ignored is not None:
            skipped = labels.equals(ignored)
            labels = skipped.where(0, labels)
            factors = skipped.where(0.0, output.like(1.0))
        positions = labels.op("Unsqueeze", [axis])
        picked = logs.op("GatherElements", positions, axis=axis)
        losses = -picked.op("Squeeze", [axis])
        if table is not None:
            weights = output.like(table).op("Gather", labels)
            factors = weights if factors is None else factors * weights
            losses = losses * weights
            logs = logs * _along(output, table, axis)
        losses = _smoothed(losses, logs, axis, smoothing)
        if skipped is not None:
            losses = skipped.where(0.0, losses)
        return _averaged(losses, factors, reduction)

    def soft(output: Tensor, labels: Tensor) -> Tensor:
        _check_table(table, output.dims, axis)
        logs = logarithms(output)
        factors = None
        losses = -(labels * logs).sum([axis], keepdims=False)
        losses = _smoothed(losses, logs, axis, smoothing)
        if table is not None:
            shares = labels * (1 - smoothing) + smoothing / table.size
            factors = (shares * _along(output, table, axis)).sum(
                [axis], keepdims=False
            )
            losses = losses * factors
        return _averaged(losses, factors, reduction)

    _check_reduction(reduction)
    if is_soft:
        return Loss(soft)
    return Loss(hard, label_type=_INT64, but=axis, picks=True, ignored=ignored)


def _along(output: Tensor, weights: NDArray[np.float32], axis: int) -> Tensor:
    """Return the weights of classes, shaped to broadcast along the axis of the output that has these."""
    behind = len(output.dims or ()) - 1 - axis if axis >= 0 else -1 - axis
    return output.like(weights.reshape(-1, *[1] * behind))


def _smoothed(losses: Tensor, logs: Tensor, axis: int, smoothing: float) -> Tensor:
    """Return losses that take a share of each label from all classes."""
    if not smoothing:
        return losses
    spread = logs.op("ReduceMean", [axis], keepdims=0)
    return losses * (1 - smoothing) - spread * smoothing


def _check_table(
    table: NDArray[np.float32] | None, output: Dims | None, axis: int
) -> None:
    """Check that there is a factor for each class along this axis of the output, as far as its shape is known.

    Raises:
        ArgumentError: there are more or fewer.
    """
    rank = len(output or ())
    if table is None or output is None or not -rank <= axis < rank:
        return
    classes = output[axis]
    if isinstance(classes, int) and classes != table.size:
        raise ArgumentError(
            f"weight has {count(table.size, 'factor')}, but the output has {classes} classes: give one for each class."
        )


def _check_factors(
    what: str, factors: NDArray[np.float32], labels: Dims | None
) -> None:
    """Check that factors broadcast to the shape of the labels, as far as it is known.

    Raises:
        ArgumentError: they do not.
    """
    if labels is None:
        return
    places = zip(factors.shape[::-1], labels[::-1], strict=False)
    fits = all(
        size in (1, place) or not isinstance(place, int) for size, place in places
    )
    if factors.ndim > len(labels) or not fits:
        shape = ", ".join(map(str, labels))
        raise ArgumentError(
            f"{what} has the shape {list(factors.shape)}, which does not broadcast to that of the labels, [{shape}]."
        )


def _log_softmax(axis: int) -> Callable[[Tensor], Tensor]:
    return lambda output: output.op("LogSoftmax", axis=axis)


def _safe_log(probabilities: Tensor) -> Tensor:
    """Return the logarithms of probabilities, kept finite."""
    return probabilities.op("Max", probabilities.like(_SMALLEST)).op("Log")


def _averaged(losses: Tensor, factors: Tensor | None, reduction: Reduction) -> Tensor:
    """Return the reduced losses; the mean is weighted by these factors, and 0 if all of them are zero."""
    if factors is None or reduction != "mean":
        return _reduced(losses, reduction)
    total = _reduced(factors, "sum")
    return _reduced(losses, "sum") / total.equals(0.0).where(1.0, total)


def _reduced(losses: Tensor, reduction: Reduction) -> Tensor:
    if reduction == "none":
        return losses
    return losses.op("ReduceMean" if reduction == "mean" else "ReduceSum", keepdims=0)


def _reducing(
    losses: LossFunction, reduction: Reduction, weight: ArrayLike | None = None
) -> Loss:
    """Return a loss that weights and reduces these losses of elements.

    Raises:
        ArgumentError, ArgumentTypeError: the reduction is unknown.
    """
    _check_reduction(reduction)
    factors = None if weight is None else float_array("weight", weight)

    def function(output: Tensor, labels: Tensor) -> Tensor:
        each = losses(output, labels)
        if factors is not None:
            _check_factors("weight", factors, output.dims)
            each = each * each.like(factors)
        return _reduced(each, reduction)

    return Loss(function)


def _check_reduction(reduction: str) -> None:
    checked_word("reduction", reduction, ("mean", "sum", "none"))


LOSSES: Final[Mapping[str, Loss]] = {
    "binary-cross-entropy": BCEWithLogitsLoss(),
    "cross-entropy": _entropy(_log_softmax(1), 1, "mean"),
    "mean-squared-error": MSELoss(),
}
"""Losses by their names on the command line."""
_NAMED: Final[Mapping[str, Loss]] = {
    make.__name__: make()
    for make in (
        BCELoss,
        BCEWithLogitsLoss,
        CrossEntropyLoss,
        L1Loss,
        MSELoss,
        NLLLoss,
        SoftmaxCrossEntropyWithLogits,
    )
}


def find_loss(loss: "str | Loss | LossFunction") -> Loss:
    """Return the loss of this name, or one that wraps this function (with float32 labels "label", shaped like the
    output).

    Raises:
        ArgumentError: there is no loss of this name.
        ArgumentTypeError: ``loss`` has the wrong type.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, str):
        known = {**LOSSES, **_NAMED}
        if loss not in known:
            raise ArgumentError(
                f"Unknown loss {loss!r}: choose one of {', '.join(known)}, or pass a function.{suggestion(known, loss)}"
            )
        return known[loss]
    if not callable(loss):
        raise ArgumentTypeError(
            f"loss_fn must be a name, a Loss or a function, not {type(loss).__name__}."
        )
    return Loss(loss)
