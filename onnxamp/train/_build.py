"""Building a network in training from a model and options."""

from collections.abc import Collection
from dataclasses import replace
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Literal

from onnx import ModelProto

from onnxamp._amp import CastWatch, active_cast, literal_options
from onnxamp._base.errors import ArgumentError, ArgumentTypeError, RuntimeFailure
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._base.words import enumerated
from onnxamp._facts.dtypes import DtypeLike, dtype_name
from onnxamp._facts.providers import is_plugin
from onnxamp._job.api import convert_as
from onnxamp._model.model import Model
from onnxamp._options.doors import door
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.passes.inline import inline
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.sessions.plugins import plugin_called
from onnxamp._runtime.sessions.session import Provider, choose_provider, make_session
from onnxamp.train._decided import step_rule
from onnxamp.train._forward import training_model, with_own_statistics
from onnxamp.train._grad_scaler import AmpScaler
from onnxamp.train._levels import (
    Decorated,
    decorating_options,
    decorating_rule,
    excluder,
    make_precision,
)
from onnxamp.train._loss import Loss, LossFunction
from onnxamp.train._losses import find_loss
from onnxamp.train._network import TrainNetwork
from onnxamp.train._optimizers import Optimizer
from onnxamp.train._scaling import (
    FROM_LEVEL,
    DynamicLossScaleManager,
    FromLevel,
    LossScale,
    LossScaleManager,
)
from onnxamp.train._sessions import Halves, NetworkState, Recorded
from onnxamp.train._step import TrainStep, build_step
from onnxamp.train._weights import find_masters

if TYPE_CHECKING:
    import onnxruntime as ort

BOOSTS = ("O0", "O1", "O2")


@door
def build_train_network(
    network: Any,
    optimizer: Optimizer,
    loss_fn: str | Loss | LossFunction | None = None,
    level: str = "O0",
    boost_level: str = "O0",
    *,
    cast_model_type: DtypeLike | Literal["float32"] | None = None,
    keep_batchnorm_fp32: bool | None = None,
    loss_scale_manager: LossScaleManager | FromLevel | None = FROM_LEVEL,
    dtype: DtypeLike = "float16",
    provider: Provider | None = None,
    seed: int = 0,
    **unknown: object,
) -> TrainNetwork:
    """Build a training step as one ONNX graph, in mixed precision with float32 master weights.

    The counterpart of ``mindspore.amp.build_train_network``. The step runs on CUDA if there is a device. Otherwise it
    runs on the CPU, where low precision is emulated by rounding every low-precision value, unless ``provider`` names an
    engine that computes low precision itself. MindSpore rejects managers that skip updates on the CPU; here they work
    everywhere.

    Args:
        network: an inference model, which is not changed: a ModelProto, a path, an onnx-graphsurgeon Graph, or the
            result of :func:`decorate`. All float initializers that the loss depends on are trained, except for settings
            of ops and scalars in formulas. A model that is already converted, for example with
            :func:`onnxamp.amp.auto_mixed_precision`, gets float32 masters of its low-precision weights; train it at
            level "O0", which does not change its precision.
        optimizer: :class:`SGD`, :class:`Momentum`, :class:`Adam` or :class:`AdamW`.
        loss_fn: a :class:`Loss`, such as :func:`MSELoss` returns, or a function as for :class:`Loss`; "cross-entropy"
            (logits [batch, classes, ...]; int64 labels [batch, ...]), "mean-squared-error" or "binary-cross-entropy"
            (logits; float32 labels of the same shape), or the name of a MindSpore or Paddle loss, such as "MSELoss".
            None if the first output of the model is the loss: a scalar, or a vector, whose sum is minimized.
        level: "O0" float32; "O1" white-listed ops in low precision; "O2" all but black-listed ops, with a dynamic loss
            scale; "O3" everything; "auto" like O2, on CUDA only. The forward pass has the precision that
            :func:`onnxamp.amp.auto_mixed_precision` gives it at this level. A decorated model is trained at O2. Within
            :func:`onnxamp.amp.auto_cast`, the level given there applies. A converted model keeps its precision at "O0";
            other levels convert it anew.
        boost_level: "O0" nothing; "O1" keeps the state on the device from step to step; "O2" keeps it in fixed buffers
            and replays CUDA graphs, recorded once per batch size (on the CPU there are no graphs; plugin providers do
            not fill buffers, so they accept at most "O1").
        cast_model_type: overrides the level: "float32" computes in float32; "float16" or "bfloat16", in any form of a
            dtype, computes everything in that type. The loss scale remains that of the level.
        keep_batchnorm_fp32: whether all normalizations stay in float32, including decomposed ones. By default, the
            level decides: BatchNormalization and LayerNormalization stay in float32 up to O2, and decomposed ones
            always do, because their squares may overflow. With ``cast_model_type``, all are lowered except at O2. False
            lowers nothing at O1, where they are not white-listed.
        loss_scale_manager: a :class:`LossScaleManager` or :class:`LossScaler`, including one of your own class,
            or None for no scaling. The default, ``FROM_LEVEL``, uses the loss scale of the level.
        dtype: the low-precision type, "float16" or "bfloat16"; also as a type of NumPy, ml_dtypes, ONNX or PyTorch.
        provider: where the step runs: "cuda", "cpu", "webgpu", or the package name of another plugin provider.
        seed: the seed of the dropout masks.

    Returns:
        A network, ready for :meth:`TrainNetwork.step` and :meth:`TrainNetwork.fit`.

    Raises:
        ArgumentError: a keyword or value is unknown, or no loss is given and the first output is not one.
        ArgumentTypeError: an argument has the wrong type.
        GradientError: an op between the loss and a weight has no gradient rule, or there is nothing to train.
        ModelError: the model cannot be read or is invalid.
        RuntimeFailure: the provider cannot be used, or ONNX Runtime cannot load the step.

    Warns:
        OptionWarning: white-listed ops stay in float32, because they have no kernel or schema in the type.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import AdamW, Batches, build_train_network
        >>> net = build_train_network("models/classifier.onnx", AdamW(), "cross-entropy", level="O1")
        >>> data = {"image": np.zeros((8, 3, 32, 32), np.float32), "label": np.arange(8)}
        >>> losses = net.fit(Batches(data, size=4), epochs=3)
        >>> losses[-1] < losses[0]
        True
        >>> trained = net.export()  # the inference model with the new weights
    """
    _check_arguments(optimizer, seed, unknown)
    boost_level = boost_level.upper() if isinstance(boost_level, str) else boost_level
    chosen = _place(provider, boost_level)
    decorated = network if isinstance(network, Decorated) else None
    decides, options = _requested(level, dtype, decorated, active_cast())
    manager = _manager(loss_scale_manager, options.level)
    source = decorated.source if decorated else Model.of(network).embedded()
    source = with_own_statistics(source)
    excludes = excluder(decorated.excluded if decorated else None, source)
    if decorated:
        decides = replace(decides, rule=decorating_rule(excludes))
    masters = find_masters(source)
    precision = make_precision(
        decides,
        options,
        masters,
        excludes,
        cast_model_type,
        keep_batchnorm_fp32,
        on_cuda=chosen == "cuda",
    )
    is_exact = precision.is_exact
    model = inline(masters.model)[0] if masters.model.functions else masters.model
    decisions = precision.decide(model)
    forward = training_model(model, decisions.opset)
    loss = None if loss_fn is None else find_loss(loss_fn)
    _check_divisor(optimizer, manager)
    scale = LossScale(manager, "float32" if is_exact else precision.options.dtype)
    plugin = plugin_called(chosen) if is_plugin(chosen) else None
    lacks = plugin.lacks if plugin else ()
    step = build_step(forward, optimizer, loss, scale.scaling, lacks)
    graph = step.model
    if not is_exact:
        rule = step_rule(forward.model, step.model, decisions.low)
        graph = _lowered(step, replace(precision.options, rule=rule), decorated)
    emulated = chosen == "cpu" and not is_exact
    ready = emulate(graph) if emulated else graph
    runs_on = f"{chosen.upper()}, emulated" if emulated else chosen.upper()
    if plugin:
        runs_on = engine_on(chosen).name()
    net = TrainNetwork(
        source=source,
        masters=masters,
        model=graph,
        plan=step,
        optimizer=optimizer,
        scale=scale,
        session=_session(ready, chosen),
        halves=Halves(step, ready, chosen),
        held=_state(step, ready, chosen, boost_level),
        runs_on=runs_on,
        seed=int(seed),
        cast_watch=CastWatch("network"),
        has_low=not is_exact,
        stored=decorated.stored if decorated else {},
    )
    if isinstance(manager, AmpScaler):
        manager.bind(net)
    return net


def _lowered(
    step: TrainStep, options: Options, decorated: Decorated | None
) -> ModelProto:
    """Return the graph of a step in mixed precision.

    Gradients are written in float32, and the whole step is then converted as any model is.
    """
    if decorated:
        options = decorated.summed_in_float32(options, step)
    converted: ModelProto = convert_as(step.model, options)
    return converted


def _state(
    step: TrainStep, model: ModelProto, provider: Provider, boost_level: str
) -> NetworkState:
    """Return what holds the state between steps, as a boost level says."""
    if boost_level == "O2":
        return Recorded(
            step.successors, on_device=True, model=model, provider=provider
        )
    return NetworkState(step.successors, on_device=boost_level == "O1")


def _place(provider: Provider | None, boost_level: str) -> Provider:
    """Return the provider that runs a step.

    Raises:
        ArgumentError: the boost level is unknown, or the provider does not support it.
        RuntimeFailure: the provider cannot be used.
    """
    if not isinstance(boost_level, str) or boost_level not in BOOSTS:
        raise ArgumentError(
            f"Unknown boost_level {boost_level!r}: choose one of {', '.join(BOOSTS)}."
        )
    chosen = choose_provider(provider)
    # Observed: WebGPU does not fill the buffers; OpenVINO ends the process.
    if boost_level == "O2" and is_plugin(chosen):
        raise ArgumentError(
            f"boost_level O2 (--boost-level) computes into fixed buffers, which plugin providers such as {chosen}"
            " do not fill: use O1, or provider cuda or cpu (--provider)."
        )
    return chosen


def _session(model: ModelProto, provider: Provider) -> "ort.InferenceSession":
    """Return the session of a step.

    Raises:
        RuntimeFailure: ONNX Runtime cannot load the step with this provider.
    """
    try:
        return make_session(model, provider)
    except RuntimeFailure as error:
        way_out = (
            ' Train on the CPU, which has all ops (provider="cpu", --provider cpu).'
        )
        raise RuntimeFailure(f"{error}{way_out * is_plugin(provider)}") from error


def _manager(
    given: LossScaleManager | FromLevel | None, level: Level
) -> LossScaleManager | None:
    """Return the given manager, or that of the level.

    Raises:
        ArgumentTypeError: it is not a manager.
    """
    if given is FROM_LEVEL:
        return DynamicLossScaleManager() if level in (Level.O2, Level.AUTO) else None
    if given is not None and not isinstance(given, LossScaleManager):
        raise ArgumentTypeError(
            "loss_scale_manager must be a LossScaleManager, such as DynamicLossScaleManager(), or None, not"
            f" {type(given).__name__}."
        )
    return given


def _check_arguments(optimizer: object, seed: int, unknown: Collection[str]) -> None:
    """Check that an optimizer is one, and a seed, and that no keyword is unknown.

    Raises:
        ArgumentError: a keyword is unknown, or the seed is out of range.
        ArgumentTypeError: the optimizer is none of ours, or the seed is not a whole number.
    """
    if unknown:
        known = [
            item.name
            for item in signature(build_train_network).parameters.values()
            if item.kind is Parameter.KEYWORD_ONLY
        ]
        raise ArgumentError(
            f"Unknown keyword {min(unknown)!r}: known are {enumerated(known)}."
        )
    what = "a whole number from 0 to 2^63 - 1"
    checked_number("seed", seed, what, lambda n: 0 <= n < 2**63, WHOLE)
    if not isinstance(optimizer, Optimizer):
        raise ArgumentTypeError(
            f"optimizer must be one from onnxamp.train, not {type(optimizer).__name__}."
        )


def _check_divisor(optimizer: Optimizer, manager: LossScaleManager | None) -> None:
    """Check the loss scale of an optimizer, by which it divides gradients in MindSpore but not here.

    Raises:
        ArgumentError: the gradients are not scaled by it, or MindSpore would divide them twice.
    """
    scale = optimizer.loss_scale
    divides = manager is None or manager.get_drop_overflow_update()
    if scale == 1 or (not divides and manager and manager.get_loss_scale() == scale):
        return
    raise ArgumentError(
        f"The optimizer has loss_scale={scale:g}, which MindSpore requires with"
        f" loss_scale_manager=FixedLossScaleManager({scale:g}, drop_overflow_update=False): pass that manager, or leave"
        " loss_scale out, because a step here always unscales its gradients."
    )


def _requested(
    level: str, dtype: DtypeLike, decorated: Decorated | None, cast: Options | None
) -> tuple[Options, Options]:
    """Return the options for the forward pass, and for all the rest: those of the arguments, of a decorated model, or
    of auto_cast.

    Raises:
        ArgumentError: a value is unknown, or the arguments contradict each other.
    """
    if decorated is None and cast is None:
        careful = {"dtype": dtype, "lists": "conservative", "fold": False}
        return literal_options(level, dtype), Options.of(level, careful)
    if (level, dtype_name(dtype)) != ("O0", "float16"):
        raise ArgumentError(
            "A decorated model or auto_cast sets level and dtype: leave both at their defaults."
        )
    if cast is None:
        options = decorating_options(decorated.dtype if decorated else dtype)
        return options, options
    if decorated is not None and (cast.level, cast.dtype) != ("O2", decorated.dtype):
        raise ArgumentError(
            f"The model is decorated at O2 in {decorated.dtype}, but auto_cast says {cast.level} in {cast.dtype}."
        )
    return cast, cast
