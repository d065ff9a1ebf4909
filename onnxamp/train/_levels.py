"""Levels of training, with the meaning of ``mindspore.amp.build_train_network``, as wishes to the engine.

=====  ==========================  ==============  ==========
level  network                     normalisations  loss scale
=====  ==========================  ==============  ==========
O0     float32                     float32         none
O1     white list low              float32         none
O2     low but for the black list  float32         dynamic
O3     low                         low             none
auto   O2 on CUDA, refused elsewhere
=====  ==========================  ==============  ==========
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from onnx import ModelProto, NodeProto

from onnxamp._dtypes import BFLOAT16, LowType, low_type
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._graph.graph import Graph
from onnxamp._ops.facts import op_key
from onnxamp._patterns.islands import decomposed_norms
from onnxamp.train._gradients.normalisations import SCALED
from onnxamp.train._gradients.writer import MIN_OPSET
from onnxamp.train._scaling import DynamicLossScaleManager, LossScaleManager, Scaling
from onnxamp.train._step import OWN

NORMALISATIONS: Final = frozenset(
    {
        "BatchNormalization", "GroupNormalization", "InstanceNormalization", "LayerNormalization", "LpNormalization",
        "MeanVarianceNormalization", "RMSNormalization",
    }
)  # fmt: skip
LEVELS: Final = ("O0", "O1", "O2", "O3", "auto")
_LOW_CONVOLUTIONS: Final = 22
"""First opset at which ONNX Runtime's CUDA Conv takes bfloat16."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What a training step computes in: ``level`` of the engine ("O0": float32), whether normalisations stay float32,
    the low type, and how the loss is scaled (None: not at all).
    """

    level: str
    keeps_norms: bool
    low: LowType
    scaling: Scaling | None
    lists: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of convert_model: lists."""
    excludes: Callable[[NodeProto], bool] | None = None
    """Which nodes stay float32, with their gradients."""

    def opset(self, model: ModelProto) -> int:
        """The least opset that the step needs."""
        convolves = any(node.op_type in ("Conv", "ConvTranspose") for node in model.graph.node)
        return _LOW_CONVOLUTIONS if self.level != "O0" and self.low is BFLOAT16 and convolves else MIN_OPSET

    def wishes(self, model: ModelProto) -> dict[str, Any]:
        """Arguments of convert_model for the step of ``model`` (in training mode): what the step adds stays float32.

        Statistics of normalisations stay float32 even where these are low: their squares would overflow, and the
        kernels of frameworks accumulate them in float32, too.
        """
        excluded = {_label(node) for node in model.graph.node if self.excludes is not None and self.excludes(node)}
        norms = [_label(node) for node in model.graph.node if op_key(node) in NORMALISATIONS]
        norms = [norm for norm in norms if norm not in excluded]
        wishes: dict[str, Any] = {"level": self.level, "dtype": self.low.name, "keep_high": [OWN], **self.lists}
        wishes["keep_high"] += [_with_gradients(label) for label in sorted(excluded)]
        if self.keeps_norms:
            wishes["keep_high"] += [_with_gradients(norm) for norm in norms]
            wishes["keep_high"] += [_with_gradients(name) for name in _written_out(model)]
        elif self.level != "O1":
            black = wishes.get("black_list", ())
            wishes["white_list"] = sorted(NORMALISATIONS.difference(black).union(wishes.get("white_list", ())))
            wishes["force_low"] = [f"{re.escape(norm)}/{SCALED}/.*" for norm in norms]
        return wishes


def _label(node: NodeProto) -> str:
    return node.name or node.output[0]


def _with_gradients(label: str) -> str:
    """A pattern of what is written for a node or a value, too: gradients bear its name."""
    return f"{re.escape(label)}(/.*)?"


def _written_out(model: ModelProto) -> list[str]:
    """Nodes of normalisations that are written as single ops, and the values between them."""
    graph = Graph.of(model)
    norms = graph.ask(decomposed_norms)
    nodes = [graph.nodes[index] for index in sorted({index for _, found in norms for index in found})]
    return [name for node in nodes for name in dict.fromkeys((node.label, *node.proto.output)) if name]


def make_precision(
    level: str,
    dtype: str,
    cast_model_type: str | None,
    keep_batchnorm_fp32: bool | None,
    loss_scale_manager: LossScaleManager | None,
    *,
    on_cuda: bool,
) -> Precision:
    """What the arguments of :func:`onnxamp.train.build_train_network` mean.

    Raises:
        ArgumentError: a level or type is not known, or the level is "auto" and there is no CUDA device.
        ArgumentTypeError: an argument has the wrong type.
    """
    if level not in LEVELS:
        raise ArgumentError(f"Unknown level {level!r}: choose one of {', '.join(LEVELS)}.")
    if keep_batchnorm_fp32 is not None and not isinstance(keep_batchnorm_fp32, bool):
        raise ArgumentTypeError(f"keep_batchnorm_fp32 must be a bool, not {type(keep_batchnorm_fp32).__name__}.")
    if loss_scale_manager is not None and not isinstance(loss_scale_manager, LossScaleManager):
        raise ArgumentTypeError(
            "loss_scale_manager must be a FixedLossScaleManager, a DynamicLossScaleManager or a GradScaler, not"
            f" {type(loss_scale_manager).__name__}."
        )
    if level == "auto" and not on_cuda:
        raise ArgumentError("Level 'auto' is O2 on a CUDA device, and there is none here: name a level.")
    level = "O2" if level == "auto" else level
    manager = DynamicLossScaleManager() if loss_scale_manager is None and level == "O2" else loss_scale_manager
    norms = level != "O3" if keep_batchnorm_fp32 is None else keep_batchnorm_fp32
    low = low_type(dtype)
    if cast_model_type == "float32":
        level = "O0"
    elif cast_model_type is not None:
        level, low = "O3", low_type(cast_model_type)
    return Precision(level, norms, low, manager.scaling() if manager else None)


def no_more(extra: Mapping[str, object]) -> None:
    """Refuse keywords that nobody knows.

    Raises:
        ArgumentError: there is one.
    """
    if extra:
        raise ArgumentError(
            f"Unknown keyword {next(iter(extra))!r}: known are cast_model_type, keep_batchnorm_fp32,"
            " loss_scale_manager, dtype and seed."
        )
