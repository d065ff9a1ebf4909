"""Constants as models compute them: a number, and nodes that give exactly that number in float32."""

from collections.abc import Callable
from random import Random

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper


class Computed:
    """Nodes that compute a constant, from Constants of their own; ``result`` is its name."""

    def __init__(self, rng: Random, array: np.ndarray, opset: int, name: Callable[[], str], steps: int) -> None:
        self.rng, self.opset, self.name = rng, opset, name
        self.nodes: list[NodeProto] = []
        self.result = self.chain(np.asarray(array, np.float32), steps)

    def constant(self, array: np.ndarray) -> str:
        return self.node("Constant", value=numpy_helper.from_array(array))

    def node(self, op: str, *inputs: str, **attributes: object) -> str:
        name = self.name()
        self.nodes.append(helper.make_node(op, inputs, [name], **attributes))
        return name

    def chain(self, array: np.ndarray, steps: int) -> str:
        """The name of the array behind so many steps, each the inverse of what is done to its numbers before."""
        ways = [self.moved, self.negated, self.scaled, self.cast, self.looked_up]
        undo = [self.rng.choice(ways) for _ in range(steps)]
        finish = []
        for way in undo:
            array, op = way(array)
            finish.append(op)
        result = self.constant(array)
        for op in reversed(finish):
            result = op(result)
        return result

    def moved(self, array: np.ndarray) -> tuple[np.ndarray, Callable[[str], str]]:
        return array, lambda name: self.node("Identity", name)

    def negated(self, array: np.ndarray) -> tuple[np.ndarray, Callable[[str], str]]:
        return -array, lambda name: self.node("Neg", name)

    def scaled(self, array: np.ndarray) -> tuple[np.ndarray, Callable[[str], str]]:
        """Times a power of two, which no float32 number of usual size notices."""
        op, factor = self.rng.choice((("Mul", 2.0), ("Mul", 0.25), ("Div", 0.5), ("Div", 4.0)))
        before = array / factor if op == "Mul" else array * factor
        other = np.asarray(factor, array.dtype)
        return before.astype(array.dtype), lambda name: self.node(op, name, self.constant(other))

    def cast(self, array: np.ndarray) -> tuple[np.ndarray, Callable[[str], str]]:
        """From another type; a double is cast back where it is one already."""
        is_double = array.dtype == np.float64
        to = TensorProto.DOUBLE if is_double else TensorProto.FLOAT
        before = array.astype(np.float32 if is_double else np.float64)
        if self.opset >= 15 and self.rng.random() < 0.5:
            return before, lambda name: self.node("CastLike", name, self.constant(np.zeros((), array.dtype)))
        return before, lambda name: self.node("Cast", name, to=to)

    def looked_up(self, array: np.ndarray) -> tuple[np.ndarray, Callable[[str], str]]:
        """A row of a table, whose other row is something else."""
        place = self.rng.randrange(2)
        rows = [np.ones_like(array), np.ones_like(array)]
        rows[place] = array
        index = np.asarray(place, np.int64)
        return np.stack(rows), lambda name: self.node("Gather", name, self.constant(index), axis=0)
