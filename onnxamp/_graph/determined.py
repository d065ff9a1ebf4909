"""Sizes of a model's open dimensions that follow from its weights, and from each other."""

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import field
from math import gcd, lcm, prod
from typing import Final, NamedTuple

from onnxamp._base.records import record
from onnxamp._facts.dimensions import Related, columns, dimension_rules
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.graph import Graph, inlined
from onnxamp._graph.shapes import Dims, Shape, named_shapes
from onnxamp._graph.view import Node

_Letter = tuple[int, str]
"""A size in the rule of one node: the node's index and the name there; "" is the number 1."""


class Determined(NamedTuple):
    """Sizes of a model's open dimensions that its ops ask for.

    Attributes:
        sizes: name -> a size other than the usual one, without which the model cannot run on the usual sizes of others.
        forced: the names that can have no other size, regardless of the others.
    """

    sizes: Mapping[str, int]
    forced: frozenset[str]


def input_relations(
    graph: Graph, dims: tuple[tuple[str, tuple[int | str, ...]], ...]
) -> "Relations":
    """Return the relations of a model whose inputs have these dimensions: sizes, or names of those that are open."""
    graph = inlined(graph)
    inferred = named_shapes(graph, graph.types, dict(dims))
    # After ops whose shapes onnx cannot infer, as in most of a decoder, declared sizes are used.
    shapes = [
        shape if shape is not None else declared
        for shape, declared in zip(inferred, graph.shapes, strict=True)
    ]
    return relations_of(graph, shapes, bodies=True)


def determine(
    relations: "Relations",
    usual: Mapping[str, int],
    given: Mapping[str, int],
    batches: Collection[str],
) -> Determined:
    """Return the sizes that follow from the weights, and from sizes that are given.

    An unknown relation leaves sizes undetermined, but makes none wrong.

    Args:
        relations: of the model.
        usual: name -> the size if nothing determines it.
        given: name -> a size that is fixed.
        batches: names that keep their usual size if they can.

    Complexity: linear in the relations.
    """
    return _Solver(relations, usual, batches).solve(given)


def is_consistent(graph: Graph, shapes: Sequence[Shape | None]) -> bool:
    """Return whether the shapes satisfy all known relations of the model's ops. The model may still fail to run."""
    relations = relations_of(graph, shapes)
    sizes: dict[_Letter, int] = {}
    for letter, factor, dim in relations.multiples:
        if isinstance(dim, int) and (
            dim % factor or sizes.setdefault(letter, dim // factor) * factor != dim
        ):
            return False
    return all(map(_broadcasts, relations.columns))


def _broadcasts(column: Sequence[int | str]) -> bool:
    """Return whether dimensions broadcast against each other, as far as their sizes are known."""
    return len({dim for dim in column if isinstance(dim, int) and dim != 1}) < 2


@record
class Relations:
    """The relations between dimensions that follow from the ops of a graph."""

    multiples: list[tuple[_Letter, int, int | str]] = field(default_factory=list)
    """Each dimension that is a factor times a letter."""
    columns: list[list[int | str]] = field(default_factory=list)
    """Dimensions that broadcast against each other."""
    counted: list[tuple[Dims, Dims]] = field(default_factory=list)
    """Shapes with the same number of elements."""


def relations_of(
    graph: Graph, shapes: Sequence[Dims | None], *, bodies: bool = False
) -> Relations:
    """Return the relations of the main graph's ops for these shapes, and of those in bodies if these are known."""
    relations = Relations()
    rules = dimension_rules()
    for node in graph.nodes if bodies else graph.at(graph.scopes[0].nodes):
        for rule in rules.get(node.key, ()):
            if rule.counted:
                relations.counted.extend(_counts(node, shapes))
                break
            inputs = [shapes[value] for value in node.inputs]
            related = rule.related(node.proto, inputs)
            if related is not None:
                _add(relations, node.index, related)
                break
    return relations


def _counts(node: Node, shapes: Sequence[Dims | None]) -> Iterator[tuple[Dims, Dims]]:
    """Yield the shapes of a node that keeps the number of elements, if both are known."""
    source = shapes[node.input(0)]
    result = shapes[node.outputs[0]]
    if source is not None and result is not None and None not in source:
        yield source, result


def _add(relations: Relations, node: int, related: Related) -> None:
    """Add the relations that one node implies."""
    relations.multiples.extend(
        ((node, size), factor, dim)
        for (size, factor), dim in related.multiples
        if dim is not None
    )
    for column in columns(related.aligned):
        known = [dim for dim in column if dim is not None]
        if len(known) > 1:
            relations.columns.append(known)


class _Solver:
    """Propagates known sizes through relations."""

    def __init__(
        self, relations: Relations, usual: Mapping[str, int], batches: Collection[str]
    ) -> None:
        self.relations = relations
        self.usual = usual
        self.batches = batches
        self.sizes: dict[str | _Letter, int] = {}
        self.fresh: deque[str | _Letter] = deque()
        self.letters: dict[str, list[tuple[_Letter, int]]] = {}
        """Dimension -> letters that it is a multiple of."""
        self.dims: dict[_Letter, list[tuple[str, int]]] = {}
        """Letter -> dimensions that are multiples of it."""
        for letter, factor, dim in relations.multiples:
            if isinstance(dim, str):
                self.letters.setdefault(dim, []).append((letter, factor))
                self.dims.setdefault(letter, []).append((dim, factor))

    def solve(self, given: Mapping[str, int]) -> Determined:
        """Return the dimensions that these sizes determine."""
        for name, size in given.items():
            self._set(name, size)
        for letter, factor, dim in self.relations.multiples:
            if isinstance(dim, int) and dim % factor == 0:
                self._set(letter, dim // factor)
            if not letter[1]:
                self._set(letter, 1)
        self._settle()
        forced = frozenset(
            name for name in self.usual if name in self.sizes and name not in given
        )
        # Batches first: relations that only suggest a size must not change theirs.
        self._assume(name for name in self.usual if name in self.batches)
        for column in self.relations.columns:
            self._broadcast(column)
        for before, after in self.relations.counted:
            self._count(before, after)
        self._assume(name for name in self.usual if name not in self.batches)
        sizes = {
            name: self.sizes[name]
            for name, size in self.usual.items()
            if self.sizes.get(name, size) != size
        }
        return Determined(
            {name: size for name, size in sizes.items() if name not in given}, forced
        )

    def _set(self, variable: str | _Letter, size: int) -> None:
        if variable not in self.sizes and size >= 0:
            self.sizes[variable] = size
            self.fresh.append(variable)

    def _settle(self) -> None:
        """Propagate new sizes between dimensions and the letters that they are multiples of, until nothing changes."""
        while self.fresh:
            variable = self.fresh.popleft()
            size = self.sizes[variable]
            if isinstance(variable, str):
                for letter, factor in self.letters.get(variable, ()):
                    if size % factor == 0:
                        self._set(letter, size // factor)
            else:
                for dim, factor in self.dims.get(variable, ()):
                    self._set(dim, size * factor)

    def _assume(self, names: Iterator[str]) -> None:
        """Set undetermined dimensions to their usual sizes, rounded up to the multiples that relations require."""
        for name in names:
            if name not in self.sizes:
                needed = lcm(
                    *(
                        factor
                        for letter, factor in self.letters.get(name, ())
                        if letter not in self.sizes
                    )
                )
                self._set(name, _next_multiple(self.usual[name], needed))
                self._settle()

    def _broadcast(self, column: Sequence[int | str]) -> None:
        """Set the dimensions of a column to its one size other than 1, because dimensions that broadcast are equal."""
        sizes = {self._known(dim) for dim in column} - {None, 1}
        if len(sizes) == 1:
            for dim in column:
                if isinstance(dim, str):
                    self._set(dim, next(size for size in sizes if size is not None))
            self._settle()

    def _count(self, before: Dims, after: Dims) -> None:
        """Set the only undetermined dimension so that both shapes have the same number of elements."""
        source = list(before)
        result = list(after)
        # The same name on both sides has one size, whatever it is, and cancels out.
        for dim in before:
            if isinstance(dim, str) and dim in result:
                source.remove(dim)
                result.remove(dim)
        unknown = [
            dim for dim in source if isinstance(dim, str) and dim not in self.sizes
        ]
        if len(unknown) != 1:
            return
        others = prod(size for dim in source if (size := self._known(dim)) is not None)
        wanted = prod(size for dim in result if (size := self._known(dim)) is not None)
        is_exact = all(self._known(dim) is not None for dim in result)
        (name,) = unknown
        if not (isinstance(name, str) and others and wanted):
            return
        if is_exact and wanted % others == 0:
            self._set(name, wanted // others)
        elif not is_exact and name in self.usual:
            needed = wanted // gcd(wanted, others)
            self._set(name, _next_multiple(self.usual[name], needed))
        self._settle()

    def _known(self, dim: int | str | None) -> int | None:
        return self.sizes.get(dim) if isinstance(dim, str) else dim


def _next_multiple(size: int, factor: int) -> int:
    """Return the smallest multiple of a factor that is not below a size."""
    # Floor division rounds down; of the negated size, that is up.
    return -(-size // factor) * factor


DEFAULT_TRIPS: Final = 10
"""Assumed iterations of a loop whose trip count is not constant."""
_NO_LIMIT: Final = 2**63 - 1
"""The trip count of loops that their condition alone ends, as exporters write it."""
_MOST_TRIPS: Final = 1000
"""Most runs of a scope that are assumed, because the guesses of nested loops multiply."""


def loop_trips(graph: Graph) -> list[int]:
    """Return how often each scope runs per run of the model, at most :data:`_MOST_TRIPS` times."""
    trips = [1] * len(graph.scopes)
    for scope in graph.scopes[1:]:
        owner = graph.nodes[scope.owner]
        own = 1
        if owner.key in op_facts().repeats:
            own = constant_trips(graph, owner) or DEFAULT_TRIPS
        # Outer scopes come first, so the entry of the parent is there.
        trips[scope.index] = min(trips[scope.parent] * max(own, 1), _MOST_TRIPS)
    return trips


def guessed_scopes(graph: Graph) -> frozenset[int]:
    """Return the scopes whose number of runs is a guess, and those within them."""
    guessed = set[int]()
    for scope in graph.scopes[1:]:
        owner = graph.nodes[scope.owner]
        is_guess = (
            owner.key in op_facts().repeats and constant_trips(graph, owner) is None
        )
        if is_guess or scope.parent in guessed:
            guessed.add(scope.index)
    return frozenset(guessed)


def _loop_trips(graph: Graph, node: Node) -> int | None:
    is_loop = node.key == "Loop"
    trips = graph.constants.integers(node.input(0)) if is_loop else None
    return trips[0] if trips and trips[0] < _NO_LIMIT else None


def constant_trips(graph: Graph, node: Node) -> int | None:
    """Return how often a Loop or Scan runs its body at most; None if that is not known in advance."""
    if node.key != "Scan" or not node.bodies:
        return _loop_trips(graph, node)
    count = int(attribute(node.proto, "num_scan_inputs") or 0)
    is_batched = node.signature is not None and node.signature.since < _SCAN
    given = attribute(node.proto, "scan_input_axes") or [int(is_batched)] * count
    scanned = node.inputs[len(node.inputs) - count :]
    for value, axis in zip(scanned, given, strict=False):
        shape = graph.shapes[value]
        if shape and -len(shape) <= axis < len(shape) and shape[axis] is not None:
            return int(shape[axis] or 0)
    return None


_SCAN: Final = 9
"""First version of Scan without a batch axis."""
