"""From a model and wishes to a network in training."""

from dataclasses import replace
from typing import Any

from onnx import ModelProto

from onnxamp._api import convert_model
from onnxamp._autocast import CastPolicy, active_cast
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._model.model import Model
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.session import Provider, cuda_available, make_session
from onnxamp.train._decorate import Decorated, Excluded
from onnxamp.train._forward import training_model
from onnxamp.train._levels import make_precision, no_more
from onnxamp.train._losses import Loss, LossFunction, find_loss
from onnxamp.train._network import RESULTS, TrainNetwork
from onnxamp.train._optimizers import Optimizer
from onnxamp.train._recorded import Recorded
from onnxamp.train._scaling import LossScaleManager
from onnxamp.train._step import build_step

_BOOSTS = ("O0", "O1", "O2")


def build_train_network(
    model: Any,
    optimizer: Optimizer,
    loss_fn: str | Loss | LossFunction | None = None,
    level: str = "O0",
    boost_level: str = "O0",
    *,
    cast_model_type: str | None = None,
    keep_batchnorm_fp32: bool | None = None,
    loss_scale_manager: LossScaleManager | None = None,
    dtype: str = "float16",
    seed: int = 0,
    **unknown: object,
) -> TrainNetwork:
    """Build a training step as one ONNX graph, in mixed precision with float32 master weights, ready to run.

    It has the meaning of ``mindspore.amp.build_train_network``. Where there is a CUDA device, it runs there; elsewhere
    it runs on the CPU, and low precision is emulated: every low value is rounded. There, too, loss scaling skips
    updates, where MindSpore refuses it.

    Args:
        model: an inference model (a ModelProto, a path, or what :func:`decorate` made); it is not changed. Its float32
            initializers are trained, but for those that are settings of an op and single numbers of a formula.
        optimizer: :class:`SGD`, :class:`Momentum`, :class:`Adam` or :class:`AdamW`.
        loss_fn: "cross-entropy", "mean-squared-error", "binary-cross-entropy", a :class:`Loss`, or a function that
            writes one; None where the model's first output is the loss. Outputs enter it as float32.
        level: "O0" float32; "O1" white-listed ops low; "O2" all but black-listed ops low, with a dynamic loss scale;
            "O3" all low; "auto" is O2 on CUDA. A decorated model is trained at O2, as it was decorated; within
            :func:`onnxamp.auto_cast`, that one's level counts.
        boost_level: "O0" none; "O1" keeps the state in ONNX Runtime's own memory, on the device, from step to step,
            in new buffers each time: no buffer is written while a node may still read it; "O2" keeps it in two sets of
            buffers, between which CUDA graphs are recorded, a pair for each batch size. On the CPU there is nothing to
            record, and the rest holds.
        cast_model_type: overrides the level: "float32" casts nothing, "float16" or "bfloat16" all; the loss scale
            stays that of the level.
        keep_batchnorm_fp32: whether normalisations stay float32; by default they do, but at O3.
        loss_scale_manager: overrides the level's.
        dtype: the low type of the levels.
        seed: of dropout.

    Raises:
        ArgumentError: a keyword or value is not known (a ValueError). ArgumentTypeError: one has the wrong type.
        GradientError: an op between the loss and a weight has no gradient rule, or there is nothing to train.
        ModelError: the model cannot be read or is invalid. RuntimeFailure: ONNX Runtime does not load the step.
    """
    no_more(unknown)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(f"optimizer must be one of onnxamp.train, not {type(optimizer).__name__}.")
    if boost_level not in _BOOSTS:
        raise ArgumentError(f"Unknown boost_level {boost_level!r}: choose one of {', '.join(_BOOSTS)}.")
    on_cuda, cast = cuda_available(), active_cast()
    worn = model if isinstance(model, Decorated) else None
    level, dtype, lists = _asked(level, dtype, worn, cast)
    precision = make_precision(level, dtype, cast_model_type, keep_batchnorm_fp32, loss_scale_manager, on_cuda=on_cuda)
    precision = replace(precision, lists=lists, excludes=Excluded(worn.excluded).takes if worn else None)
    source: ModelProto = worn.source if worn else Model.of(model).embedded()
    forward = training_model(source, precision.opset(source))
    loss = None if loss_fn is None else find_loss(loss_fn)
    step = build_step(forward, optimizer, loss, precision.scaling)
    graph = step.model if precision.level == "O0" else convert_model(step.model, **precision.wishes(forward.model))
    low = graph is not step.model
    ready = emulate(graph) if low and not on_cuda else graph
    provider: Provider = "cuda" if on_cuda else "cpu"
    session = make_session(ready, provider)
    recorded = Recorded(ready, provider, step.successors, RESULTS) if boost_level == "O2" else None
    runs_on = "CUDA" if on_cuda else "CPU, emulated" if low else "CPU"
    return TrainNetwork(source, graph, step, optimizer, session, runs_on, boost_level != "O0", recorded, seed)


def _asked(level: str, dtype: str, worn: Decorated | None, cast: CastPolicy | None) -> tuple[str, str, dict[str, Any]]:
    """Level, low type and lists, which a decorated model and a context give, too.

    Raises:
        ArgumentError: they are given twice, and not the same.
    """
    if worn is None and cast is None:
        return level, dtype, {}
    if (level, dtype) != ("O0", "float16"):
        raise ArgumentError(
            "A decorated model, and auto_cast, give level and dtype: leave both at their defaults with these."
        )
    if worn is not None and cast is not None and (cast.level, cast.dtype) != ("O2", worn.dtype):
        raise ArgumentError(
            f"The model is decorated at O2 in {worn.dtype}, but auto_cast says {cast.level} in {cast.dtype}."
        )
    if cast is None:
        return "O2", worn.dtype if worn else dtype, {"lists": "paddle"}
    lists = {name: value for name, value in cast.wishes().items() if name not in ("level", "dtype")}
    return cast.level, cast.dtype, lists
