"""``decorate`` as in Paddle: models with low-precision weights, and float32 masters for training.

Source: ``paddle.amp.decorate`` in Paddle's API reference.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from onnx import ModelProto, NodeProto

from onnxamp._amp import amp_level_of
from onnxamp._api import convert_as
from onnxamp._decide.problem import check_opset
from onnxamp._dtypes import FORMATS, DtypeLike, dtype_name, low_type
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._model.model import Model
from onnxamp._ops.facts import op_key
from onnxamp._options.lists import ops_named
from onnxamp._options.options import Options
from onnxamp.train._levels import NORMALISATIONS
from onnxamp.train._optimizers import Optimizer
from onnxamp.train._step import Step

_SAVED: Final = (*FORMATS, "float32", "float64")


@dataclass(frozen=True, slots=True, eq=False)
class Decorated:
    """A model decorated at level O2 by :func:`decorate`.

    Attributes:
        model: the model with low-precision weights, an ordinary ModelProto.
        source: the original model. :func:`build_train_network` starts from its float32 weights, so that decorating a
            model rounds none of the weights that are trained.
        dtype: the low-precision type, "float16" or "bfloat16".
        excluded: the layers that stay float32.
        save_dtype: the type in which :meth:`TrainNetwork.export` stores weights; None for float32.
        master_grad: whether all parts of a gradient are summed up in float32.

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
    save_dtype: str | None = None
    master_grad: bool = False

    def summed_in_float32(self, options: Options, step: Step) -> Options:
        """The options of a step's conversion; with ``master_grad``, sums of gradients of one weight are float32."""
        if not self.master_grad:
            return options
        made = {output: node for node in step.model.graph.node for output in node.output}
        passed = {name: made[made[output].input[0]] for name, output in step.gradients.items()}
        totals = ((name, made[node.input[0]]) for name, node in passed.items())
        sums = [total.name for name, total in totals if total.name.startswith(f"{name}/gradient/")]
        return replace(options, keep_high=(*options.keep_high, *map(re.escape, sums)))


def decorate(
    models: Any,
    optimizers: Optimizer | Sequence[Optimizer] | None = None,
    level: str = "O1",
    dtype: DtypeLike = "float16",
    master_weight: bool | None = None,
    save_dtype: str | DtypeLike | None = None,
    master_grad: bool = False,
    excluded_layers: str | Iterable[str] | None = None,
) -> Any:
    """Give models low-precision weights for training. The counterpart of ``paddle.amp.decorate``.

    At O1 models are returned as they are. At O2 each becomes a :class:`Decorated`, converted with Paddle's lists, with
    float32 normalisations, inputs and outputs; :func:`build_train_network` takes it at its default level. Training then
    keeps float32 masters of all weights.

    Args:
        models: a ModelProto, a path or an onnx-graphsurgeon Graph, or a list of them; they are not changed.
        optimizers: one or a list. They are returned as they are: their masters are float32 in any case.
        level: "O1" or "O2", in either case.
        dtype: the low-precision type, "float16" or "bfloat16"; also as a NumPy, ml_dtypes or ONNX type.
        master_weight: None or True at O2. Without float32 masters, updates smaller than the last bit of a weight would
            be lost, so False is an error.
        save_dtype: the type in which :meth:`TrainNetwork.export` stores the trained weights at O2: "float16",
            "bfloat16", "float32" or "float64"; None for float32. Checkpoints always hold the float32 masters.
        master_grad: at O2, sum up in float32 the parts of the gradient of a weight that several nodes read; otherwise
            they may be summed up in low precision. All else that happens to gradients after the backward pass (scaling
            back, accumulation over batches, clipping, the update) is float32 in any case.
        excluded_layers: layers that stay float32 at O2: op types, by ONNX's names or those of MindSpore and Paddle, or
            regular expressions that match whole node names.

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
    level = amp_level_of(level, ("O1", "O2"), "decorate")
    name, saved = low_type(dtype).name, None if save_dtype is None else dtype_name(save_dtype)
    if saved is not None and saved not in _SAVED:
        raise ArgumentError(f"Unknown save_dtype {saved!r}: choose one of {', '.join(_SAVED)}.")
    given = (
        optimizers
        if isinstance(optimizers, Sequence)
        else []
        if optimizers is None
        else [optimizers]
    )
    if wrong := [item for item in given if not isinstance(item, Optimizer)]:
        raise ArgumentTypeError(
            f"optimizers must be of onnxamp.train, not {type(wrong[0]).__name__}."
        )
    if level == "O2":
        if master_weight is False:
            raise ArgumentError(
                "master_weight=False is not supported: training keeps float32 masters. Leave it None."
            )
        excluded, extra = Excluded(excluded_layers), (saved, bool(master_grad))
        if isinstance(models, (list, tuple)):
            models = [_decorated(model, name, excluded, *extra) for model in models]
        else:
            models = _decorated(models, name, excluded, *extra)
        if unmatched := [text for text in excluded.texts if text not in excluded.matched]:
            raise ArgumentError(
                f"excluded_layers: no node has the name or op type {unmatched[0]!r}."
            )
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
            raise ArgumentTypeError(
                f"excluded_layers must hold strings, not {type(wrong[0]).__name__}."
            )
        try:
            self._patterns = {text: re.compile(text) for text in self.texts}
        except re.error as error:
            raise ArgumentError(
                f"excluded_layers: {error.pattern!r} is not a regular expression: {error}."
            ) from None

    def takes(self, node: NodeProto) -> bool:
        """Whether the node is one of them."""
        names = [name for name in (node.name, *node.output) if name]
        matches = {
            text
            for text, pattern in self._patterns.items()
            if op_key(node) in ops_named(text) or any(map(pattern.fullmatch, names))
        }
        self.matched |= matches
        return bool(matches)


def _decorated(
    model: Any, dtype: str, excluded: Excluded, saved: str | None, master_grad: bool
) -> Decorated:
    def rule(node: NodeProto) -> str | None:
        return "high" if excluded.takes(node) or op_key(node) in NORMALISATIONS else None

    source = Model.of(model).embedded()
    low = convert_as(
        source, Options.of("O2", {"dtype": dtype, "lists": "paddle", "fold": False, "rule": rule})
    )
    if saved in FORMATS:
        check_opset(source, Options.of("O2", {"dtype": saved}))
    return Decorated(
        model=low,
        source=source,
        dtype=dtype,
        excluded=excluded.texts,
        save_dtype=saved,
        master_grad=master_grad,
    )
