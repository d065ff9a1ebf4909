"""Kernels that a target loses when a model is upgraded to a newer opset."""

from typing import Final

from onnxamp._convert.analysis import Analysis
from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS
from onnxamp._facts.kernels import float_types
from onnxamp._facts.ops import op_facts
from onnxamp._facts.signature import lookup
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import CPU, cpu_of, target_of, with_kernels
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.freedom import Typed, runs_on
from onnxamp._graph.view import ABSENT
from onnxamp._rewrite.passes.upgrade import Obstacle
from onnxamp._rewrite.passes.upgrade_rules import steps_of


def fallen(before: Analysis, after: Analysis) -> str:
    """Return the op types of nodes that the target leaves to the CPU after an upgrade, although it ran them before.

    Types count: where only some nodes of an op have a kernel, the others were on the CPU before.
    """
    graph = before.graph
    target = before.options.target
    lost = set[str]()
    makers = {value.name: value.producer for value in graph.values}
    for index, free in after.problem.freedoms.items():
        node = after.graph.nodes[index]
        if not free.falls_back or node.key in lost:
            continue
        maker = makers.get(node.first_output, ABSENT)
        was_here = maker == ABSENT or runs_on(
            target, Typed.of(graph.nodes[maker], graph.types)
        )
        if was_here:
            lost.add(node.key)
    return ", ".join(sorted(lost))


def lost_kernel(graph: Graph, opset: int, target: str) -> Obstacle | None:
    """Return a node that ONNX Runtime no longer runs in float32 at that opset; None if there is none.

    Nodes that the target leaves to the CPU do run. Without a device, a node that the CPU cannot run cannot be
    validated.
    """
    current = graph.book.opsets[""]
    place = target_of(target)
    places = {target, cpu_of(target)} if place.limits_types else {*with_kernels()}
    places |= {CPU} if place.builds else set()
    for key, nodes in graph.by_key.items():
        node = nodes[0]
        steps = steps_of(key, current, opset)
        if not steps or node.signature is None or key in op_facts().kernel_free:
            continue
        op = steps[-1].op
        version = steps[-1].version
        newer = lookup("", op, opset)
        if newer is None:
            continue
        before = set[str]()
        after = set[str]()
        old = Typed.of(node, graph.types)
        for one in places:
            if newer.has_function:
                runs = runs_on(one, old), runs_on(one, old._replace(signature=newer))
            else:
                then = float_types(one, key, node.signature.since)
                runs = FLOAT in then, FLOAT in float_types(one, op, version)
            before.update([one] if runs[0] else [])
            after.update([one] if runs[1] else [])
        # The CPU is needed to validate the result, and an engine is built from the whole model or not at all.
        lost = {device_of(one) for one in before - after}
        is_needed = any(device == CPU or target_of(device).builds for device in lost)
        if before and (not after or is_needed):
            taker = f"{place.title} does not support it" if place.builds else _UNKNOWN
            return Obstacle(opset, node.label, key, f"{taker} there")
    return None


_UNKNOWN: Final = "ONNX Runtime has no kernel for it"


def lost_low_kernel(graph: Graph, opset: int, target: str) -> Obstacle | None:
    """Return a node that is already in low precision and that the target runs only at the model's own opset."""
    current = graph.book.opsets[""]
    for key, nodes in graph.by_key.items():
        steps = steps_of(key, current, opset)
        signature = nodes[0].signature
        op = steps[-1].op if steps else key
        # The body of a function consists of ops of the new opset.
        has_body = signature is not None and signature.has_function
        newer = lookup("", op, opset) if steps or has_body else None
        if newer is None:
            continue
        for node in nodes:
            kinds = graph.types_of((*node.inputs, *node.outputs))
            if node.signature is None or LOW_TENSORS.keys().isdisjoint(kinds):
                continue
            old = Typed.of(node, graph.types)
            new = old._replace(signature=newer)
            if runs_on(target, old) and not runs_on(target, new):
                why = f"{target} has no kernel for its types there"
                return Obstacle(opset, node.label, key, why)
    return None
