"""The loss scale of one network: between its manager, which owns it, and the graph, which may change it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._dtypes import FORMATS
from onnxamp.train._grad_scaler import GradScaler
from onnxamp.train._optimizers import FACTORS, SCALE, SCALE_STATE, WINDOWS, Scaling
from onnxamp.train._scaling import (
    NEVER,
    LossScaleManager,
    MovingLossScaleManager,
    ScaleState,
    ScaleUpdate,
    is_moved_by_graph,
    scale_of,
)

_STILL: Final = ScaleUpdate(1.0, 1.0, NEVER, NEVER)
"""What remains of a scaler that another network disabled."""


@dataclass(slots=True)
class LossScale:
    """The loss scale of one network.

    ``manager`` is None, or one that scales nothing, where the loss is not scaled.
    """

    manager: LossScaleManager | None
    scaling: Scaling | None
    seen: ScaleState | None = None
    """The state of a manager that the graph moves, as the network has it."""

    @classmethod
    def of(cls, manager: LossScaleManager | None, dtype: str) -> "LossScale":
        """The loss scale of a network that computes in this type; bfloat16 disables a GradScaler."""
        if isinstance(manager, GradScaler) and dtype in FORMATS and not FORMATS[dtype].is_narrow:
            manager.disable()
        if manager is None or (isinstance(manager, GradScaler) and not manager.is_enable()):
            return cls(manager, None)
        moves = is_moved_by_graph(manager) and manager.get_update_cell() is not None
        return cls(manager, Scaling(manager.get_drop_overflow_update(), moves))

    def now(self) -> float:
        """The scale of the next step; 1 without one.

        Raises:
            ArgumentError: a manager of the user's own returned none.
        """
        if self.manager is None or self.scaling is None:
            return 1.0
        # What the graph moves needs no check: it was valid when it was given, and the graph keeps it so.
        return (
            float(self.manager.get_loss_scale()) if self.scaling.moves else scale_of(self.manager)
        )

    def feeds(self, scale: float) -> dict[str, NDArray[Any]]:
        """Inputs of a step with this scale: the scale, or how the graph changes it."""
        if self.manager is None or self.scaling is None:
            return {}
        if not self.scaling.moves:
            return {SCALE: np.array(scale, np.float32)}
        update = self.manager.get_update_cell() or _STILL
        return {
            FACTORS: np.array([update.grow, update.shrink], np.float32),
            WINDOWS: np.array([update.grow_every, update.shrink_every], np.int64),
        }

    def arrays(self) -> dict[str, NDArray[Any]]:
        """What the graph changes, by input; empty if it does not."""
        owner = self._owner()
        return (
            {} if owner is None else dict(zip(SCALE_STATE, owner.scale_state.arrays(), strict=True))
        )

    def changed(self) -> dict[str, NDArray[Any]]:
        """:meth:`arrays` if somebody else changed them since the network did."""
        owner = self._owner()
        if owner is None or owner.scale_state is self.seen:
            return {}
        self.seen = owner.scale_state
        return self.arrays()

    def keep(self, state: Mapping[str, Any], overflow: bool, *, is_due: bool) -> None:
        """Give the scale after a step back to its manager, or let the manager change it."""
        if self._owner() is not None:
            self.load(state)
        elif self.manager is not None and self.scaling is not None and is_due:
            self.manager.update_loss_scale(overflow)

    def load(self, state: Mapping[str, Any]) -> None:
        """Give the scale in the state of the network to its manager."""
        owner = self._owner()
        if owner is not None:
            self.seen = owner.scale_state = ScaleState(*(state[name] for name in SCALE_STATE))

    def _owner(self) -> MovingLossScaleManager | None:
        """The manager, if the graph changes its scale."""
        moves = self.scaling is not None and self.scaling.moves
        return self.manager if moves and is_moved_by_graph(self.manager) else None
