"""Removal of pairs of Casts around data movement: to a wider float type, and back.

Such a pair loses nothing, and its values fit the narrow type: the Casts are removed, and the nodes between them move
the narrow type. This applies to whole regions of data movement whose values come only from Casts of one narrow type and
go only to Casts back to it. If others also read a value between the Casts, the minimum cut decides.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, field

from onnx import ModelProto

from onnxamp._facts.dtypes import (
    ANY_FLOAT_TENSORS,
    ELEM_NUMBERS,
    element_name,
    is_lossless,
)
from onnxamp._facts.ops import op_facts
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.freedom import Typed, runs_on
from onnxamp._graph.types import bind
from onnxamp._graph.view import ABSENT, Node
from onnxamp._rewrite import Draft, PassResult


def remove_pairs(
    graph: Graph, kept: Callable[[Graph], Container[int]], target: str = "any"
) -> PassResult:
    """Remove redundant pairs of Casts from a copy of the model; the same graph if it has none.

    Args:
        graph: the model.
        kept: returns the nodes of a graph to leave unchanged.
        target: where the result will run: nodes move only types for which they have a kernel there.

    Complexity: linear in nodes; nested pairs need another sweep per type.
    """
    done = PassResult(Draft.of(graph))
    while True:
        # Pairs around other pairs come first.
        for chains in (True, False):
            pairs = find_pairs(done.graph, target, chains=chains)
            # Finding the nodes to keep takes longer, so it waits until there is a pair.
            if pairs.ends:
                pairs = find_pairs(done.graph, target, kept(done.graph), chains=chains)
            if pairs.ends:
                break
        else:
            return done
        ends = len(pairs.ends)
        casts = len(pairs.ends) + len(pairs.starts)
        result = Draft(pairs.apply(), graph.folder)
        done = PassResult(result, pairs=done.pairs + ends, casts=done.casts + casts)


def find_pairs(
    graph: Graph,
    target: str = "any",
    kept: Container[int] = (),
    *,
    chains: bool = True,
) -> "Pairs":
    """Return the redundant pairs of a graph. Complexity: linear in nodes.

    Args:
        graph: the model.
        target: as for :func:`remove_pairs`.
        kept: nodes to leave as they are.
        chains: whether Casts may follow each other, as in float16 -> float32 -> double; a pair then ends where its
            first type is reached again, and pairs in between are not found.
    """
    pairs = Pairs(graph, kept, target, chains)
    pairs.find()
    if pairs.narrow:
        pairs.prune()
        pairs.resolve()
    return pairs


@dataclass(slots=True)
class Pairs:
    """Redundant pairs of Casts.

    Attributes:
        wide: Casts to a wider type, and Casts of their outputs that also lose nothing.
        moves: nodes between the Casts, whose values become narrow; Casts that change no type are among them.
        ends: Casts back to the narrow type.
        starts: Casts to the wide type that nothing reads anymore.
        narrow: value of the wide type -> the type that its numbers fit.
        origin: output of a Cast to a wider type -> the value that it makes wider.
        source: output of a Cast of a pair -> the narrow value that it holds.
        names: value between the Casts -> the name of the graph output that it becomes.
        identities: Casts back whose outputs are returned: they become Identities.
    """

    graph: Graph
    kept: Container[int]
    target: str
    chains: bool
    wide: set[int] = field(default_factory=set)
    moves: set[int] = field(default_factory=set)
    ends: set[int] = field(default_factory=set)
    starts: set[int] = field(default_factory=set)
    narrow: dict[int, str] = field(default_factory=dict)
    origin: dict[int, int] = field(default_factory=dict)
    source: dict[int, int] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    identities: set[int] = field(default_factory=set)

    # -- search ------------------------------------------------------------------------------------------------

    def find(self) -> None:
        """Find Casts to wider types, and all data movement that reads nothing else."""
        casts = self.graph.nodes_of({"Cast"})
        if all(self.widened(cast) == ABSENT for cast in casts):
            return
        for node in self.graph.order:
            if node.key == "Cast" and (origin := self.widened(node)) != ABSENT:
                self.wide.add(node.index)
                self.origin[node.outputs[0]] = origin
                self.narrow[node.outputs[0]] = str(self.graph.types[origin])
            elif self.narrow and (kind := self.moved(node)) is not None:
                self.moves.add(node.index)
                self.narrow.update((value, kind) for value in node.writes)

    def allows(self, node: Node) -> bool:
        """Return whether the node may change."""
        return node.index not in self.kept and not self.graph.scopes[node.scope].opaque

    def widened(self, node: Node) -> int:
        """Return the value that the Cast widens, possibly through other Casts; ABSENT if it widens none."""
        if ABSENT in (node.input(0), node.outputs[0]) or not self.allows(node):
            return ABSENT
        read = node.inputs[0]
        if read in self.origin and (self.chains or node.index in self.graph.passing):
            read = self.origin[read]
        before = self.graph.types[read]
        after = self.graph.types[node.outputs[0]]
        if before == after or not ANY_FLOAT_TENSORS.issuperset((before, after)):
            return ABSENT
        is_wider = is_lossless(element_name(before), element_name(after))
        return read if is_wider else ABSENT

    def moved(self, node: Node) -> str | None:
        """Return the narrow type of all values that the node moves, if it has a kernel for it; None if it does more
        than that.
        """
        signature = node.signature
        if signature is None or not self.allows(node):
            return None
        if node.key == "Cast":
            is_idle = node.input(0) != ABSENT and node.index in self.graph.passing
            return self.narrow.get(node.inputs[0]) if is_idle else None
        if node.key not in op_facts().moves_data:
            return None
        positions = op_facts().moved_inputs[node.key]
        kinds = set[str | None]()
        moved = set[str]()
        others = set[str]()
        for port, value in enumerate(node.inputs):
            formal = signature.input(port)
            if value == ABSENT or formal is None:
                continue
            if port in positions:
                moved.add(formal.type)
                kinds.add(self.narrow.get(value))
            else:
                others.add(formal.type)
        kind = kinds.pop() if len(kinds) == 1 else None
        # What shares its type with a value that is moved would become narrow as well.
        if kind is None or not moved.isdisjoint(others):
            return None
        bound = bind(signature, [self.graph.types[value] for value in node.inputs])
        bound |= dict.fromkeys(moved, kind)
        is_legal = all(kind in signature.params.get(param, ()) for param in moved)
        typed = Typed(signature, bound, node.proto)
        return kind if is_legal and runs_on(self.target, typed) else None

    def prune(self) -> None:
        """Drop nodes whose values others read or return, and all data movement that is connected with them."""
        waiting = [
            index for index in self.moves if self.is_open(self.graph.nodes[index])
        ]
        while waiting:
            index = waiting.pop()
            if index not in self.moves:
                continue
            self.moves.discard(index)
            node = self.graph.nodes[index]
            makers = filter(None, map(self.graph.producer, node.inputs))
            waiting += [maker.index for maker in makers]
            waiting += [reader.index for reader, _ in self.graph.readers(node)]

    def is_open(self, node: Node) -> bool:
        """Return whether something other than data movement and Casts back reads a value of the node."""
        hidden = self.graph.hidden
        written = node.writes
        origins = (self.origin.get(value) for value in node.inputs)
        if not hidden.isdisjoint((*origins, *written)):
            return True
        if any(self.graph.results[value] for value in written):
            return True
        readers = (reader for reader, _ in self.graph.readers(node))
        return not all(
            reader.index in self.moves or self.ends_pair(reader) for reader in readers
        )

    def ends_pair(self, node: Node) -> bool:
        """Return whether the node casts a value back to the type that its numbers fit."""
        if node.key != "Cast" or not self.allows(node):
            return False
        read = node.input(0)
        result = node.outputs[0]
        return (
            result != ABSENT and self.narrow.get(read, "") == self.graph.types[result]
        )

    # -- rewriting ----------------------------------------------------------------------------------------------

    def resolve(self) -> None:
        """Find the Casts to remove, and the values to read instead."""
        for node in self.graph.order:
            if node.index in self.wide:
                origin = source = self.origin[node.outputs[0]]
                if origin not in self.narrow:
                    source = self.source.get(origin, origin)
                self.source[node.outputs[0]] = source
            elif self.ends_pair(node):
                self.end(node, node.inputs[0])
        # Readers first, because a Cast may be read by another Cast that goes.
        for node in reversed(self.graph.order):
            if node.index in self.wide and self.is_done(node.outputs[0]):
                self.starts.add(node.index)

    def end(self, node: Node, read: int) -> None:
        """Let readers of a Cast back read its input, unless that is not narrow after all, or hidden."""
        maker = self.graph.producer(read)
        result = node.outputs[0]
        if maker is None:
            return
        if maker.index not in self.moves and maker.index not in self.wide:
            return
        if self.origin.get(read) in self.graph.hidden:
            return
        self.ends.add(node.index)
        self.source[result] = self.source.get(read, read)
        returned = self.graph.results[result]
        if not returned:
            return
        homes = {scope for scope, _ in returned} | {node.scope}
        is_free = read not in self.names and result not in self.graph.hidden
        if maker.index in self.moves and homes == {maker.scope} and is_free:
            self.names[read] = self.graph.values[result].name
        else:
            self.identities.add(node.index)

    def is_done(self, value: int) -> bool:
        """Return whether a value of the wide type has lost all its readers."""
        readers = {node for node, _ in self.graph.uses[value]}
        if not readers or self.graph.results[value]:
            return False
        return all(
            index in self.starts
            and self.origin[self.graph.nodes[index].outputs[0]] != value
            for index in readers - self.moves - self.ends
        )

    # -- application -------------------------------------------------------------------------------------------

    def apply(self) -> ModelProto:
        """Return the edited copy of the graph's model."""
        editor = GraphEditor(self.graph)
        editor.remove(*((self.ends | self.starts) - self.identities))
        for node in self.graph.nodes:
            proto = editor.node(node.index)
            for port, value in enumerate(node.inputs):
                if value != ABSENT:
                    proto.input[port] = self.name(self.read(node, value))
            for port, value in enumerate(node.outputs):
                if value in self.names:
                    proto.output[port] = self.names[value]
            is_idle = node.key == "Cast" and node.index in self.moves
            if is_idle or node.index in self.identities:
                proto.op_type = "Identity"
                del proto.attribute[:]
        for scope, graph in zip(self.graph.scopes, editor.graphs, strict=True):
            for entry in graph.value_info:
                value = self.graph.visible(entry.name, scope.index)
                maker = self.graph.producer(value)
                if maker is not None and maker.index in self.moves:
                    narrow = element_name(self.narrow[value])
                    entry.type.tensor_type.elem_type = ELEM_NUMBERS[narrow]
        for value in self.names:
            held = self.graph.values[value]
            editor.undeclare(held.scope, [held.name])
        return editor.finish()

    def read(self, node: Node, value: int) -> int:
        """Return the node's new input instead of a value."""
        is_start = value in self.narrow
        takes = not is_start or node.index in self.moves or node.index in self.ends
        return self.source.get(value, value) if takes else value

    def name(self, value: int) -> str:
        """Return the new name of a value."""
        return self.names.get(value, self.graph.values[value].name)
