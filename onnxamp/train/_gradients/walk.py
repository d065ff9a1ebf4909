"""Reverse mode: the forward pass, then the gradients from the loss back to the wanted values."""

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field

from onnx import ModelProto

from onnxamp._dtypes import FLOAT_ELEMS
from onnxamp._errors import ArgumentError, GradientError, OpsetError
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.view import ABSENT
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import opset_imports
from onnxamp.train._gradients.forward_pass import (
    ALWAYS,
    FORWARD,
    RULES,
    ForwardPass,
    expand,
    value_of,
)
from onnxamp.train._gradients.writer import MIN_OPSET, Tensor, Writer

_PARTIAL = frozenset({"Split"})
"""Ops whose rules do not need the gradient of the first output."""


@dataclass(frozen=True, slots=True)
class Gradients:
    """A model that also computes gradients, made by :func:`add_gradients`.

    Attributes:
        model: the model.
        outputs: by value, the output that holds the gradient of the loss with respect to it.

    Example:
        >>> import onnx
        >>> from onnxamp.train import add_gradients
        >>> square = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
        ...     f (float[3] x) => (float y) { s = Mul (x, x) y = ReduceSum <keepdims=0> (s) }''')
        >>> add_gradients(square, "y", ["x"]).outputs
        {'x': 'x/gradient'}
    """

    model: ModelProto
    outputs: Mapping[str, str]


def add_gradients(model: ModelSource, loss: str, wanted: Iterable[str]) -> Gradients:
    """Extend a model with the gradients of one of its values with respect to others.

    The forward pass stays the same, except for ops without a gradient rule, which are replaced by their function bodies
    or, if they are recurrent, unrolled; for batch normalisation in training mode, which is decomposed; and for MaxPool,
    which outputs its indices, too.

    Args:
        model: a ModelProto, a path or an onnx-graphsurgeon Graph, at opset 18 or later; it is not changed.
        loss: name of a float value with one element.
        wanted: names of float inputs, initializers or other values.

    Returns:
        A new model with the same inputs and outputs, and a further output per wanted value, with its shape and dtype.

    Raises:
        ArgumentError: nothing is wanted.
        GradientError: an op between the loss and a wanted value has no gradient rule, or the loss does not depend on a
            wanted value.
        OpsetError: the opset of the model is below 18.
        ModelError: the model cannot be read or is invalid.

    Example:
        >>> import numpy as np, onnx, onnxruntime
        >>> from onnxamp.train import add_gradients
        >>> square = onnx.parser.parse_model('''<ir_version: 8, opset_import: ["": 18]>
        ...     f (float[3] x) => (float y) { s = Mul (x, x) y = ReduceSum <keepdims=0> (s) }''')
        >>> found = add_gradients(square, "y", ["x"])
        >>> session = onnxruntime.InferenceSession(found.model.SerializeToString())
        >>> session.run([found.outputs["x"]], {"x": np.array([1, 2, 3], np.float32)})[0].tolist()
        [2.0, 4.0, 6.0]
    """
    return differentiate(Model.of(model).embedded(), loss, wanted)


def differentiate(
    model: ModelProto, loss: str, wanted: Iterable[str], lacks: Container[str] = ()
) -> Gradients:
    """:func:`add_gradients` for a well-formed model with its weights. Linear in nodes, except for shape inference.

    ``lacks`` is what the engine that is meant cannot run, as in the ``engine.toml`` of a target.
    """
    names = list(dict.fromkeys(wanted))
    if not names:
        raise ArgumentError("Name at least one value whose gradient is wanted.")
    version = opset_imports(model)[""]
    if version < MIN_OPSET:
        raise OpsetError(
            f"Gradients need opset {MIN_OPSET} or later; the model has opset {version}: upgrade it first."
        )
    forward = expand(model, loss, names)
    writer = Writer(GraphEditor(forward.graph), lacks=lacks)
    saved = _write_forward(forward, writer)
    gradients = _Backward(forward, writer).write(saved, value_of(forward.graph, loss))
    outputs: dict[str, str] = {}
    for name in names:
        value = value_of(forward.graph, name)
        if value not in gradients:
            raise GradientError(
                f"The loss {loss!r} does not depend on {name!r}, or only through ops of zero gradient."
            )
        writer.prefix = outputs[name] = writer.editor.names.fresh(f"{name}/gradient")
        gradient = gradients[value].op("Identity", into=outputs[name])
        writer.output(gradient, forward.dims[value])
    return Gradients(writer.finish(), outputs)


def _write_forward(forward: ForwardPass, writer: Writer) -> dict[int, tuple[Tensor, ...]]:
    """Write what changes in the forward pass; returns what nodes keep for their rules, by node index."""
    saved, on_path = {}, {node.index for node in forward.path}
    for node in (forward.graph.nodes[index] for index in forward.graph.order):
        if node.key in FORWARD and (
            node.index in on_path or (node.key in ALWAYS and node.scope == 0)
        ):
            writer.prefix = node.label
            saved[node.index] = FORWARD[node.key](forward.call(writer, node))
            writer.replace(node.index)
    return saved


@dataclass(slots=True)
class _Backward:
    """Writes gradients; all by value index."""

    forward: ForwardPass
    writer: Writer
    addends: dict[int, list[Tensor]] = field(default_factory=dict)
    """Gradients through the consumers visited so far."""
    totals: dict[int, Tensor] = field(default_factory=dict)

    def write(self, saved: Mapping[int, tuple[Tensor, ...]], loss: int) -> Mapping[int, Tensor]:
        """The gradients of all values on the path."""
        self.writer.prefix = f"{self.forward.graph.values[loss].name}/gradient"
        self.addends[loss] = [self._seed(loss)]
        for node in reversed(self.forward.path):
            dys = [self._total(value) for value in node.outputs]
            if all(dy is None for dy in dys):
                continue
            kept = saved.get(node.index, ())
            call = self.forward.call(self.writer, node, saved=kept, dys=dys)
            if dys[0] is None and node.key not in _PARTIAL:
                raise call.error(
                    "reaches the loss through an output other than the first, which has no gradient rule"
                )
            self.writer.prefix = f"{node.label}/gradient"
            rows = zip(node.inputs, RULES[node.key](call), call.wants, strict=False)
            for value, dx, is_wanted in rows:
                if dx is not None and is_wanted:
                    self.addends.setdefault(value, []).append(dx)
        for value in list(self.addends):
            self._total(value)
        return self.totals

    def _seed(self, loss: int) -> Tensor:
        """A one in the shape of the loss.

        Raises:
            GradientError: the loss is not a float, or has more than one element.
        """
        value = self.forward.handle(self.writer, loss)
        assert value is not None
        if value.elem not in FLOAT_ELEMS:
            raise GradientError(f"The loss {value.name!r} is not of a float type.")
        if any(isinstance(dim, int) and dim != 1 for dim in value.dims or ()):
            raise GradientError(
                f"The loss {value.name!r} has the shape {value.dims}: reduce it to one element first."
            )
        if value.dims is None:
            return value.like(1).op("Expand", value.op("Shape"))
        return value.like(1).op("Reshape", [1] * len(value.dims))

    def _total(self, value: int) -> Tensor | None:
        """The gradient of a value, once all its consumers have been visited."""
        if value != ABSENT and value in self.addends:
            addends = self.addends.pop(value)
            if len(addends) > 1:
                self.writer.prefix = f"{self.forward.graph.values[value].name}/gradient"
                addends = [addends[0].op("Add" if len(addends) == 2 else "Sum", *addends[1:])]
            self.totals[value] = addends[0]
        return self.totals.get(value)
