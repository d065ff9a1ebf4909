"""Findings about targets that build engines: nodes that a builder may refuse, and its answers if it is asked."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Final

from onnxamp._audit import Audit, BuiltEngine, Finding, NodeFacts, finding, ordered
from onnxamp._base.errors import ArgumentError
from onnxamp._decide.builder import Builder, builder_of
from onnxamp._facts.dtypes import FLOAT, FORMATS, LOW_TENSORS
from onnxamp._facts.tables import target_table
from onnxamp._facts.targets import target_of, targets
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node
from onnxamp._model.model import Model
from onnxamp._runtime.building import Refusal, build_engine


def refused_casts(graph: Graph, target: str) -> Iterator[Finding]:
    """Yield the nodes around Casts that the target's builder may refuse. Complexity: linear in nodes."""
    builder = builder_of(graph, target)
    for node, position in builder.constant_reads():
        text = f"input {position} is a constant: {target}'s builder accepts none there"
        yield finding(node, "error", "kernel", text, "Put an Identity before it.")
    for node, why, action in _doubts(builder):
        text = f"{why}: {target}'s builder may refuse that"
        yield finding(
            node, "warning", "kernel", text, action.replace("TARGET", target)
        )


def _doubts(builder: Builder) -> Iterator[tuple[Node, str, str]]:
    """Yield the nodes that a builder may refuse, with the reason and the remedy."""
    graph = builder.graph
    types = builder.graph.types
    for node in builder.stacked_up():
        if low := LOW_TENSORS.get(types[node.outputs[0]] or ""):
            why = f"a loop stacks its {low.name} results unchanged"
            yield node, why, "Convert for TARGET, or keep it in float32."
    for node, first, second in builder.split_scales():
        if types[first.outputs[0]] != types[second.outputs[0]]:
            why = "its factors are dequantized to different types"
            yield node, why, "Give both scales one type."
    for first, node in builder.shared_factors():
        if types[node.outputs[0]] != types[first.outputs[0]]:
            why = "it shares a dequantized factor with a product of another type"
            yield node, why, "Give both products one type."
    for state, moved in builder.states:
        loop = graph.producer(state)
        uses = chain.from_iterable(map(graph.consumers, moved))
        is_cast = any(node.key == "Cast" for node, _ in uses)
        if loop is not None and is_cast:
            action = "Convert for TARGET, or give all readers of the state one type."
            yield loop, "its body moves a state that is cast after the loop", action
    for read in builder.reads:
        cast = graph.producer(read.value, "Cast")
        if cast is None or types[read.value] != FLOAT:
            continue
        if low := LOW_TENSORS.get(types[cast.input(0)] or ""):
            what = "stacks up" if read.owner.bodies else "reads"
            action = "Convert for TARGET, or keep the input of the Cast in float32 (--keep-fp32 NAME)."
            yield read.owner, f"it {what} a float32 Cast of {low.name}", action


_LOW: Final = frozenset({*FORMATS, "mixed"})
"""Precisions of nodes that are at least partly low."""


def with_engine(audit: Audit, model: Model, feeds: Mapping[str, Any]) -> Audit:
    """Build an engine from a model, and add the builder's answers to the model's audit.

    Args:
        audit: the audit without an engine.
        model: the model.
        feeds: inputs that fix the shapes that the model leaves open.

    Raises:
        ArgumentError: the audit is for a target that builds no engines.
        RuntimeFailure: the builder is not installed.
    """
    if not target_of(audit.target).builds:
        builders = [name for name, one in targets().items() if one.builds]
        raise ArgumentError(
            f"No engine can be built for {audit.target!r}: choose {' or '.join(builders)}."
        )
    built = build_engine(model, feeds)
    nodes = {node.node: node for node in audit.nodes}
    refusals = [
        _finding(audit.target, built.by, refusal, nodes.get(refusal.node))
        for refusal in built.refusals
    ]
    findings = ordered((*refusals, *audit.findings))
    return replace(
        audit,
        findings=findings,
        engine=BuiltEngine(built.by, not built.refusals, built.size),
    )


def _finding(
    target: str, by: str, refusal: Refusal, node: NodeFacts | None
) -> Finding:
    """Return the finding for a refusal, with the remedy."""
    rows: Sequence[Mapping[str, str]] = target_table(target, "builder")["refusals"]
    # The first row whose words are in the message explains it.
    rule = next((row for row in rows if row["says"] in refusal.text), {})
    why = f" ({rule['rule']})" if rule else ""
    text = f"{by} refuses it: {refusal.text}{why}"
    if node is None:
        action = rule.get("cure") or "Check the ops that the message names."
        return finding(refusal.node, "error", "engine", text, action)
    if node.precision in _LOW:
        action = f"Keep it in float32: convert with --target {target}, or with --keep-node NAME or --black {node.op}."
    else:
        action = (
            "No precision fixes this: replace the op, or load a plugin that has it."
        )
    return Finding("error", "engine", node.node, node.op, text, action)
