"""The state of a network between its steps, and the run of a whole step that changes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from onnxamp._runtime.session import run, run_values
from onnxamp._runtime.values import from_value, to_value
from onnxamp.train._feeds import Feeds
from onnxamp.train._recorded import Recorded
from onnxamp.train._step import LOSS
from onnxamp.train._update import NORM, OVERFLOW

if TYPE_CHECKING:
    import onnxruntime as ort

RESULTS: Final = (LOSS, OVERFLOW, NORM)
"""Outputs of a step besides the state."""


@dataclass(slots=True)
class Held:
    """A state by name: arrays, values on the device if ``on_device``, or the buffers of recorded steps."""

    on_device: bool
    recorded: Recorded | None
    items: dict[str, Any] = field(default_factory=dict)

    def hold(self, state: Feeds) -> None:
        """Hold these arrays, and no others."""
        if self.recorded is not None:
            self.items = dict(self.recorded.hold(state))
        else:
            self.items = dict(values_of(state) if self.on_device else state)

    def put(self, part: Feeds) -> None:
        """Replace a part of the state."""
        if self.recorded is not None:
            self.recorded.put(part)
        else:
            self.items |= values_of(part) if self.on_device else part

    def keep(self, values: "Mapping[str, ort.OrtValue]") -> None:
        """Hold these values, which a session left on the device, and no others."""
        if self.on_device and self.recorded is None:
            self.items = dict(values)
        else:
            self.hold({name: np.asarray(from_value(value)) for name, value in values.items()})

    def array(self, name: str) -> NDArray[Any]:
        """An array; what it shows may change with the next step."""
        held = self.items[name]
        return np.asarray(from_value(held)) if self.on_device else held

    def copies(self) -> dict[str, NDArray[Any]]:
        """Copies of all arrays."""
        return {name: np.array(self.array(name)) for name in self.items}

    def values(self) -> "dict[str, ort.OrtValue]":
        """The state as ONNX Runtime's values."""
        return self.items if self.on_device else values_of(self.items)

    def run(self, session: "ort.InferenceSession", feeds: Feeds, successors: Mapping[str, str]) -> Feeds:
        """Run a whole step and hold the next state; returns the :data:`RESULTS`.

        Args:
            session: of the step; recorded steps have their own.
            feeds: all inputs that are not state.
            successors: the output that replaces each piece of state.

        Raises:
            RuntimeFailure: ONNX Runtime cannot run the step; the state does not change.
        """
        if self.recorded is not None:
            made, state = self.recorded.step(feeds)
            self.items = dict(state)
            return {name: from_value(value) for name, value in made.items()}
        wanted = [*RESULTS, *successors.values()]
        if self.on_device:
            outputs = run_values(session, {**values_of(feeds), **self.items}, wanted)
            results = {name: from_value(outputs[name]) for name in RESULTS}
        else:
            outputs = run(session, {**feeds, **self.items}, wanted)
            results = {name: outputs[name] for name in RESULTS}
        self.items = {name: outputs[output] for name, output in successors.items()}
        return results


def values_of(arrays: Feeds) -> "dict[str, ort.OrtValue]":
    """Arrays as ONNX Runtime's values."""
    return {name: to_value(array) for name, array in arrays.items()}
