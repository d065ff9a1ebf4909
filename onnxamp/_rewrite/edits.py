"""Edits of a model as data: ``plan_edits`` plans them, and ``apply`` applies them."""

from dataclasses import dataclass, field

from onnxamp._dtypes import Format
from onnxamp._model.blobs import Chosen
from onnxamp._model.protos import record


@record
class NewCast:
    """A Cast to insert in ``scope`` after node ``after`` (ABSENT: at the start of the scope)."""

    scope: int
    after: int
    source: str
    target: str
    elem: int
    name: str
    shield: str = ""
    """Name of the Cast's output if a fusion would absorb a bare Cast. A Max of one input then copies it to ``target``,
    an op that no optimization of the runtime removes."""


@record
class NewConstant:
    """A second copy of a constant: an initializer, or a node after the Constant that produces ``value``."""

    value: int
    name: str
    node_name: str
    low: bool


@record
class NewDequantize:
    """A second node like ``node``, right after it, that dequantizes the same integers with a scale of type ``elem``."""

    node: int
    scale: str
    target: str
    name: str
    elem: int


@dataclass(slots=True)
class Edits:
    """All changes of a model.

    Keys are node and value indices of the view, and (node, port) and (scope, output position) pairs.
    """

    low: Format
    casts: list[NewCast] = field(default_factory=list)
    copies: list[NewConstant] = field(default_factory=list)
    dequantized: list[NewDequantize] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)
    """Original Cast -> the node after which it moves (ABSENT: to the start of the scope)."""
    removed: set[int] = field(default_factory=set)
    inputs: dict[tuple[int, int], str] = field(default_factory=dict)
    outputs: dict[tuple[int, int], str] = field(default_factory=dict)
    results: dict[tuple[int, int], str] = field(default_factory=dict)
    types: dict[int, str] = field(default_factory=dict)
    """Value -> the type to declare."""
    result_types: dict[tuple[int, int], str] = field(default_factory=dict)
    attributes: set[int] = field(default_factory=set)
    """Nodes whose dtype attribute, or Constant value, becomes low precision."""
    weights: set[int] = field(default_factory=set)
    """Initializers that become low precision in place."""
    renamed: dict[int, str] = field(default_factory=dict)
    """Values that are declared or stored under a new name: those of bodies that would shadow an outer one."""
    rounded: dict[int, Chosen] = field(default_factory=dict)
    """Constants whose low-precision numbers are known beforehand, since they are not the nearest."""
    halved: set[int] = field(default_factory=set)
    """Constants whose sentinels saturate to half the largest finite number, so that mask + score stays finite."""

    def __bool__(self) -> bool:
        return bool(
            self.casts
            or self.copies
            or self.dequantized
            or self.moved
            or self.removed
            or self.inputs
            or self.outputs
            or self.results
            or self.types
            or self.result_types
            or self.attributes
            or self.weights
            or self.renamed
        )
