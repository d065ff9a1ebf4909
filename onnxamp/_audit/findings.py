"""What an audit returns: frozen records, which the reports print and save. See :mod:`onnxamp._audit`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong or costs time.

    ``severity``: "error" (it will not load, or is known to break), "warning" (it may break or is slow), "note".
    ``kind``: "type", "opset", "kernel", "fallback", "cast", "fold", "hazard", "weight", "schema". ``node`` is empty
    where the whole model is meant. ``text`` is the same for findings of one sort; ``action`` says what to do, or is
    empty.
    """

    severity: str
    kind: str
    node: str
    op: str
    text: str
    action: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A node as it will run: ``precision`` is "float16", "bfloat16", "float32", "float64", "mixed" or "no floats".

    ``provider`` is where the target runs it: "CUDA", "CPU", "none" where it has no kernel at all, and "" where that is
    unknown, or where it is computed on the host once and for all while the model is loaded.
    """

    position: int
    node: str
    op: str
    scope: str
    """Name of the body it is in ("loop1.body"), empty in the main graph."""
    precision: str
    provider: str


@dataclass(frozen=True, slots=True)
class Casts:
    """Cast traffic of one run, by estimate: Casts between floats, what they move, and those that cancel each other."""

    count: int
    bytes: int
    redundant: int


@dataclass(frozen=True, slots=True)
class Audit:
    """All that is known of a model before it runs."""

    target: str
    opsets: Mapping[str, int]
    nodes: tuple[NodeFacts, ...]
    findings: tuple[Finding, ...]
    casts: Casts
    weight_bytes: Mapping[str, int]
    """Element type -> bytes of weights."""
