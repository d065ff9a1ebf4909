"""Pieces of a graph as models of their own, and how they are run.

A piece consists of some nodes in order. Its inputs are what they read from elsewhere, large weights included, so that
sessions hold no weights; its outputs are the values that are wanted. Pieces are not optimised: values are those of the
graph as written.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from onnx import GraphProto, ModelProto, TensorProto, ValueInfoProto

from onnxamp._dtypes import Format
from onnxamp._graph.editor import NewNames
from onnxamp._model.blobs import Bits
from onnxamp._model.lowering import raised, rounded
from onnxamp._model.protos import copy_fields
from onnxamp._runtime.emulate import cast, rounding
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.plugins import wants_ranks
from onnxamp._runtime.session import Provider, make_session, run_values
from onnxamp._runtime.values import to_value, typed

if TYPE_CHECKING:
    import onnxruntime as ort

_SESSIONS: Final = 16
"""Sessions that a runner keeps. Small allocations of many sessions between large values fragment the heap."""

_NONE: Final[Mapping[str, Format]] = {}


@dataclass(frozen=True, slots=True)
class Piece:
    """Some nodes in order, and the values that are wanted of them.

    ``renamed`` gives outputs of these nodes other names, while the nodes read the values of the old names from outside.
    ``rounded`` are inputs that arrive in float32 and are rounded to the low precision that they have in the model.
    """

    nodes: tuple[int, ...]
    wanted: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    rounded: frozenset[str] = frozenset()


def piece_inputs(flow: Flow, piece: Piece) -> list[str]:
    """Values that a piece reads from outside."""
    renamed = dict(piece.renamed)
    made = {
        name
        for node in piece.nodes
        for name in flow.nodes[node].output
        if name and name not in renamed
    }
    reads = dict.fromkeys(
        name for node in piece.nodes for name in flow.reads[node] if name not in made
    )
    return list(reads)


def piece_model(flow: Flow, piece: Piece, kinds: Mapping[str, str]) -> ModelProto:
    """A piece as a model of its own.

    Args:
        kinds: type by input of the piece.

    Raises:
        RuntimeFailure: a value that cannot be fed (a map) would have to enter the piece.
    """
    model = ModelProto()
    copy_fields(flow.shell.model, model, but={"graph"})
    model.graph.name = flow.shell.model.graph.name or "piece"
    renamed = dict(piece.renamed)
    names = NewNames({*flow.names, *renamed.values()})
    ranks = (
        {} if renamed else flow.ranks
    )  # under other names nodes may be fed with another model's values
    for name in piece_inputs(flow, piece):
        entry = model.graph.input.add(name=name)
        entry.type.CopyFrom(typed(kinds[name]))
        if name in flow.shell.weights and name not in flow.defaults:
            _declare_dims(entry, flow.shell.weights[name].dims)
        elif name in ranks and entry.type.HasField("tensor_type"):
            _declare_dims(
                entry, [None] * ranks[name]
            )  # some kernels crash the process on other ranks
        if name in piece.rounded:
            entry.name = names.fresh(f"{name}/given")
            source, elem = entry.name, flow.low[name]
            model.graph.node.extend(
                rounding(names, source, name, elem)
                if flow.emulated
                else [cast(names, source, name, elem)]
            )
    _hold(
        flow, model.graph, dict.fromkeys(name for node in piece.nodes for name in flow.held[node])
    )
    for node in piece.nodes:
        added = model.graph.node.add()
        added.CopyFrom(flow.nodes[node])
        added.output[:] = [renamed.get(name, name) for name in added.output]
    for name in piece.wanted:
        model.graph.output.add(name=name)
    return model


def _declare_dims(entry: ValueInfoProto, dims: Iterable[int | None]) -> None:
    """Declare a shape: kernels may ask for the rank, and ONNX Runtime refuses inputs of a wrong one."""
    entry.type.tensor_type.shape.SetInParent()
    for dim in dims:
        entry.type.tensor_type.shape.dim.add(dim_value=dim)


def _rank(
    names: Iterable[str], entries: Iterable[ValueInfoProto], values: "Mapping[str, ort.OrtValue]"
) -> None:
    """Declare the ranks that inputs have in this run, where none are known."""
    for name, entry in zip(names, entries, strict=True):
        declared = entry.type.tensor_type
        if name in values and entry.type.HasField("tensor_type") and not declared.HasField("shape"):
            _declare_dims(entry, [None] * len(values[name].shape()))


def _hold(flow: Flow, graph: GraphProto, names: Iterable[str]) -> None:
    for name in names:
        constant = flow.constants[name]
        if isinstance(constant, TensorProto):
            graph.initializer.append(constant)
        else:
            graph.sparse_initializer.append(constant)


@dataclass(slots=True)
class Runner:
    """Runs pieces. Some sessions are kept for further samples, weights until :meth:`forget`.

    ``threads`` and ``spin`` are as for :func:`~onnxamp._runtime.session.make_session`. ``kept`` is the number of
    sessions that are kept; None for a few, and none of a model with large weights. ``given`` are weights whose
    low-precision numbers are not the nearest.
    """

    flow: Flow
    provider: Provider
    threads: int = 0
    spin: bool = True
    kept: int | None = None
    given: Mapping[str, Bits] = field(default_factory=dict)
    _sessions: "dict[Piece, tuple[ort.InferenceSession, list[tuple[str, str]]]]" = field(
        default_factory=dict
    )
    _weights: "dict[tuple[str, Format | None], ort.OrtValue]" = field(default_factory=dict)

    def run(
        self, piece: Piece, values: "Mapping[str, ort.OrtValue]", low: Mapping[str, Format] = _NONE
    ) -> "dict[str, ort.OrtValue]":
        """Run a piece.

        Args:
            values: at least those that the piece reads from outside, apart from weights.
            low: weights that are rounded on their way in.

        Returns:
            The wanted values by name.

        Raises:
            RuntimeFailure: ONNX Runtime cannot load or run the piece.
        """
        loaded = self._sessions.get(piece) or self._load(piece, values)
        if len(self._sessions) < (
            (0 if self.flow.large else _SESSIONS) if self.kept is None else self.kept
        ):
            self._sessions[piece] = loaded
        session, entries = loaded
        feeds = {
            entry: values[name] if name in values else self._weight(name, low.get(name))
            for name, entry in entries
        }
        return run_values(session, feeds, piece.wanted)

    def forget(self) -> None:
        """Drop the weights that were read for earlier pieces."""
        self._weights.clear()

    def _load(
        self, piece: Piece, values: "Mapping[str, ort.OrtValue]"
    ) -> "tuple[ort.InferenceSession, list[tuple[str, str]]]":
        """The session, and (value, input of the piece) pairs."""
        names = piece_inputs(self.flow, piece)
        model = piece_model(
            self.flow, piece, {name: self._kind(piece, name, values) for name in names}
        )
        if wants_ranks(self.provider):
            _rank(names, model.graph.input, values)
        session = make_session(
            model,
            self.provider,
            optimize=False,
            lean=self.flow.large,
            threads=self.threads,
            spin=self.spin,
        )
        return session, list(zip(names, (entry.name for entry in model.graph.input), strict=True))

    def _kind(self, piece: Piece, name: str, values: "Mapping[str, ort.OrtValue]") -> str:
        declared = self.flow.types.get(name)
        if declared is not None and (name not in piece.rounded or name not in values):
            return declared
        return str(values[name].data_type())

    def _weight(self, name: str, low: Format | None) -> "ort.OrtValue":
        if (name, low) not in self._weights:
            array = self.flow.shell.array(name, raised=self.flow.emulated)
            if low is not None and name in self.given:
                array = raised(self.given[name].reshape(array.shape), low.elem)
            elif low is not None:
                array = rounded(array, low, low.max_finite / 2)
            self._weights[name, low] = to_value(array)
        return self._weights[name, low]
