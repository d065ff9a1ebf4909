"""Reverse mode: the forward pass, then the gradients from the loss back to the wanted values."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from onnx import ModelProto, TensorProto, numpy_helper

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    GradientError,
    OpsetError,
)
from onnxamp._base.public import no_collections
from onnxamp._facts.dtypes import FLOAT_ELEMS, elem_of
from onnxamp._facts.ops import op_facts
from onnxamp._gradients import attention, linear, movement, pointwise, quantized
from onnxamp._gradients.constants import small_constants
from onnxamp._gradients.recurrent import UNROLLED, checked_length, unroll
from onnxamp._gradients.writer import MIN_OPSET, Call, Forward, Rule, Tensor, Writer
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import symbolic_shapes
from onnxamp._graph.view import ABSENT, Node, inline_functions
from onnxamp._graph.wiring import wire
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import opset_imports
from onnxamp._options.doors import door
from onnxamp._options.values import checked_names

RULE_MODULES: Final = (attention, linear, movement, pointwise, quantized)
"""The modules with the rules."""

RULES: Final[Mapping[str, Rule]] = {
    op: rule for module in RULE_MODULES for op, rule in module.RULES.items()
}
"""Rules by key of the op."""

FORWARD: Final[Mapping[str, Forward]] = {
    **linear.FORWARD,
    **pointwise.FORWARD,
}
"""Ops whose forward pass stores values for the rule, or is decomposed."""

ALWAYS: Final = frozenset({"BatchNormalization"})
"""Those of them that may have no kernel, and are therefore decomposed even off the path to the loss."""

ROUNDS: Final = frozenset({"Ceil", "Floor", "Round"})
"""Ops that round to whole numbers."""
_STEPS: Final = ROUNDS | {"Hardmax", "Sign"}
FLAT: Final = op_facts().random | op_facts().representable | _STEPS
"""Ops whose derivative is zero or undefined everywhere: no gradient flows through them.

Outputs that are not floats also end the path, and need no entry.
"""

_MOVABLE: Final = FLOAT_ELEMS | {TensorProto.UNDEFINED}
"""Element types of values that may have a gradient: values of unknown type may be floats."""

_SOURCES: Final = {"OneHot": (2,)}
"""Op -> the inputs that it has gradients for, where others are floats as well. Rules of other ops name theirs."""

_PARTIAL: Final = pointwise.SKIPPED | {"Split"}
"""Ops whose rules do not need the gradient of the first output."""

_DEEPEST: Final = 8
"""The maximum nesting depth of function bodies."""


class Pass:
    """A model with a path for gradients, and the gradients that are written so far, by value index.

    Args:
        graph: the model.
        path: the nodes between wanted values and the loss, in order.
        moved: values that depend on a wanted value through floats.
        lacks: features that the intended engine cannot run, as in the ``engine.toml`` of a target.
        rules: the rules by key of the op.

    Complexity: linear, except for onnx's shape inference.
    """

    def __init__(
        self,
        graph: Graph,
        path: Sequence[Node],
        moved: Container[int],
        lacks: Container[str],
        rules: Mapping[str, Rule] = RULES,
    ) -> None:
        self.graph = graph
        self.path = path
        self.moved = moved
        self.rules = rules
        self.writer = Writer(GraphEditor(graph), lacks=lacks)
        self.dims = graph.dims
        self.known = small_constants(graph, self.dims)
        """Small constants by name."""
        self.addends: dict[int, list[Tensor]] = {}
        """Gradients from the consumers visited so far."""
        self.shares: dict[tuple[int, int], list[Tensor]] = {}
        """The contribution of each consumer to the gradient of each value."""
        self.totals: dict[int, Tensor] = {}
        producers = {
            name: graph.producer(graph.scopes[0].names[name]) for name in self.known
        }
        computed = {
            name: numpy_helper.from_array(self.known[name], name)
            for name, node in producers.items()
            if node is not None and node.key != "Constant"
        }
        if computed:
            self.dims = symbolic_shapes(graph, computed)

    def handle(self, value: int) -> Tensor | None:
        """Return the handle of a value for rules; None for an absent value."""
        if value == ABSENT:
            return None
        name = self.graph.values[value].name
        elem = elem_of(self.graph.types[value])
        return Tensor(self.writer, name, elem, self.dims[value])

    def call(self, node: Node, **more: Any) -> Call:
        """Return the handle of a node for rules."""
        inputs = tuple(map(self.handle, node.inputs))
        outputs = tuple(map(self.handle, node.outputs))
        return Call(self.writer, node, inputs, outputs, self.known, **more)

    def can_unroll(self, node: Node) -> bool:
        """Return whether a recurrent node can be written as its steps."""
        call = self.call(node)
        try:
            _check_form(call)
            checked_length(call)
        except GradientError:
            return False
        return True

    def unrolled(self, nodes: Iterable[Node]) -> ModelProto:
        """Return the model with these recurrent nodes unrolled."""
        for node in nodes:
            self.writer.prefix = node.label
            call = self.call(node)
            _check_form(call)
            unroll(call)
            self.writer.replace(node.index)
        return self.writer.finish()

    def write_forward(self) -> dict[int, tuple[Tensor, ...]]:
        """Write the changes of the forward pass; return the values that nodes store for their rules, by node index."""
        saved = {}
        on_path = {node.index for node in self.path}
        for node in self.graph.order:
            always = node.key in ALWAYS and node.scope == 0
            if node.key in FORWARD and (always or node.index in on_path):
                self.writer.prefix = node.label
                saved[node.index] = FORWARD[node.key](self.call(node))
                self.writer.replace(node.index)
        return saved

    def write_gradients(
        self,
        seeds: Callable[[], Mapping[int, Tensor]],
        otherwise: Rule | None = None,
    ) -> Mapping[int, Tensor]:
        """Write the gradients of all values on the path.

        Args:
            seeds: writes the gradients from outside, by value, with which the pass starts.
            otherwise: the rule of nodes that have none, or whose rule fails; None to fail there. If given, infinities
                and NaN count as zero, so that they do not spread.

        Raises:
            GradientError: a rule fails for a node, and there is no other rule.
        """
        saved = self.write_forward()
        self.addends |= {value: [seed] for value, seed in seeds().items()}
        # From the end, all consumers of a node have added their gradients when the node is reached.
        for node in reversed(self.path):
            dys = [self._total(value) for value in node.outputs]
            if all(dy is None for dy in dys):
                continue
            call = self.call(node, saved=saved.get(node.index, ()), dys=dys)
            self.writer.prefix = f"{node.label}/gradient"
            try:
                addends = self._addends(call, self._rule_of(call))
            except GradientError:
                if otherwise is None:
                    raise
                addends = self._addends(call, otherwise)
            # Other rules divide by nothing that may be zero, and need no nodes that look for infinities.
            if otherwise is not None and node.key in pointwise.SINGULAR:
                addends = [(value, finite(addend)) for value, addend in addends]
            for value, addend in addends:
                self.addends.setdefault(value, []).append(addend)
                self.shares.setdefault((value, node.index), []).append(addend)
        for value in list(self.addends):
            self._total(value)
        return self.totals

    def _addends(self, call: Call, rule: Rule) -> list[tuple[int, Tensor]]:
        """Return the gradients that a rule writes for those inputs of a node that move."""
        grads = rule(call)
        if isinstance(grads, Tensor):
            grads = [grads]
        addends = []
        for value, dx in zip(call.node.inputs, grads, strict=False):
            if dx is not None and value in self.moved:
                addends.append((value, dx() if callable(dx) else dx))
        return addends

    def _rule_of(self, call: Call) -> Rule:
        """Return the rule of a node.

        Raises:
            GradientError: there is none, or the loss depends on an output of the node that the rule does not cover.
        """
        if call.node.key not in self.rules:
            raise call.error("has no gradient rule")
        if call.dys[0] is None and call.node.key not in _PARTIAL:
            raise call.error(
                "reaches the loss through an output other than the first, which has no gradient rule"
            )
        _check_form(call)
        return self.rules[call.node.key]

    def seed(self, loss: int) -> Tensor:
        """Return a one in the shape of the loss.

        Raises:
            GradientError: the loss is not a float, or may have more than one element.
        """
        self.writer.prefix = f"{self.graph.values[loss].name}/gradient"
        value = self.handle(loss)
        assert value is not None
        if value.elem not in FLOAT_ELEMS:
            raise GradientError(f"The loss {value.name!r} is not of a float type.")
        if any(dim != 1 for dim in value.dims or ()):
            shape = ", ".join(map(str, value.dims or ()))
            raise GradientError(
                f"The loss {value.name!r} has the shape [{shape}]: reduce it to one element first."
            )
        if value.dims is None:
            return value.like(1).op("Expand", value.op("Shape"))
        return value.like(1).op("Reshape", [1] * len(value.dims))

    def _total(self, value: int) -> Tensor | None:
        """Return the gradient of a value once all its consumers have been visited."""
        if value != ABSENT and value in self.addends:
            addends = self.addends.pop(value)
            if len(addends) > 1:
                self.writer.prefix = f"{self.graph.values[value].name}/gradient"
                addends = [
                    addends[0].op("Add" if len(addends) == 2 else "Sum", *addends[1:])
                ]
            self.totals[value] = addends[0]
        return self.totals.get(value)


def _check_form(call: Call) -> None:
    """Refuse a node with attributes or inputs for which the rule of its op does not hold."""
    for name, allowed in pointwise.FORMS.get(call.node.key, {}).items():
        value = call.attribute(name, allowed[0])
        if value not in allowed:
            raise call.error(
                f"has {name} = {value!r}, for which there is no gradient rule"
            )
    for position in pointwise.WITHOUT.get(call.node.key, ()):
        if call.has(position):
            raise call.error(
                f"reads {call[position].name!r} as input {position}, for which there is no gradient rule"
            )


def finite(x: Tensor) -> Tensor:
    """Return a tensor with zeros where it holds infinities and NaN."""
    # The difference is zero for all numbers, and NaN for both: one op instead of IsInf, IsNaN and Or.
    return (x - x).op("IsNaN").where(0.0, x)


def expand(
    model: ModelProto, loss: str, wanted: Sequence[str], lacks: Container[str] = ()
) -> Pass:
    """Return the model, expanded until each op between the wanted values and the loss has a rule.

    Raises:
        GradientError: an op has neither a rule nor a function body.
        ModelError: a function cannot be inlined.
    """
    model = inline_functions(model, partly=True)
    # Each round inlines the functions that the last one brought in: one level of function bodies.
    for _ in range(_DEEPEST):
        graph = Graph.of(model)
        path, moved = find_path(
            graph, [value_of(graph, name) for name in wanted], value_of(graph, loss)
        )
        lacking = [node for node in path if node.key not in RULES]
        if not lacking:
            return Pass(graph, path, moved, lacks)
        for node in lacking:
            _check(node)
        unrolled = [node for node in lacking if node.key in UNROLLED]
        if unrolled:
            model = Pass(graph, path, moved, lacks).unrolled(unrolled)
        else:
            ops = {(node.proto.domain, node.proto.op_type) for node in lacking}
            model = inline_functions(model, ops)
    raise GradientError(
        f"Function bodies are nested deeper than {_DEEPEST} levels: inline them first."
    )


def value_of(graph: Graph, name: str) -> int:
    """Return the index of a value of the main graph.

    Raises:
        GradientError: there is no such value.
    """
    if name not in graph.scopes[0].names:
        raise GradientError(f"The model has no value {name!r} to differentiate.")
    return graph.scopes[0].names[name]


def _check(node: Node) -> None:
    what = (
        f"Node {node.label!r} ({node.key}) lies between the loss and a trained weight"
    )
    if node.bodies:
        raise GradientError(
            f"{what}, and has subgraphs, for which there is no gradient rule: unroll or inline it first."
        )
    if node.key not in UNROLLED and (
        node.signature is None or not node.signature.has_function
    ):
        raise GradientError(
            f"{what}, and has no gradient rule: replace it, or do not train the weights before it."
        )


def find_path(
    graph: Graph, wanted: Iterable[int], loss: int
) -> tuple[list[Node], set[int]]:
    """Return the nodes of the main graph through which the loss depends on a wanted value, by floats.

    Returns:
        The nodes in order, and the values that depend on a wanted value. Complexity: linear.
    """
    needs = dict(wire(graph).needs)
    for node in graph.nodes_of(_SOURCES):
        if node.index in needs:
            needs[node.index] = node.inputs_at(_SOURCES[node.key])
    moved = set(wanted)
    movers = list[Node]()
    for node in (node for node in graph.order if node.index in needs):
        if node.key not in FLAT and not moved.isdisjoint(needs[node.index]):
            movers.append(node)
            moved.update(
                value
                for value in node.writes
                if elem_of(graph.types[value]) in _MOVABLE
            )
    needed = {loss} & moved
    between = []
    for node in reversed(movers):
        if not needed.isdisjoint(node.outputs):
            between.append(node)
            needed.update(moved.intersection(needs[node.index]))
    return between[::-1], moved


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


@door
def add_gradients(model: ModelSource, loss: str, wanted: Iterable[str]) -> Gradients:
    """Extend a model with the gradients of one of its values with respect to others.

    The forward pass stays the same, with three exceptions. Ops without a gradient rule are replaced by their function
    bodies or, if they are recurrent, unrolled; batch normalization in training mode is decomposed; and MaxPool also
    outputs its indices.

    Args:
        model: a ModelProto, a path or an onnx-graphsurgeon Graph, at opset 18 or later; it is not changed.
        loss: name of a float value with one element.
        wanted: names of float inputs, initializers or other values.

    Returns:
        A new model with the same inputs and outputs, and a further output per wanted value, with its shape and dtype.

    Raises:
        ArgumentError: ``wanted`` is empty.
        ArgumentTypeError: an argument has the wrong type.
        GradientError: an op between the loss and a wanted value has no gradient rule, the loss does not depend on a
            wanted value, a wanted value is not of a float type, or the loss may have more than one element.
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
    if not isinstance(loss, str):
        raise ArgumentTypeError(
            f"loss must be the name of a value, not {type(loss).__name__}."
        )
    names = checked_names("wanted", wanted)
    return differentiate(Model.of(model).embedded(), loss, names)


@no_collections()
def differentiate(
    model: ModelProto, loss: str, wanted: Iterable[str], lacks: Container[str] = ()
) -> Gradients:
    """Run :func:`add_gradients` on a well-formed model with its weights. Linear in nodes, except for shape inference.

    ``lacks`` has the features that the intended engine cannot run, as in the ``engine.toml`` of a target.
    """
    names = list(dict.fromkeys(wanted))
    if not names:
        raise ArgumentError("Name at least one value whose gradient is wanted.")
    version = opset_imports(model)[""]
    if version < MIN_OPSET:
        raise OpsetError(
            f"Gradients need opset {MIN_OPSET} or later; the model has opset {version}: upgrade it first."
        )
    expanded = expand(model, loss, names, lacks)
    graph = expanded.graph
    for name in names:
        elem = elem_of(graph.types[value_of(graph, name)])
        if elem not in _MOVABLE:
            raise GradientError(
                f"The value {name!r}, whose gradient is wanted, is not of a float type."
            )
    start = value_of(graph, loss)
    gradients = expanded.write_gradients(lambda: {start: expanded.seed(start)})
    writer = expanded.writer
    outputs = dict[str, str]()
    for name in names:
        value = value_of(graph, name)
        if value not in gradients:
            raise GradientError(
                f"The loss {loss!r} does not depend on {name!r}, or only through ops whose gradient is zero."
            )
        writer.prefix = outputs[name] = writer.editor.names.fresh(f"{name}/gradient")
        gradient = gradients[value].op("Identity", into=outputs[name])
        writer.output(gradient, expanded.dims[value])
    return Gradients(writer.finish(), outputs)
