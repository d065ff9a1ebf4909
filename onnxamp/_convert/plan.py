"""The decision as data: printed, saved as JSON, and replayed on the same model or a re-exported one."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.pins import variable_keys
from onnxamp._errors import ArgumentError
from onnxamp._graph.view import ABSENT
from onnxamp._model.storage import write_file

FORMAT = 1
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What was decided for one variable. ``key`` names scope, node and type parameter."""

    key: str
    op: str
    low: bool
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class HazardRow:
    """A hazard that fired: node, what is wrong there, and whether the node is low all the same."""

    node: str
    op: str
    low: bool
    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Which float lives in which precision, and why. ``str(plan)`` is a table; ``cost`` is that of the cut."""

    level: str
    dtype: str
    target: str
    keep_io_types: bool | tuple[str, ...]
    freeze_defaults: bool
    keep_functions: bool
    opset: int | None
    """The opset that the model was upgraded to on request."""
    rows: tuple[PlanRow, ...]
    hazards: tuple[HazardRow, ...]
    heeded: bool
    """Whether the hazards were kept in float32, or only noted (``hazards=False``)."""
    casts: int
    cost: int
    warnings: tuple[str, ...]
    fold: bool = False
    """Whether what is written out was folded before."""

    def decisions(self) -> dict[str, bool]:
        """Variable key -> whether it is low."""
        return {row.key: row.low for row in self.rows}

    def counts(self) -> Counter[tuple[str, bool]]:
        """(op type, low) -> number of variables."""
        return Counter((row.op, row.low) for row in self.rows)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON.

        Raises:
            OutputError: the file cannot be written.
        """
        write_file(Path(path), (json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n").encode())

    def __str__(self) -> str:
        head = f"{self.level} {self.dtype} for {self.target}: {self.casts} new Casts, cost {self.cost}"
        width = max((len(row.key) for row in self.rows), default=0)
        body = (
            f"{row.key:<{width}}  {self.dtype if row.low else 'float32':<8}  {row.op}  {row.reason}"
            + (f": {row.detail}" if row.detail else "")
            for row in self.rows
        )
        return "\n".join([head, *body])


def make_plan(analysis: Analysis, opset: int | None = None) -> Plan:
    """The plan that an analysis amounts to; ``opset`` is what the model was to be upgraded to before."""
    view, rows, variables = analysis.view, [], analysis.terms.variables
    for key, variable, verdict in zip(
        variable_keys(view, variables), variables, analysis.decision.verdicts, strict=True
    ):
        op = "initializer" if variable.node == ABSENT else view.nodes[variable.node].key
        rows.append(PlanRow(key, op, verdict.low, verdict.reason.value, verdict.detail))
    hazards = tuple(
        HazardRow(view.nodes[h.node].label, view.nodes[h.node].key, _is_low(analysis, h.node), h.reason.value, h.detail)
        for h in analysis.hazards
        if analysis.terms.of_node.get(h.node)
    )
    policy = analysis.policy
    return Plan(
        str(policy.level), policy.low.name, policy.target,
        policy.keep_io if isinstance(policy.keep_io, bool) else tuple(sorted(policy.keep_io)),
        policy.freeze_defaults, policy.keep_functions, opset, tuple(rows), hazards, policy.hazards,
        len(analysis.edits.casts), analysis.decision.cost, analysis.pins.warnings, policy.fold,
    )  # fmt: skip


def _is_low(analysis: Analysis, node: int) -> bool:
    """Whether any part of the node is low."""
    return any(analysis.decision.low[variable] for variable in analysis.terms.of_node[node].values())


def load_plan(path: str | Path) -> Plan:
    """Read a plan that :meth:`Plan.save` wrote.

    Raises:
        ArgumentError: the file is missing, or no plan.
    """
    try:
        data: Mapping[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
        if data["format"] != FORMAT:
            raise ArgumentError(f"The plan {str(path)!r} has format {data['format']!r}, this onnxamp reads {FORMAT}.")
        rows = tuple(PlanRow(**row) for row in data["rows"])
        hazards = tuple(HazardRow(**row) for row in data["hazards"])
        kept = data["keep_io_types"]
        return Plan(
            data["level"], data["dtype"], data["target"], kept if isinstance(kept, bool) else tuple(kept),
            bool(data["freeze_defaults"]), bool(data["keep_functions"]),
            None if data["opset"] is None else int(data["opset"]), rows, hazards, bool(data["heeded"]),
            int(data["casts"]), int(data["cost"]), tuple(data["warnings"]), bool(data.get("fold")),
        )  # fmt: skip
    except OSError as error:
        raise ArgumentError(f"Cannot read the plan {str(path)!r}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, UnicodeDecodeError) as error:
        if isinstance(error, ArgumentError):
            raise
        raise ArgumentError(f"{str(path)!r} is not a plan of onnxamp's: write one with --save-plan.") from None
