"""Repair of models that ONNX Runtime loads although they violate the standard.

If nothing is converted, the result is the original model.

============================================  ======================================================================
in the model                                  in its repaired copy
============================================  ======================================================================
nodes out of order                            in order, each as near to its place as possible
several Constants or initializers of a name   the one that counts in ONNX Runtime: the last Constant, or else the last
                                              initializer (onnxruntime/core/graph/graph.cc, the constructor of Graph);
                                              refused if they differ and are larger, where it takes the first
a branch that never runs and cannot be read   a copy of the branch that does
============================================  ======================================================================
"""

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, numpy_helper

from onnxamp._base.errors import ModelError, OpsetError
from onnxamp._base.words import shortened
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._model.protos import copied, node_bodies, stored_bytes
from onnxamp._model.wellformed import check_wellformed, is_wellformed

_SHOWN: Final = 3
"""Names that a note lists."""


def tidied(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    """Return a repaired copy of a model and sentences about the repairs; the model itself if it needs no repair.

    Raises:
        ModelError, OpsetError: as :func:`~onnxamp._model.wellformed.check_wellformed`, for faults that cannot be
            repaired.

    Complexity: linear in nodes and names; those of bodies count once for each level around them.
    """
    try:
        if check_wellformed(model):
            return model, ()
    except OpsetError:
        raise
    except ModelError:
        result, notes = _repaired(model)
        if result is model:
            raise
        check_wellformed(result)
        return result, notes
    return _repaired(model)


def _repaired(model: ModelProto) -> tuple[ModelProto, tuple[str, ...]]:
    doubles = _doubles(model.graph)
    is_dead = any(True for _ in _unreadable(model))
    if not (doubles or is_dead or _is_disordered(model.graph)):
        return model, ()
    if unclear := _unclear(model.graph, doubles):
        raise ModelError(
            f"The weight {unclear!r} is defined twice, with different numbers: remove one, because ONNX Runtime takes"
            " either, by its size."
        )
    result = copied(model)
    notes = list[str]()
    if doubles:
        _drop_doubles(result.graph, doubles)
        named = shortened([*map(repr, doubles)], _SHOWN)
        notes.append(
            f"Several constants had the same name, and the last one counts, as in ONNX Runtime: {named}."
        )
    if is_dead:
        notes += [_replace_branch(*branch) for branch in _unreadable(result)]
    if _is_disordered(result.graph):
        result = in_order(result)
        notes.append("Nodes were out of order and have been sorted.")
    return result, tuple(notes)


def _scopes(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and its bodies, outer ones first. Iterative."""
    waiting = [graph]
    while waiting:
        graph = waiting.pop()
        yield graph
        waiting += chain.from_iterable(map(_bodies, graph.node))


def _bodies(node: NodeProto) -> list[GraphProto]:
    """Return the bodies of a node; those of ai.onnx but for control flow have none, which saves a look."""
    is_standard = node.domain in ("", "ai.onnx")
    if is_standard and node.op_type not in op_facts().control_flow:
        return []
    return [body for _, body in node_bodies(node)]


# --- constants of one name --------------------------------------------------------------------------------------


def _doubles(graph: GraphProto) -> list[str]:
    """Return names that several constants of the main graph share; elsewhere, ONNX Runtime refuses such models."""
    names = [tensor.name for tensor in graph.initializer]
    names += [name for name in map(_constant, graph.node) if name is not None]
    if len({*names}) == len(names):
        return []
    return [name for name, count in Counter(names).items() if count > 1]


def _constant(node: NodeProto) -> str | None:
    """Return the name that a Constant defines; None of other nodes."""
    return node.output[0] if node.op_type == "Constant" and node.output else None


def _unclear(graph: GraphProto, doubles: Sequence[str]) -> str | None:
    """Return a name of several large constants that differ; None if there is none."""
    tensors_of_name = {name: list[TensorProto]() for name in doubles}
    held = [(one.name, one) for one in graph.initializer]
    for node in graph.node:
        tensor = (
            attribute(node, "value") if _constant(node) in tensors_of_name else None
        )
        held += [] if tensor is None else [(node.output[0], tensor)]
    for name, tensor in held:
        if name in tensors_of_name:
            tensors_of_name[name].append(tensor)
    for name, tensors in tensors_of_name.items():
        is_large = any(stored_bytes(tensor) >= _LARGE for tensor in tensors)
        if is_large and len({_content(tensor) for tensor in tensors}) > 1:
            return name
    return None


def _content(tensor: TensorProto) -> bytes:
    """Return what tensors of equal contents have in common."""
    if tensor.data_location == TensorProto.EXTERNAL:
        return b"".join(
            sorted(entry.SerializeToString() for entry in tensor.external_data)
        )
    numbers = numpy_helper.to_array(tensor)
    return repr((numbers.dtype.str, numbers.shape)).encode() + numbers.tobytes()


_LARGE: Final = 128
"""Bytes from which on ONNX Runtime keeps the first of several constants of a name (seen in 1.31.1)."""


def _drop_doubles(graph: GraphProto, doubles: Container[str]) -> None:
    """Keep the last Constant of each name, or else the last initializer."""
    seen = set[str]()
    constants = [_constant(node) for node in graph.node]
    weights = [tensor.name for tensor in graph.initializer]
    both: Any = ((graph.node, constants), (graph.initializer, weights))
    # Nodes come first, since any of them counts rather than an initializer; from the end, deleting moves no others.
    for places, names in both:
        for position, name in reversed(list(enumerate(names))):
            if name in seen:
                del places[position]
            elif name in doubles:
                seen.add(name)


# --- order ------------------------------------------------------------------------------------------------------


def _defined(graph: GraphProto) -> set[str]:
    """Return names that a graph defines."""
    names = {entry.name for entry in graph.input}
    names.update(tensor.name for tensor in graph.initializer)
    names.update(sparse.values.name for sparse in graph.sparse_initializer)
    names.update(chain.from_iterable(node.output for node in graph.node))
    return names


def _reads(node: NodeProto) -> Sequence[str] | set[str]:
    """Return names that a node and its bodies read from the graph around it, or from further out."""
    bodies = _bodies(node)
    if not bodies:
        return node.input
    reads = set(node.input)
    waiting = [(body, set[str]()) for body in bodies]
    while waiting:
        body, hidden = waiting.pop()
        hidden = hidden | _defined(body)
        for inner in body.node:
            reads.update(name for name in inner.input if name not in hidden)
            waiting += [(further, hidden) for further in _bodies(inner)]
        reads.update(entry.name for entry in body.output if entry.name not in hidden)
    return reads


def in_order(model: ModelProto) -> ModelProto:
    """Return a copy of a model with nodes after those that they depend on; the model itself if they are."""
    if not _is_disordered(model.graph):
        return model
    result = copied(model)
    for scope in reversed([*_scopes(result.graph)]):  # ordering copies bodies
        _order(scope)
    return result


def _is_disordered(graph: GraphProto) -> bool:
    """Return whether a node comes before one that it depends on, in a graph or in a body."""
    for scope in _scopes(graph):
        later = set(chain.from_iterable([node.output for node in scope.node])) - {""}
        for node in scope.node:
            if not later.isdisjoint(_reads(node)):
                return True
            later.difference_update(node.output)
    return False


_NEW: Final = 0
_ENTERED: Final = 1
_LEFT: Final = 2
"""States of nodes while they are put in order."""


def _order(graph: GraphProto) -> None:
    """Put nodes after those that they depend on; a cycle stays where it is, to be refused later. Iterative."""
    nodes = list(graph.node)
    makers = dict[str, int]()
    for index, node in enumerate(nodes):
        makers |= dict.fromkeys(filter(None, node.output), index)
    order = list[int]()
    # A depth-first search: a node is entered, then all that it needs, then it is left, which is its place.
    state = [_NEW] * len(nodes)
    for start in range(len(nodes)):
        stack = [start]
        while stack:
            index = stack[-1]
            if state[index] == _NEW:
                state[index] = _ENTERED
                reads = _reads(nodes[index])
                needed = {makers[name] for name in reads if name in makers}
                # The last on the stack is next, so that nodes stay in their order as far as possible.
                makers_first = sorted(needed, reverse=True)
                stack += [maker for maker in makers_first if state[maker] == _NEW]
                continue
            stack.pop()
            if state[index] == _ENTERED:
                state[index] = _LEFT
                order.append(index)
    rebuilt = GraphProto()
    rebuilt.node.extend(nodes[index] for index in order)
    del graph.node[:]
    graph.node.extend(rebuilt.node)


# --- branches that never run ------------------------------------------------------------------------------------


_THEN: Final = "then_branch"
_ELSE: Final = "else_branch"
"""Names of the bodies of an If."""


def _unreadable(
    model: ModelProto,
) -> Iterator[tuple[NodeProto, str, GraphProto, GraphProto]]:
    """Yield Ifs whose condition is a constant and whose branch that never runs is broken.

    Each comes with the name of that branch, the branch, and the other branch.
    """
    waiting = [(model.graph, set[str](), dict[str, bool]())]
    while waiting:
        graph, outer, known = waiting.pop()
        owners = [(node, bodies) for node in graph.node if (bodies := _bodies(node))]
        if not owners:
            continue
        visible = outer | _defined(graph)
        known = known | _truths(graph)
        for node, bodies in owners:
            waiting += [(body, visible, known) for body in bodies]
            condition = known.get(node.input[0]) if node.input else None
            branches = dict(node_bodies(node))
            is_whole = len(bodies) == 2 and branches.keys() == {_THEN, _ELSE}
            if op_key(node) != "If" or condition is None or not is_whole:
                continue
            dead, other = (_ELSE, _THEN) if condition else (_THEN, _ELSE)
            body = branches[dead]
            if not (_is_closed(body, visible) and is_wellformed(body, model)):
                yield node, dead, body, branches[other]


def _truths(graph: GraphProto) -> dict[str, bool]:
    """Return names that a graph defines -> their truth value, if they have one that no caller can change."""
    listed = {entry.name for entry in graph.input}
    tensors = {
        tensor.name: tensor
        for tensor in graph.initializer
        if tensor.name not in listed
    }
    for node in graph.node:
        name = _constant(node)
        if name is None:
            continue
        for item in node.attribute:
            if item.name == "value" and item.HasField("t"):
                tensors[name] = item.t
    truths = {}
    for name, tensor in tensors.items():
        # The model is not checked yet, so that a tensor may claim more than it holds.
        is_held = len(tensor.raw_data) == 1 or len(tensor.int32_data) == 1
        is_one = is_held and list(tensor.dims) in ([], [1])
        if is_one and tensor.data_type == TensorProto.BOOL:
            truths[name] = bool(numpy_helper.to_array(tensor).reshape(-1)[0])
    return truths


def _is_closed(body: GraphProto, visible: set[str]) -> bool:
    """Return whether all values that a body reads are defined."""
    owner = NodeProto(op_type="If")
    owner.attribute.add(name="body").g.CopyFrom(body)
    return visible.issuperset(name for name in _reads(owner) if name)


def _replace_branch(
    node: NodeProto, name: str, dead: GraphProto, other: GraphProto
) -> str:
    label = node.name or next(iter(node.output), "")
    dead.CopyFrom(other)
    return f"The {name} of {label!r} never runs and cannot be read, so the other branch replaces it."
