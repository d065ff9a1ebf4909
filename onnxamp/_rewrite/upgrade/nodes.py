"""One node, from version to version of its op."""

from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto

from onnxamp._model.copying import copied
from onnxamp._ops.facts import attribute
from onnxamp._rewrite.upgrade.rules import RULES
from onnxamp._rewrite.upgrade.steps import MovedAttribute, Step, steps_of
from onnxamp._rewrite.upgrade.writer import Site, StuckError, drop_attributes, set_attribute, take_attribute


class StuckAtError(Exception):
    """A node cannot take the step to a version."""

    def __init__(self, version: int, why: str) -> None:
        super().__init__(why)
        self.version = version


def upgraded_nodes(site: Site, current: int, wanted: int) -> list[NodeProto]:
    """The nodes that stand in the place of the site's node at a newer opset.

    Raises:
        StuckAtError: it cannot take a step.
    """
    done, waiting = list[NodeProto](), [(copied(site.node.proto), current)]
    while waiting:
        proto, version = waiting.pop()
        step = next(iter(steps_of(proto.op_type, version, wanted)), None)
        if step is None:
            done.append(proto)
            continue
        try:
            nodes = [proto] if step.is_silent else _taken(step, proto, site)
        except StuckError as stuck:
            raise StuckAtError(step.version, str(stuck)) from None
        waiting += [(node, step.version) for node in reversed(nodes)]
    return done


def _taken(step: Step, proto: NodeProto, site: Site) -> list[NodeProto]:
    """The nodes that a node becomes by one step.

    Raises:
        StuckError: it cannot take the step.
    """
    if any(item.ref_attr_name for item in proto.attribute):
        raise StuckError("its attributes are those of a function")
    _check(step, proto, site)
    for name, value in (step.missing or {}).items():
        if attribute(proto, name) is None:
            set_attribute(proto, name, value)
    drop_attributes(proto, step.drop)
    for name, words in (step.words or {}).items():
        word = attribute(proto, name) or step.defaults.get(name)
        if word is not None and word.decode() in words:
            set_attribute(proto, name, words[word.decode()])
    for moved in step.inputs:
        _move(moved, step, proto, site)
    proto.op_type = step.op
    return RULES[step.call](proto, site) if step.call else [proto]


def _check(step: Step, proto: NodeProto, site: Site) -> None:
    """Refuse a node that uses what the new version lacks or does in another way; drop outputs that nobody reads.

    Raises:
        StuckError: it does.
    """
    if step.is_closed:
        raise StuckError(step.why or "what changes there is not known here")
    for name, allowed in (step.only or {}).items():
        value = attribute(proto, name)
        value = step.defaults.get(name) if value is None else value
        value = value.decode() if isinstance(value, bytes) else value
        if value is not None and value not in allowed:
            raise StuckError(step.why)
    if step.types and (kind := site.type_of(proto.input[0])) is not None and kind not in step.types:
        raise StuckError(step.why)
    if step.outputs is not None:
        spare = [name for name in proto.output[step.outputs :] if name]
        if spare and not (step.unread and not any(_is_read(site, name) for name in spare)):
            raise StuckError(step.why)
        del proto.output[step.outputs :]
    for (side, position), admitted in step.lost.items():
        names = proto.input if side == "inputs" else proto.output
        found = site.type_of(names[position]) if position < len(names) and names[position] else None
        if found is not None and found not in admitted:
            raise StuckError(f"it takes no {found} there" if side == "inputs" else f"it makes no {found} there")


def _is_read(site: Site, name: str) -> bool:
    value = site.values[name]
    return bool(site.graph.uses[value] or site.graph.results[value])


def _move(moved: MovedAttribute, step: Step, proto: NodeProto, site: Site) -> None:
    """Turn an attribute into an input."""
    value = take_attribute(proto, moved.attribute, step.defaults.get(moved.attribute))
    is_nothing = isinstance(value, (list, tuple)) and not len(value) and moved.attribute == "axes"
    if value is None or is_nothing:
        return
    if moved.unless is not None and value == np.float32(moved.unless):
        return
    names = [*proto.input, *[""] * (moved.position + 1 - len(proto.input))]
    names[moved.position] = _constant(moved, value, proto, site)
    proto.input[:] = names


def _constant(moved: MovedAttribute, value: Any, proto: NodeProto, site: Site) -> str:
    base = site.named(moved.attribute)
    if moved.form == "ints":
        return site.writer.ints(value if isinstance(value, (list, tuple)) else [value], base)
    if moved.form == "int":
        return site.writer.ints(value, base)
    elem = site.elem_of(proto.input[0]) if moved.form == "like" else TensorProto.FLOAT
    return site.writer.constant(np.asarray(value, np.float32), base, elem)
