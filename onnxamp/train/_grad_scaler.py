"""``AmpScaler`` and ``GradScaler`` as in Paddle: the loss scale, and the second half of a training loop."""

from collections.abc import Mapping
from typing import Any, Final
from weakref import WeakSet

import numpy as np

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    CallOrderError,
    EmptyStateError,
    warn,
)
from onnxamp._facts.dtypes import FORMATS
from onnxamp._options.doors import door
from onnxamp._options.values import checked_array, checked_flag
from onnxamp.train._optimizers import Optimizer
from onnxamp.train._scale_values import (
    SMALLEST,
    checked_count,
    checked_factor,
    checked_fraction,
    checked_small_scale,
    checked_updates,
)
from onnxamp.train._scaling import (
    STILL,
    MovingLossScaleManager,
    ScaleState,
    ScaleUpdate,
)
from onnxamp.train._sessions import StepGradients


@door
class AmpScaler(MovingLossScaleManager):
    """The loss scale of ``paddle.amp.AmpScaler``, for training loops written for Paddle.

    Like :class:`GradScaler`, with other defaults: a scale of 2**15 that rises after 1,000 updates.

    Raises:
        ArgumentError: a value is out of range.
        ArgumentTypeError: a flag is not a bool, or another value not a number.

    Example:
        >>> from onnxamp.train import AmpScaler
        >>> scaler = AmpScaler(init_loss_scaling=1024)
        >>> scaler.scale(2.0)
        2048.0
    """

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**15,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 1000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        self._enable = checked_flag("enable", enable)
        self._dynamic = checked_flag(
            "use_dynamic_loss_scaling", use_dynamic_loss_scaling
        )
        self._networks: WeakSet[Any] = WeakSet()
        self._overflow: bool | None = None
        """Whether an update since the last :meth:`update` overflowed; None if no update counts."""
        self._stepped: WeakSet[Any] = WeakSet()
        self.set_init_loss_scaling(init_loss_scaling)
        if not self._enable:
            self._init = 1.0
        self.set_incr_ratio(incr_ratio)
        self.set_decr_ratio(decr_ratio)
        self.set_incr_every_n_steps(incr_every_n_steps)
        self.set_decr_every_n_nan_or_inf(decr_every_n_nan_or_inf)

    def __repr__(self) -> str:
        state = ", ".join(
            f"{name}={value}" for name, value in self.state_dict().items()
        )
        return f"{type(self).__name__}({state or 'enable=False'})"

    # the loop

    def scale(self, var: Any) -> Any:
        """Return the scaled loss.

        Args:
            var: the result of :meth:`TrainNetwork.gradients`, which is returned unchanged because its gradients are
                already those of the scaled loss; or a number, an array or a list of these, which are multiplied by the
                scale.

        Raises:
            ArgumentError: the network was built without this scaler.
            ArgumentTypeError: ``var`` is something else.
        """
        if isinstance(var, (list, tuple)):
            return type(var)(self.scale(item) for item in var)
        if not isinstance(var, StepGradients):
            if isinstance(var, (str, bytes, type)) or not hasattr(var, "__mul__"):
                raise ArgumentTypeError(
                    "scale() takes what net.gradients(batch) returns, a number, an array or a list of these, not"
                    f" {type(var).__name__}."
                )
            return var * self.get_loss_scale() if self._enable else var
        if not any(net.pending is var for net in self._networks):
            raise ArgumentError(
                "These gradients were not scaled by this scaler, or are out of date: build the network with"
                " loss_scale_manager=scaler, and scale what its last gradients() returned."
            )
        return var

    def unscale_(self, optimizer: Any) -> None:
        """Divide the gradients by the scale, so that you can inspect or change them before :meth:`step`.

        Args:
            optimizer: the optimizer of the network, or the network.

        Raises:
            CallOrderError: there are no gradients, or they are already unscaled.
        """
        for net, _ in self._pending(optimizer):
            if self._enable:
                net.unscale()

    def step(self, optimizer: Any) -> None:
        """Unscale the gradients if necessary, and update the weights unless a gradient holds NaN or Inf.

        Args:
            optimizer: the optimizer of the network, or the network.

        Raises:
            CallOrderError: there are no gradients, or you did not call :meth:`update` after the last step.
        """
        for net, first in self._pending(optimizer):
            if net in self._stepped:
                raise CallOrderError(
                    "step() was called already: call update() after each step."
                )
            result, counts = net.finish(first, moves_scale=False)
            if self.is_use_dynamic_loss_scaling():
                self._stepped.add(net)
                if counts:
                    self._overflow = bool(self._overflow) or result.overflow

    def update(self, new_scale: float | None = None) -> None:
        """Adjust the scale to the steps since the last update.

        Args:
            new_scale: continue with this scale instead, as in PyTorch.
        """
        if new_scale is not None:
            scale = checked_small_scale("new_scale", new_scale)
            if self._enable:
                array = np.array(scale, np.float32)
                self._scale_state = self._scale_state._replace(scale=array)
        elif self._overflow is not None:
            self.update_loss_scale(self._overflow)
        self._overflow = None
        self._stepped.clear()

    def minimize(
        self,
        optimizer: Any,
        loss: StepGradients | None = None,
        startup_program: None = None,
        parameters: None = None,
        no_grad_set: None = None,
    ) -> None:
        """Call :meth:`step` and then :meth:`update`.

        Args:
            optimizer: the optimizer of the network, or the network.
            loss: the scaled loss, whose gradients the network holds.
            startup_program, parameters, no_grad_set: must be None; the optimizer decides what is trained.

        Raises:
            ArgumentError: one of these is not None. Others as :meth:`step`.
        """
        unused = (startup_program, parameters, no_grad_set)
        if any(item is not None for item in unused):
            raise ArgumentError(
                "minimize() takes no startup_program, parameters or no_grad_set: choose what is trained with the"
                " 'weights' of the optimizer."
            )
        if loss is not None:
            self.scale(loss)
        self.step(optimizer)
        self.update()

    def _pending(self, optimizer: Any) -> list[tuple[Any, StepGradients]]:
        """Return the networks with this optimizer that have gradients, each with its gradients."""
        if not isinstance(optimizer, Optimizer) and not hasattr(optimizer, "pending"):
            raise ArgumentTypeError(
                f"Pass the optimizer or its network, not {type(optimizer).__name__}."
            )
        own = [
            net
            for net in self._networks
            if net is optimizer or net.optimizer is optimizer
        ]
        if not own:
            raise ArgumentError(
                "No network was built with this optimizer and loss_scale_manager=scaler."
            )
        ready = [(net, net.pending) for net in own if net.pending is not None]
        if not ready:
            raise CallOrderError(
                "There are no gradients: call net.gradients(batch) first."
            )
        return ready

    # as a manager

    def get_update_cell(self) -> ScaleUpdate | None:
        """Return how the graph of a step changes the scale; None if the scaler is disabled."""
        if not self._enable:
            return None
        if not self._dynamic:
            return STILL
        # Paddle and PyTorch let the scale fall below 1.
        return ScaleUpdate(
            self._incr_ratio,
            self._decr_ratio,
            self._incr_every,
            self._decr_every,
            SMALLEST,
        )

    def bind(self, network: Any) -> None:
        """Register the network whose gradients :meth:`step` and the other methods use.

        One whose loss needs no dynamic scale disables the scaler.
        """
        if self._enable and network.scale.scaling is None:
            needless = (
                "bfloat16 has the range of float32 and needs no dynamic loss scale"
            )
            warn([f"{needless}: {type(self).__name__} is disabled."])
            self._enable = False
            self.set_init_loss_scaling(1.0)
        self._networks.add(network)

    def _scales(self, dtype: str) -> bool:
        """Return whether the loss of a network in this type is scaled; bfloat16 needs no dynamic scale."""
        is_wide = dtype in FORMATS and not FORMATS[dtype].is_narrow
        return self._enable and not (is_wide and self._dynamic)

    # settings

    def is_enable(self) -> bool:
        """Return whether the loss is scaled."""
        return self._enable

    def is_use_dynamic_loss_scaling(self) -> bool:
        """Return whether the scale changes."""
        return self._enable and self._dynamic

    def get_init_loss_scaling(self) -> float:
        """Return the initial scale; 1 if the scaler was created disabled."""
        return self._init

    def set_init_loss_scaling(self, new_init_loss_scaling: float) -> None:
        """Restart with this scale, which must be positive."""
        self._init = checked_small_scale("init_loss_scaling", new_init_loss_scaling)
        self._scale_state = ScaleState.of(self._init if self._enable else 1)

    def get_incr_ratio(self) -> float:
        """Return the factor by which the scale rises."""
        return self._incr_ratio

    def set_incr_ratio(self, new_incr_ratio: float) -> None:
        """Change the factor by which the scale rises; it must be greater than 1."""
        self._incr_ratio = checked_factor("incr_ratio", new_incr_ratio)

    def get_decr_ratio(self) -> float:
        """Return the factor by which the scale falls."""
        return self._decr_ratio

    def set_decr_ratio(self, new_decr_ratio: float) -> None:
        """Change the factor by which the scale falls; it must be between 0 and 1."""
        self._decr_ratio = checked_fraction("decr_ratio", new_decr_ratio)

    def get_incr_every_n_steps(self) -> int:
        """Return the number of updates in a row without overflow before the scale rises."""
        return self._incr_every

    def set_incr_every_n_steps(self, new_incr_every_n_steps: int) -> None:
        """Change the number of updates in a row without overflow before the scale rises."""
        self._incr_every = checked_count("incr_every_n_steps", new_incr_every_n_steps)

    def get_decr_every_n_nan_or_inf(self) -> int:
        """Return the number of updates in a row with overflow before the scale falls."""
        return self._decr_every

    def set_decr_every_n_nan_or_inf(self, new_decr_every_n_nan_or_inf: int) -> None:
        """Change the number of updates in a row with overflow before the scale falls."""
        self._decr_every = checked_count(
            "decr_every_n_nan_or_inf", new_decr_every_n_nan_or_inf
        )

    # settings by the names of PyTorch

    def is_enabled(self) -> bool:
        """Return whether the loss is scaled."""
        return self._enable

    def get_scale(self) -> float:
        """Return the current scale; 1 if the scaler is disabled."""
        return self.get_loss_scale()

    def get_growth_factor(self) -> float:
        """Return the factor by which the scale rises."""
        return self.get_incr_ratio()

    def set_growth_factor(self, new_factor: float) -> None:
        """Change the factor by which the scale rises; it must be greater than 1."""
        self.set_incr_ratio(new_factor)

    def get_backoff_factor(self) -> float:
        """Return the factor by which the scale falls."""
        return self.get_decr_ratio()

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change the factor by which the scale falls; it must be between 0 and 1."""
        self.set_decr_ratio(new_factor)

    def get_growth_interval(self) -> int:
        """Return the number of updates in a row without overflow before the scale rises."""
        return self.get_incr_every_n_steps()

    def set_growth_interval(self, new_interval: int) -> None:
        """Change the number of updates in a row without overflow before the scale rises."""
        self.set_incr_every_n_steps(new_interval)

    # the state

    def state_dict(self) -> dict[str, Any]:
        """Return the scale (a float32 array of one element), its settings and counters; empty if the scaler is
        disabled.
        """
        if not self._enable:
            return {}
        scale, good, bad = self._scale_state.arrays()
        return {
            "scale": scale.reshape(1),
            "incr_ratio": self._incr_ratio,
            "decr_ratio": self._decr_ratio,
            "incr_every_n_steps": self._incr_every,
            "decr_every_n_nan_or_inf": self._decr_every,
            "incr_count": int(good),
            "decr_count": int(bad),
            "use_dynamic_loss_scaling": self._dynamic,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned, here or in PyTorch, even during training.

        A disabled scaler does not change.

        Raises:
            EmptyStateError: the state is empty, like that of a disabled scaler.
            ArgumentError: a key is missing, or a value is out of range; the state does not change.
        """
        if not isinstance(state_dict, Mapping):
            raise ArgumentTypeError(
                f"state_dict must be what state_dict() returned, not {type(state_dict).__name__}."
            )
        if not self._enable:
            return
        if not state_dict:
            raise EmptyStateError(
                "The state of a scaler is empty: it was probably saved by one that is disabled."
            )
        if "growth_factor" in state_dict:
            state_dict = _of_pytorch(state_dict)
        if missing := self.state_dict().keys() - state_dict.keys():
            raise ArgumentError(f"The state of a scaler needs {min(missing)!r}.")
        counters = {"scale", "incr_count", "decr_count"}
        given = {
            name: state_dict[name] for name in self.state_dict().keys() - counters
        }
        stored = checked_array("The scale of a scaler", state_dict["scale"])
        if stored.size != 1 or stored.dtype.kind not in "iuf":
            raise ArgumentError(
                f"The scale of a scaler must be one number, not {state_dict['scale']!r}."
            )
        scale = float(stored.item())
        fresh = AmpScaler(init_loss_scaling=scale, **given)
        good, bad = (
            checked_updates(name, state_dict[name])
            for name in ("incr_count", "decr_count")
        )
        kept = ("_networks", "_stepped", "_overflow")
        vars(self).update(
            {name: item for name, item in vars(fresh).items() if name not in kept}
        )
        if self._dynamic:
            self._scale_state = ScaleState.of(scale, good, bad)


_PYTORCH_STATE: Final = {
    "growth_factor": "incr_ratio",
    "backoff_factor": "decr_ratio",
    "growth_interval": "incr_every_n_steps",
    "_growth_tracker": "incr_count",
}
"""Keys in the state of ``torch.amp.GradScaler``, and their names here."""


def _of_pytorch(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of a scaler of PyTorch as a state of this one."""
    own = {_PYTORCH_STATE.get(name, name): value for name, value in state.items()}
    # PyTorch lowers the scale at each overflow.
    fixed = {"decr_every_n_nan_or_inf": 1, "decr_count": 0}
    return {**fixed, "use_dynamic_loss_scaling": True, **own}


@door
class GradScaler(AmpScaler):
    """The loss scale of ``paddle.amp.GradScaler`` and ``torch.amp.GradScaler``, for training loops written for them.

    :func:`build_train_network` takes it as ``loss_scale_manager``. Then either call :meth:`TrainNetwork.step`, or write
    the training loop as in Paddle or PyTorch; the results are the same. Pass the optimizer or the network where these
    take the optimizer. With bfloat16, where nothing is flushed, a dynamic scaler is disabled with a warning.

    The arguments may have PyTorch's names and order: ``GradScaler("cuda", init_scale=1024, growth_interval=100)``. The
    device is not needed, because the scale is where the network is.

    Args:
        enable: False scales nothing.
        init_loss_scaling: the initial scale. It may be below 1, and may fall to any positive number.
        incr_ratio: factor by which the scale rises, greater than 1.
        decr_ratio: factor by which the scale falls, between 0 and 1.
        incr_every_n_steps: updates in a row without overflow before the scale rises.
        decr_every_n_nan_or_inf: updates in a row with overflow before the scale falls.
        use_dynamic_loss_scaling: False keeps the initial scale; you need not call :meth:`update`.

    Raises:
        ArgumentError: a value is out of range.
        ArgumentTypeError: a flag is not a bool, or another value not a number.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import GradScaler, SGD, build_train_network
        >>> optimizer, scaler = SGD(), GradScaler(init_loss_scaling=1024)
        >>> net = build_train_network(
        ...     "models/classifier.onnx", optimizer, "cross-entropy", "O1", loss_scale_manager=scaler)
        >>> loss = net.gradients({"image": np.ones((2, 3, 32, 32), np.float32), "label": np.array([0, 1])})
        >>> scaled = scaler.scale(loss)
        >>> scaled.backward()
        >>> scaler.step(optimizer)
        >>> scaler.update()
        >>> net.steps, scaler.state_dict()["incr_count"]
        (1, 1)
    """

    def __init__(
        self,
        enable: bool = True,
        init_loss_scaling: float = 2.0**16,
        incr_ratio: float = 2.0,
        decr_ratio: float = 0.5,
        incr_every_n_steps: int = 2000,
        decr_every_n_nan_or_inf: int = 1,
        use_dynamic_loss_scaling: bool = True,
    ) -> None:
        super().__init__(
            enable=enable,
            init_loss_scaling=init_loss_scaling,
            incr_ratio=incr_ratio,
            decr_ratio=decr_ratio,
            incr_every_n_steps=incr_every_n_steps,
            decr_every_n_nan_or_inf=decr_every_n_nan_or_inf,
            use_dynamic_loss_scaling=use_dynamic_loss_scaling,
        )
