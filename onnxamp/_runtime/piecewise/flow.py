"""A model's main graph, ready to run a few nodes at a time (:mod:`onnxamp._runtime.piecewise.pieces`), so that only
values that are still needed stay in memory.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Final

import onnx
from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto

from onnxamp._base.errors import ArgumentError
from onnxamp._base.public import no_collections
from onnxamp._base.temporary import temporary_folder
from onnxamp._facts.dtypes import (
    ELEM_NAMES,
    LOW_ELEMS,
    LOW_TENSORS,
    readable_types,
)
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._facts.providers import Profile
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, carried_shapes, elements
from onnxamp._graph.types import lowest_precision
from onnxamp._graph.view import Node, View, inline_functions
from onnxamp._graph.wiring import Wiring, wire
from onnxamp._model.exponents import stored_exponents
from onnxamp._model.model import Asked
from onnxamp._model.protos import (
    all_nodes,
    copied,
    copy_fields,
)
from onnxamp._runtime.accumulate import EXACT
from onnxamp._runtime.emulate import emulate_graph
from onnxamp._runtime.piecewise.choices import Branch, Condition
from onnxamp._runtime.piecewise.fixed import fixed_values
from onnxamp._runtime.piecewise.windows import with_defined_windows
from onnxamp._runtime.sessions.session import Provider, make_session
from onnxamp._runtime.sessions.shell import WEIGHTS_IN_GRAPH, Shell, take_weights
from onnxamp._runtime.sessions.values import Feed, Feeds, as_typed

if TYPE_CHECKING:
    import onnxruntime as ort

_WIDTH: Final = 4
"""Bytes of most elements."""


@dataclass(frozen=True, eq=False)
class DataflowGraph(Asked):
    """The main graph as nodes in topological order.

    On CPU, models with low precision are emulated: ``nodes`` are those of the emulation, and all values are float32.
    """

    nodes: tuple[NodeProto, ...]
    reads: tuple[tuple[str, ...], ...]
    """By node: the values that it and its bodies need, apart from constants."""
    held: tuple[tuple[str, ...], ...]
    """By node: the constants that it and its bodies need."""
    maker: Mapping[str, int]
    """Value -> the node that computes it."""
    constants: Mapping[str, TensorProto | SparseTensorProto]
    """Initializers that pieces contain."""
    fixed: frozenset[str]
    """Values that nodes compute from nothing but constants."""
    types: Mapping[str, str | None]
    low: Mapping[str, int]
    """Value that is low precision in the model as written -> its element type."""
    own: frozenset[str]
    """Values of the model as written, without those that emulation adds."""
    lowest: str
    """The lowest float type anywhere in the model: "bfloat16", "float16" or "float32"."""
    sizes: Mapping[str, int]
    """Value -> bytes, best effort."""
    ranks: Mapping[str, int]
    """Value -> rank if inference is certain, as ONNX Runtime would infer it from the whole model."""
    emulated: bool
    large: bool
    """Whether weights are fed to the pieces instead of being part of them."""
    inputs: tuple[str, ...]
    """Inputs without a default."""
    defaults: frozenset[str]
    """Inputs with a default, which is among the shell's weights."""
    outputs: tuple[str, ...]
    shell: Shell
    """The model around the graph, and the weights."""
    names: frozenset[str]
    """Every name of the model, including those in bodies."""
    exponents: Mapping[str, int]
    """Value -> e, where it is stored as a multiple by 2^-e."""
    is_altered: bool
    """Whether nodes differ from those of the model: they round, or compute what the model leaves to the engine."""
    choices: tuple[tuple[str, bool], ...] = ()
    """Conditions, and optional inputs that are empty, as the sample has them that the branches were settled for."""
    conditions: tuple[Condition, ...] = ()
    """The conditions of all Ifs of the model that are no constants."""
    taken: frozenset[Branch] = frozenset()
    """The branches that the sample takes, where they are known."""
    summed: Mapping[str, Sequence[int]] | None = None
    """The shapes of inputs on which emulated sums depend; None if sums are float32."""

    def reads_of(self, nodes: Iterable[int]) -> list[str]:
        """Return the values that nodes read, apart from constants; a value occurs once per node that reads it."""
        return [*chain.from_iterable(self.reads[node] for node in nodes)]

    def outputs_of(self, nodes: Iterable[int]) -> list[str]:
        """Return the values that nodes compute, in order."""
        names = chain.from_iterable(self.nodes[node].output for node in nodes)
        return [name for name in names if name]


def make_flow(
    model: ModelProto,
    base_dir: str | PathLike[str] | None = None,
    *,
    emulated: bool,
    keep: int = WEIGHTS_IN_GRAPH,
) -> DataflowGraph:
    """Prepare a model.

    Args:
        model: it is not changed. Model-local functions are inlined, so that the values in them can be observed.
        base_dir: folder of external data, if the model has any that is not loaded.
        emulated: float32 throughout, with explicit rounding (:mod:`onnxamp._runtime.emulate`); else as written.
        keep: bytes of weights up to which they are part of the pieces.

    Raises:
        ModelError: the model cannot be resolved or a function not inlined. OpsetError, ExternalDataError: as
            :func:`~onnxamp._runtime.emulate.emulate`.

    Complexity: linear in nodes, and in bytes of the weights that stay.
    """
    shell = take_weights(model, base_dir, keep=keep)
    inlined = shell._replace(model=inline_functions(shell.model))
    return flow_of(inlined, emulated=emulated)


@no_collections()
def flow_of(
    shell: Shell,
    *,
    emulated: bool,
    shapes: Mapping[str, Sequence[int]] | None = None,
    arithmetic: Profile | None = None,
) -> DataflowGraph:
    """Return :func:`make_flow` of a model whose weights are taken out and whose functions are inlined.

    Args:
        shapes: shapes of inputs, from which those of other values are inferred.
        arithmetic: the target whose float16 sums are emulated; None for float32 sums.
    """
    # Names and types of the model as written are noted before nodes are added to it.
    own = Graph.of(_without_shortcuts(shell.model) if emulated else shell.model)
    lowest = lowest_precision(own.types)
    graph = with_defined_windows(own)
    inferred = graph.shapes_of(shapes or {})
    if emulated and lowest != "float32":
        graph, inferred = _rounded(shell, graph, inferred, arithmetic, shapes or {})
    written = graph.model
    # A sample may replace the default of an input, so that defaults are fed as weights are, whatever their size.
    defaults = frozenset(value.name for value in graph.overridable())
    stored = shell.model.graph.initializer
    weights = {one.name: one for one in stored if one.name in defaults}
    weights |= shell.weights
    constants = _constants(written.graph, weights)
    given = constants.keys() | weights.keys()
    main_nodes = [node for node in graph.order if node.scope == 0]
    wiring = wire(graph)
    reads, held = _needs(graph, main_nodes, wiring, constants)
    inputs = (entry.name for entry in written.graph.input)
    rest = ModelProto(graph=GraphProto(name=written.graph.name))
    copy_fields(written, rest, but={"graph"})
    return DataflowGraph(
        nodes=tuple(node.proto for node in main_nodes),
        reads=reads,
        held=held,
        maker=_makers(main_nodes),
        constants=constants,
        fixed=fixed_values(graph, main_nodes, wiring, given - defaults),
        types={name: graph.types[at] for name, at in graph.scopes[0].names.items()},
        low=_low_types(own),
        own=frozenset(own.scopes[0].names),
        lowest=lowest,
        sizes=_sizes(graph, main_nodes, inferred),
        ranks=_ranks(graph, inferred) if shapes else {},
        emulated=emulated,
        large=bool(shell.weights),
        inputs=tuple(name for name in inputs if name not in given),
        defaults=defaults,
        outputs=tuple(entry.name for entry in written.graph.output),
        shell=Shell(rest, weights, shell.base_dir),
        names=frozenset(graph.all_names()),
        exponents=stored_exponents(written),
        is_altered=written is not shell.model,
    )


def _rounded(
    shell: Shell,
    graph: Graph,
    known: Sequence[Shape | None],
    arithmetic: Profile | None,
    given: Mapping[str, Sequence[int]],
) -> tuple[Graph, Sequence[Shape | None]]:
    """Return the graph with explicit rounding, and the shapes of its values.

    Args:
        shell: the model.
        graph: its graph.
        known: the shapes of its values.
        arithmetic: the target whose float16 sums are emulated; None for float32 sums.
        given: the shapes of inputs.
    """
    rounding = emulate_graph(
        graph, hollow=shell.weights, arithmetic=arithmetic, shapes=known
    )
    rounded = Graph.of(rounding)
    if arithmetic is None:  # Casts are all that is added
        return rounded, carried_shapes(rounded, graph, known)
    return rounded, rounded.shapes_of(given)


def _low_types(graph: Graph) -> dict[str, int]:
    """Return the low-precision values of the main graph, with their element types."""
    low = dict[str, int]()
    for name, value in graph.scopes[0].names.items():
        kind = LOW_TENSORS.get(graph.types[value] or "")
        if kind is not None:
            low[name] = kind.elem
    return low


def _needs(
    graph: Graph, nodes: Sequence[Node], wiring: Wiring, constants: Container[str]
) -> tuple[tuple[tuple[str, ...], ...], tuple[tuple[str, ...], ...]]:
    """Return what each node and its bodies need: computed values, and constants."""
    reads = list[tuple[str, ...]]()
    held = list[tuple[str, ...]]()
    for node in nodes:
        needs = [graph.values[value].name for value in wiring.needs[node.index]]
        reads.append(tuple(name for name in needs if name not in constants))
        held.append(tuple(name for name in needs if name in constants))
    return tuple(reads), tuple(held)


def _makers(nodes: Sequence[Node]) -> dict[str, int]:
    """Return the values that nodes compute, each with the place of its node."""
    makers = dict[str, int]()
    for place, node in enumerate(nodes):
        makers |= dict.fromkeys(filter(None, node.proto.output), place)
    return makers


def _constants(
    graph: GraphProto, weights: Container[str]
) -> dict[str, TensorProto | SparseTensorProto]:
    """Return the initializers of a graph that are not fed as weights."""
    dense = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.name not in weights
    }
    return dense | {sparse.values.name: sparse for sparse in graph.sparse_initializer}


def _without_shortcuts(model: ModelProto) -> ModelProto:
    """Return the model, or a copy whose nodes compute in the types that they have, and in no fewer bits."""
    shortcuts = op_facts().shortcut
    if not any(op_key(node) in shortcuts for node in all_nodes(model.graph.node)):
        return model
    result = copied(model)
    for node in all_nodes(result.graph.node):
        shortcut = shortcuts.get(op_key(node))
        names = [one.name for one in node.attribute]
        if shortcut in names:
            del node.attribute[names.index(shortcut)]
    return result


def _ranks(graph: Graph, shapes: Sequence[Shape | None]) -> dict[str, int]:
    """Return the ranks of main-graph values, apart from outputs, whose declarations may be wrong.

    Inputs of ops that take sizes are left out: if ONNX Runtime knows the rank of Resize's input, it mistakes unknown
    ``sizes`` for empty ones.
    """
    sized = graph.nodes_of(op_facts().size_inputs)
    left_out = frozenset(chain.from_iterable(node.inputs for node in sized))
    ranks = {}
    for name, value in graph.scopes[0].names.items():
        shape = shapes[value]
        is_output = bool(graph.results[value])
        if shape is not None and not is_output and value not in left_out:
            ranks[name] = len(shape)
    return ranks


def _sizes(
    view: View, nodes: Iterable[Node], known: Sequence[Shape | None]
) -> dict[str, int]:
    """Return bytes by main-graph value; one of unknown shape counts as its node's largest input."""
    sizes: dict[str, int] = {}
    for name, value in view.scopes[0].names.items():
        shape = known[value]
        if shape is not None and None not in shape:
            sizes[name] = _WIDTH * elements(shape)
    for node in nodes:
        proto = node.proto
        largest = max((sizes.get(name, 0) for name in proto.input), default=0)
        for name in proto.output:
            sizes.setdefault(name, largest)
    return sizes


def origin(flow: DataflowGraph, name: str) -> tuple[str, int]:
    """Return the float32 value that emulation rounds to a value (itself if it does not), and the model's node."""
    maker = flow.maker[name]
    last = flow.nodes[maker]
    first = flow.maker.get(last.input[0]) if last.op_type == "Cast" else None
    if not flow.emulated or name not in flow.low or first is None:
        return name, maker
    node = flow.nodes[first]
    if node.op_type != "Cast" or attribute(node, "to") not in LOW_ELEMS:
        return name, maker
    exact = node.input[0]
    if exact in flow.maker:
        # Emulated accumulators add nodes to a sum; the last of them names the sum.
        metadata = flow.nodes[flow.maker[exact]].metadata_props
        exact = next((item.value for item in metadata if item.key == EXACT), exact)
    if exact in flow.maker:
        return exact, first if exact in flow.own else flow.maker[exact]
    return exact if exact in flow.inputs else name, first


def dtype_of(flow: DataflowGraph, name: str) -> str:
    """Return a value's element type in the model as written: "float32", "float16", "int64", ..."""
    if name in flow.low:
        return ELEM_NAMES[flow.low[name]]
    return readable_types(flow.types.get(name))


def fitted(flow: DataflowGraph, feeds: Feeds) -> dict[str, Feed]:
    """Return the feeds of a model in its float types. Numbers for low-precision inputs are rounded.

    Raises:
        ArgumentError: it has an input that is not fed.
    """
    missing = [name for name in flow.inputs if name not in feeds]
    if missing:
        raise ArgumentError(
            f"The models take different inputs: only one of them has {', '.join(map(repr, missing))}."
        )
    known = {*flow.inputs, *flow.defaults}
    return {
        name: as_typed(feed, flow.types.get(name))
        for name, feed in feeds.items()
        if name in known
    }


def expose(
    model: ModelProto, provider: Provider, names: Container[str]
) -> "tuple[ort.InferenceSession, tuple[str, ...]]":
    """Return a session like that of :func:`make_session`, with values of the main graph as additional outputs.

    Args:
        model: a model whose weights are inputs, or small; it is not changed.
        provider: where it runs.
        names: the values to show.

    Returns:
        The session, and the names of the additional outputs: those values that remain after fusions.

    Raises:
        RuntimeFailure: ONNX Runtime cannot load the model.
    """
    with temporary_folder() as folder:
        path = Path(folder, "optimized.onnx")
        make_session(model, provider, optimized_to=path)
        optimized = onnx.load(path)
    given = {entry.name for entry in optimized.graph.output}
    computed = chain.from_iterable(node.output for node in optimized.graph.node)
    shown = [name for name in computed if name in names and name not in given]
    optimized.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in shown
    )
    # More outputs would prevent fusions that the first session made, so the graph is not optimized again.
    return make_session(optimized, provider, optimize=False), tuple(shown)
