"""The one editor of models: changes are recorded against a frozen view, and made in one sweep per scope."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import filterfalse
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._graph.view import View, scope_graphs
from onnxamp._model.protos import all_nodes, arrange, copied, drop_named

WEIGHTS_ALONE: Final = 4
"""First IR version at which a weight need not be listed as a graph input."""


@dataclass(slots=True)
class NewNames:
    """A source of names that no scope uses; O(1) each on average."""

    taken: set[str]
    _next: dict[str, int] = field(default_factory=dict)

    def fresh(self, base: str) -> str:
        """Return ``base``, or ``base`` with a number if that name is taken. The result is taken from then on."""
        name = base
        number = self._next.get(base, 1)
        while name in self.taken:
            name = f"{base}_{number}"
            number = number + 1
        self._next[base] = number
        self.taken.add(name)
        return name


class GraphEditor:
    """Records changes of a model by index of the view, and makes them when :meth:`finish` is called.

    Nodes that stay are changed in place, through :meth:`node`. Nodes come and go through :meth:`insert`,
    :meth:`remove`, :meth:`replace` and :meth:`move`. Everything else stays the same: order, names, metadata, doc
    strings, functions and unknown fields.

    Args:
        view: the model as it is. It is not changed, unless its own model is to be edited.
        model: the model to edit: the view's model or a copy of it. By default, a copy is made when it is first needed.
        names: the source of new names. By default, all names of the view are taken.
    """

    def __init__(
        self,
        view: View,
        model: ModelProto | None = None,
        names: NewNames | None = None,
    ) -> None:
        self.view = view
        self._given = model
        self._names = names
        self._constants: dict[tuple[int, tuple[int, ...], bytes], TensorProto] = {}
        self._inserted: dict[int, dict[int, list[NodeProto | int]]] = {}
        """Scope -> index of a node -> the nodes before it: new nodes, and the indices of nodes that move."""
        self._removed: dict[int, set[int]] = {}
        self._undeclared: dict[int, set[str]] = {}
        self._added: dict[int, list[TensorProto]] = {}
        self._dropped: set[int] = set()
        """Initializers that go, by value."""

    # -- what is there -----------------------------------------------------------------------------------------

    @cached_property
    def model(self) -> ModelProto:
        """The model that is edited."""
        return copied(self.view.model) if self._given is None else self._given

    @cached_property
    def graphs(self) -> Sequence[GraphProto]:
        """The graph of each scope."""
        return scope_graphs(self.view, self.model)

    @cached_property
    def names(self) -> NewNames:
        """Names that are not used yet."""
        return NewNames(self.view.all_names()) if self._names is None else self._names

    @cached_property
    def _weights(self) -> Mapping[tuple[int, str], TensorProto]:
        weights = dict[tuple[int, str], TensorProto]()
        for scope, graph in enumerate(self.graphs):
            for tensor in graph.initializer:
                weights[scope, tensor.name] = tensor
        return weights

    def node(self, index: int) -> NodeProto:
        """Return a node of the edited model, to be changed in place until :meth:`finish`."""
        scope = self.view.nodes[index].scope
        return self.graphs[scope].node[index - self.view.scopes[scope].nodes.start]

    def weight(self, value: int) -> TensorProto:
        """Return an initializer of the edited model, to be changed in place, but for its name."""
        held = self.view.values[value]
        return self._weights[held.scope, held.name]

    # -- what is new -------------------------------------------------------------------------------------------

    def make(
        self,
        op: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str | None = None,
        **attributes: Any,
    ) -> NodeProto:
        """Return a node of ai.onnx that is named like its first output, unless it is given a name."""
        name = outputs[0] if name is None else name
        return helper.make_node(op, inputs, outputs, name=name, **attributes)

    def constant(
        self, array: NDArray[Any] | np.generic, base: str, elem: int | None = None
    ) -> str:
        """Return the name of a constant of the main graph, which bodies see. Equal constants are written once.

        Args:
            array: its elements.
            base: its name, if that is free and the constant is new.
            elem: its element type (``TensorProto.DataType``), if that is not the array's.
        """
        array = np.asarray(array)
        tensor = numpy_helper.from_array(array)
        if elem is not None and elem != tensor.data_type:
            tensor = helper.make_tensor(
                "", elem, array.shape, array.reshape(-1).tolist()
            )
        # The bytes of the elements tell 0.0 from -0.0, which are equal as numbers.
        key = (
            tensor.data_type,
            tuple(tensor.dims),
            numpy_helper.to_array(tensor).tobytes(),
        )
        if key not in self._constants:
            tensor.name = self.names.fresh(base)
            self._constants[key] = tensor
        return self._constants[key].name

    def ints(self, numbers: Any, base: str) -> str:
        """Return the name of an int64 constant of the shape of ``numbers``."""
        return self.constant(np.asarray(numbers, np.int64), base)

    # -- what changes ------------------------------------------------------------------------------------------

    def insert(self, scope: int, before: int, *nodes: NodeProto) -> None:
        """Put nodes before a node of a scope, after those put there before; ``nodes.stop`` means the end."""
        self._inserted.setdefault(scope, {}).setdefault(before, []).extend(nodes)

    def insert_after(self, index: int, *nodes: NodeProto) -> None:
        """Put nodes after a node."""
        self.insert(self.view.nodes[index].scope, index + 1, *nodes)

    def remove(self, *indices: int) -> None:
        """Remove nodes, and the declarations of their outputs unless an inserted node produces these."""
        for index in indices:
            self._removed.setdefault(self.view.nodes[index].scope, set()).add(index)

    def replace(self, index: int, nodes: Iterable[NodeProto]) -> None:
        """Put nodes in the place of one."""
        self.remove(index)
        self.insert(self.view.nodes[index].scope, index, *nodes)

    def move(self, index: int, before: int) -> None:
        """Move a node before another one of its scope."""
        self.remove(index)
        moved = self._inserted.setdefault(self.view.nodes[index].scope, {})
        moved.setdefault(before, []).append(index)

    def undeclare(self, scope: int, names: Iterable[str]) -> None:
        """Remove the declarations of values of a scope."""
        self._undeclared.setdefault(scope, set()).update(names)

    def add_weight(self, scope: int, tensor: TensorProto) -> None:
        """Add an initializer; its name is one of :attr:`names`, or that of an initializer that is removed.

        An IR version at which every initializer has to be an input is raised.
        """
        self._added.setdefault(scope, []).append(tensor)
        if self.model.ir_version >= WEIGHTS_ALONE:
            return
        listed = {entry.name for entry in self.graphs[scope].input}
        if tensor.name not in listed:
            self.model.ir_version = WEIGHTS_ALONE

    def drop_weight(self, value: int) -> None:
        """Remove an initializer."""
        self._dropped.add(value)

    def finish(self) -> ModelProto:
        """Make all recorded changes, and return the edited model. The editor is of no use afterwards.

        Only new nodes are copied. Complexity: linear in the nodes of scopes in which nodes come or go.
        """
        for scope, graph in reversed([*enumerate(self.graphs)]):  # bodies first
            self._rebuild(scope, graph)
        if self._constants:
            read = set[str]()
            for node in all_nodes(self.model.graph.node):
                read.update(node.input[:])
            self._add_constants(
                [row for row in self._constants.values() if row.name in read]
            )
        return self.model

    def _rebuild(self, scope: int, graph: GraphProto) -> None:
        """Make the recorded changes of one scope."""
        inserted = self._inserted.get(scope, {})
        removed = self._removed.get(scope, set())
        nodes = self.view.scopes[scope].nodes
        written = graph.node[:]
        gone = set(self._undeclared.get(scope, ()))
        # Only declarations are removed by name, and many models have none.
        is_declared = bool(graph.value_info)
        for index in removed if is_declared else ():
            gone.update(written[index - nodes.start].output[:])
        if inserted or removed:
            first = nodes.start
            order = list[int]()
            reached = first
            for place in sorted(inserted):
                staying = filterfalse(removed.__contains__, range(reached, place))
                order += [index - first for index in staying]
                reached = place
                for node in inserted[place]:
                    if isinstance(node, int):
                        order.append(node - first)
                        gone.difference_update(written[node - first].output[:])
                        continue
                    # New nodes go to the end, and into their places all at once.
                    order.append(len(graph.node))
                    gone.difference_update(node.output[:])
                    graph.node.append(node)
            staying = filterfalse(removed.__contains__, range(reached, nodes.stop))
            order += [index - first for index in staying]
            arrange(graph.node, order)
        if gone:
            drop_named(graph.value_info, gone)
        if self._dropped:
            names = (
                held.name
                for held in map(self.view.values.__getitem__, self._dropped)
                if held.scope == scope
            )
            drop_named(graph.initializer, {*names})
        graph.initializer.extend(self._added.get(scope, ()))

    def _add_constants(self, tensors: Sequence[TensorProto]) -> None:
        """Add constants to the main graph: as nodes if every initializer has to be an input."""
        graph = self.model.graph
        if self.model.ir_version >= WEIGHTS_ALONE:
            graph.initializer.extend(tensors)
            return
        count = len(graph.node)
        graph.node.extend(
            helper.make_node("Constant", [], [tensor.name], value=tensor)
            for tensor in tensors
        )
        arrange(graph.node, [*range(count, len(graph.node)), *range(count)])


def set_attribute(proto: NodeProto, name: str, value: Any) -> None:
    """Give a node an attribute, in the place of the one of that name, or at the end."""
    new = helper.make_attribute(name, value)
    for item in proto.attribute:
        if item.name == name:
            item.CopyFrom(new)
            return
    proto.attribute.append(new)


def drop_attributes(proto: NodeProto, names: Collection[str]) -> None:
    """Remove attributes of a node."""
    drop_named(proto.attribute, names)
