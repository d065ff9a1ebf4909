"""``decorate`` as in Paddle: models with low-precision weights, and float32 masters for training.

Source: ``paddle.amp.decorate`` in Paddle's API reference.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onnx import ModelProto, NodeProto

from onnxamp._api import convert_as
from onnxamp._dtypes import low_type
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._model.model import Model
from onnxamp._ops.facts import op_key
from onnxamp._options.options import Options
from onnxamp.train._levels import NORMALISATIONS
from onnxamp.train._optimizers import Optimizer

LEVELS = ("O1", "O2")


@dataclass(frozen=True, slots=True, eq=False)
class Decorated:
    """A model decorated at level O2 by :func:`decorate`.

    Attributes:
        model: the model with low-precision weights, an ordinary ModelProto.
        source: the original model. :func:`build_train_network` starts from its float32 weights, so that decorating a
            model rounds none of the weights that are trained.
        dtype: the low-precision type, "float16" or "bfloat16".
        excluded: the layers that stay float32.

    Example:
        >>> from onnxamp.train import decorate
        >>> decorated = decorate("models/classifier.onnx", level="O2", excluded_layers=["Gemm"])
        >>> decorated.dtype, decorated.excluded
        ('float16', ('Gemm',))
    """

    model: ModelProto
    source: ModelProto
    dtype: str
    excluded: tuple[str, ...]


def decorate(
    models: Any,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    level: str = "O1",
    dtype: str = "float16",
    master_weight: bool | None = None,
    excluded_layers: str | Iterable[str] | None = None,
) -> Any:
    """Give models low-precision weights for training. The counterpart of ``paddle.amp.decorate``.

    At O1 models are returned as they are. At O2 each becomes a :class:`Decorated`, converted with Paddle's lists, with
    float32 normalisations, inputs and outputs; :func:`build_train_network` takes it at its default level.

    Args:
        models: a ModelProto, a path or an onnx-graphsurgeon Graph, or a list of them; they are not changed.
        optimizers: one or a list. They are returned as they are: their masters are float32 in any case.
        level: "O1" or "O2".
        dtype: the low-precision type, "float16" or "bfloat16".
        master_weight: None or True at O2. Without float32 masters, updates smaller than the last bit of a weight would
            be lost, so False is an error.
        excluded_layers: layers that stay float32 at O2: op types, or regular expressions that match whole node names.

    Returns:
        The models, one for one and a list for a list; with optimizers, a pair of models and optimizers.

    Raises:
        ArgumentError: a value is unknown, or an excluded layer is in no model.
        ArgumentTypeError: an argument has the wrong type.
        ModelError: a model cannot be read or is invalid.

    Example:
        >>> from onnxamp.train import SGD, build_train_network, decorate
        >>> decorated, optimizer = decorate("models/classifier.onnx", SGD(), level="O2")
        >>> net = build_train_network(decorated, optimizer, "cross-entropy")
    """
    if level not in LEVELS:
        raise ArgumentError(f"Unknown level {level!r}: decorate knows {' and '.join(LEVELS)}.")
    low_type(dtype)
    given = optimizers if isinstance(optimizers, Sequence) else [] if optimizers is None else [optimizers]
    if wrong := [item for item in given if not isinstance(item, Optimizer)]:
        raise ArgumentTypeError(f"optimizers must be of onnxamp.train, not {type(wrong[0]).__name__}.")
    if level == "O2":
        if master_weight is False:
            raise ArgumentError("master_weight=False is not supported: training keeps float32 masters. Leave it None.")
        excluded = Excluded(excluded_layers)
        if isinstance(models, (list, tuple)):
            models = [_decorated(model, dtype, excluded) for model in models]
        else:
            models = _decorated(models, dtype, excluded)
        if unmatched := [text for text in excluded.texts if text not in excluded.matched]:
            raise ArgumentError(f"excluded_layers: no node has the name or op type {unmatched[0]!r}.")
    return models if optimizers is None else (models, optimizers)


class Excluded:
    """Nodes that stay float32: those of an op type, or whose whole name matches a regular expression.

    Raises:
        ArgumentError: a regular expression is invalid.
        ArgumentTypeError: an item is not a string.
    """

    def __init__(self, layers: str | Iterable[str] | None) -> None:
        self.texts = (layers,) if isinstance(layers, str) else tuple(layers or ())
        self.matched: set[str] = set()
        if wrong := [text for text in self.texts if not isinstance(text, str)]:
            raise ArgumentTypeError(f"excluded_layers must hold strings, not {type(wrong[0]).__name__}.")
        try:
            self._patterns = {text: re.compile(text) for text in self.texts}
        except re.error as error:
            raise ArgumentError(f"excluded_layers: {error.pattern!r} is not a regular expression: {error}.") from None

    def takes(self, node: NodeProto) -> bool:
        """Whether the node is one of them."""
        names = [name for name in (node.name, *node.output) if name]
        matches = {
            text
            for text, pattern in self._patterns.items()
            if text == op_key(node) or any(map(pattern.fullmatch, names))
        }
        self.matched |= matches
        return bool(matches)


def _decorated(model: Any, dtype: str, excluded: Excluded) -> Decorated:
    def rule(node: NodeProto) -> str | None:
        return "high" if excluded.takes(node) or op_key(node) in NORMALISATIONS else None

    source = Model.of(model).embedded()
    low = convert_as(source, Options.of("O2", {"dtype": dtype, "lists": "paddle", "rule": rule}))
    return Decorated(low, source, dtype, excluded.texts)
