"""A model's main graph, ready to be run a few nodes at a time (:mod:`onnxamp._runtime.pieces`), so that no more values
live than somebody still needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from typing import Final

from onnx import ModelProto, NodeProto, SparseTensorProto, TensorProto

from onnxamp._dtypes import ELEM_NAMES, LOW_ELEMS, LOW_TYPES, readable_types
from onnxamp._errors import ArgumentError
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.graph import Graph
from onnxamp._graph.inline import inline_functions
from onnxamp._graph.shapes import Shape, elements, infer_shapes
from onnxamp._graph.types import Types, infer_types
from onnxamp._graph.view import View
from onnxamp._graph.wiring import wire
from onnxamp._model.copying import copy_fields
from onnxamp._ops.facts import attribute, op_facts
from onnxamp._runtime.emulate import emulate_view
from onnxamp._runtime.shell import WEIGHTS_IN_GRAPH, Shell, take_weights
from onnxamp._runtime.values import Feed, as_typed

_WIDTH: Final = 4
"""Bytes of an element, nearly always."""


@dataclass(frozen=True, slots=True)
class Flow:
    """The main graph as nodes in an order that runs.

    On CPU, models with low values are emulated: ``nodes`` are those of the emulation, and all values float32.
    """

    nodes: tuple[NodeProto, ...]
    reads: tuple[tuple[str, ...], ...]
    """By node: the values that it and its bodies need, without constants."""
    held: tuple[tuple[str, ...], ...]
    """By node: the constants that it and its bodies need."""
    maker: Mapping[str, int]
    """Value -> the node that makes it."""
    constants: Mapping[str, TensorProto | SparseTensorProto]
    """Initializers that a piece holds itself."""
    types: Mapping[str, str | None]
    low: Mapping[str, int]
    """Value that is low in the model as written -> its element type."""
    own: frozenset[str]
    """Values of the model as written: what emulation adds is not among them."""
    lowest: str
    """The lowest float type anywhere in the model: "bfloat16", "float16" or "float32"."""
    sizes: Mapping[str, int]
    """Value -> bytes, best effort."""
    ranks: Mapping[str, int]
    """Value -> number of dimensions, where inference is sure: what ONNX Runtime would know, loading the whole model."""
    emulated: bool
    large: bool
    """Whether its weights are fed to the pieces instead of being held."""
    inputs: tuple[str, ...]
    """Those that no initializer gives a value."""
    defaults: frozenset[str]
    """Those that have an initializer, which callers may override; it is among the shell's weights."""
    outputs: tuple[str, ...]
    shell: Shell
    """What is around the graph; the weights."""
    names: frozenset[str]
    """Every name of the model, those in bodies included."""


def make_flow(
    model: ModelProto,
    base_dir: str | PathLike[str] | None = None,
    *,
    emulated: bool,
    shapes: Mapping[str, Sequence[int]] | None = None,
    keep: int = WEIGHTS_IN_GRAPH,
) -> Flow:
    """Make a model ready.

    Args:
        model: it is not changed. Model-local functions are inlined, so that the values in them can be seen.
        base_dir: folder of external data, if the model has any that is not loaded.
        emulated: float32 throughout, with low values rounded (:mod:`onnxamp._runtime.emulate`); else as it is.
        shapes: shapes of inputs, which tell those of the values behind them.
        keep: bytes of weights up to which they stay in the pieces.

    Raises:
        ModelError: the model cannot be resolved or a function not inlined. OpsetError, ExternalDataError: as
            :func:`~onnxamp._runtime.emulate.emulate`.

    Complexity: linear in nodes, and in bytes of the weights that stay.
    """
    shell = take_weights(model, base_dir, keep=keep)
    return flow_of(replace(shell, model=inline_functions(shell.model)), emulated=emulated, shapes=shapes)


@no_collections()
def flow_of(shell: Shell, *, emulated: bool, shapes: Mapping[str, Sequence[int]] | None = None) -> Flow:
    """:func:`make_flow` of a model whose weights are taken out and whose functions are inlined."""
    written = shell.model
    view = Graph.of(written)
    types = infer_types(view)
    low, lowest = _low_values(view, types), lowest_type(types)
    own = frozenset(view.scopes[0].names)
    if lowest != "float32" and emulated:
        written = emulate_view(view, types, hollow=shell.weights)
        view = Graph.of(written)
        types = infer_types(view)
    main = view.scopes[0]
    defaults = {value.name for value in view.overridable()}
    weights = {t.name: t for t in shell.model.graph.initializer if t.name in defaults} | dict(shell.weights)
    constants: dict[str, TensorProto | SparseTensorProto] = {
        **{tensor.name: tensor for tensor in written.graph.initializer if tensor.name not in weights},
        **{sparse.values.name: sparse for sparse in written.graph.sparse_initializer},
    }
    given = constants.keys() | weights.keys()
    inferred = infer_shapes(view, types, given=shapes)
    order = [index for index in view.order if view.nodes[index].scope == 0]
    needs = {node: [view.values[value].name for value in values] for node, values in wire(view).needs.items()}
    rest = ModelProto()
    copy_fields(written, rest, but={"graph"})
    rest.graph.name = written.graph.name
    return Flow(
        nodes=tuple(view.nodes[index].proto for index in order),
        reads=tuple(tuple(name for name in needs[index] if name not in constants) for index in order),
        held=tuple(tuple(name for name in needs[index] if name in constants) for index in order),
        maker={name: rank for rank, index in enumerate(order) for name in view.nodes[index].proto.output if name},
        constants=constants,
        types={name: types[value] for name, value in main.names.items()},
        low=low,
        own=own,
        lowest=lowest,
        sizes=_sizes(view, order, inferred),
        ranks=_ranks(view, inferred) if shapes else {},
        emulated=emulated,
        large=bool(shell.weights),
        inputs=tuple(entry.name for entry in written.graph.input if entry.name not in given),
        defaults=frozenset(defaults),
        outputs=tuple(entry.name for entry in written.graph.output),
        shell=Shell(rest, weights, shell.base_dir),
        names=frozenset(view.all_names()),
    )


def _ranks(view: View, shapes: Sequence[Shape | None]) -> dict[str, int]:
    """Ranks of main-graph values but outputs: what the file declares of these may be wrong.

    What stands beside a size is left out: where ONNX Runtime knows the rank of Resize's input, it takes ``sizes`` that
    it does not know for empty ones.
    """
    sized = op_facts().size_inputs
    beside = {value for node in view.nodes if node.key in sized for value in node.inputs}
    names = view.scopes[0].names.items()
    named = ((name, shapes[value]) for name, value in names if not view.results[value] and value not in beside)
    return {name: len(shape) for name, shape in named if shape is not None}


def _sizes(view: View, order: Sequence[int], known: Sequence[Shape | None]) -> dict[str, int]:
    """Bytes by main-graph value; what shape inference does not know is taken to be as large as what it is made of."""
    found: dict[str, int] = {}
    for name, value in view.scopes[0].names.items():
        shape = known[value]
        if shape is not None and None not in shape:
            found[name] = _WIDTH * elements(shape)
    for index in order:
        node = view.nodes[index].proto
        largest = max((found.get(name, 0) for name in node.input), default=0)
        for name in node.output:
            found.setdefault(name, largest)
    return found


def _low_values(view: View, types: Types) -> dict[str, int]:
    """Low values of the main graph with their element types."""
    low = {low.tensor: low for low in LOW_TYPES.values()}
    main = view.scopes[0].names.items()
    return {name: low[kind].elem for name, value in main if (kind := types[value]) in low}


def lowest_type(types: Types) -> str:
    """The lowest float type of any value in any scope: "bfloat16", "float16" or "float32"."""
    return next((name for name in ("bfloat16", "float16") if LOW_TYPES[name].tensor in types), "float32")


def origin(flow: Flow, name: str) -> tuple[str, int]:
    """The float32 value that emulation rounds to a value (itself where it does not), and the node of the model."""
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
        return exact, first if exact in flow.own else flow.maker[exact]
    return exact if exact in flow.inputs else name, first


def dtype_of(flow: Flow, name: str) -> str:
    """The element type that a value has in the model as written, as people call it: "float32", "float16", "int64"."""
    return ELEM_NAMES[flow.low[name]] if name in flow.low else readable_types(flow.types.get(name))


def fitted(flow: Flow, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """The feeds that a flow takes, in its float types: an input that a conversion made low takes rounded numbers.

    Raises:
        ArgumentError: the flow has an input that is not fed.
    """
    missing = [name for name in flow.inputs if name not in feeds]
    if missing:
        raise ArgumentError(f"The models take different inputs: only one of them has {', '.join(map(repr, missing))}.")
    taken = {*flow.inputs, *flow.defaults}
    return {name: as_typed(feed, flow.types.get(name)) for name, feed in feeds.items() if name in taken}
