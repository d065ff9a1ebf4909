"""A fold as data: which nodes go, and the one node that stands for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import TensorProto

from onnxamp._graph.view import ABSENT
from onnxamp._patterns.forms import Form
from onnxamp._patterns.match import Reading


@dataclass(frozen=True, slots=True)
class NewWeight:
    """A weight that a fold brings, to be called ``base`` or the like; it is made when it is needed."""

    base: str
    make: Callable[[], TensorProto]


@dataclass(frozen=True, slots=True)
class Fold:
    """One node for many.

    ``kind`` is what reports call it, ``opset`` the first that has the op. The new node stands where ``last`` stood,
    with its name, and makes its first output; or ``first`` stays where it is, with its attributes and other ``inputs``.
    """

    kind: str
    op: str
    opset: int
    nodes: frozenset[int]
    last: int
    inputs: tuple[int | NewWeight, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    first: int = ABSENT


@dataclass(frozen=True, slots=True)
class Found:
    """A form at its last node, before it is known whether all that it takes is given."""

    form: Form
    nodes: frozenset[int]
    values: Mapping[str, int]
    axes: tuple[int, ...]
    last: int


def is_closed(reading: Reading, nodes: frozenset[int], last: int) -> bool:
    """Whether nobody outside reads what the nodes make, but for the output of the last one.

    Reductions and divisions have one output each; a node whose others are read is none of a form.
    """
    for index in nodes - {last}:
        for value in reading.graph.nodes[index].outputs:
            if value == ABSENT:
                continue
            if reading.graph.results[value] or any(reader not in nodes for reader, _ in reading.graph.uses[value]):
                return False
    return True
