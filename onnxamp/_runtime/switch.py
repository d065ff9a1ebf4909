"""One graph for every choice of precisions: a Boolean mask selects the rounded or the exact form of each value.

=====================================  =====================================================================
of a node that may be low precision    in the switched graph, which is float32 throughout
=====================================  =====================================================================
float input *x*                        ``Where(switch, rounded x, x)``; *x* is rounded once for all readers, and
                                       not at all if it is a constant that low precision holds exactly
float output *y*                       the node, then ``Where(switch, rounded y, y)`` for other readers of *y*
such an output, read as such an input  ``Where(either's switch, rounded, exact)`` alone: rounding twice is rounding
=====================================  =====================================================================

Rounding is ``Cast(to=low) -> Cast(to=float)``. Constants beyond the range of low precision, as in attention masks,
saturate as in conversions. Weights without data are chosen by whoever feeds them, not in the graph: each node that may
read one in low precision has an initializer of its own for it. With all switches off the graph computes bit for bit
what the model computes.

For a target that sums up float16 in float16, ``Where(switch, summed y, y)`` stands between such a node and all that the
table says of its output (:mod:`onnxamp._runtime.accumulate`).
"""

from collections.abc import Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import FLOAT16, Format
from onnxamp._errors import OpsetError
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.constants import constant_tensors
from onnxamp._graph.editor import NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin, Scope
from onnxamp._model.blobs import Bits
from onnxamp._model.lowering import raised
from onnxamp._model.protos import copy_fields, opset_imports
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.accumulate import Accumulator
from onnxamp._runtime.emulate import Rounder

_TOGETHER: Final = 64
"""Switches that are split off the mask together, in front of the first node that needs one of them. With all at once,
ONNX Runtime 1.31 would take quadratic time to load the model."""

_COUNTED: Final = 18
"""Opset from which on Split needs the number of its outputs."""


@dataclass(slots=True)
class Switches:
    """Splits switches off the mask as they are needed.

    Attributes:
        mask: name of the input.
        names: makes further names.
        opset: that of the model.
        main: its main graph, which grows.
        nodes: by element of the mask: the nodes any of which turns it on; empty if unused.
    """

    mask: str
    names: NewNames
    opset: int
    main: GraphProto
    nodes: list[frozenset[int]] = field(default_factory=list)
    _named: dict[frozenset[int], str] = field(default_factory=dict)
    _unused: list[tuple[int, str]] = field(default_factory=list)
    """Elements that are split off already, and have no nodes yet."""

    def switch(self, graph: GraphProto, nodes: frozenset[int]) -> str:
        """The name of the switch of these nodes, for a reader in a graph of the model.

        If none is left, further ones are split off the mask: here, or, in a body, at the start of the main graph.
        """
        if nodes not in self._named:
            if not self._unused:
                self._split(len(self.main.node) if graph is self.main else 0)
            position, self._named[nodes] = self._unused.pop()
            self.nodes[position] = nodes
        return self._named[nodes]

    def enter_bodies(self) -> None:
        """Forget switches that are left: they may be made behind the nodes whose bodies come now."""
        self._unused.clear()

    def _split(self, at: int) -> None:
        """Insert the nodes that split switches off the mask."""
        start = len(self.nodes)
        self.nodes += [frozenset[int]()] * _TOGETHER
        names = [self.names.fresh(f"{self.mask}/{start + i}") for i in range(_TOGETHER)]
        part, positions = (
            self.names.fresh(f"{self.mask}/{start}/{kind}") for kind in ("part", "positions")
        )
        elements = np.arange(start, start + _TOGETHER, dtype=np.int64)
        self.main.initializer.append(numpy_helper.from_array(elements, positions))
        self.main.node.insert(at, helper.make_node("Gather", [self.mask, positions], [part]))
        split = helper.make_node("Split", [part], names)
        if self.opset >= _COUNTED:
            split.attribute.append(helper.make_attribute("num_outputs", _TOGETHER))
        self.main.node.insert(at + 1, split)
        self._unused = list(enumerate(names, start))[::-1]


Floats: TypeAlias = npt.NDArray[np.float32]

MASK: Final = "switches"
"""Name of the new input, unless the model uses it already."""

WHERE_OPSET: Final = 9
"""Opset that introduced Where."""

_FOLDED: Final = 1 << 20
"""Elements up to which constants are rounded and saturated beforehand."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Positions of a node's float inputs and outputs that are low precision if the node is."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Switched:
    """A switched model. Nodes are identified by their first output."""

    model: ModelProto
    mask: str
    """Name of its new input."""
    nodes: tuple[str, ...]
    """Nodes that may be low precision, in execution order."""
    switches: tuple[tuple[str, ...], ...]
    """By element of the mask: the nodes any of which turns it on."""
    fed: Mapping[str, tuple[str, str]]
    """New initializer without data -> the weight that it stands for, and the node that reads it."""

    def masked(self, low: AbstractSet[str]) -> npt.NDArray[np.bool_]:
        """The new input's value if these nodes are low precision."""
        return np.array([not low.isdisjoint(nodes) for nodes in self.switches], np.bool_)

    def rounded(self, low: AbstractSet[str]) -> list[str]:
        """The new initializers that must be fed rounded if these nodes are low precision."""
        return [name for name, (_, node) in self.fed.items() if node in low]


@no_collections()
def switched(
    model: ModelProto,
    ports: Mapping[str, Ports],
    low: Format,
    *,
    hollow: Container[str] = (),
    arithmetic: Profile | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    given: Mapping[str, Bits] = MappingProxyType({}),
) -> Switched:
    """Give nodes switches.

    Args:
        model: float32, with its weights; it is not changed.
        ports: by the first output of a node at any depth, whose name no other node may use. Nodes that the model does
            not have are ignored.
        low: the type to round to.
        hollow: initializers of the main graph without data (:mod:`onnxamp._runtime.shell`).
        arithmetic: the target whose float16 sums are emulated; None for float32 sums.
        shapes: shapes of inputs, which tell how long sums are.
        given: initializers of the main graph whose low-precision numbers are not the nearest.

    Raises:
        ModelError: the model cannot be resolved. OpsetError: it is too old for Where.

    Complexity: linear in nodes and weight bytes.
    """
    if (version := opset_imports(model)[""]) < WHERE_OPSET:
        raise OpsetError(
            f"The model's opset {version} has no Where, which choosing precisions by data needs: convert it with"
            f" opset={WHERE_OPSET} (--opset {WHERE_OPSET}) or newer."
        )
    view = Graph.of(model)
    nodes = {key: index for index in view.order if (key := node_key(view.nodes[index])) in ports}
    names = NewNames(view.all_names())
    empty = {value for name, value in view.scopes[0].names.items() if name in hollow}
    result = ModelProto()
    copy_fields(model, result, but={"graph"})
    switches = Switches(names.fresh(MASK), names, version, result.graph)
    job = _Job(
        view=view,
        low=low,
        names=names,
        switches=switches,
        ports={i: ports[key] for key, i in nodes.items()},
        hollow=empty,
    )
    job.given = {
        value: given[name] for name, value in view.scopes[0].names.items() if name in given
    }
    if arithmetic is not None and low is FLOAT16:
        job.accumulator = Accumulator(arithmetic, names, version, view.shapes_of(shapes or {}))
    job.targets[0] = result.graph
    for scope in view.scopes:  # a scope stands behind the one around it
        _fill(job, scope, job.targets[scope.index])
        if scope.index == 0:
            switches.enter_bodies()
    result.graph.input.append(
        helper.make_tensor_value_info(switches.mask, TensorProto.BOOL, [len(switches.nodes)])
    )
    by_element = tuple(
        tuple(node_key(view.nodes[index]) for index in sorted(group)) for group in switches.nodes
    )
    return Switched(result, switches.mask, tuple(nodes), by_element, job.fed)


def node_key(node: Node) -> str:
    """How nodes are identified here: by their first output."""
    return next((name for name in node.proto.output if name), "")


@dataclass(slots=True)
class _Job:
    """The switched graph of one model, scope by scope."""

    view: Graph
    low: Format
    names: NewNames
    switches: Switches
    ports: Mapping[int, Ports]
    hollow: AbstractSet[int]
    """Weights without data."""
    fed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """As in :class:`Switched`."""
    targets: dict[int, GraphProto] = field(default_factory=dict)
    exact: dict[int, str] = field(default_factory=dict)
    """Value that may be low precision -> name of the node's exact output."""
    rounded: dict[int, str] = field(default_factory=dict)
    """Value -> name of its rounded form, which follows it in the same scope."""
    given: Mapping[int, Bits] = field(default_factory=dict)
    """Constants whose low-precision numbers are not the nearest."""
    accumulator: Accumulator | None = None

    def __post_init__(self) -> None:
        for index, own in self.ports.items():
            node = self.view.nodes[index]
            made = [node.outputs[port] for port in own.outputs]
            self.exact |= {
                value: self.names.fresh(f"{self.view.values[value].name}/exact") for value in made
            }
            for value in (*made, *(node.input(port) for port in own.inputs)):
                if value != ABSENT and value not in self.rounded and value not in self.hollow:
                    self.rounded[value] = self.names.fresh(
                        f"{self.view.values[value].name}/rounded"
                    )

    def round(self, graph: GraphProto, value: int) -> None:
        """Append the rounded form of a value if a switch needs it."""
        if value in self.rounded:
            constant = self.constant(value)
            if constant is not None:
                own = self.given.get(value)
                rounded = (
                    _saturated(constant, self.low) if own is None else self.raised(own, constant)
                )
                if np.array_equal(rounded, constant):
                    self.rounded[value] = self.view.values[value].name
                else:
                    graph.initializer.append(numpy_helper.from_array(rounded, self.rounded[value]))
            else:
                source = self.exact.get(value, self.view.values[value].name)
                Rounder(self.names).round(graph, source, self.rounded[value], self.low.elem)

    def choose(self, graph: GraphProto, value: int, reader: int, target: str) -> str:
        """Append the choice between a value's forms: rounded if its producer or its reader (ABSENT for any) is low.

        Returns its name: that of the value itself if there is nothing to choose.
        """
        exact = self.view.values[value].name
        if self.rounded[value] == exact:  # a constant that low precision holds exactly
            return exact
        nodes = {reader} - {ABSENT}
        if value in self.exact:
            exact = self.exact[value]
            nodes.add(self.view.values[value].producer)
        return self.where(graph, value, frozenset(nodes), (self.rounded[value], exact), target)

    def where(
        self,
        graph: GraphProto,
        value: int,
        nodes: frozenset[int],
        forms: tuple[str, str],
        target: str,
    ) -> str:
        """Append the choice between two forms of a value: the first if any of the nodes is low. Returns ``target``."""
        switch = self.switches.switch(graph, nodes)
        if not self.view.shapes[
            value
        ]:  # a scalar, or perhaps one: it would get a dimension from the switch
            scalar = self.names.fresh(f"{target}/switch")
            graph.node.append(helper.make_node("Squeeze", [switch], [scalar]))
            switch = scalar
        graph.node.append(helper.make_node("Where", [switch, *forms], [target]))
        return target

    def accumulate(self, graph: GraphProto, node: Node, added: NodeProto) -> None:
        """Append what the target's accumulator makes of a node's output if the node is low: its exact form from now."""
        value = node.outputs[0]
        if (
            self.accumulator is None
            or value not in self.exact
            or not self.accumulator.applies(added)
        ):
            return
        raw = self.exact[value]
        summed = self.accumulator.add(graph, node, added, raw)
        if summed != raw:
            target = self.names.fresh(f"{self.view.values[value].name}/summed")
            self.exact[value] = self.where(
                graph, value, frozenset({node.index}), (summed, raw), target
            )

    def feed(self, value: int, reader: int, target: str) -> str:
        """Add an initializer for what the reader gets of a weight without data; returns its name."""
        weight = self.view.values[value].name
        self.fed[target] = weight, node_key(self.view.nodes[reader])
        self.targets[0].initializer.add(
            name=target,
            data_type=TensorProto.FLOAT,
            dims=[size or 0 for size in self.view.shapes[value] or ()],
        )
        return target

    def raised(self, bits: Bits, like: Floats) -> Floats:
        """Low-precision numbers in float32, in the shape of the constant."""
        return raised(bits.reshape(like.shape), self.low.elem)

    def is_read_as_is(self, value: int) -> bool:
        """Whether anything reads or returns a value without a choice of its own."""
        readers = ((self.ports.get(node), port) for node, port in self.view.uses[value])
        return bool(self.view.results[value]) or any(
            own is None or port not in own.inputs for own, port in readers
        )

    def constant(self, value: int) -> Floats | None:
        """A small constant's elements."""
        tensor = self.view.ask(constant_tensors).get(value)
        is_large = (
            prod(tensor.dims) > _FOLDED and value not in self.given if tensor is not None else False
        )
        if tensor is None or tensor.data_type != TensorProto.FLOAT or is_large:
            return None
        return numpy_helper.to_array(tensor)


def _saturated(array: Floats, low: Format) -> Floats:
    beyond = np.isfinite(array) & (np.abs(array) >= low.overflow)
    clipped = np.where(beyond, np.copysign(np.float32(low.max_finite / 2), array), array)
    return clipped.astype(helper.tensor_dtype_to_np_dtype(low.elem)).astype(np.float32)


def _fill(job: _Job, scope: Scope, target: GraphProto) -> None:
    """Copy a graph. Nodes are added between their producers and their readers, since bodies must be in order."""
    copy_fields(scope.proto, target, but={"node"})
    for value in dict.fromkeys(scope.names.values()):
        if (
            job.view.values[value].scope == scope.index
            and job.view.values[value].origin is not Origin.NODE
        ):
            job.round(target, value)
    for index in scope.nodes:
        node, own = job.view.nodes[index], job.ports.get(index, Ports((), ()))
        chosen: dict[int, str] = {}
        for value in (node.input(port) for port in own.inputs):
            if value != ABSENT and value not in chosen:
                name = job.names.fresh(f"{job.view.values[value].name}/{index}")
                own_weight = value in job.hollow
                chosen[value] = (
                    job.feed(value, index, name)
                    if own_weight
                    else job.choose(target, value, index, name)
                )
        added = target.node.add()
        added.CopyFrom(node.proto)
        _find_bodies(job, node, added)
        for port in own.inputs:
            added.input[port] = chosen.get(node.input(port), "")
        for port in own.outputs:
            added.output[port] = job.exact[node.outputs[port]]
        job.accumulate(target, node, added)
        for value in node.outputs:
            job.round(target, value)
            if value in job.exact and job.is_read_as_is(value):
                job.choose(target, value, ABSENT, job.view.values[value].name)


def _find_bodies(job: _Job, node: Node, added: NodeProto) -> None:
    """Empty the bodies of a copied node; they are filled when their scopes are visited."""
    bodies = iter(node.bodies)
    for item in added.attribute:
        for graph in [*([item.g] if item.HasField("g") else []), *item.graphs]:
            graph.Clear()
            job.targets[next(bodies)[1]] = graph
