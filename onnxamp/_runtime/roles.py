"""The roles of a model's inputs, which say what their numbers mean."""

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final, NamedTuple

from onnx import TensorProto, numpy_helper

from onnxamp._graph.bodies import body_sources, body_targets
from onnxamp._graph.constants import constant_tensors
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._ops.facts import Lookup, attribute, op_facts
from onnxamp._runtime.sizes import GRID


class Role(Enum):
    """The meaning of an input's numbers."""

    PLAIN = "nothing that the graph tells"
    INDEX = "rows of a table"
    MASK = "which elements count"
    SIZE = "a size, a shape or a number of rounds"
    POSITION = "positions along the last axis"
    LENGTH = "how many elements of an axis count"
    CACHED = "whether caches hold something"
    FACTOR = "a factor, such as a speed"
    GRID = "frames, rows and columns of patches"
    EXTENT = "heights and widths of images"


class Use(NamedTuple):
    """The use of an input."""

    role: Role
    bound: int | None = None
    """Rows of the smallest table that the input indexes, or elements that it counts, if known."""
    past: int | None = None
    """Tokens that a decoder's caches hold; None in other models."""
    row: tuple[int, ...] = ()
    """The numbers of each grid or extent."""
    marker: int | None = None
    """The token that an index is compared with, which marks the place of a feature."""
    marked: int = 0
    """How often that token occurs."""


_NAMES: Final = (
    (Role.CACHED, "bool", re.compile("^use_cache_branch$")),
    (Role.GRID, "int", GRID),
    (Role.EXTENT, "int", re.compile("image_sizes$")),
    (Role.MASK, "", re.compile("mask")),
    (Role.POSITION, "", re.compile("position")),
    (
        Role.LENGTH,
        "int",
        re.compile(r"(?<![a-z])(lengths?|lens?|audio_sizes)(?![a-z])"),
    ),
    (
        Role.FACTOR,
        "float",
        re.compile(r"(?<![a-z])(scales?|speeds?|temperature)(?![a-z])"),
    ),
)
"""Roles by part of an input's name and kind of its type."""

_NUMBERS: Final = ("value_int", "value_ints", "value_float", "value_floats")
"""Attributes of Constant that hold numbers instead of a tensor."""


def input_use(view: Graph, value: int, shapes: Sequence[Shape | None]) -> Use:
    """Return the use of a model input, followed through data movement, Casts and bodies.

    Look-ups decide first (an input with "position" in its name is a position then), then the name, then masks
    (``1 - x``, a Cast to bool, an attention op), then sizes.

    Args:
        view: the model.
        value: index of the input.
        shapes: by value index, as :func:`onnxamp._graph.shapes.infer_shapes` gives them.

    Complexity: linear in the part of the graph that moves the input.
    """
    by_name = _named(view, value, shapes[value])
    bounds: list[int | None] = []
    roles, markers = set[Role](), list[int]()
    facts = op_facts()
    for node, port in _readers(view, value):
        lookup = next(
            (
                lookup
                for lookup in facts.lookups.get(node.key, ())
                if lookup.indices == port
            ),
            None,
        )
        markers += _markers(view, node, port)
        if lookup is not None:
            bounds.append(_rows(node, lookup, shapes))
        elif port in facts.mask_inputs.get(node.key, ()) or _negates_mask(
            view, node, port
        ):
            roles.add(Role.MASK)
        elif port in facts.size_inputs.get(node.key, ()):
            roles.add(Role.SIZE)
    if bounds:
        role = Role.POSITION if by_name is Role.POSITION else Role.INDEX
        bound = min((bound for bound in bounds if bound is not None), default=None)
        return Use(role, bound, marker=next(iter(markers), None))
    if by_name is not None:
        return Use(by_name)
    return Use(
        next((role for role in (Role.MASK, Role.SIZE) if role in roles), Role.PLAIN)
    )


def _named(graph: Graph, value: int, shape: Shape | None) -> Role | None:
    """Return the role that an input's name implies. A matrix has no lengths, since there is one per element
    of a batch.
    """
    name, kind = graph.values[value].name.lower(), graph.types[value] or ""
    roles = (
        role for role, numbers, part in _NAMES if numbers in kind and part.search(name)
    )
    return next(
        (role for role in roles if role is not Role.LENGTH or len(shape or ()) < 2),
        None,
    )


def _readers(view: View, value: int) -> Iterator[tuple[Node, int]]:
    """(node, input position) pairs that read the value, directly or through data movement."""
    facts = op_facts()
    seen, stack = {value}, [value]
    while stack:
        value = stack.pop()
        reached: list[int] = []
        for node, port in view.consumers(value):
            yield node, port
            if port in facts.moved_inputs.get(node.key, ()) or node.key == "Cast":
                reached += node.outputs
            for _, body in node.bodies if node.key in facts.control_flow else ():
                inputs = view.scopes[body].inputs
                sources = body_sources(node, len(inputs))
                reached += [
                    inner
                    for inner, source in zip(inputs, sources, strict=True)
                    if source == port
                ]
        for scope, position in view.results[value]:
            owner = view.scopes[scope].owner
            if owner != ABSENT and view.nodes[owner].key in facts.control_flow:
                node = view.nodes[owner]
                target = body_targets(node, position + 1)[position]
                reached += node.outputs[target : target + 1] if target != ABSENT else ()
        for new in reached:
            if new != ABSENT and new not in seen:
                seen.add(new)
                stack.append(new)


def _rows(node: Node, lookup: Lookup, shapes: Sequence[Shape | None]) -> int | None:
    """Size of the axis that a look-up indexes; for GatherND the smallest of those that it may index."""
    value = node.input(lookup.table)
    shape = shapes[value]
    axis = int(attribute(node.proto, lookup.axis) or 0) if lookup.axis else 0
    if not shape or not -len(shape) <= axis < len(shape):
        return None
    return (
        min((dim for dim in shape[axis:] if dim is not None), default=None)
        if node.key == "GatherND"
        else shape[axis]
    )


def _markers(graph: Graph, node: Node, port: int) -> Iterator[int]:
    """The token that a node compares with: images are below zero in some models, and a token of their own in others."""
    if port or node.key not in ("Equal", "Less"):
        return
    number = graph.constants.scalar(node.input(1))
    if number is not None:
        yield int(number) - (node.key == "Less")


def _negates_mask(view: Graph, node: Node, port: int) -> bool:
    """``1 - x``, or a Cast to bool."""
    if node.key == "Cast":
        return bool(attribute(node.proto, "to") == TensorProto.BOOL)
    return node.key == "Sub" and port == 1 and _is_one(view, node.input(0))


def _is_one(graph: Graph, value: int) -> bool:
    """Return whether the value is a constant 1 of any type, directly or through a Cast."""
    cast = graph.producer(value, "Cast")
    if cast is not None:
        value = cast.input(0)
    constant = graph.producer(value, "Constant")
    tensor = graph.ask(constant_tensors).get(value)
    if tensor is not None:
        if tensor.data_location == TensorProto.EXTERNAL or any(
            dim != 1 for dim in tensor.dims
        ):
            return False
        array = numpy_helper.to_array(tensor)
        return array.dtype.kind in "biufV" and bool(array.reshape(()) == 1)
    numbers = [attribute(constant.proto, name) for name in _NUMBERS] if constant else []
    return any(number in (1, [1]) for number in numbers)
