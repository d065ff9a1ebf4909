"""Values that control flow passes into bodies, out of them, and from one iteration of a loop to the next.

:func:`wire` tells which values of the main graph each of its nodes needs, also through bodies.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx.checker
import onnx.defs
import onnx.inliner
from onnx import ModelProto, NodeProto, helper

from onnxamp._errors import ModelError
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._model.protos import copy_without, opset_imports
from onnxamp._model.wellformed import check_functions
from onnxamp._ops.facts import attribute


def body_sources(node: Node, body_inputs: int) -> list[int]:
    """For each input of the node's body, the position of the node input that feeds it (ABSENT: a counter).

    Loop passes (iteration, condition, state...), Scan and SequenceMap pass their inputs as they stand.
    """
    if node.key == "Loop":
        return [ABSENT, 1, *range(2, body_inputs)][:body_inputs]
    offset = (
        len(node.inputs) - body_inputs if node.key == "Scan" else 0
    )  # Scan-8 has a leading sequence_lens
    return [position + offset for position in range(body_inputs)]


def body_targets(node: Node, body_outputs: int) -> list[int]:
    """For each output of the node's body, the node output that it becomes (ABSENT for Loop's condition)."""
    return [
        position - 1 if node.key == "Loop" else position
        for position in range(body_outputs)
    ]


def carried(view: View, node: Node) -> list[tuple[int, int]]:
    """(node input, node output) pairs that are the initial and the final value of a loop-carried state."""
    if node.key == "Loop":
        return [(2 + k, k) for k in range(max(len(node.inputs) - 2, 0))]
    if node.key == "Scan":
        scans = int(attribute(node.proto, "num_scan_inputs") or 0)
        body_inputs = len(view.scopes[node.bodies[0][1]].inputs) if node.bodies else 0
        offset = len(node.inputs) - body_inputs
        return [(offset + k, k) for k in range(body_inputs - scans)]
    return []


def transfers(view: View, node: Node) -> Iterator[tuple[int, int]]:
    """Pairs (source, result) of values, ABSENT for none, that If, Loop or Scan passes on: into bodies and out of them,
    and from one turn of a loop to the next.
    """
    states = carried(view, node)
    for source, target in states:
        yield node.input(source), node.output(target)
    for _, body in node.bodies:
        scope = view.scopes[body]
        sources = body_sources(node, len(scope.inputs))
        targets = body_targets(node, len(scope.outputs))
        entering = {
            source: inner for inner, source in zip(scope.inputs, sources, strict=True)
        }
        leaving = {
            target: inner for inner, target in zip(scope.outputs, targets, strict=True)
        }
        yield from (
            (node.input(source), inner)
            for source, inner in entering.items()
            if source >= 0
        )
        yield from ((inner, node.output(target)) for target, inner in leaving.items())
        yield from (
            (leaving.get(target, ABSENT), entering.get(source, ABSENT))
            for source, target in states
        )


def inline_functions(
    model: ModelProto,
    ops: Collection[tuple[str, str]] | None = None,
    *,
    partly: bool = False,
) -> ModelProto:
    """Replace function calls by the bodies of the functions; the model itself if there is nothing to inline.

    onnx's inliner serializes the model, so it runs on a copy without the weights. The copy declares them as inputs, so
    that the inliner knows their types and avoids their names.

    Args:
        model: the model; it is not changed.
        ops: (domain, op type) of ops to replace by the function bodies of their schemas, at the model's opset; None for
            the model's own functions.
        partly: return a model that still calls functions that cannot be inlined, instead of failing.

    Raises:
        ModelError: a function calls itself, calls grow beyond measure, or a function cannot be inlined.
    """
    if ops is None and not model.functions:
        return model
    check_functions(model)
    shell = copy_without(model, "initializer")
    listed = {entry.name for entry in model.graph.input}
    weights = (
        tensor for tensor in model.graph.initializer if tensor.name not in listed
    )
    shell.graph.input.extend(
        helper.make_tensor_value_info(t.name, t.data_type, tuple(t.dims))
        for t in weights
    )
    for node in shell.graph.node:
        if ops is not None and (node.domain, node.op_type) in ops:
            _fill_defaults(node, opset_imports(model).get(node.domain, 1))
    try:
        if ops is None:
            result = onnx.inliner.inline_local_functions(shell, convert_version=True)
        else:
            result = onnx.inliner.inline_selected_functions(
                shell, sorted(ops), inline_schema_functions=True
            )
    except (onnx.checker.ValidationError, RuntimeError) as error:
        raise ModelError(
            f"The functions of {model.graph.name!r} cannot be inlined: {error}"
        ) from error
    if ops is None and result.functions and not partly:
        function = result.functions[0]
        raise ModelError(
            f"The model-local function {function.domain}::{function.name} cannot be inlined, so its rounding cannot be"
            " emulated: inline it in the model first."
        )
    del result.graph.input[:]
    result.graph.input.extend(model.graph.input)
    result.graph.initializer.extend(model.graph.initializer)
    return result


def _fill_defaults(node: NodeProto, version: int) -> None:
    """Write the schema's default attributes into a node, because the inliner drops some of them."""
    given = {item.name for item in node.attribute}
    for name, item in onnx.defs.get_schema(
        node.op_type, version, node.domain
    ).attributes.items():
        if name not in given and item.default_value.type:
            node.attribute.append(item.default_value)


@dataclass(frozen=True, slots=True)
class Wiring:
    """The main-graph values that main-graph nodes need."""

    needs: Mapping[int, Sequence[int]]
    """Main-graph node -> main-graph values that it or its bodies read or return."""
    readers: Mapping[int, Sequence[int]]
    """Main-graph value -> main-graph nodes that need it."""
    outermost: Sequence[int]
    """Node of any scope -> the main-graph node that contains it, or the node itself."""


def wire(view: View) -> Wiring:
    """Resolve the main graph. Complexity: linear in nodes and reads of all scopes."""
    containers = [ABSENT] * len(view.scopes)
    for scope in view.scopes[1:]:  # a scope comes after the one around it
        containers[scope.index] = (
            scope.owner if scope.parent == 0 else containers[scope.parent]
        )
    outermost = [
        node.index if node.scope == 0 else containers[node.scope] for node in view.nodes
    ]
    needs: dict[int, dict[int, None]] = {index: {} for index in view.scopes[0].nodes}
    readers: dict[int, dict[int, None]] = {}
    for value in view.values:
        if value.scope == 0:
            returned = (
                containers[scope]
                for scope, _ in view.results[value.index]
                if scope != 0
            )
            for node in (
                *(outermost[node] for node, _ in view.uses[value.index]),
                *returned,
            ):
                needs[node][value.index] = None
                readers.setdefault(value.index, {})[node] = None
    return Wiring(
        {node: tuple(values) for node, values in needs.items()},
        {value: tuple(nodes) for value, nodes in readers.items()},
        outermost,
    )
