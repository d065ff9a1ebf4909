"""Removal of redundant Casts from a model.

Pairs around data movement go first (:mod:`onnxamp._rewrite.pairs`). Then three rules apply within each scope until none
matches:

* identity: ``Cast(x: a -> a)`` is x;
* duplicate: two Casts of one value to the same type are one;
* chain: ``Cast(Cast(x: a -> b) -> c)`` is ``Cast(x: a -> c)`` if a -> b is lossless, and x if also a = c.

The lossy pair float32 -> float16 -> float32 rounds, so it stays unless ``lossy`` asks for its removal.
"""

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import replace
from functools import partial

from onnx import ModelProto

from onnxamp._decide.builder import builder_of
from onnxamp._decide.hazards.ranges import beyond_init_max
from onnxamp._decide.overrides import find_overrides
from onnxamp._dtypes import FLOAT, FORMATS, is_lossless
from onnxamp._errors import ArgumentTypeError
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import attribute
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._rewrite import Draft, Passed
from onnxamp._rewrite.pairs import find_pairs, remove_pairs


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
    return _find_removal(remove_pairs(Graph.of(model)).graph, lossy=lossy).apply()


def apply(draft: Draft, options: Options) -> Passed:
    """Remove pairs of Casts, and nodes that become unused; the user may want to keep all of them."""
    is_kept = options.level == Level.O0 or "Cast" in options.black
    if is_kept or "Cast" not in draft.graph.by_key:
        return Passed(draft)
    kept = partial(_kept, options=options)
    freed = remove_pairs(draft.graph, options.target, kept)
    idle = _idle_casts(freed.graph, kept)
    if idle is None:
        return replace(freed, requested=freed.casts > 0)
    casts = freed.casts + len(idle.removed)
    result = Draft(idle.apply(), draft.folder)
    return Passed(result, requested=casts > 0, pairs=freed.pairs, casts=casts)


def _kept(graph: Graph, options: Options) -> set[int]:
    """Return nodes that the user wants in float32, or decides for one by one, and Casts that the target needs."""
    kept = set(find_overrides(graph, options).of_node)
    kept |= {node.index for node in graph.nodes if node.key in options.black}
    if options.init_max is not None:
        kept |= {hazard.node for hazard in beyond_init_max(graph, options)}
    builder = builder_of(graph, options.target)
    needed = (*builder.casts_of_constants(), *builder.own_casts())
    return kept | {cast.index for _, cast in needed}


def _idle_casts(
    graph: Graph, kept: Callable[[Graph], Container[int]]
) -> "_Removal | None":
    """Casts that change no type, that nothing reads, and all but one of those of one value to one type.

    A Cast that changes no type and that a graph returns stays, for that graph alone.

    Args:
        graph: the model.
        kept: returns the nodes to leave unchanged; called only if there are Casts to remove.

    Complexity: linear in nodes.
    """
    if _find_removal(graph, chains=False).is_empty:
        return None
    removal = _find_removal(graph, chains=False, kept=kept(graph))
    return None if removal.is_empty else removal


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
    removal = _Removal(graph, lossy, chains, kept)
    removal.run()
    removal.orphans()
    return removal


class _Removal:
    """Collects the new input of each Cast, and the replacement for the output of each removed Cast."""

    def __init__(
        self, graph: Graph, lossy: bool, chains: bool, kept: Container[int]
    ) -> None:
        self.graph, self.lossy, self.chains, self.kept = graph, lossy, chains, kept
        self.types = graph.types
        self.source: dict[int, int] = {}
        """Cast node -> the value that it reads from now on."""
        self.alias: dict[int, int] = {}
        """Output of a removed Cast -> the value that replaces it."""
        self.removed: set[int] = set()
        self.hidden = graph.hidden
        """They must not get new readers."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing changes."""
        return not self.alias and not self.removed

    def run(self) -> None:
        """Visit producers first, so that chains collapse in one sweep."""
        existing: dict[tuple[int, str, int], int] = {}
        for node in self.graph.order if "Cast" in self.graph.by_key else ():
            if node.key != "Cast" or ABSENT in (node.input(0), node.outputs[0]):
                continue
            if node.index in self.kept:
                continue
            target = self.types[node.outputs[0]]
            source = self.through(node)
            self.source[node.index] = source
            if target is None:
                continue
            key = (source, target, node.scope)
            is_returned = self.is_returned(node)
            if (
                is_returned
                and not self.chains
                and self.types[source] == target
                and self.graph.uses[node.outputs[0]]
            ):
                self.bypass(node, source)
            elif not is_returned:
                if self.types[source] == target:
                    self.drop(node, source)
                    continue
                if key in existing and attribute(node.proto, "saturate") != 0:
                    self.drop(node, existing[key])
                    continue
            if node.outputs[0] not in self.hidden:
                existing.setdefault(key, node.outputs[0])

    def orphans(self) -> None:
        """Remove Casts that lost all their readers when chains collapsed, and Casts that never had any."""
        casts = [self.graph.nodes[index] for index in reversed(self.source)]
        reads = Counter(
            self.reads(reader, cast.outputs[0])
            for cast in casts
            for reader, _ in self.graph.readers(cast)
            if reader.index not in self.removed
        )
        for node in casts:
            index = node.index
            if index in self.removed or self.is_returned(node):
                continue
            if (self.graph.uses[node.outputs[0]] or not self.chains) and not reads[
                node.outputs[0]
            ]:
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
        a, b, c = (
            str(self.types[value]).removeprefix("tensor(").removesuffix(")")
            for value in (first, second, third)
        )
        if is_lossless(a, b):
            return c != "string"  # the type determines which digits are written
        return self.lossy and f"tensor({a})" == FLOAT and b in FORMATS and c == a

    def is_returned(self, node: Node) -> bool:
        return bool(self.graph.results[node.outputs[0]])

    def drop(self, node: Node, replacement: int) -> None:
        if replacement not in self.hidden:
            self.removed.add(node.index)
            self.alias[node.outputs[0]] = replacement

    def bypass(self, node: Node, replacement: int) -> None:
        """Leave a Cast to the graph that returns its output: once that is of another type, it is a Cast in earnest."""
        if replacement not in self.hidden:
            self.alias[node.outputs[0]] = replacement

    def apply(self) -> ModelProto:
        """Return the edited copy of the model."""
        editor = GraphEditor(self.graph)
        editor.remove(*self.removed)
        read = {
            *self.alias,
            *(self.graph.nodes[cast].inputs[0] for cast in self.source),
        }
        readers = {index for value in read for index, _ in self.graph.uses[value]}
        for node in self.graph.at(readers):
            proto = editor.node(node.index)
            for port, value in enumerate(node.inputs):
                if value != ABSENT:
                    proto.input[port] = self.graph.values[self.reads(node, value)].name
        return editor.finish()
