"""Building an engine from a model: what the builder refuses, as findings with the options that cure them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Final

from onnxamp._audit.findings import Audit, Engine, Finding, NodeFacts, ordered
from onnxamp._dtypes import LOW_TYPES
from onnxamp._errors import ArgumentError
from onnxamp._model.model import Model
from onnxamp._ops.tables import read_table
from onnxamp._runtime.building import Refusal, build_engine
from onnxamp._target.versions import BUILDERS

_LOW: Final = frozenset({*(low.name for low in LOW_TYPES.values()), "mixed"})
"""Precisions of nodes that are low in part at least."""


def with_engine(audit: Audit, model: Model, feeds: Mapping[str, Any]) -> Audit:
    """Build an engine from a model, and add to its audit what the builder says.

    Args:
        audit: what is known without building.
        model: the model.
        feeds: inputs whose shapes the engine is for, where the model leaves them open.

    Raises:
        ArgumentError: the audit is for a target that builds no engines.
        RuntimeFailure: the builder is not installed.
    """
    if audit.target not in BUILDERS:
        raise ArgumentError(f"Only for {' and '.join(BUILDERS)} engines are built, not for {audit.target!r}.")
    built = build_engine(model, feeds)
    nodes = {node.node: node for node in audit.nodes}
    said = [_finding(audit.target, built.by, refusal, nodes.get(refusal.node)) for refusal in built.refusals]
    findings = ordered((*said, *audit.findings))
    return replace(audit, findings=findings, engine=Engine(built.by, not built.refusals, built.size))


def _finding(target: str, by: str, refusal: Refusal, node: NodeFacts | None) -> Finding:
    """A refusal, with what to do about it."""
    rule = next((row for row in _rules(target) if row["says"] in refusal.text), None)
    why = f" ({rule['rule']})" if rule is not None else ""
    text = f"{by} refuses it: {refusal.text}{why}"
    if node is None:
        action = str(rule.get("cure", "")) if rule is not None else ""
        return Finding("error", "engine", refusal.node, "", text, action or "Look at the ops that it names.")
    if node.precision in _LOW:
        action = f"Keep it float32: convert with --target {target}, or with --keep-node NAME or --black {node.op}."
    else:
        action = "No precision cures it: replace the op, or load a plugin that has it."
    return Finding("error", "engine", node.node, node.op, text, action)


@cache
def _rules(target: str) -> Sequence[Mapping[str, str]]:
    """Rules of strong typing, by what the builder says where they are broken."""
    rules: Sequence[Mapping[str, str]] = read_table(f"targets/{target}").get("rules", ())
    return rules
