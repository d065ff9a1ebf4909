"""The decision as data: printed, saved as JSON, and replayed on the same model or a re-exported one."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.pins import variable_names
from onnxamp._errors import ArgumentError
from onnxamp._graph.view import ABSENT
from onnxamp._model.storage import write_file
from onnxamp._options.options import Options

FORMAT = 2
"""Version of the JSON form."""


@dataclass(frozen=True, slots=True)
class PlanRow:
    """What was decided for one precision variable.

    ``key`` names it: scope, node (or weight), type parameter, and ``rank`` among variables that share all three.
    """

    key: str
    scope: str
    node: str
    param: str
    rank: int
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


@dataclass(frozen=True)
class Plan:
    """Which float lives in which precision, and why. ``str(plan)`` is a table; ``cost`` is that of the cut."""

    options: Options
    """What was asked for; replaying the plan needs the lists no more."""
    rows: tuple[PlanRow, ...]
    hazards: tuple[HazardRow, ...]
    casts: int
    cost: int
    warnings: tuple[str, ...]

    @property
    def level(self) -> str:
        """The level, as in "O2"."""
        return str(self.options.level)

    @property
    def dtype(self) -> str:
        """The low-precision type: "float16" or "bfloat16"."""
        return self.options.dtype

    @property
    def target(self) -> str:
        """Where the result will run, as in "cuda"."""
        return self.options.target

    def decisions(self) -> dict[str, bool]:
        """Variable key -> whether it is low."""
        return {row.key: row.low for row in self.rows}

    def counts(self) -> Counter[tuple[str, bool]]:
        """(op type, low) -> number of variables."""
        return Counter((row.op, row.low) for row in self.rows)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON.

        Raises:
            OutputError: the file cannot be written.
        """
        data = {
            "format": FORMAT, "options": self.options.as_json(), "rows": [asdict(row) for row in self.rows],
            "hazards": [asdict(row) for row in self.hazards], "casts": self.casts, "cost": self.cost,
            "warnings": self.warnings,
        }  # fmt: skip
        write_file(Path(path), (json.dumps(data, indent=1) + "\n").encode())

    def __str__(self) -> str:
        head = f"{self.level} {self.dtype} for {self.target}: {self.casts} new Casts, cost {self.cost}"
        width = max((len(row.key) for row in self.rows), default=0)
        body = (
            f"{row.key:<{width}}  {self.dtype if row.low else 'float32':<8}  {row.op}  {row.reason}"
            + (f": {row.detail}" if row.detail else "")
            for row in self.rows
        )
        return "\n".join([head, *body])


def make_plan(analysis: Analysis) -> Plan:
    """The plan that an analysis amounts to."""
    graph, rows, variables = analysis.graph, [], analysis.ports.variables
    names = variable_names(graph, variables)
    for name, variable, verdict in zip(names, variables, analysis.decision.verdicts, strict=True):
        op = "initializer" if variable.node == ABSENT else graph.nodes[variable.node].key
        decided = op, verdict.low, verdict.reason.value, verdict.detail
        rows.append(PlanRow(str(name), name.scope, name.node, name.param, name.rank, *decided))
    hazards = tuple(
        HazardRow(
            graph.nodes[h.node].label, graph.nodes[h.node].key, _is_low(analysis, h.node), h.reason.value, h.detail
        )
        for h in analysis.problem.hazards
        if analysis.ports.of_node.get(h.node)
    )
    return Plan(
        analysis.options, tuple(rows), hazards, len(analysis.edits.casts), analysis.decision.cost,
        analysis.pins.warnings,
    )  # fmt: skip


def _is_low(analysis: Analysis, node: int) -> bool:
    """Whether any part of the node is low."""
    return any(analysis.decision.low[variable] for variable in analysis.ports.of_node[node].values())


def load_plan(path: str | PathLike[str]) -> Plan:
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
        options, warnings = Options.from_json(data["options"]), tuple(data["warnings"])
        return Plan(options, rows, hazards, int(data["casts"]), int(data["cost"]), warnings)
    except OSError as error:
        raise ArgumentError(f"Cannot read the plan {str(path)!r}: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
        if isinstance(error, ArgumentError) and "format" in str(error):
            raise
        raise ArgumentError(f"{str(path)!r} is not a plan of onnxamp's: write one with --save-plan.") from None
