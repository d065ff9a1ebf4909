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
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import FLOAT16, Format
from onnxamp._errors import OpsetError
from onnxamp._graph.collecting import no_collections
from onnxamp._graph.constants import constant_tensors
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin, Ports, Scope
from onnxamp._model.blobs import Bits
from onnxamp._model.lowering import raised
from onnxamp._model.protos import opset_imports
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.accumulate import Accumulator
from onnxamp._runtime.emulate import rounding

_TOGETHER: Final = 64
"""Switches that are split off the mask together, in front of the first node that needs one of them. With all at once,
ONNX Runtime 1.31 would take quadratic time to load the model."""

_COUNTED: Final = 18
"""Opset from which on Split needs the number of its outputs."""


Floats: TypeAlias = npt.NDArray[np.float32]

MASK: Final = "switches"
"""Name of the new input, unless the model uses it already."""

WHERE_OPSET: Final = 9
"""Opset that introduced Where."""

_FOLDED: Final = 1 << 20
"""Elements up to which constants are rounded and saturated beforehand."""


class Switched(NamedTuple):
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
        return np.array(
            [not low.isdisjoint(nodes) for nodes in self.switches], np.bool_
        )

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
        hollow: initializers of the main graph without data (:mod:`onnxamp._runtime.flow`).
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
    nodes = {
        key: index
        for index in view.order
        if (key := node_key(view.nodes[index])) in ports
    }
    values, editor = view.scopes[0].names.items(), GraphEditor(view)
    job = _Switching(
        view=view,
        editor=editor,
        low=low,
        mask=editor.names.fresh(MASK),
        ports={index: ports[key] for key, index in nodes.items()},
        hollow={value for name, value in values if name in hollow},
        given={value: given[name] for name, value in values if name in given},
    )
    if arithmetic is not None and low is FLOAT16:
        job.accumulator = Accumulator(arithmetic, editor, view.shapes_of(shapes or {}))
    for scope in view.scopes:  # a scope stands behind the one around it
        job.fill(scope)
        if scope.index == 0:
            job.unused.clear()  # they may be made behind the nodes whose bodies come now
    editor.graphs[0].input.append(
        helper.make_tensor_value_info(job.mask, TensorProto.BOOL, [len(job.switches)])
    )
    by_element = tuple(
        tuple(node_key(view.nodes[index]) for index in sorted(group))
        for group in job.switches
    )
    return Switched(editor.finish(), job.mask, tuple(nodes), by_element, job.fed)


def node_key(node: Node) -> str:
    """How nodes are identified here: by their first output."""
    return next((name for name in node.proto.output if name), "")


@dataclass(slots=True)
class _Switching:
    """The switched graph of one model, scope by scope."""

    view: Graph
    editor: GraphEditor
    low: Format
    mask: str
    ports: Mapping[int, Ports]
    hollow: AbstractSet[int]
    """Weights without data."""
    given: Mapping[int, Bits]
    """Constants whose low-precision numbers are not the nearest."""
    accumulator: Accumulator | None = None
    fed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """As in :class:`Switched`."""
    exact: dict[int, str] = field(default_factory=dict)
    """Value that may be low precision -> name of the node's exact output."""
    rounded: dict[int, str] = field(default_factory=dict)
    """Value -> name of its rounded form, which follows it in the same scope."""
    switches: list[frozenset[int]] = field(default_factory=list)
    """By element of the mask: the nodes any of which turns it on; empty if unused."""
    unused: list[tuple[int, str]] = field(default_factory=list)
    """Elements that are split off already, and have no nodes yet."""
    made: list[NodeProto] = field(default_factory=list)
    """New nodes that have no place yet, in a scope."""
    scope: int = 0
    _named: dict[frozenset[int], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names, values = self.editor.names, self.view.values
        for index, own in self.ports.items():
            node = self.view.nodes[index]
            made = [node.outputs[port] for port in own.outputs]
            self.exact |= {
                value: names.fresh(f"{values[value].name}/exact") for value in made
            }
            for value in (*made, *(node.input(port) for port in own.inputs)):
                if (
                    value != ABSENT
                    and value not in self.rounded
                    and value not in self.hollow
                ):
                    self.rounded[value] = names.fresh(f"{values[value].name}/rounded")

    def fill(self, scope: Scope) -> None:
        """Add the nodes of a scope between their producers and their readers, since bodies must be in order."""
        self.scope, values = scope.index, self.view.values
        for value in dict.fromkeys(scope.names.values()):
            if (
                values[value].scope == scope.index
                and values[value].origin is not Origin.NODE
            ):
                self.round(value)
        self.place(scope.nodes.start)
        for index in scope.nodes:
            node, own = self.view.nodes[index], self.ports.get(index, Ports((), ()))
            chosen: dict[int, str] = {}
            for value in (node.input(port) for port in own.inputs):
                if value != ABSENT and value not in chosen:
                    name = self.editor.names.fresh(f"{values[value].name}/{index}")
                    reads = self.feed if value in self.hollow else self.choose
                    chosen[value] = reads(value, index, name)
            self.place(index)
            proto = self.editor.node(index)
            for port in own.inputs:
                proto.input[port] = chosen.get(node.input(port), "")
            for port in own.outputs:
                proto.output[port] = self.exact[node.outputs[port]]
            self.accumulate(node, proto)
            for value in node.outputs:
                self.round(value)
                if value in self.exact and self.is_read_as_is(value):
                    self.choose(value, ABSENT, values[value].name)
            self.place(index + 1)

    def place(self, before: int) -> None:
        """Put the new nodes before a node of the scope."""
        self.editor.insert(self.scope, before, *self.made)
        self.made = []

    def add(
        self, op: str, inputs: Sequence[str], *outputs: str, **attributes: Any
    ) -> None:
        """Add a node without a name."""
        self.made.append(helper.make_node(op, inputs, outputs, **attributes))

    def round(self, value: int) -> None:
        """Add the rounded form of a value if a switch needs it."""
        if value not in self.rounded:
            return
        constant = self.constant(value)
        if constant is None:
            source = self.exact.get(value, self.view.values[value].name)
            target, elem = self.rounded[value], self.low.elem
            self.made += rounding(self.editor.names, source, target, elem)
            return
        own = self.given.get(value)
        rounded = (
            _saturated(constant, self.low)
            if own is None
            else raised(own.reshape(constant.shape), self.low.elem)
        )
        if np.array_equal(rounded, constant):
            self.rounded[value] = self.view.values[value].name
        else:
            tensor = numpy_helper.from_array(rounded, self.rounded[value])
            self.editor.add_weight(self.scope, tensor)

    def choose(self, value: int, reader: int, target: str) -> str:
        """Add the choice between a value's forms: rounded if its producer or its reader (ABSENT for any) is low.

        Returns its name: that of the value itself if there is nothing to choose.
        """
        exact = self.view.values[value].name
        if self.rounded[value] == exact:  # a constant that low precision holds exactly
            return exact
        nodes = {reader} - {ABSENT}
        if value in self.exact:
            exact = self.exact[value]
            nodes.add(self.view.values[value].producer)
        return self.where(value, frozenset(nodes), (self.rounded[value], exact), target)

    def where(
        self, value: int, nodes: frozenset[int], forms: tuple[str, str], target: str
    ) -> str:
        """Add the choice between two forms of a value: the first if any of the nodes is low. Returns ``target``."""
        switch = self.switch(nodes)
        if not self.view.shapes[
            value
        ]:  # a scalar, or perhaps one: it would get a dimension from the switch
            scalar = self.editor.names.fresh(f"{target}/switch")
            self.add("Squeeze", [switch], scalar)
            switch = scalar
        self.add("Where", [switch, *forms], target)
        return target

    def switch(self, nodes: frozenset[int]) -> str:
        """Return the name of the switch of these nodes.

        If none is left, further ones are split off the mask: here, or, in a body, at the start of the main graph.
        """
        if nodes not in self._named:
            if not self.unused:
                self.split()
            position, self._named[nodes] = self.unused.pop()
            self.switches[position] = nodes
        return self._named[nodes]

    def split(self) -> None:
        """Add the nodes that split switches off the mask."""
        start, fresh = len(self.switches), self.editor.names.fresh
        self.switches += [frozenset[int]()] * _TOGETHER
        names = [fresh(f"{self.mask}/{start + i}") for i in range(_TOGETHER)]
        part = fresh(f"{self.mask}/{start}/part")
        elements = fresh(f"{self.mask}/{start}/positions")
        numbers = np.arange(start, start + _TOGETHER, dtype=np.int64)
        self.editor.add_weight(0, numpy_helper.from_array(numbers, elements))
        counted = self.view.book.opsets[""] >= _COUNTED
        more: dict[str, Any] = {"num_outputs": _TOGETHER} if counted else {}
        nodes = [
            helper.make_node("Gather", [self.mask, elements], [part]),
            helper.make_node("Split", [part], names, **more),
        ]
        if self.scope:
            self.editor.insert(0, self.view.scopes[0].nodes.start, *nodes)
        else:
            self.made += nodes
        self.unused = list(enumerate(names, start))[::-1]

    def accumulate(self, node: Node, proto: NodeProto) -> None:
        """Add what the target's accumulator makes of a node's output if the node is low: its exact form from now."""
        value = node.outputs[0]
        if self.accumulator is None or value not in self.exact:
            return
        raw = self.exact[value]
        if summed := self.accumulator.nodes(node, proto, raw):
            self.made += summed
            target = self.editor.names.fresh(f"{self.view.values[value].name}/summed")
            forms = summed[-1].output[0], raw
            self.exact[value] = self.where(
                value, frozenset({node.index}), forms, target
            )

    def feed(self, value: int, reader: int, target: str) -> str:
        """Add an initializer for what the reader gets of a weight without data; returns its name."""
        weight = self.view.values[value].name
        self.fed[target] = weight, node_key(self.view.nodes[reader])
        dims = [size or 0 for size in self.view.shapes[value] or ()]
        tensor = TensorProto(name=target, data_type=TensorProto.FLOAT, dims=dims)
        self.editor.add_weight(0, tensor)
        return target

    def is_read_as_is(self, value: int) -> bool:
        """Whether anything reads or returns a value without a choice of its own."""
        readers = ((self.ports.get(node), port) for node, port in self.view.uses[value])
        return bool(self.view.results[value]) or any(
            own is None or port not in own.inputs for own, port in readers
        )

    def constant(self, value: int) -> Floats | None:
        """A small constant's elements."""
        tensor = self.view.ask(constant_tensors).get(value)
        if tensor is None or tensor.data_type != TensorProto.FLOAT:
            return None
        if prod(tensor.dims) > _FOLDED and value not in self.given:
            return None
        return numpy_helper.to_array(tensor)


def _saturated(array: Floats, low: Format) -> Floats:
    beyond = np.isfinite(array) & (np.abs(array) >= low.overflow)
    clipped = np.where(
        beyond, np.copysign(np.float32(low.max_finite / 2), array), array
    )
    return clipped.astype(helper.tensor_dtype_to_np_dtype(low.elem)).astype(np.float32)
