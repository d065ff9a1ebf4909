"""Levels of training, with the meaning of ``mindspore.amp.build_train_network``, as options of the conversion.

=====  ===========================================  ==============  ==========
level  low precision                                normalisations  loss scale
=====  ===========================================  ==============  ==========
O0     nothing                                      float32         none
O1     white-listed ops                             float32         none
O2     all but black-listed ops                     float32         dynamic
O3     everything                                   low             none
auto   as O2 on CUDA; an error without CUDA device
=====  ===========================================  ==============  ==========
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from onnx import ModelProto, NodeProto

from onnxamp._dtypes import BFLOAT16
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._graph.graph import Graph
from onnxamp._ops.facts import op_key
from onnxamp._options.options import Level, Options
from onnxamp._patterns.patterns import patterns_of
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
LEVELS: Final = tuple(Level)
_LOW_CONVOLUTIONS: Final = 22
"""First opset at which ONNX Runtime's CUDA Conv takes bfloat16."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of a training step: of its conversion, of its normalisations, and how the loss is scaled, if it is.

    ``excludes`` says which nodes stay float32.
    """

    options: Options
    keeps_norms: bool
    scaling: Scaling | None
    excludes: Callable[[NodeProto], bool]

    def opset(self, model: ModelProto) -> int:
        """The lowest opset at which the step can run."""
        convolves = any(node.op_type in ("Conv", "ConvTranspose") for node in model.graph.node)
        is_bfloat16 = self.options.level != Level.O0 and self.options.low is BFLOAT16
        return _LOW_CONVOLUTIONS if is_bfloat16 and convolves else MIN_OPSET

    def options_for(self, model: ModelProto) -> Options:
        """Options for the conversion of the step of ``model``, which is in training mode.

        What the step adds to the model stays float32. So do the statistics of low-precision normalisations: their
        squares would overflow, and the kernels of frameworks accumulate them in float32, too.
        """
        excluded = {_label(node) for node in model.graph.node if self.excludes(node)}
        norms = [_label(node) for node in model.graph.node if op_key(node) in NORMALISATIONS]
        norms = [norm for norm in norms if norm not in excluded]
        kept, options = sorted(excluded), self.options
        listed = {_label(node) for node in model.graph.node if op_key(node) in options.user_white}
        lowered = [norm for norm in norms if norm in listed]
        if self.keeps_norms:
            kept += [*(norm for norm in norms if norm not in listed), *_decomposed_norms(model)]
        elif options.level != Level.O1:
            white = {**dict.fromkeys(NORMALISATIONS, "normalisations are not kept"), **options.preset.white}
            black = {op: source for op, source in options.preset.black.items() if op not in NORMALISATIONS}
            lowered, options = norms, replace(options, lists=replace(options.preset, white=white, black=black))
        options = replace(options, force_low=tuple(f"{re.escape(norm)}/{SCALED}/.*" for norm in lowered))
        return replace(options, keep_high=(OWN, *map(_with_gradients, kept)))


def _label(node: NodeProto) -> str:
    return node.name or node.output[0]


def _with_gradients(label: str) -> str:
    """A pattern for a node or value and all that is derived from it, whose names start with its name."""
    return f"{re.escape(label)}(/.*)?"


def _decomposed_norms(model: ModelProto) -> list[str]:
    """Nodes of decomposed normalisations, and the values between them."""
    graph = Graph.of(model)
    norms = frozenset[int]().union(*(match.nodes for match in patterns_of(graph, "normalisation")))
    nodes = [graph.nodes[index] for index in sorted(norms)]
    return [name for node in nodes for name in dict.fromkeys((node.label, *node.proto.output)) if name]


def make_precision(
    options: Options,
    excludes: Callable[[NodeProto], bool],
    cast_model_type: str | None,
    keep_batchnorm_fp32: bool | None,
    loss_scale_manager: LossScaleManager | None,
    *,
    on_cuda: bool,
) -> Precision:
    """The precision that the arguments of :func:`onnxamp.train.build_train_network` ask for.

    Raises:
        ArgumentError: a type is unknown, or the level is "auto" and there is no CUDA device.
        ArgumentTypeError: an argument has the wrong type.
    """
    if keep_batchnorm_fp32 is not None and not isinstance(keep_batchnorm_fp32, bool):
        raise ArgumentTypeError(f"keep_batchnorm_fp32 must be a bool, not {type(keep_batchnorm_fp32).__name__}.")
    if loss_scale_manager is not None and not isinstance(loss_scale_manager, LossScaleManager):
        raise ArgumentTypeError(
            "loss_scale_manager must be a FixedLossScaleManager, a DynamicLossScaleManager or a GradScaler, not"
            f" {type(loss_scale_manager).__name__}."
        )
    if options.level == Level.AUTO:
        if not on_cuda:
            raise ArgumentError("Level 'auto' needs a CUDA device, and there is none here: choose another level.")
        options = replace(options, level=Level.O2)
    manager = loss_scale_manager
    if manager is None and options.level == Level.O2:
        manager = DynamicLossScaleManager()
    keeps_norms = options.level != Level.O3 if keep_batchnorm_fp32 is None else keep_batchnorm_fp32
    if cast_model_type == "float32":
        options = replace(options, level=Level.O0)
    elif cast_model_type is not None:
        options = replace(options, level=Level.O3, dtype=cast_model_type)
    return Precision(options, keeps_norms, manager.scaling() if manager else None, excludes)
