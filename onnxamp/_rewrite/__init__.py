"""Rewriting: preparation of a model, edits planned from a decision, and the one place that applies them.

Here are the common parts of passes. A pass is a function that rewrites a draft, and returns the same one if there is
nothing to do. :data:`onnxamp._rewrite.prepare.PASSES` names all passes in their order. Those that rewrite single nodes
do it at a :class:`Site`: it has facts about the node in the old model, and names for new nodes and values.
"""

from collections.abc import Callable, Mapping
from dataclasses import field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Final, TypeAlias

from onnx import ModelProto, NodeProto, TensorProto

from onnxamp._base.records import record
from onnxamp._facts.dtypes import ELEM_NUMBERS, element_name
from onnxamp._facts.ops import attribute
from onnxamp._graph.editor import GraphEditor, drop_attributes
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.weights import read_array
from onnxamp._options.options import Options

_FEW: Final = 64
"""Most elements of a constant that may be scales."""


class Draft:
    """A model on its way through the passes. Its graph is built on first use."""

    def __init__(
        self,
        proto: ModelProto,
        folder: Path | None,
        build: Callable[[], Graph] | None = None,
    ) -> None:
        self.proto = proto
        self.folder = folder
        self._build = build

    @classmethod
    def of(cls, graph: Graph) -> "Draft":
        """Return the draft of a graph that exists already."""
        return cls(graph.model, graph.folder, lambda: graph)

    @cached_property
    def graph(self) -> Graph:
        """The graph of the draft.

        Raises:
            ModelError: the model breaks a rule of ONNX.
        """
        return (
            Graph.of(self.proto, self.folder) if self._build is None else self._build()
        )


@record
class PassResult:
    """The result of a pass on a draft.

    Attributes:
        draft: the new draft; the old one if nothing had to change.
        notes: one sentence per change.
        requested: whether the change stays even if nothing is lowered: one that the user requested, or removed Casts.
        refused: sentences about requests that were not carried out, with reasons.
        pairs: number of redundant pairs of Casts that were removed.
        casts: number of all Casts that went: those of pairs, idle ones and duplicates.
    """

    draft: Draft
    notes: tuple[str, ...] = ()
    requested: bool = False
    refused: tuple[str, ...] = ()
    pairs: int = 0
    casts: int = 0

    @property
    def graph(self) -> Graph:
        """The graph of the new draft."""
        return self.draft.graph

    def after(self, earlier: "PassResult") -> "PassResult":
        """Return the result of both passes, without the earlier draft, which may be a whole copy of the model."""
        return PassResult(
            draft=self.draft,
            notes=(*earlier.notes, *self.notes),
            requested=earlier.requested or self.requested,
            refused=(*earlier.refused, *self.refused),
            pairs=earlier.pairs + self.pairs,
            casts=earlier.casts + self.casts,
        )


Pass: TypeAlias = Callable[[Draft, Options], PassResult]


class StuckError(Exception):
    """A node cannot take a step of an upgrade. The text is the end of a sentence."""


@record
class Site:
    """A node of the old model that is rewritten, for which new constants and values are named."""

    graph: Graph
    node: Node
    editor: GraphEditor
    opset: int = 0
    """The opset that the node is upgraded to, if it is."""
    values: Mapping[str, int] = field(init=False)

    def __post_init__(self) -> None:
        proto = self.node.proto
        node = self.node
        pairs = (
            *zip(proto.input, node.inputs, strict=True),
            *zip(proto.output, node.outputs, strict=True),
        )
        # The class is frozen, so the field is set in the way of dataclasses themselves.
        object.__setattr__(self, "values", dict(pairs))

    def named(self, what: str) -> str:
        """Return a name, not used yet, for something that belongs to the node."""
        return f"{self.node.label}/{what}"

    def fresh(self, what: str) -> str:
        """Return a new name for a node or value that belongs to the node."""
        return self.editor.names.fresh(self.named(what))

    def type_of(self, name: str) -> str | None:
        """Return the type of a value that the node reads or writes; None if it is not known."""
        return self.graph.types[self.values.get(name, ABSENT)]

    def shape_of(self, name: str) -> Shape | None:
        """Return the shape of a value that the node reads or writes; None if it is not known."""
        return self.graph.shapes[self.values.get(name, ABSENT)]

    def rank_of(self, name: str) -> int:
        """Return the number of dimensions of a value.

        Raises:
            StuckError: it is not known.
        """
        shape = self.shape_of(name)
        if shape is None:
            raise StuckError(f"the number of dimensions of {name!r} is unknown")
        return len(shape)

    def floats_of(self, name: str) -> list[float] | None:
        """Return the elements of a small float32 constant that the node reads; None where it is not one."""
        tensor = self.graph.constants.tensors.get(self.values.get(name, ABSENT))
        if (
            tensor is None
            or tensor.data_type != TensorProto.FLOAT
            or prod(tensor.dims) > _FEW
        ):
            return None
        return [
            float(number)
            for number in read_array(tensor, self.graph.folder).reshape(-1)
        ]

    def elem_of(self, name: str) -> int:
        """Return the element type of a tensor that the node reads.

        Raises:
            StuckError: it is not known.
        """
        kind = self.type_of(name)
        if kind is None:
            raise StuckError(f"the type of {name!r} is unknown")
        return ELEM_NUMBERS[element_name(kind)]


def take_attribute(proto: NodeProto, name: str, default: Any = None) -> Any:
    """Remove an attribute, and return its value; ``default`` if there is none."""
    value = attribute(proto, name)
    drop_attributes(proto, (name,))
    return default if value is None else value
