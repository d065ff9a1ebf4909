"""One graph for every choice of precisions: a Boolean input per node chooses between rounded and exact values.

=====================================  =====================================================================
of a node with a switch                in the switched graph, which is float32 throughout
=====================================  =====================================================================
float input *x* that may be low        ``Where(switch, rounded x, x)``; *x* is rounded once, whoever reads it
float output *y* that may be low       the node, then ``Where(switch, rounded y, y)``
=====================================  =====================================================================

Rounding is ``Cast(to=low) -> Cast(to=float)``. Constants that the low type cannot hold, as in attention masks, saturate
as conversions let them. With all switches off the graph computes what the model computes, bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp.dtypes import LowType
from onnxamp.errors import OpsetError
from onnxamp.graph import ABSENT, Node, Origin, Scope, View, opset_imports
from onnxamp.names import NewNames
from onnxamp.resolve import view_model
from onnxamp.runtime.protos import copy_fields

Floats: TypeAlias = npt.NDArray[np.float32]

MASK: Final = "switches"
"""Name of the new input, unless the model has it already: one bool per switch."""

_WHERE: Final = 9
"""Opset from which on there is Where."""

_FOLDED: Final = 1 << 20
"""Elements up to which constants are rounded beforehand, and saturated."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Float inputs and outputs of a node that are low when the node is, by position."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Switched:
    """The switched model, the name of its new input, and the node behind each of its positions, in execution order.

    Nodes are called by the first value that they make.
    """

    model: ModelProto
    mask: str
    nodes: tuple[str, ...]


def switched(model: ModelProto, ports: Mapping[str, Ports], low: LowType) -> Switched:
    """Give nodes switches.

    Args:
        model: float32, with its weights; it is not changed.
        ports: by the first value that a node makes, at any depth; no other node may make one of the same name. What
            the model does not have is left out.
        low: the type to round to.

    Raises:
        ModelError: the model cannot be resolved. OpsetError: it is too old for Where.

    Complexity: linear in nodes and weight bytes.
    """
    if (version := opset_imports(model)[""]) < _WHERE:
        raise OpsetError(
            f"The model's opset {version} has no Where, which choosing precisions by data needs: convert it with"
            f" opset={_WHERE} (--opset {_WHERE}) or newer."
        )
    view = view_model(model)
    found = {key: index for index in view.order if (key := node_key(view.nodes[index])) in ports}
    names = NewNames(view.all_names())
    job = _Job(view, low, names, names.fresh(MASK))
    for position, (key, index) in enumerate(found.items()):
        job.switches[index] = position, ports[key]
    wanted = (job.view.nodes[index].input(port) for index, (_, ports) in job.switches.items() for port in ports.inputs)
    job.rounded = {value: names.fresh(f"{view.values[value].name}/rounded") for value in wanted if value != ABSENT}
    result = ModelProto()
    copy_fields(model, result, but={"graph"})
    job.targets[0] = result.graph
    for scope in view.scopes:  # a scope stands behind the one around it
        _fill(job, scope, job.targets[scope.index])
    result.graph.input.append(helper.make_tensor_value_info(job.mask, TensorProto.BOOL, [len(found)]))
    return Switched(result, job.mask, tuple(found))


def node_key(node: Node) -> str:
    """What a node is called here: the first value that it makes."""
    return next((name for name in node.proto.output if name), "")


@dataclass(slots=True)
class _Job:
    view: View
    low: LowType
    names: NewNames
    mask: str
    switches: dict[int, tuple[int, Ports]] = field(default_factory=dict)
    targets: dict[int, GraphProto] = field(default_factory=dict)
    rounded: dict[int, str] = field(default_factory=dict)
    """Value -> name of its rounded form, which stands right behind it, in the same scope."""

    def round(self, graph: GraphProto, value: int) -> None:
        """Append the rounded form of a value, where a switch wants it."""
        if value in self.rounded:
            constant = self.constant(value)
            if constant is not None:
                rounded = numpy_helper.from_array(_saturated(constant, self.low), self.rounded[value])
                graph.initializer.append(rounded)
            else:
                self.pair(graph, self.view.values[value].name, self.rounded[value])

    def switch(self, position: int) -> str:
        """Name of a switch, as a scalar."""
        return f"{self.mask}/{position}"

    def pair(self, graph: GraphProto, source: str, target: str) -> None:
        low = self.names.fresh(f"{target}/low")
        graph.node.append(helper.make_node("Cast", [source], [low], to=self.low.elem))
        graph.node.append(helper.make_node("Cast", [low], [target], to=TensorProto.FLOAT))

    def constant(self, value: int) -> Floats | None:
        """A small constant's elements."""
        found, producer = self.view.values[value], self.view.producer(value)
        if found.origin is Origin.INITIALIZER:
            tensors = self.view.scopes[found.scope].proto.initializer
            tensor = next((tensor for tensor in tensors if tensor.name == found.name), None)
        elif producer is not None and producer.key == "Constant":
            tensor = next((item.t for item in producer.proto.attribute if item.name == "value"), None)
        else:
            tensor = None
        if tensor is None or tensor.data_type != TensorProto.FLOAT or np.prod(tensor.dims) > _FOLDED:
            return None
        return numpy_helper.to_array(tensor)


def _saturated(array: Floats, low: LowType) -> Floats:
    beyond = np.isfinite(array) & (np.abs(array) >= low.overflow)
    clipped = np.where(beyond, np.copysign(np.float32(low.max_finite / 2), array), array)
    return clipped.astype(helper.tensor_dtype_to_np_dtype(low.elem)).astype(np.float32)


def _fill(job: _Job, scope: Scope, target: GraphProto) -> None:
    """Copy a graph. What is added stands between what it reads and what reads it: bodies must be in order."""
    copy_fields(scope.proto, target, but={"node"})
    if scope.index == 0:
        for position, _ in job.switches.values():
            where = job.names.fresh(f"{job.mask}/{position}/position")
            target.initializer.append(numpy_helper.from_array(np.array(position), where))
            target.node.append(helper.make_node("Gather", [job.mask, where], [job.switch(position)]))
    for value in dict.fromkeys(scope.names.values()):
        if job.view.values[value].scope == scope.index and job.view.values[value].origin is not Origin.NODE:
            job.round(target, value)
    for index in scope.nodes:
        node = job.view.nodes[index]
        copy = NodeProto()
        copy.CopyFrom(node.proto)
        made = list(_switch(job, node, copy, target)) if index in job.switches else []
        added = target.node.add()
        added.CopyFrom(copy)
        _find_bodies(job, node, added)
        target.node.extend(made)
        for value in node.outputs:
            job.round(target, value)


def _find_bodies(job: _Job, node: Node, added: NodeProto) -> None:
    """Empty the bodies of a copied node, which are filled when their scopes come."""
    bodies = iter(node.bodies)
    for item in added.attribute:
        for graph in [*([item.g] if item.HasField("g") else []), *item.graphs]:
            graph.Clear()
            job.targets[next(bodies)[1]] = graph


def _switch(job: _Job, node: Node, copy: NodeProto, target: GraphProto) -> Iterator[NodeProto]:
    """Choose the inputs of a node in front of it; yield what chooses its outputs, behind it."""
    position, ports = job.switches[node.index]
    switch = job.switch(position)
    for port in ports.inputs:
        value = node.input(port)
        if value != ABSENT:
            name = job.names.fresh(f"{job.view.values[value].name}/{position}")
            choice = [switch, job.rounded[value], job.view.values[value].name]
            target.node.append(helper.make_node("Where", choice, [name]))
            copy.input[port] = name
    for port in ports.outputs:
        name = copy.output[port]
        exact, low, rounded = (job.names.fresh(f"{name}/{kind}") for kind in ("exact", "low", "result"))
        copy.output[port] = exact
        yield helper.make_node("Cast", [exact], [low], to=job.low.elem)
        yield helper.make_node("Cast", [low], [rounded], to=TensorProto.FLOAT)
        yield helper.make_node("Where", [switch, rounded, exact], [name])


def switches_on(nodes: Sequence[str], low: AbstractSet[str]) -> npt.NDArray[np.bool_]:
    """The input that turns on the switches of some nodes."""
    return np.array([name in low for name in nodes], np.bool_)
