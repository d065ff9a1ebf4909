"""``decorate`` as in Paddle: models whose weights are low, and what training keeps of them in float32.

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
    """A model decorated at level O2.

    ``model`` is it with low weights, an ordinary model. ``source`` is what it was: its float32 weights are the masters
    that :func:`build_train_network` begins with, so that decorating rounds nothing that is trained. ``dtype`` is the
    low type, ``excluded`` what stays float32, as :func:`decorate` was told.
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
    """Give models low weights for training, as ``paddle.amp.decorate``.

    At O1 models are returned as they are. At O2 each becomes a :class:`Decorated`, with Paddle's lists, float32
    normalisations, and inputs and outputs as they were; :func:`build_train_network` takes it at its default level.

    Args:
        models: a ModelProto or a path, or a list of them; they are not changed.
        optimizers: one or a list; they are returned as they are, since they keep float32 masters anyway.
        level: "O1" or "O2".
        dtype: "float16" or "bfloat16".
        master_weight: at O2, None or True. Without masters updates smaller than a low weight's last bit would be lost,
            and no graph made here trains so: False is refused.
        excluded_layers: what stays float32 at O2: op types, and regular expressions of node names (whole names).

    Returns:
        The models, one for one and a list for a list; with optimizers, a pair of models and optimizers.

    Raises:
        ArgumentError: a value is not known, or an excluded layer is in no model. ArgumentTypeError: one has the wrong
            type. ModelError: a model cannot be read or is invalid.
    """
    if level not in LEVELS:
        raise ArgumentError(f"Unknown level {level!r}: decorate knows {' and '.join(LEVELS)}.")
    low_type(dtype)
    given = optimizers if isinstance(optimizers, Sequence) else [] if optimizers is None else [optimizers]
    if wrong := [item for item in given if not isinstance(item, Optimizer)]:
        raise ArgumentTypeError(f"optimizers must be of onnxamp.train, not {type(wrong[0]).__name__}.")
    found = models
    if level == "O2":
        if master_weight is False:
            raise ArgumentError("master_weight=False: weights are trained as float32 masters here; leave it None.")
        excluded = Excluded(excluded_layers)
        if isinstance(models, (list, tuple)):
            found = [_lowered(model, dtype, excluded) for model in models]
        else:
            found = _lowered(models, dtype, excluded)
        if slips := [text for text in excluded.texts if text not in excluded.matched]:
            raise ArgumentError(f"excluded_layers: no node has the name or op type {slips[0]!r}.")
    return found if optimizers is None else (found, optimizers)


class Excluded:
    """Which nodes stay float32: those of an op type, or with a name that a regular expression matches as a whole.

    Raises:
        ArgumentError: a regular expression is none. ArgumentTypeError: something is no string.
    """

    def __init__(self, layers: str | Iterable[str] | None) -> None:
        texts = [layers] if isinstance(layers, str) else list(layers or ())
        if wrong := [text for text in texts if not isinstance(text, str)]:
            raise ArgumentTypeError(f"excluded_layers must hold strings, not {type(wrong[0]).__name__}.")
        try:
            self._patterns = {text: re.compile(text) for text in texts}
        except re.error as error:
            raise ArgumentError(f"excluded_layers: {error.pattern!r} is no regular expression: {error}.") from None
        self.texts = tuple(texts)
        self.matched: set[str] = set()

    def takes(self, node: NodeProto) -> bool:
        """Whether the node is one of them."""
        names = [node.name, *node.output]
        found = {
            text
            for text, pattern in self._patterns.items()
            if text == op_key(node) or any(pattern.fullmatch(name) for name in names if name)
        }
        self.matched |= found
        return bool(found)


def _lowered(model: Any, dtype: str, excluded: Excluded) -> Decorated:
    def rule(node: NodeProto) -> str | None:
        return "high" if excluded.takes(node) or op_key(node) in NORMALISATIONS else None

    source = Model.of(model).embedded()
    low = convert_as(source, Options.of("O2", {"dtype": dtype, "lists": "paddle", "rule": rule}))
    return Decorated(low, source, dtype, excluded.texts)
