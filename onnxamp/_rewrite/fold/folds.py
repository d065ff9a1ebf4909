"""A fold as data: which nodes go, and the one node that stands for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from onnx import TensorProto

from onnxamp._graph.view import ABSENT


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
