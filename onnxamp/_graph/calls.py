"""Calls of model-local functions, made explicit before onnx's inliner replaces them by bodies.

A node of a function may refer to an attribute of the function. If the call gives the attribute, the node takes it. If
not, the node takes the default that the function declares. If there is none, the node lacks the attribute, and the
default of its own op holds, or of the function that it calls. The inliner knows no defaults of functions: it leaves out
every attribute that the call does not give. It also replaces nodes of ops whose names a function shadows, although ONNX
Runtime runs the op. And it cannot convert all bodies to the model's opset.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, count
from typing import TypeAlias

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto

from onnxamp._base.errors import ModelError
from onnxamp._facts.signature import SignatureBook, lookup
from onnxamp._model.protos import (
    all_nodes,
    copied,
    default_domain,
    node_bodies,
    opset_imports,
)

_Key: TypeAlias = tuple[str, str, str]
"""Domain, name and overload of a function."""


def drop_shadowing(model: ModelProto) -> None:
    """Remove the functions that are named like an op of the runtime, in place: their calls are nodes of that op."""
    book = SignatureBook(opset_imports(model))
    for function in [*model.functions]:
        if book.get(function.domain, function.name) is not None:
            model.functions.remove(function)


def adopt_opsets(model: ModelProto) -> None:
    """Let functions import the model's opsets where all their ops are the same there, in place.

    Otherwise the inliner converts the bodies, and fails at a call within a function, whose type it does not know (seen
    in onnx 1.23).
    """
    current = opset_imports(model)
    for function in model.functions:
        nodes = all_nodes(function.node)
        used = {(default_domain(node.domain), node.op_type) for node in nodes}
        for entry in function.opset_import:
            domain = default_domain(entry.domain)
            version = current.get(domain, entry.version)
            ops = [op for own, op in used if own == domain]
            if all(
                _since(domain, op, version) == _since(domain, op, entry.version)
                for op in ops
            ):
                entry.version = version


def _since(domain: str, op: str, version: int) -> int:
    """Return the version of a domain in which an op became what it is at another version; 0 if it has no schema."""
    signature = lookup(domain, op, version)
    return 0 if signature is None else signature.since


def bind_defaults(model: ModelProto) -> bool:
    """Resolve the attributes that calls leave out, in place.

    Each function becomes one copy for each set of attributes that calls leave out. In a copy, defaults replace the
    references to these attributes; without a default, the reference goes.

    Returns:
        Whether references went, so that a node may lack an attribute that its op requires.

    Raises:
        ModelError: the graph of a default refers to another default that holds a graph.

    Complexity: linear in the nodes of the graph and of all copies.
    """
    bodies = chain.from_iterable(function.node for function in model.functions)
    if next(_references(bodies), None) is None:
        return False
    copies = _Copies(
        {_key_of(function): copied(function) for function in model.functions}
    )
    copies.bind(model.graph.node)
    del model.functions[:]
    model.functions.extend(copies.made)
    return copies.has_gaps


def _references(nodes: Iterable[NodeProto]) -> Iterator[AttributeProto]:
    """Yield the attributes of nodes, and of those in their bodies, that refer to attributes of a function."""
    for node in all_nodes(nodes):
        yield from (item for item in node.attribute if item.ref_attr_name)


def _key_of(function: FunctionProto) -> _Key:
    return default_domain(function.domain), function.name, function.overload


@dataclass(slots=True)
class _Copies:
    """Copies of functions, each for the calls that leave out the same attributes."""

    functions: Mapping[_Key, FunctionProto]
    made: list[FunctionProto] = field(default_factory=list)
    has_gaps: bool = False
    names: dict[tuple[_Key, frozenset[str]], str] = field(default_factory=dict)
    """Function and left-out attributes -> name of the copy."""
    taken: set[_Key] = field(default_factory=set)
    wanted: dict[_Key, frozenset[str]] = field(default_factory=dict)
    """Function -> attributes that it refers to."""

    def bind(self, nodes: Iterable[NodeProto]) -> None:
        """Let calls among nodes name the copies, and calls in these, at any depth."""
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            for _, body in node_bodies(node):
                waiting += body.node
            key = default_domain(node.domain), node.op_type, node.overload
            if key not in self.functions:
                continue
            lacking = self._wanted(key).difference(
                item.name for item in node.attribute
            )
            if (key, lacking) not in self.names:
                waiting += self._copy(key, lacking).node
            node.op_type = self.names[key, lacking]

    def _wanted(self, key: _Key) -> frozenset[str]:
        if key not in self.wanted:
            function = self.functions[key]
            defaults = (item.g.node for item in function.attribute_proto)
            nodes = chain(function.node, *defaults)
            self.wanted[key] = frozenset(
                one.ref_attr_name for one in _references(nodes)
            )
        return self.wanted[key]

    def _copy(self, key: _Key, lacking: frozenset[str]) -> FunctionProto:
        """Return a copy of a function for calls that lack attributes; the first copy keeps the name."""
        function = copied(self.functions[key])
        domain, name, overload = key
        # The first copy has the name without a number, so the second one gets 2.
        fresh = (f"{name}_{number}" for number in count(2))
        while _key_of(function) in self.taken:
            function.name = next(
                one for one in fresh if (domain, one, overload) not in self.functions
            )
        self.taken.add(_key_of(function))
        self.names[key, lacking] = function.name
        self.made.append(function)
        defaults = {item.name: item for item in function.attribute_proto}
        waiting = [(node, False) for node in function.node]
        while waiting and lacking:
            node, is_default = waiting.pop()
            for item in [*node.attribute]:
                is_lacking = item.ref_attr_name in lacking
                if is_lacking:
                    self._replace(node, item, defaults, is_default=is_default)
                waiting += [(inner, is_default or is_lacking) for inner in item.g.node]
        return function

    def _replace(
        self,
        node: NodeProto,
        item: AttributeProto,
        defaults: Mapping[str, AttributeProto],
        *,
        is_default: bool,
    ) -> None:
        """Put a default in the place of a node's reference, or drop the reference."""
        name = item.name
        default = defaults.get(item.ref_attr_name)
        if default is None:
            node.attribute.remove(item)
            self.has_gaps = True
            return
        # Such a default may contain a reference to itself, and the replacement would never end.
        if is_default and default.HasField("g"):
            raise ModelError(
                f"The default of a function attribute refers to {default.name!r}, whose default is a graph as well:"
                " give one of them in the calls."
            )
        item.CopyFrom(default)
        item.name = name
