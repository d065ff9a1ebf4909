"""The roles of inputs: what their numbers mean, by the ops that read them and by their names."""

import re
from collections.abc import Iterator, Sequence
from enum import Enum
from math import isfinite
from typing import Final, NamedTuple

from onnx import TensorProto

from onnxamp._facts.ops import Lookup, attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.masks.added import added_masks
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import Node, passed_values
from onnxamp._runtime.sizes import GRID


class Role(Enum):
    """The meaning of an input's numbers."""

    PLAIN = "nothing that the graph tells"
    INDEX = "rows of a table"
    MASK = "which elements count"
    PADDING = "which elements do not count"
    ADDED = "a mask that is added to scores"
    SUBTRACTED = "a mask that is subtracted from scores"
    SIZE = "a size, a shape, a number of rounds or a divisor"
    POSITION = "positions along the last axis"
    LENGTH = "how many elements of an axis count"
    CACHED = "whether caches hold something"
    FACTOR = "a factor, such as a speed"
    GRID = "frames, rows and columns of patches"
    EXTENT = "heights and widths of images"
    TIMESTEP = "steps of a diffusion"


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
    may_be_empty: bool = False
    """Whether a mask may leave no element of a row."""


_NAMES: Final = (
    (Role.CACHED, "bool", re.compile("^use_cache_branch$")),
    (Role.GRID, "int", GRID),
    # orig_target_sizes: as RT-DETR and D-FINE export it (tools/deployment/export_onnx.py).
    (Role.EXTENT, "int", re.compile("(image|target)_sizes$")),
    # im_shape: PaddleDetection (deploy/EXPORT_MODEL.md); image_shape: YOLOv3 of the ONNX Model Zoo.
    (Role.EXTENT, "float", re.compile("^im(age)?_shape$")),
    # Diffusers' schedulers count to num_train_timesteps, which is 1000.
    (Role.TIMESTEP, "int", re.compile("^timesteps?$")),
    # torch.nn.MultiheadAttention ignores keys where it is True.
    (Role.PADDING, "bool", re.compile("key_padding_mask$")),
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


def input_use(view: Graph, value: int, shapes: Sequence[Shape | None]) -> Use:
    """Return the use of a model input, followed through data movement, Casts and bodies.

    Look-ups decide first (an input with "position" in its name is a position then), then masks that are added to
    scores, then the name, then other masks (``1 - x``, a Cast to bool, an attention op), then sizes.

    Args:
        view: the model.
        value: index of the input.
        shapes: by value index, as :func:`onnxamp._graph.shapes.infer_shapes` gives them.

    Complexity: linear in the part of the graph that moves the input.
    """
    by_name = _named(view, value, shapes[value])
    bounds: list[int | None] = []
    roles = set[Role]()
    markers = list[int]()
    facts = op_facts()
    for node, port in _readers(view, value):
        tables = facts.lookups.get(node.key) or facts.placements.get(node.key, ())
        lookups = [lookup for lookup in tables if lookup.indices == port]
        markers += _markers(view, node, port)
        if lookups:
            bounds.append(_rows(node, lookups[0], shapes))
        elif port in facts.mask_inputs.get(node.key, ()) or _negates_mask(
            view, node, port
        ):
            roles.add(Role.MASK)
        elif port in facts.size_inputs.get(node.key, ()) or _divides(view, node, port):
            roles.add(Role.SIZE)
    if bounds:
        role = Role.POSITION if by_name is Role.POSITION else Role.INDEX
        bound = min((bound for bound in bounds if bound is not None), default=None)
        return Use(role, bound, marker=next(iter(markers), None))
    masks = view.ask(added_masks)
    if value in masks.factors:
        return Use(Role.FACTOR)
    if value in masks.inputs:
        is_added = value not in masks.subtracted
        return Use(Role.ADDED if is_added else Role.SUBTRACTED)
    if by_name is not None:
        return Use(by_name)
    if Role.MASK in roles:
        return Use(Role.MASK)
    return Use(Role.SIZE if Role.SIZE in roles else Role.PLAIN)


def _named(graph: Graph, value: int, shape: Shape | None) -> Role | None:
    """Return the role that an input's name implies. A matrix has no lengths, since there is one per element
    of a batch.
    """
    name = graph.values[value].name.lower()
    kind = graph.types[value] or ""
    may_be_length = len(shape or ()) < 2
    for role, numbers, part in _NAMES:
        if role is Role.LENGTH and not may_be_length:
            continue
        if numbers in kind and part.search(name):
            return role
    return None


def _readers(graph: Graph, value: int) -> Iterator[tuple[Node, int]]:
    """Yield the nodes and input positions that read the value, directly or through data movement."""
    facts = op_facts()
    passed = graph.ask(passed_values)
    seen = {value}
    stack = [value]
    while stack:
        value = stack.pop()
        reached = [*passed.get(value, ())]
        for node, port in graph.consumers(value):
            yield node, port
            if port in facts.moved_inputs.get(node.key, ()) or node.key == "Cast":
                reached += node.writes
        for new in reached:
            if new not in seen:
                seen.add(new)
                stack.append(new)


def _rows(node: Node, lookup: Lookup, shapes: Sequence[Shape | None]) -> int | None:
    """Return the size of the axis that a look-up indexes; for GatherND the smallest of those that it may index."""
    value = node.input(lookup.table)
    shape = shapes[value]
    axis = int(attribute(node.proto, lookup.axis) or 0) if lookup.axis else 0
    if not shape or not -len(shape) <= axis < len(shape):
        return None
    if node.key in ("GatherND", "ScatterND"):
        return min((dim for dim in shape[axis:] if dim is not None), default=None)
    return shape[axis]


def _divides(graph: Graph, node: Node, port: int) -> bool:
    """Return whether an input is an integer by which a node divides, which must not be zero."""
    return (
        node.key in ("Div", "Mod")
        and port == 1
        and "int" in (graph.types[node.input(port)] or "")
    )


def _markers(graph: Graph, node: Node, port: int) -> Iterator[int]:
    """Yield the token that a node compares with: below zero for images in some models, a token of theirs in others."""
    if port or node.key not in ("Equal", "Less"):
        return
    number = graph.constants.scalar(node.input(1))
    if number is not None and isfinite(number):
        # Less holds for the numbers below: the largest of them is a marker.
        yield int(number) - (node.key == "Less")


def _negates_mask(view: Graph, node: Node, port: int) -> bool:
    """Return whether a node is ``1 - x``, or a Cast to bool."""
    if node.key == "Cast":
        return bool(attribute(node.proto, "to") == TensorProto.BOOL)
    return node.key == "Sub" and port == 1 and _is_one(view, node.input(0))


def _is_one(graph: Graph, value: int) -> bool:
    """Return whether the value is a constant 1 of any type, directly or through a Cast."""
    cast = graph.producer(value, "Cast")
    source = value if cast is None else cast.input(0)
    number = graph.constants.numbers(source, most=1)
    return number is not None and number.size == 1 and bool(number.item() == 1)
