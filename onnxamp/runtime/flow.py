"""A model's main graph, ready to be run a few nodes at a time, so that no more values live than somebody still needs.

A piece is a model of its own: some nodes, in order; its inputs are what these nodes read from elsewhere, large weights
among them, so that a session holds no weights; its outputs are what somebody wants. Nothing is optimised in a piece:
values are those of the graph as written.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import TYPE_CHECKING, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, ValueInfoProto, helper

from onnxamp.dtypes import ELEM_NUMBERS, LOW_TYPES
from onnxamp.errors import ArgumentError
from onnxamp.graph import ABSENT, View
from onnxamp.infer import infer_types
from onnxamp.names import NewNames
from onnxamp.resolve import view_model
from onnxamp.runtime.emulate import emulate, inlined
from onnxamp.runtime.protos import copy_fields
from onnxamp.runtime.session import Provider, make_session, run_values
from onnxamp.runtime.shell import WEIGHTS_IN_GRAPH, Shell, take_weights
from onnxamp.runtime.values import Feed, to_value, type_proto
from onnxamp.sizes import elements, infer_shapes

if TYPE_CHECKING:
    import onnxruntime as ort


_SESSIONS: Final = 16
"""Sessions that a runner keeps. What many of them allocate between large values keeps the heap from shrinking."""

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
        emulated: float32 throughout, with low values rounded (:mod:`onnxamp.runtime.emulate`); else as it is.
        shapes: shapes of inputs, which tell those of the values behind them.
        keep: bytes of weights up to which they stay in the pieces.

    Raises:
        ModelError: the model cannot be resolved or a function not inlined. OpsetError, ExternalDataError: as
            :func:`~onnxamp.runtime.emulate.emulate`.

    Complexity: linear in nodes, and in bytes of the weights that stay.
    """
    shell = take_weights(model, base_dir, keep=keep)
    return flow_of(replace(shell, model=inlined(shell.model)), emulated=emulated, shapes=shapes)


def flow_of(shell: Shell, *, emulated: bool, shapes: Mapping[str, Sequence[int]] | None = None) -> Flow:
    """:func:`make_flow` of a model whose weights are taken out and whose functions are inlined."""
    written = shell.model
    view = view_model(written)
    low, lowest = _low_values(view)
    own = frozenset(view.scopes[0].names)
    if lowest != "float32" and emulated:
        written = emulate(written, hollow=shell.weights)
        view = view_model(written)
    types, main = infer_types(view), view.scopes[0]
    defaults = {value.name for value in view.overridable()}
    weights = {t.name: t for t in shell.model.graph.initializer if t.name in defaults} | dict(shell.weights)
    constants: dict[str, TensorProto | SparseTensorProto] = {
        **{tensor.name: tensor for tensor in written.graph.initializer if tensor.name not in weights},
        **{sparse.values.name: sparse for sparse in written.graph.sparse_initializer},
    }
    given = constants.keys() | weights.keys()
    order = [index for index in view.order if view.nodes[index].scope == 0]
    needs = _needs(view)
    rest = ModelProto()
    copy_fields(written, rest, but={"graph"})
    rest.graph.name = written.graph.name
    return Flow(
        tuple(view.nodes[index].proto for index in order),
        tuple(tuple(name for name in needs[index] if name not in constants) for index in order),
        tuple(tuple(name for name in needs[index] if name in constants) for index in order),
        {name: rank for rank, index in enumerate(order) for name in view.nodes[index].proto.output if name},
        constants,
        {name: types[value] for name, value in main.names.items()},
        low,
        own,
        lowest,
        _sizes(view, order, shapes or {}),
        emulated,
        bool(shell.weights),
        tuple(entry.name for entry in written.graph.input if entry.name not in given),
        frozenset(defaults),
        tuple(entry.name for entry in written.graph.output),
        Shell(rest, weights, shell.base_dir),
        frozenset(view.all_names()),
    )


def _sizes(view: View, order: Sequence[int], shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Bytes by main-graph value; what shape inference does not know is taken to be as large as what it is made of."""
    known = infer_shapes(view, given=shapes)
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


def _low_values(view: View) -> tuple[dict[str, int], str]:
    """Low values of the main graph with their element types, and the lowest type in any scope."""
    types = infer_types(view)
    low = {low.tensor: low for low in LOW_TYPES.values()}
    found = {low[kind].name for kind in types if kind in low}
    lowest = next((name for name in ("bfloat16", "float16") if name in found), "float32")
    main = view.scopes[0].names.items()
    return {name: low[kind].elem for name, value in main if (kind := types[value]) in low}, lowest


def _needs(view: View) -> dict[int, tuple[str, ...]]:
    """By main-graph node: the main-graph values that it or a node of its bodies reads, or a body returns."""
    needs: dict[int, dict[str, None]] = {index: {} for index in view.scopes[0].nodes}
    for value in view.values:
        if value.scope != 0:
            continue
        readers = [view.nodes[node].scope for node, _ in view.uses[value.index]]
        mine = [node for node, _ in view.uses[value.index]]
        for node, scope in zip(mine, readers, strict=True):
            needs[node if scope == 0 else _outermost(view, scope)][value.name] = None
        for scope, _ in view.results[value.index]:
            if scope != 0:
                needs[_outermost(view, scope)][value.name] = None
    return {index: tuple(names) for index, names in needs.items()}


def _outermost(view: View, scope: int) -> int:
    """The main-graph node that a body belongs to, at any depth."""
    while (parent := view.scopes[scope].parent) != 0:
        scope = parent
        assert parent != ABSENT
    return view.scopes[scope].owner


def fitted(flow: Flow, feeds: Mapping[str, Feed]) -> dict[str, Feed]:
    """The feeds that a flow takes, in its float types: an input that a conversion made low takes rounded numbers.

    Raises:
        ArgumentError: the flow has an input that is not fed.
    """
    missing = [name for name in flow.inputs if name not in feeds]
    if missing:
        raise ArgumentError(f"The models take different inputs: only one of them has {', '.join(map(repr, missing))}.")
    taken = {*flow.inputs, *flow.defaults}
    return {name: _as_typed(feed, flow.types.get(name)) for name, feed in feeds.items() if name in taken}


def _as_typed(feed: Feed, kind: str | None) -> Feed:
    if kind is None or feed is None:
        return feed
    inner = kind[kind.index("(") + 1 : -1]
    if kind.startswith("optional("):
        return _as_typed(feed, inner)
    if not isinstance(feed, np.ndarray):
        return [_as_typed(item, inner) for item in feed]
    elem = ELEM_NUMBERS.get(inner)
    wanted = helper.tensor_dtype_to_np_dtype(elem) if elem is not None else feed.dtype
    floats = "float" in str(wanted) and "float" in str(feed.dtype)
    return feed.astype(wanted) if floats and wanted != feed.dtype else feed


@dataclass(frozen=True, slots=True)
class Piece:
    """Some nodes of a flow, in order, and what is wanted of them.

    ``renamed`` gives outputs of these nodes other names, while the nodes read the values of the old names from
    outside; ``rounded`` are inputs that arrive in float32 and are rounded to the low type that they have in the model.
    """

    nodes: tuple[int, ...]
    wanted: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    rounded: frozenset[str] = frozenset()


def piece_inputs(flow: Flow, piece: Piece) -> list[str]:
    """What a piece reads from outside."""
    renamed = dict(piece.renamed)
    made = {name for node in piece.nodes for name in flow.nodes[node].output if name and name not in renamed}
    reads = dict.fromkeys(name for node in piece.nodes for name in flow.reads[node] if name not in made)
    return list(reads)


def piece_model(flow: Flow, piece: Piece, kinds: Mapping[str, str]) -> ModelProto:
    """A piece as a model of its own.

    Args:
        kinds: type by name of each input of the piece.

    Raises:
        RuntimeFailure: a value of some exotic kind (a map) would have to enter the piece.
    """
    model = ModelProto()
    copy_fields(flow.shell.model, model, but={"graph"})
    model.graph.name = flow.shell.model.graph.name or "piece"
    renamed = dict(piece.renamed)
    names = NewNames({*flow.names, *renamed.values()})
    for name in piece_inputs(flow, piece):
        entry = model.graph.input.add(name=name)
        entry.type.CopyFrom(type_proto(kinds[name]))
        if name in flow.shell.weights and name not in flow.defaults:
            _declare_dims(entry, flow.shell.weights[name])
        if name in piece.rounded:
            entry.name = names.fresh(f"{name}/given")
            _round(flow, model.graph, entry.name, name, names)
    _hold(flow, model.graph, dict.fromkeys(name for node in piece.nodes for name in flow.held[node]))
    for node in piece.nodes:
        added = model.graph.node.add()
        added.CopyFrom(flow.nodes[node])
        added.output[:] = [renamed.get(name, name) for name in added.output]
    for name in piece.wanted:
        model.graph.output.add(name=name)
    return model


def _declare_dims(entry: ValueInfoProto, tensor: TensorProto) -> None:
    """Kernels that ask for the rank of a weight find it."""
    for dim in tensor.dims:
        entry.type.tensor_type.shape.dim.add(dim_value=dim)


def _round(flow: Flow, graph: GraphProto, source: str, target: str, names: NewNames) -> None:
    """The Casts that make a float32 input what it would be in the model."""
    low = names.fresh(f"{target}/low") if flow.emulated else target
    graph.node.append(helper.make_node("Cast", [source], [low], to=flow.low[target]))
    if flow.emulated:
        graph.node.append(helper.make_node("Cast", [low], [target], to=TensorProto.FLOAT))


def _hold(flow: Flow, graph: GraphProto, names: Iterable[str]) -> None:
    for name in names:
        constant = flow.constants[name]
        if isinstance(constant, TensorProto):
            graph.initializer.append(constant)
        else:
            graph.sparse_initializer.append(constant)


@dataclass(slots=True)
class Runner:
    """Runs pieces of a flow. A few sessions are kept for further samples, weights until :meth:`forget`."""

    flow: Flow
    provider: Provider
    _sessions: "dict[Piece, tuple[ort.InferenceSession, list[tuple[str, str]]]]" = field(default_factory=dict)
    _weights: "dict[str, ort.OrtValue]" = field(default_factory=dict)

    def run(self, piece: Piece, values: "Mapping[str, ort.OrtValue]") -> "dict[str, ort.OrtValue]":
        """Run a piece.

        Args:
            values: at least what the piece reads from outside, but for weights.

        Returns:
            What is wanted of the piece, by name.

        Raises:
            RuntimeFailure: ONNX Runtime cannot load or run the piece.
        """
        found = self._sessions.get(piece) or self._load(piece, values)
        if not self.flow.large and len(self._sessions) < _SESSIONS:
            self._sessions[piece] = found
        session, entries = found
        feeds = {entry: values[name] if name in values else self._weight(name) for name, entry in entries}
        return run_values(session, feeds, piece.wanted)

    def forget(self) -> None:
        """Let go of the weights that were read for earlier pieces."""
        self._weights.clear()

    def _load(
        self, piece: Piece, values: "Mapping[str, ort.OrtValue]"
    ) -> "tuple[ort.InferenceSession, list[tuple[str, str]]]":
        """The session, and (value, input of the piece) pairs."""
        names = piece_inputs(self.flow, piece)
        model = piece_model(self.flow, piece, {name: self._kind(piece, name, values) for name in names})
        session = make_session(model, self.provider, optimize=False, lean=self.flow.large)
        return session, list(zip(names, (entry.name for entry in model.graph.input), strict=True))

    def _kind(self, piece: Piece, name: str, values: "Mapping[str, ort.OrtValue]") -> str:
        declared = self.flow.types.get(name)
        if declared is not None and (name not in piece.rounded or name not in values):
            return declared
        return str(values[name].data_type())

    def _weight(self, name: str) -> "ort.OrtValue":
        if name not in self._weights:
            self._weights[name] = to_value(self.flow.shell.array(name, raised=self.flow.emulated))
        return self._weights[name]
