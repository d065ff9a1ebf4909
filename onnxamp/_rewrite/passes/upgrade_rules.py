"""Rewrites of single nodes that a row of ``_data/upgrades.toml`` cannot express; each row names its own by ``call``.

A rule receives a copy of the node, changes it, and returns the nodes that replace it, at the version after the step.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import numpy as np
import onnx.defs
from onnx import NodeProto, TensorProto, helper
from onnx.defs import OpSchema

from onnxamp._base.records import record
from onnxamp._facts.ops import attribute
from onnxamp._facts.tables import read_table
from onnxamp._graph.editor import set_attribute
from onnxamp._rewrite import Site, StuckError, take_attribute

Rule = Callable[[NodeProto, Site], list[NodeProto]]

_ALLOWS_ZERO: Final = 14
"""First opset at which a Reshape may take 0 for a size."""


def _type_number(proto: NodeProto, _: Site) -> list[NodeProto]:
    """Replace the name of a type by its number, which Cast-6 has."""
    name = take_attribute(proto, "to", b"")
    name = name.decode() if isinstance(name, bytes) else name
    if isinstance(name, str):
        types = dict(TensorProto.DataType.items())
        if name.upper() not in types:
            raise StuckError(f"it casts to {name!r}, which is not a type")
        name = types[name.upper()]
    set_attribute(proto, "to", name)
    return [proto]


def _pads(proto: NodeProto, _: Site) -> list[NodeProto]:
    """Rename the paddings to "pads", as Pad-2 calls them."""
    set_attribute(proto, "pads", take_attribute(proto, "paddings"))
    return [proto]


def _one_input(proto: NodeProto, _: Site) -> list[NodeProto]:
    """Drop an omitted input of sizes, because Split-2 has them in the attribute alone."""
    if len(proto.input) > 1 and proto.input[1]:
        raise StuckError(
            "its sizes are an input, which the op does not have at that opset"
        )
    del proto.input[1:]
    return [proto]


def _whole_p(proto: NodeProto, _: Site) -> list[NodeProto]:
    """Make the exponent an integer, as LpPool-2 has it."""
    if attribute(proto, "kernel_shape") is None and proto.op_type == "LpPool":
        raise StuckError("it has no kernel_shape")
    p = take_attribute(proto, "p", 2.0)
    if p != int(p):
        raise StuckError(f"its exponent is {p:g}, which must be whole there")
    set_attribute(proto, "p", int(p))
    return [proto]


def _broadcast(proto: NodeProto, site: Site) -> list[NodeProto]:
    """Align shapes at the end, as from version 7 on; ``axis`` gave the place of the second operand's first axis."""
    is_broadcast = take_attribute(proto, "broadcast", 0)
    axis = take_attribute(proto, "axis")
    if not is_broadcast or axis is None:
        return [proto]
    rank = site.rank_of(proto.input[0])
    other = site.rank_of(proto.input[1])
    start = axis + rank if axis < 0 else axis
    return _widened(proto, site, other, rank - start)


def _slope(proto: NodeProto, site: Site) -> list[NodeProto]:
    """Align slopes at the end, as PRelu-7 does; before, there was one for each channel, or one for all."""
    shape = site.shape_of(proto.input[1])
    if shape is not None and all(size == 1 for size in shape):
        return [proto]
    if site.rank_of(proto.input[1]) != 1:
        return [proto]
    return _widened(proto, site, 1, site.rank_of(proto.input[0]) - 1)


def _widened(proto: NodeProto, site: Site, rank: int, wanted: int) -> list[NodeProto]:
    """Return the node after one that appends axes of size 1 to its second operand."""
    if wanted <= rank:
        return [proto]
    wide = site.fresh(f"{proto.input[1]}/aligned")
    axes = list(range(rank, wanted))
    name = site.fresh("align")
    node = site.editor.make("Unsqueeze", [proto.input[1]], [wide], name, axes=axes)
    proto.input[1] = wide
    return [node, proto]


def _scales(proto: NodeProto, _: Site) -> list[NodeProto]:
    """Gather the scales in one list, as Upsample-7 has it."""
    height = take_attribute(proto, "height_scale")
    width = take_attribute(proto, "width_scale")
    set_attribute(proto, "scales", [1.0, 1.0, float(height), float(width)])
    return [proto]


def _region(proto: NodeProto, site: Site) -> list[NodeProto]:
    """Insert the region of Resize-11, which only one of its modes reads, and choose how it rounds coordinates.

    ONNX Runtime rounded coordinates of Resize-10 up when shrinking images, and down otherwise
    (``GetNearestPixelFromOriginal`` in core/providers/cpu/tensor/upsamplebase.h: SIMPLE).
    """
    if attribute(proto, "mode") in (None, b"nearest") and site.node.key == "Resize":
        scales = site.floats_of(proto.input[1])
        if scales is None or min(scales) < 1 < max(scales):
            raise StuckError(
                "it takes the nearest pixel, which depends on scales that are unknown, or that both shrink and enlarge"
            )
        if min(scales) < 1:
            set_attribute(proto, "nearest_mode", "ceil")
    empty = site.editor.constant(np.zeros(0, np.float32), site.named("roi"))
    proto.input[:] = [proto.input[0], empty, proto.input[1]]
    return [proto]


def _sizes(proto: NodeProto, _: Site) -> list[NodeProto]:
    """Omit unused inputs, as Resize-13 can: the region, and scales beside sizes; older versions need empty ones."""
    names = [*proto.input]
    if attribute(proto, "coordinate_transformation_mode") != b"tf_crop_and_resize":
        names[1] = ""
    if len(names) > 3 and names[3]:
        names[2] = ""
    proto.input[:] = names
    return [proto]


def _coerced(proto: NodeProto, site: Site) -> list[NodeProto]:
    """Give Softmax and similar ops the one axis that they work along from version 13 on; before, they worked along this
    and all following axes together.
    """
    axis = take_attribute(proto, "axis", 1)
    shape = site.shape_of(proto.input[0])
    # Axes of size 1 make no difference, so one wide axis is as good as all of them.
    if shape is not None and len(shape):
        start = axis + len(shape) if axis < 0 else axis
        wide = [
            position for position in range(start, len(shape)) if shape[position] != 1
        ]
        if len(wide) < 2 and start < len(shape):
            set_attribute(
                proto, "axis", wide[0] if wide and len(shape) - 1 != wide[0] else -1
            )
            return [proto]
    elif axis == -1:
        set_attribute(proto, "axis", -1)
        return [proto]
    data = proto.input[0]
    result = proto.output[0]
    flat, done, shape_name = (
        site.fresh(name) for name in ("flat", "flat_result", "shape")
    )
    flatten = helper.make_node(
        "Flatten", [data], [flat], site.fresh("Flatten"), axis=axis
    )
    measure = helper.make_node("Shape", [data], [shape_name], site.fresh("Shape"))
    restore = helper.make_node(
        "Reshape", [done, shape_name], [result], site.fresh("Reshape")
    )
    # Otherwise, 0 copies a size of the flat tensor, which has another one there.
    is_perhaps_empty = shape is None or not all(shape)
    if is_perhaps_empty and site.opset >= _ALLOWS_ZERO:
        set_attribute(restore, "allowzero", 1)
    proto.input[0], proto.output[0] = flat, done
    set_attribute(proto, "axis", -1)
    return [flatten, measure, proto, restore]


def _windows(proto: NodeProto, _: Site) -> list[NodeProto]:
    """Refuse pools with windows that begin in the padding after the data: ceil_mode leaves them out from version 22 on.

    The last window begins less than a stride after the last that fits, so there is none if a window is longer than a
    stride and that padding together.
    """
    kernel = attribute(proto, "kernel_shape")
    padding = attribute(proto, "auto_pad")
    if not attribute(proto, "ceil_mode") or padding not in (None, b"NOTSET"):
        return [proto]
    rank = len(kernel)
    ones = [1] * len(kernel)
    strides = attribute(proto, "strides") or ones
    dilations = attribute(proto, "dilations") or ones
    behind = (attribute(proto, "pads") or [0] * 2 * rank)[rank:]
    for k, d, s, p in zip(kernel, dilations, strides, behind, strict=True):
        if (k - 1) * d + 1 < s + p:
            raise StuckError(
                "at that opset, ceil_mode leaves out windows that begin in the padding"
            )
    return [proto]


def _parts(proto: NodeProto, _: Site) -> list[NodeProto]:
    """Write the number of equal parts as an attribute, as Split-18 has it; it used to be that of the outputs."""
    if len(proto.input) < 2 or not proto.input[1]:
        set_attribute(proto, "num_outputs", len(proto.output))
    return [proto]


def _per_channel(proto: NodeProto, site: Site) -> list[NodeProto]:
    """Repeat scale and bias for each channel, as GroupNormalization-21 has them; before, each group had one."""
    shape = site.shape_of(proto.input[0])
    groups = attribute(proto, "num_groups")
    channels = shape[1] if shape is not None and len(shape) > 1 else None
    if not isinstance(channels, int) or not groups or channels % groups:
        raise StuckError(f"the number of channels of {proto.input[0]!r} is unknown")
    if channels == groups:
        return [proto]
    nodes = list[NodeProto]()
    count = channels // groups
    for position, name in ((1, "scale"), (2, "bias")):
        repeated = [
            site.fresh(f"{name}/{part}") for part in ("column", "table", "channels")
        ]
        steps = (
            ("Reshape", [-1, 1], "column"),
            ("Expand", [1, count], "times"),
            ("Reshape", [-1], "row"),
        )
        for number, (op, dims, base) in enumerate(steps):
            sizes = site.editor.ints(dims, site.named(base))
            own = site.fresh(f"{name}/{number + 1}")
            inputs = [proto.input[position], sizes]
            nodes.append(site.editor.make(op, inputs, [repeated[number]], own))
            proto.input[position] = repeated[number]
    return [*nodes, proto]


RULES: Final[Mapping[str, Rule]] = {
    "type_number": _type_number,
    "pads": _pads,
    "one_input": _one_input,
    "whole_p": _whole_p,
    "broadcast": _broadcast,
    "slope": _slope,
    "scales": _scales,
    "region": _region,
    "sizes": _sizes,
    "coerced": _coerced,
    "parts": _parts,
    "windows": _windows,
    "per_channel": _per_channel,
}
"""The rules by the names that the table has for them."""


@record
class UpgradeStep:
    """The change from one schema of an op to the next, and how its nodes follow.

    ``op`` and ``version`` are those of the new schema, ``defaults`` those of attributes in the old one. ``lost`` maps
    a port, such as ``("inputs", 0)``, to the types that the new schema still admits, if it admits fewer. ``row`` is the
    row of the table, empty where nothing has to be said; None if nothing is known.
    """

    op: str
    version: int
    row: Mapping[str, Any] | None
    defaults: Mapping[str, Any]
    lost: Mapping[tuple[str, int], frozenset[str]]

    @property
    def is_closed(self) -> bool:
        """Whether no node can take the step."""
        if self.row is None:
            return True
        return "why" in self.row and _CONDITIONS.isdisjoint(self.row)

    @property
    def is_silent(self) -> bool:
        """Whether every node can take the step unchanged."""
        return self.row is not None and not self.lost and self.row.keys() <= _PLACE


_PLACE: Final = frozenset({"ops", "to"})
"""Columns that identify the node of a row."""
_CONDITIONS: Final = frozenset({"only", "types", "outputs"})
"""Columns that say when a step cannot be taken."""


@cache
def steps_of(op: str, current: int, wanted: int) -> tuple[UpgradeStep, ...]:
    """Return the steps of an ai.onnx op between two opsets, in order; none for an op of which nothing is known.

    A step to another op, as from Upsample to Resize, is followed by the steps of that one.
    """
    steps = list[UpgradeStep]()
    version = current
    while version < wanted:
        version += 1
        old = _schema(op, current)
        new = _schema(op, version)
        if old is None:
            # Of ops that ONNX Runtime has in ai.onnx besides those of onnx, the table alone knows what changes.
            row = upgrade_rows(op).get(version)
            if row is not None:
                steps.append(UpgradeStep(op, version, row, {}, {}))
                current = version
            continue
        if new is not None and new.since_version > old.since_version:
            steps.append(_step(old, new))
            op = steps[-1].op
            current = steps[-1].version
    return tuple(steps)


@cache
def newest_loaded() -> int:
    """Return the newest opset of models that ONNX Runtime loads."""
    newest: int = read_table("upgrades")["loads"]
    return newest


def upgrade_rows(op: str) -> Mapping[int, Mapping[str, Any]]:
    """Return version -> the row about the step of an ai.onnx op to it."""
    _, rows = _table()
    return {version: row for (name, version), row in rows.items() if name == op}


def is_silent(op: str, current: int, wanted: int) -> bool:
    """Return whether nodes of an op do not change between two opsets, whatever features they use."""
    return all(step.is_silent for step in steps_of(op, current, wanted))


def _schema(op: str, version: int) -> OpSchema | None:
    try:
        return onnx.defs.get_schema(op, version, "")
    except onnx.defs.SchemaError:
        return None


@cache
def _table() -> tuple[int, Mapping[tuple[str, int], Mapping[str, Any]]]:
    """Return the newest opset that was checked, and (op, version) -> row."""
    table = read_table("upgrades")
    rows = dict[tuple[str, int], Mapping[str, Any]]()
    for row in table["step"]:
        for op in row["ops"]:
            rows[op, row["to"]] = row
    return table["checked"], rows


def _step(old: OpSchema, new: OpSchema) -> UpgradeStep:
    """Return the step between two schemas of an op."""
    checked, rows = _table()
    version = new.since_version
    row = rows.get((old.name, version))
    name = old.name if row is None else row.get("name", old.name)
    target = new if name == old.name else _schema(name, version)
    defaults = {
        key: helper.get_attribute_value(item.default_value)
        for key, item in old.attributes.items()
        if item.default_value.type
    }
    if target is None or version > checked or (row is None and _differ(old, target)):
        return UpgradeStep(name, version, None, defaults, {})
    row = row or {}
    return UpgradeStep(name, version, row, defaults, _lost(old, target, row))


def _differ(old: OpSchema, new: OpSchema) -> bool:
    """Return whether more than types and documentation differ."""

    def shape(schema: OpSchema) -> Any:
        inputs = [(port.option, port.is_homogeneous) for port in schema.inputs]
        outputs = [(port.option, port.is_homogeneous) for port in schema.outputs]
        attributes = {
            name: (item.type, item.required, item.default_value.SerializeToString())
            for name, item in schema.attributes.items()
        }
        return schema.deprecated, inputs, outputs, attributes

    return bool(shape(old) != shape(new))


def _lost(
    old: OpSchema, new: OpSchema, row: Mapping[str, Any]
) -> dict[tuple[str, int], frozenset[str]]:
    """Return (side, position) -> the types that the new schema allows, if the old one allows others as well.

    Inputs that replace attributes, or the reverse, shift others. These follow the table and are not compared.
    """
    types = {}
    is_settled = "call" in row or "name" in row
    for side in () if is_settled else ("inputs", "outputs"):
        before, after = (
            _types(schema, getattr(schema, side)) for schema in (old, new)
        )
        for position, (one, other) in enumerate(zip(before, after, strict=False)):
            if not one <= other:
                types[side, position] = frozenset(other)
    return types


def _types(
    schema: OpSchema, ports: Sequence[OpSchema.FormalParameter]
) -> list[set[str]]:
    admitted = {
        row.type_param_str: set(row.allowed_type_strs)
        for row in schema.type_constraints
    }
    return [admitted.get(port.type_str, {port.type_str}) for port in ports]
