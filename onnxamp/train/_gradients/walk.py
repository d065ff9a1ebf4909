"""Reverse mode: the forward pass, then the gradients, from the loss back to the wanted values."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onnx import ModelProto, NodeProto, helper

from onnxamp._errors import ArgumentError, GradientError, OpsetError
from onnxamp._graph.names import NewNames
from onnxamp._graph.view import ABSENT, opset_imports
from onnxamp.train._gradients.expand import expand, value_of
from onnxamp.train._gradients.reading import Reading
from onnxamp.train._gradients.table import ALWAYS, FORWARD, RULES
from onnxamp.train._gradients.writer import FLOATS, MIN_OPSET, Tensor, Writer

_PARTIAL = frozenset({"Split"})
"""Ops whose rules need no gradient of the first output."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """A model that also computes gradients."""

    model: ModelProto
    outputs: Mapping[str, str]
    """Value -> the output that holds the loss's gradient with respect to it."""


def add_gradients(model: ModelProto, loss: str, wanted: Iterable[str]) -> Gradients:
    """Extend a model by the gradients of one of its values with respect to others.

    The forward pass stays as it is, but for ops that have no rule of their own and are replaced by their function
    bodies (recurrent ones by their steps), batch normalisation in training mode, which is written in single ops, and
    MaxPool, which is asked for its indices.

    Args:
        model: it is read, never changed; opset 18 or later.
        loss: a float value of one element.
        wanted: names of float inputs, initializers or other values. They get their gradient in their own type.

    Returns:
        A new model with the same inputs and outputs, and one more output for each wanted value.

    Raises:
        GradientError: an op between the loss and a wanted value has no rule, or the loss does not depend on it.
        OpsetError: the opset is older than the ops that gradients are written in.
        ArgumentError: nothing is wanted.

    Complexity: linear in the nodes, but for onnx's shape inference.
    """
    names = list(dict.fromkeys(wanted))
    if not names:
        raise ArgumentError("Name at least one value whose gradient is wanted.")
    version = opset_imports(model)[""]
    if version < MIN_OPSET:
        raise OpsetError(f"Gradients need opset {MIN_OPSET} or later; the model has opset {version}: upgrade it first.")
    reading = expand(model, loss, names)
    writer = Writer(NewNames(reading.view.all_names()))
    saved = _forward(reading, writer)
    found = _backward(reading, writer, saved, loss)
    return _assembled(reading, writer, {name: _gradient(reading, found, name, loss) for name in names})


def _forward(reading: Reading, writer: Writer) -> dict[int, tuple[Tensor, ...]]:
    """Write the forward pass; returns what nodes kept for their rules."""
    saved, on_path = {}, {node.index for node in reading.path.nodes}
    for node in (reading.view.nodes[index] for index in reading.view.order):
        if node.scope:
            continue
        writer.prefix = node.label
        if node.key in FORWARD and (node.index in on_path or node.key in ALWAYS):
            saved[node.index] = FORWARD[node.key](reading.call(writer, node))
        else:
            proto = NodeProto()
            proto.CopyFrom(node.proto)
            writer.nodes.append(proto)
    return saved


def _backward(
    reading: Reading, writer: Writer, saved: Mapping[int, tuple[Tensor, ...]], loss: str
) -> dict[int, Tensor]:
    """Write the gradients of all values on the way; by value index."""
    start = value_of(reading.view, loss)
    parts: dict[int, list[Tensor]] = {start: [_seed(reading, writer, start)]}
    found: dict[int, Tensor] = {}
    for node in reversed(reading.path.nodes):
        call = replace(reading.call(writer, node), saved=saved.get(node.index, ()))
        dys = [_summed(reading, writer, parts, found, value) for value in node.outputs]
        if all(dy is None for dy in dys):
            continue
        if dys[0] is None and node.key not in _PARTIAL:
            raise call.refusal("reaches the loss by another output than the first, for which there is no rule")
        writer.prefix = f"{node.label}/gradient"
        for position, (value, dx) in enumerate(zip(node.inputs, RULES[node.key](call, dys), strict=False)):
            if dx is not None and call.wants[position]:
                parts.setdefault(value, []).append(dx)
    for value in list(parts):
        _summed(reading, writer, parts, found, value)
    return found


def _seed(reading: Reading, writer: Writer, loss: int) -> Tensor:
    """A one in the shape of the loss.

    Raises:
        GradientError: the loss is no float, or is known to have more than one element.
    """
    handle = reading.handle(writer, loss)
    assert handle is not None
    if handle.elem not in FLOATS:
        raise GradientError(f"The loss {handle.name!r} is not of a float type.")
    if any(isinstance(dim, int) and dim != 1 for dim in handle.dims or ()):
        raise GradientError(f"The loss {handle.name!r} has the shape {handle.dims}: reduce it to one element first.")
    if handle.dims is None:
        return writer.number(1, handle.elem).op("Expand", handle.op("Shape"))
    return writer.number(1, handle.elem).op("Reshape", [1] * len(handle.dims))


def _summed(
    reading: Reading, writer: Writer, parts: dict[int, list[Tensor]], found: dict[int, Tensor], value: int
) -> Tensor | None:
    """The gradient of a value, once all that reads it has been visited."""
    if value == ABSENT or value not in parts:
        return found.get(value)
    addends = parts.pop(value)
    if len(addends) > 1:
        writer.prefix = f"{reading.view.values[value].name}/gradient"
        addends = [addends[0].op("Add" if len(addends) == 2 else "Sum", *addends[1:])]
    found[value] = addends[0]
    return addends[0]


def _gradient(reading: Reading, found: Mapping[int, Tensor], name: str, loss: str) -> Tensor:
    value = value_of(reading.view, name)
    if value not in found:
        raise GradientError(f"The loss {loss!r} does not depend on {name!r}, or only through ops without a slope.")
    return found[value]


def _assembled(reading: Reading, writer: Writer, gradients: Mapping[str, Tensor]) -> Gradients:
    result = ModelProto()
    result.CopyFrom(reading.view.model)
    graph, outputs = result.graph, {}
    for name, gradient in gradients.items():
        writer.prefix = outputs[name] = writer.names.fresh(f"{name}/gradient")
        gradient.op("Identity", into=outputs[name])
        value = reading.view.scopes[0].names[name]
        graph.output.append(helper.make_tensor_value_info(outputs[name], gradient.elem, reading.dims[value]))
    del graph.node[:]
    graph.node.extend(writer.nodes)
    graph.initializer.extend(writer.constants.values())
    return Gradients(result, outputs)
