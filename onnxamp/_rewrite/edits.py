"""What changes in a model, as data: planned by :mod:`onnxamp._rewrite.plan_edits`, applied by ``apply``."""

from dataclasses import dataclass, field

from onnxamp._dtypes import LowType


@dataclass(frozen=True, slots=True)
class NewCast:
    """A Cast to insert in ``scope`` behind node ``after`` (ABSENT: at the scope's start)."""

    scope: int
    after: int
    source: str
    target: str
    elem: int
    name: str
    shield: str = ""
    """Name of the Cast's own output where a one-input Max stands between it and ``target``: an op that changes nothing,
    and that no optimisation of the runtime removes, where a fusion would swallow the bare Cast."""


@dataclass(frozen=True, slots=True)
class NewConstant:
    """A second copy of a constant: of the initializer ``value``, or behind the Constant node that makes it."""

    value: int
    name: str
    node_name: str
    low: bool


@dataclass(slots=True)
class Edits:
    """All that changes in the model; everything that is not named here stays as it is.

    Keys are node indices, (node, port) and (scope, position) pairs, and value indices of the view.
    """

    low: LowType
    casts: list[NewCast] = field(default_factory=list)
    copies: list[NewConstant] = field(default_factory=list)
    moved: dict[int, int] = field(default_factory=dict)
    """Cast node of the user's -> the node behind which it moves (ABSENT: to the scope's start)."""
    removed: set[int] = field(default_factory=set)
    inputs: dict[tuple[int, int], str] = field(default_factory=dict)
    outputs: dict[tuple[int, int], str] = field(default_factory=dict)
    results: dict[tuple[int, int], str] = field(default_factory=dict)
    types: dict[int, str] = field(default_factory=dict)
    """Value -> its new type, for declarations."""
    result_types: dict[tuple[int, int], str] = field(default_factory=dict)
    attributes: set[int] = field(default_factory=set)
    """Nodes whose dtype attribute (or Constant value) becomes low."""
    weights: set[int] = field(default_factory=set)
    """Initializers that become low in place."""
    renamed: dict[int, str] = field(default_factory=dict)
    """Initializers and inputs of bodies that take another name."""
    halved: set[int] = field(default_factory=set)
    """Constants whose sentinels saturate to half the largest number, so that mask + score stays finite."""

    def __bool__(self) -> bool:
        return bool(
            self.casts or self.copies or self.moved or self.removed or self.inputs or self.outputs or self.results
            or self.types or self.result_types or self.attributes or self.weights or self.renamed
        )  # fmt: skip
