"""Removal of Casts that change nothing, or as much as another Cast does. Three rules apply within each scope:

* identity: ``Cast(x: a -> a)`` is x;
* duplicate: two Casts of one value to the same type are one;
* chain: ``Cast(Cast(x: a -> b) -> c)`` is ``Cast(x: a -> c)`` if a -> b is lossless, and x if also a = c.

The lossy pair float32 -> float16 -> float32 rounds, so it stays unless ``lossy`` asks for its removal.
"""

from collections import Counter
from collections.abc import Container

from onnx import ModelProto

from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS, element_name, is_lossless
from onnxamp._facts.ops import attribute
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node


def find_idle_casts(
    graph: Graph,
    *,
    lossy: bool = False,
    chains: bool = True,
    kept: Container[int] = (),
) -> "IdleCasts":
    """Find the Casts to remove. Complexity: linear in nodes.

    Args:
        graph: the model.
        lossy: also remove Casts to low precision and back.
        chains: whether Casts may also read what is before other Casts that lose nothing. If not, only those go that
            change no type, that nothing reads, or that repeat another one of the same value. One that changes no type
            and that a graph returns stays, for that graph alone.
        kept: nodes to leave unchanged.
    """
    removal = IdleCasts(graph, lossy, chains, kept)
    removal.run()
    removal.orphans()
    return removal


class IdleCasts:
    """Collects the new input of each Cast, and the replacement for the output of each removed Cast.

    Attributes:
        source: Cast node -> the value that it reads from now on.
        alias: output of a removed Cast -> the value that replaces it.
        removed: the Casts that go.
        hidden: values that must not get new readers in the bodies that shadow them.
    """

    def __init__(
        self, graph: Graph, lossy: bool, chains: bool, kept: Container[int]
    ) -> None:
        self.graph = graph
        self.lossy = lossy
        self.chains = chains
        self.kept = kept
        self.types = graph.types
        self.source = dict[int, int]()
        self.alias = dict[int, int]()
        self.removed = set[int]()
        self.hidden = graph.hidden

    def run(self) -> None:
        """Visit producers first, so that chains collapse in one sweep."""
        existing: dict[tuple[object, ...], int] = {}
        for node in self.graph.order if "Cast" in self.graph.by_key else ():
            result = node.output(0)
            if node.key != "Cast" or ABSENT in (node.input(0), result):
                continue
            if node.index in self.kept:
                continue
            target = self.types[result]
            source = self.through(node)
            self.source[node.index] = source
            if target is None:
                continue
            # Casts to the same type differ if one of them does not saturate, or rounds otherwise.
            how = (attribute(node.proto, name) for name in ("saturate", "round_mode"))
            key = (source, target, node.scope, *how)
            is_idle = self.types[source] == target
            is_again = key in existing
            if self.graph.results[result]:
                if is_idle and not self.chains and self.graph.uses[result]:
                    # Once the graph's result is of another type, it is a Cast in earnest.
                    self.replace(result, source)
            elif is_idle or is_again:
                if self.replace(result, source if is_idle else existing[key]):
                    self.removed.add(node.index)
                continue
            if result not in self.hidden:
                existing.setdefault(key, result)

    def orphans(self) -> None:
        """Remove Casts that lost all their readers when chains collapsed, and Casts that never had any."""
        # Last Casts first, so that a Cast whose only reader is removed is seen after it.
        casts = [self.graph.nodes[index] for index in reversed(self.source)]
        reads = Counter[int]()
        for cast in casts:
            for reader, _ in self.graph.readers(cast):
                if reader.index not in self.removed:
                    reads[self.reads(reader, cast.outputs[0])] += 1
        for node in casts:
            index = node.index
            result = node.outputs[0]
            if index in self.removed or self.graph.results[result]:
                continue
            if not reads[result] and (self.graph.uses[result] or not self.chains):
                self.removed.add(index)
                reads[self.reads(node, node.inputs[0])] -= 1

    def reads(self, node: Node, value: int) -> int:
        """Return the new input of a node instead of ``value``."""
        now = self.source.get(node.index, value) if node.key == "Cast" else value
        return self.alias.get(now, now)

    def through(self, node: Node) -> int:
        """Return the earliest value that the Cast may read instead of its input."""
        source = self.alias.get(node.inputs[0], node.inputs[0])
        while self.chains and (producer := self.graph.producer(source, "Cast")):
            before = self.source.get(producer.index, ABSENT)
            if before == ABSENT or before in self.hidden:
                break
            if not self.may_skip(before, source, node.outputs[0]):
                break
            source = before
        return source

    def may_skip(self, first: int, second: int, third: int) -> bool:
        """Return whether first -> second -> third may become first -> third."""
        a, b, c = (self.types[value] for value in (first, second, third))
        if is_lossless(element_name(a), element_name(b)):
            # The type of a number determines which digits of it a string gets.
            return c != "tensor(string)"
        return self.lossy and a == c == FLOAT and b in LOW_TENSORS

    def replace(self, value: int, replacement: int) -> bool:
        """Let readers of a Cast's output read another value, and return whether they may."""
        if replacement not in self.hidden:
            self.alias[value] = replacement
        return replacement not in self.hidden

    def apply(self) -> ModelProto:
        """Return the edited copy of the model."""
        editor = GraphEditor(self.graph)
        editor.remove(*self.removed)
        read = {
            *self.alias,
            *(self.graph.nodes[cast].inputs[0] for cast in self.source),
        }
        readers = set[int]()
        for value in read:
            readers.update(index for index, _ in self.graph.uses[value])
        for node in self.graph.at(readers):
            proto = editor.node(node.index)
            for port, value in enumerate(node.inputs):
                if value != ABSENT:
                    proto.input[port] = self.graph.values[self.reads(node, value)].name
        return editor.finish()
