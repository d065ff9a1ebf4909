"""The pass that mends a model whose declarations contradict the types of its values, which no runtime loads.

The declared type of an output is what callers expect, so a Cast makes it so. Other declarations only repeat what
follows from the nodes: they are corrected or removed. Nodes whose own inputs contradict each other cannot be mended,
because nothing says which type is meant.
"""

from collections.abc import Iterator

from onnx import TensorProto, TypeProto

from onnxamp._base.errors import ModelError
from onnxamp._base.words import shortened
from onnxamp._facts.dtypes import elem_of, readable_types
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import declared_type, type_proto
from onnxamp._graph.view import ABSENT
from onnxamp._options.options import Options
from onnxamp._rewrite import Draft, PassResult
from onnxamp._rewrite.checks.node_faults import disagreement
from onnxamp._rewrite.checks.verify import Conflict, all_conflicts

_SHOWN = 3
"""Most values that a note names."""
_NO_NUMBERS = frozenset({TensorProto.UNDEFINED, TensorProto.STRING})
"""Element types that no Cast of floats makes."""


def apply(draft: Draft, options: Options) -> PassResult:  # noqa: ARG001 - every pass gets the options
    """Mend declarations; return the same draft if there is nothing to mend.

    Raises:
        ModelError: the inputs of a node, or the branches of an If, contradict each other.

    Complexity: linear in nodes.
    """
    graph = draft.graph
    conflicts = graph.ask(_conflicts)
    if not conflicts and not any(_misdeclared_weights(graph)):
        return PassResult(draft)
    if why := next(_beyond_repair(graph, conflicts), ""):
        raise ModelError(
            f"The model contradicts itself, so no runtime loads it: {why}. Insert a Cast there, or export the model again."
        )
    mender = _Mender(graph, GraphEditor(graph))
    notes = [*mender.outputs(), *mender.declarations()]
    if not notes:
        return PassResult(draft)
    result = Draft(mender.editor.finish(), graph.folder)
    return PassResult(result, tuple(notes), requested=True)


def _conflicts(graph: Graph) -> tuple[Conflict, ...]:
    return tuple(all_conflicts(graph))


def _beyond_repair(graph: Graph, conflicts: tuple[Conflict, ...]) -> Iterator[str]:
    """Yield contradictions that no declaration causes, in words."""
    for conflict in conflicts:
        if conflict.branches != ABSENT:
            yield f"{conflict.where} {conflict.text}"
        elif conflict.node != ABSENT:
            node = graph.nodes[conflict.node]
            assert node.signature is not None
            if text := disagreement(node.signature, graph.types_of(node.inputs)):
                yield f"{conflict.where} {text}"


class _Mender:
    """Mends the declarations of one graph."""

    def __init__(self, graph: Graph, editor: GraphEditor) -> None:
        self.graph = graph
        self.editor = editor

    def outputs(self) -> Iterator[str]:
        """Cast outputs of the model to their declared types, and yield a note for each."""
        graph = self.graph
        main = graph.scopes[0]
        entries = dict(zip(main.outputs, main.proto.output, strict=True))
        for value, entry in entries.items():
            declared = declared_type(entry.type)
            actual = graph.types[value]
            if None in (declared, actual) or declared == actual:
                continue
            name = graph.values[value].name
            contradiction = (
                f"{readable_types(actual)}, but declared {readable_types(declared)}"
            )
            # ONNX Runtime returns an input as it is, regardless of the declaration.
            if graph.producer(value) is None:
                continue
            if {elem_of(declared), elem_of(actual)} & _NO_NUMBERS:
                raise ModelError(
                    f"The model contradicts itself, so no runtime loads it: its output {name!r} is {contradiction}."
                )
            self._cast(value, elem_of(declared))
            yield f"The output {name!r} was {contradiction}, which no runtime loads: a Cast makes it what is declared."

    def _cast(self, value: int, elem: int) -> None:
        """Rename a value, and cast it to the output that has its name."""
        held = self.graph.values[value]
        inner = self.editor.names.fresh(f"{held.name}_uncast")
        maker = self.graph.nodes[held.producer]
        self.editor.node(maker.index).output[held.port] = inner
        for node, port in self.graph.uses[value]:
            self.editor.node(node).input[port] = inner
        for scope, position in self.graph.results[value]:
            if scope != held.scope:
                self.editor.graphs[scope].output[position].name = inner
        self.editor.undeclare(held.scope, [held.name])
        cast = self.editor.make("Cast", [inner], [held.name], to=elem)
        self.editor.insert_after(maker.index, cast)

    def declarations(self) -> Iterator[str]:
        """Correct the declarations of bodies, of weights and of values between nodes, and yield a note about them."""
        mended = dict.fromkeys([*self._removed(), *self._corrected()])
        if not mended:
            return
        listed = shortened([*map(repr, mended)], _SHOWN)
        yield f"Declared types contradicted those of values, which no runtime loads, and were corrected: {listed}."

    def _removed(self) -> Iterator[str]:
        """Remove wrong declarations of node outputs, and yield their names."""
        graph = self.graph
        for scope in graph.scopes:
            for entry in () if scope.opaque else scope.proto.value_info:
                value = graph.visible(entry.name, scope.index)
                is_made = value != ABSENT and graph.producer(value) is not None
                if is_made and _contradicts(entry.type, graph.types[value]):
                    self.editor.undeclare(scope.index, [entry.name])
                    yield entry.name

    def _corrected(self) -> Iterator[str]:
        """Correct declarations of bodies' inputs and outputs and of weights that are inputs, and yield their names."""
        graph = self.graph
        for scope, edited in zip(graph.scopes, self.editor.graphs, strict=True):
            is_main = scope.index == 0
            entries = edited.input if is_main else (*edited.input, *edited.output)
            for entry in () if scope.opaque else entries:
                value = graph.visible(entry.name, scope.index)
                kind = graph.types[value]
                is_weight = value != ABSENT and graph.values[value].is_stored
                if kind is None or (is_main and not is_weight):
                    continue
                proto = type_proto(kind)
                if proto is not None and _contradicts(entry.type, kind):
                    _retype(entry.type, proto)
                    yield entry.name


def _misdeclared_weights(graph: Graph) -> Iterator[bool]:
    """Yield for each input of the model that is a weight whether it is declared as another type."""
    for entry in graph.model.graph.input:
        value = graph.scopes[0].names[entry.name]
        if graph.values[value].is_stored:
            yield _contradicts(entry.type, graph.types[value])


def _contradicts(declared: TypeProto, actual: str | None) -> bool:
    """Return whether a declaration differs from the actual type, if both are known."""
    return (
        None not in (declared_type(declared), actual)
        and declared_type(declared) != actual
    )


def _retype(declared: TypeProto, actual: TypeProto) -> None:
    """Give a declaration the actual type, and keep the shape of a tensor."""
    if declared.HasField("tensor_type") and actual.HasField("tensor_type"):
        declared.tensor_type.elem_type = actual.tensor_type.elem_type
    else:
        declared.CopyFrom(actual)
