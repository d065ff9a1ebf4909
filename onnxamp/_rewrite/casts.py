"""Removal of redundant Casts from a model.

Pairs around data movement go first: Casts to a wider float type and back, with nothing but data movement between them.
Such a pair loses nothing, and its values fit the narrow type: the Casts are removed, and the nodes between them move
the narrow type. This applies to whole regions of data movement whose values come only from Casts of one narrow type and
go only to Casts back to it. If others also read a value between the Casts, the minimum cut decides.

Then three rules apply within each scope until none matches:

* identity: ``Cast(x: a -> a)`` is x;
* duplicate: two Casts of one value to the same type are one;
* chain: ``Cast(Cast(x: a -> b) -> c)`` is ``Cast(x: a -> c)`` if a -> b is lossless, and x if also a = c.

The lossy pair float32 -> float16 -> float32 rounds, so it stays unless ``lossy`` asks for its removal.
"""

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from functools import cache, partial

from onnx import ModelProto

from onnxamp._base.errors import ArgumentTypeError
from onnxamp._decide.builder import builder_of
from onnxamp._decide.kinds import asked_hazards
from onnxamp._decide.overrides import find_overrides
from onnxamp._facts.dtypes import (
    ANY_FLOAT_TENSORS,
    ELEM_NUMBERS,
    FLOAT,
    LOW_TENSORS,
    element_name,
    is_lossless,
)
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.freedom import Typed, runs_on
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import bind
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult


def remove_redundant_casts(model: ModelProto, *, lossy: bool = False) -> ModelProto:
    """Copy a model without its redundant Casts, and change nothing else.

    If data movement is between a Cast to a wider float type and a Cast back, it then moves the narrower type.

    Args:
        model: any ModelProto; it is not changed.
        lossy: also remove pairs of Casts from float32 to float16 or bfloat16 and back. These round, so outputs change.

    Returns:
        The copy.

    Raises:
        ArgumentTypeError: ``model`` is not a ModelProto.
        ModelError: the model breaks a rule of ONNX.

    Complexity: near linear in nodes.

    Example:
        >>> import onnx, onnxamp
        >>> text = '''<ir_version: 8, opset_import: ["": 17]>
        ...     g (float[4] x) => (float[4] y) { a = Cast<to = 1>(x)  y = Relu(a) }'''
        >>> [node.op_type for node in onnxamp.remove_redundant_casts(onnx.parser.parse_model(text)).graph.node]
        ['Relu']
    """
    if not isinstance(model, ModelProto):
        raise ArgumentTypeError(
            f"model must be an onnx.ModelProto, not {type(model).__name__}."
        )
    freed = remove_pairs(Graph.of(model), lambda _: ())
    return _find_removal(freed.graph, lossy=lossy).apply()


def apply(draft: Draft, options: Options) -> PassResult:
    """Remove pairs of Casts, and nodes that become unused; the user may want to keep all of them."""
    is_kept = options.level == Level.O0 or "Cast" in options.black
    if is_kept or "Cast" not in draft.graph.by_key:
        return PassResult(draft)
    kept = cache(partial(_kept, options=options))
    freed = remove_pairs(draft.graph, kept, options.target)
    idle = _find_removal(freed.graph, chains=False)
    # Most models have none. The nodes to keep, which take longer to find, matter only to the others.
    if idle.alias or idle.removed:
        idle = _find_removal(freed.graph, chains=False, kept=kept(freed.graph))
    casts = freed.casts + len(idle.removed)
    result = freed.draft
    if idle.alias or idle.removed:
        result = Draft(idle.apply(), draft.folder)
    return PassResult(result, requested=casts > 0, pairs=freed.pairs, casts=casts)


def _kept(graph: Graph, options: Options) -> set[int]:
    """Return the nodes that the user keeps in float32 or decides one by one, and the Casts that the target needs."""
    kept = set(find_overrides(graph, options).of_node)
    kept |= {node.index for node in graph.nodes if node.key in options.black}
    kept |= {hazard.node for hazard in asked_hazards(graph, options)}
    builder = builder_of(graph, options.target)
    needed = (*builder.casts_of_constants(), *builder.own_casts())
    return kept | {cast.index for _, cast in needed}


def redundant_casts(graph: Graph) -> frozenset[int]:
    """Return the Casts that :func:`remove_redundant_casts` removes, by node index."""
    pairs = graph.ask(find_pairs)
    return frozenset(_find_removal(graph).removed | pairs.ends | pairs.starts)


def _find_removal(
    graph: Graph,
    *,
    lossy: bool = False,
    chains: bool = True,
    kept: Container[int] = (),
) -> "_Removal":
    """Find the Casts to remove. Complexity: linear in nodes.

    Args:
        graph: the model.
        lossy: also remove Casts to low precision and back.
        chains: whether Casts may read what is before others. If not, Casts go that change no type, that nothing reads,
            and all but one of those of one value to one type. One that changes no type and that a graph returns stays,
            for that graph alone.
        kept: nodes to leave unchanged.
    """
    removal = _Removal(graph, lossy, chains, kept)
    removal.run()
    removal.orphans()
    return removal


class _Removal:
    """Collects the new input of each Cast, and the replacement for the output of each removed Cast."""

    def __init__(
        self, graph: Graph, lossy: bool, chains: bool, kept: Container[int]
    ) -> None:
        self.graph = graph
        self.lossy = lossy
        self.chains = chains
        self.kept = kept
        self.types = graph.types
        self.source: dict[int, int] = {}
        """Cast node -> the value that it reads from now on."""
        self.alias: dict[int, int] = {}
        """Output of a removed Cast -> the value that replaces it."""
        self.removed: set[int] = set()
        self.hidden = graph.hidden
        """Values that must not get new readers in the bodies that shadow them."""

    def run(self) -> None:
        """Visit producers first, so that chains collapse in one sweep."""
        existing: dict[tuple[int, str, int], int] = {}
        for node in self.graph.order if "Cast" in self.graph.by_key else ():
            made = node.output(0)
            if node.key != "Cast" or ABSENT in (node.input(0), made):
                continue
            if node.index in self.kept:
                continue
            target = self.types[made]
            source = self.through(node)
            self.source[node.index] = source
            if target is None:
                continue
            key = (source, target, node.scope)
            is_idle = self.types[source] == target
            # A Cast that does not saturate differs from others to the same type.
            is_again = key in existing and attribute(node.proto, "saturate") != 0
            if self.graph.results[made]:
                if is_idle and not self.chains and self.graph.uses[made]:
                    # Once the graph's result is of another type, it is a Cast in earnest.
                    self.replace(made, source)
            elif is_idle or is_again:
                if self.replace(made, source if is_idle else existing[key]):
                    self.removed.add(node.index)
                continue
            if made not in self.hidden:
                existing.setdefault(key, made)

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
            made = node.outputs[0]
            if index in self.removed or self.graph.results[made]:
                continue
            if not reads[made] and (self.graph.uses[made] or not self.chains):
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
            found = find_pairs(done.graph, target, chains=chains)
            # Finding the nodes to keep takes longer, so it waits until there is a pair.
            if found.ends:
                found = find_pairs(done.graph, target, kept(done.graph), chains=chains)
            if found.ends:
                break
        else:
            return done
        ends = len(found.ends)
        casts = len(found.ends) + len(found.starts)
        result = Draft(found.apply(), graph.folder)
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
    """Casts back whose outputs are returned: they become Identities."""

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
        types = self.graph.types
        if signature is None or not self.allows(node):
            return None
        if (
            node.key == "Cast"
            and node.input(0) != ABSENT
            and node.index in self.graph.passing
        ):
            return self.narrow.get(node.inputs[0])
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
            (moved if port in positions else others).add(formal.type)
            if port in positions:
                kinds.add(self.narrow.get(value))
        kind = kinds.pop() if len(kinds) == 1 else None
        if kind is None or not moved.isdisjoint(others):
            return None
        bound = bind(signature, [types[value] for value in node.inputs])
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
        made = node.writes
        origins = (self.origin.get(value) for value in node.inputs)
        if not hidden.isdisjoint((*origins, *made)):
            return True
        if any(self.graph.results[value] for value in made):
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
        made = node.outputs[0]
        return made != ABSENT and self.narrow.get(read, "") == self.graph.types[made]

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
