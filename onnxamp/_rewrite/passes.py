"""The common parts of passes. A pass consists of a function that rewrites a draft, and one that returns whether this is
necessary.

:data:`onnxamp._rewrite.prepare.PASSES` names all passes in their order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from onnx import ModelProto

from onnxamp._graph.graph import Graph
from onnxamp._options.options import Options


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
        """The draft whose graph is there already."""
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


@dataclass(frozen=True, slots=True)
class Passed:
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


class Pass(NamedTuple):
    """A pass: whether a draft needs it with these options, and the function that applies it."""

    applies: Callable[[Draft, Options], bool]
    apply: Callable[[Draft, Options], Passed]
