"""Plans: decisions as data, to print, save as JSON, and replay on the same model or a new export of it."""

import json
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from os import PathLike
from typing import Any, Final, TypeVar

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, printable
from onnxamp._base.paths import as_path, cannot_read, reason_of
from onnxamp._base.public import Shown
from onnxamp._base.records import record
from onnxamp._base.state import as_data, from_data
from onnxamp._convert.analysis import Analysis
from onnxamp._decide.kinds import Hazard
from onnxamp._decide.variables.names import variable_names
from onnxamp._decide.verdicts import reason_text
from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.quantized import Quantized, quantized_nodes, units_between
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.staging import write_file
from onnxamp._options.options import Options
from onnxamp._options.values import meant

T = TypeVar("T")

FORMAT: Final = 3
"""Version of the JSON format."""
CONSTANTS: Final = ("initializer", "Constant")
"""The op type in rows about constants."""


@record
class PlanRow:
    """The decision about one precision variable.

    ``key`` names the variable: scope, node (or weight), type parameter, and ``rank`` among variables that share these.
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

    @property
    def why(self) -> str:
        """The reason in plain words, with its detail."""
        return reason_text(self.reason, self.detail, low=self.low)


@record
class HazardRow:
    """A hazard: the node, the fault, and whether the node is low nevertheless."""

    node: str
    op: str
    low: bool
    reason: str
    detail: str


@record
class ErrorShare:
    """The contribution of a node to an expected error: its share of the squared error."""

    node: str
    op: str
    share: float


@record(kw_only=True)
class ExpectedError:
    """The error to expect of a result, for inputs like the samples.

    Errors are relative L2 errors of the output that has the largest.

    Attributes:
        error: the error to expect on the worst sample; None if nothing is known.
        bound: the error that at most one of 10,000 such inputs exceeds.
        least: the error to expect on the best sample.
        samples: how many there are.
        nodes: the nodes that contribute most on the worst sample, the largest share first.
        jumps: nodes that select by value, and may select something else, which the estimate does not include.
        spread: nodes without a gradient, so that what is before them is known less exactly.
        why: why nothing is known.
    """

    error: float | None = None
    bound: float | None = None
    least: float | None = None
    samples: int = 0
    nodes: tuple[ErrorShare, ...] = ()
    jumps: tuple[str, ...] = ()
    spread: tuple[str, ...] = ()
    why: str = ""


@record
class QuantizedPart:
    """Nodes of a quantized network that share a type and a role.

    Attributes:
        type: "int8", "float8e4m3fn", "int4", ...; "float" of what is not quantized.
        role: "scales" (they quantize or dequantize), "products" (of dequantized factors), "integers" (kernels that
            read integers) or "rest".
        ops: op type -> number of nodes.
        low: how many have low-precision floats.
        float32: label of a node whose floats stay in float32 -> why.
    """

    type: str
    role: str
    ops: Mapping[str, int]
    low: int
    float32: Mapping[str, str]


@record
class QuantizedUnit:
    """Equal units: nodes between integers, from dequantizers to quantizers.

    Attributes:
        dequantized, quantized: type of the integers and type of the scale, as in "int8 float16" -> number of nodes.
        ops: precision -> op type -> number of nodes that compute between them.
        count: how many such units there are.
    """

    dequantized: Mapping[str, int]
    ops: Mapping[str, Mapping[str, int]]
    quantized: Mapping[str, int]
    count: int = 1


_REST: Final = Quantized("float", "rest")
_FIXED: Final = "its schema allows only float32"


@dataclass(frozen=True, repr=False)
class Plan(Shown):
    """The precision of every float, and why. ``str(plan)`` is a table.

    Attributes:
        options: the options that were used; replaying the plan ignores their lists.
        opset: the opset that the model had, or was upgraded to, when this was decided.
        rows: one per precision variable.
        hazards: the places where low precision is known to break or lose values.
        casts: number of new Casts.
        cost: cost of the new Casts, of weights that stay in float32, and of missed gains, in 64ths
            of the launch of a Cast.
        warnings: sentences about options that match nothing or cannot be followed.
        expected: the error to expect of the result; None if it was not asked for.
        quantized: the nodes by type and role, where the model is quantized.
        units: the nodes between those that dequantize and those that quantize.

    Example:
        >>> import onnxamp
        >>> plan = onnxamp.plan_model("models/encoder.onnx", "O2")
        >>> plan.level, plan.dtype, plan.target, plan.counts()["MatMul", False]
        ('O2', 'float16', 'cuda', 0)
    """

    options: Options
    opset: int
    rows: tuple[PlanRow, ...]
    hazards: tuple[HazardRow, ...]
    casts: int
    cost: int
    warnings: tuple[str, ...]
    expected: ExpectedError | None = None
    quantized: tuple[QuantizedPart, ...] = ()
    units: tuple[QuantizedUnit, ...] = ()

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
        """Where the result will run: "cuda", "cpu", "webgpu", "tensorrt" or "any", possibly with a version."""
        return self.options.target

    def decisions(self) -> dict[str, bool]:
        """Return variable key -> whether it is low."""
        return {row.key: row.low for row in self.rows}

    def of_nodes(self) -> dict[str, bool]:
        """Return variable key -> whether it is low, without constants, which follow from their readers."""
        return {row.key: row.low for row in self.rows if row.op not in CONSTANTS}

    @property
    def float32_nodes(self) -> tuple[str, ...]:
        """Nodes that stay in float32, wholly or in part, although they could be low, in execution order."""
        rows = (row for row in self.rows if not row.low and row.op not in CONSTANTS)
        return tuple(dict.fromkeys(row.node for row in rows))

    def counts(self) -> Counter[tuple[str, bool]]:
        """Return (op type, low) -> number of variables."""
        return Counter((row.op, row.low) for row in self.rows)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan as JSON.

        Raises:
            OutputError: the file cannot be written.
        """
        write_file(
            as_path(path), (json.dumps(plan_json(self), indent=1) + "\n").encode()
        )

    def __str__(self) -> str:
        head = f"{self.level} {self.dtype} for {self.target}: {self.casts} new Casts, cost {self.cost}"
        keys = {row.key: printable(row.key) for row in self.rows}
        width = max(map(len, keys.values()), default=0)
        body = []
        # Constants follow from their readers, so they come last.
        for row in sorted(self.rows, key=lambda row: row.op in CONSTANTS):
            precision = self.dtype if row.low else "float32"
            body.append(
                f"{keys[row.key]:<{width}}  {precision:<8}  {printable(row.op)}  {printable(row.why)}"
            )
        return "\n".join([head, *body])


def make_plan(analysis: Analysis) -> Plan:
    """Return the plan of an analysis."""
    graph = analysis.graph
    rows = []
    variables = analysis.ports.variables
    names = variable_names(graph, variables)
    of_nodes = dict[int, list[PlanRow]]()
    for name, variable in zip(names, variables, strict=True):
        op = (
            "initializer"
            if variable.node == ABSENT
            else graph.nodes[variable.node].key
        )
        verdict = analysis.verdict(variable.index)
        why = verdict.reason.value, verdict.detail
        rows.append(PlanRow(str(name), *name, op, verdict.low, *why))
        of_nodes.setdefault(variable.node, []).append(rows[-1])
    hazards = (_hazard_row(analysis, hazard) for hazard in analysis.problem.hazards)
    return Plan(
        options=analysis.options,
        opset=graph.book.opsets[""],
        rows=tuple(rows),
        hazards=tuple(filter(None, hazards)),
        casts=analysis.casts,
        cost=analysis.decision.cost,
        warnings=analysis.pins.warnings,
        quantized=tuple(_parts(graph, analysis.options.low.tensor, of_nodes)),
        units=tuple(_units(graph, analysis.options.dtype, of_nodes)),
    )


def _parts(
    graph: Graph, low: str, of_nodes: Mapping[int, Sequence[PlanRow]]
) -> Iterator[QuantizedPart]:
    """Yield the nodes of a quantized network by type and role, in the order in which they come."""
    quantized = graph.ask(quantized_nodes)
    parts = dict[Quantized, list[Node]]()
    for node in graph.nodes if quantized else ():
        if node.index in quantized or (
            node.index in of_nodes and node.key not in CONSTANTS
        ):
            parts.setdefault(quantized.get(node.index, _REST), []).append(node)
    for (kind, role), nodes in sorted(
        parts.items(), key=lambda part: part[0] == _REST
    ):
        lows = 0
        kept = dict[str, str]()
        for node in nodes:
            rows = of_nodes.get(node.index, ())
            high = [row.why for row in rows if not row.low]
            types = {*graph.types_of(node.inputs)}
            if rows and len(high) == len(rows):
                kept[node.label] = high[0]
            elif rows or low in types:
                lows += 1
            elif FLOAT in types:
                kept[node.label] = _FIXED
        yield QuantizedPart(
            kind, role, Counter(node.key for node in nodes), lows, kept
        )


def _units(
    graph: Graph, low: str, of_nodes: Mapping[int, Sequence[PlanRow]]
) -> Iterator[QuantizedUnit]:
    """Yield the units between integers, those that are alike once, in the order in which they come."""
    quantized = graph.ask(quantized_nodes)
    facts = op_facts()

    def precision(node: Node) -> str:
        """Return the precision that a node computes with; for a scale that is not decided, its own."""
        rows = of_nodes.get(node.index, ())
        if rows:
            return low if any(row.low for row in rows) else "float32"
        types = {*graph.types_of(node.inputs)}
        return low if LOW_TENSORS.keys() & types else "float32"

    def grids(ends: Sequence[Node], keys: Container[str]) -> Mapping[str, int]:
        """Return type and precision -> the number of nodes at the ends of a unit."""
        return Counter(
            f"{quantized[node.index].type} {precision(node)}"
            for node in ends
            if node.key in keys
        )

    firsts = dict[object, QuantizedUnit]()
    counts = Counter[object]()
    for inside, ends in units_between(graph):
        ops = dict[str, Counter[str]]()
        for node in inside:
            ops.setdefault(precision(node), Counter())[node.key] += 1
        unit = QuantizedUnit(
            grids(ends, facts.dequantize), ops, grids(ends, facts.quantize)
        )
        key = (
            frozenset(unit.dequantized.items()),
            frozenset((kind, frozenset(own.items())) for kind, own in ops.items()),
            frozenset(unit.quantized.items()),
        )
        firsts.setdefault(key, unit)
        counts[key] += 1
    for alike, unit in firsts.items():
        yield replace(unit, count=counts[alike])


def _hazard_row(analysis: Analysis, hazard: Hazard) -> HazardRow | None:
    """Return the outcome of a hazard; None if there was nothing to decide."""
    node = analysis.graph.nodes[hazard.node]
    variables = analysis.ports.at(node, hazard.value)
    if not variables:
        return None
    is_low = any(analysis.decision.low[variable] for variable in variables)
    return HazardRow(node.label, node.key, is_low, hazard.reason.value, hazard.detail)


def plan_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, for :func:`plan_of`."""
    rest = {name: as_data(getattr(plan, name)) for name in _KEYS[2:]}
    if plan.expected is None:
        del rest["expected"]
    if not plan.quantized:
        del rest["quantized"], rest["units"]
    return {"format": FORMAT, "options": plan.options.as_json(), **rest}


_KEYS: Final = ("format", *(item.name for item in fields(Plan)))
"""Keys of a plan."""


def plan_of(data: Mapping[str, Any]) -> Plan:
    """Return the plan from the values of :func:`plan_json`.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: the values are of something else.
        ArgumentError: its options are invalid.
    """
    return Plan(
        options=Options.from_json(data["options"]),
        opset=_number(data, "opset"),
        rows=_records(PlanRow, data, "rows"),
        hazards=_records(HazardRow, data, "hazards"),
        casts=_number(data, "casts"),
        cost=_number(data, "cost"),
        warnings=_records(str, data, "warnings"),
        expected=from_data(ExpectedError, data["expected"])
        if "expected" in data
        else None,
        quantized=_records(QuantizedPart, {"quantized": [], **data}, "quantized"),
        units=_records(QuantizedUnit, {"units": [], **data}, "units"),
    )


def _number(data: Mapping[str, Any], name: str) -> int:
    """Return a field with an integer.

    Raises:
        TypeError: it holds something else. KeyError: it is missing.
    """
    number = data[name]
    if not isinstance(number, int) or isinstance(number, bool):
        raise TypeError(f"{name} is {number!r:.40}, not a whole number")
    return number


def _records(kind: type[T], data: Mapping[str, Any], name: str) -> tuple[T, ...]:
    """Return a field that holds a list of records of a kind.

    Raises:
        TypeError, ValueError: it holds something else. KeyError: it is missing.
    """
    if not isinstance(data[name], list):
        raise TypeError(f"{name} is {data[name]!r:.40}, not a list")
    records = []
    for number, entry in enumerate(data[name]):
        try:
            records.append(from_data(kind, entry))
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f"{name}[{number}] is damaged: {json.dumps(entry):.80}"
            ) from None
    return tuple(records)


def _check_keys(data: Any) -> None:
    """Refuse a file that is no plan, or a plan in another format.

    Raises:
        ArgumentError: ``data`` is no plan, or has another format.
    """
    if not isinstance(data, dict) or "format" not in data:
        raise ArgumentError("it is not an onnxamp plan; --save-plan writes one.")
    if data["format"] != FORMAT:
        raise ArgumentError(
            f"it has format {data['format']!r}, but this version of onnxamp reads {FORMAT}."
        )
    if unknown := sorted(data.keys() - _KEYS):
        raise ArgumentError(
            f"plans have no key {unknown[0]!r}: {meant(unknown[0], _KEYS)}"
        )


def strict(plan: Plan) -> Plan:
    """Return the plan, which is refused for a model that lacks one of its nodes."""
    return replace(plan, options=replace(plan.options, strict_options=True))


def load_plan(path: str | PathLike[str]) -> Plan:
    """Read a plan that :meth:`Plan.save` wrote.

    Args:
        path: the JSON file.

    Returns:
        The plan, for :func:`apply_plan` or :func:`convert_file`.

    Raises:
        ArgumentError: the file cannot be read, or is not a plan.

    Example:
        >>> import onnxamp, tempfile
        >>> plan = onnxamp.plan_model("models/encoder.onnx")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(f"{folder}/plan.json")
        ...     loaded = onnxamp.load_plan(f"{folder}/plan.json")
        >>> loaded == plan
        True
    """
    try:
        data: Mapping[str, Any] = json.loads(as_path(path).read_text(encoding="utf-8"))
        _check_keys(data)
        return plan_of(data)
    except (ArgumentError, ArgumentTypeError) as error:
        raise ArgumentError(
            f"The plan {str(path)!r} cannot be used: {error}"
        ) from None
    except OSError as error:
        raise cannot_read(f"the plan {str(path)!r}", error) from None
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ) as error:
        what = (
            f"{error.args[0]!r} is missing"
            if isinstance(error, KeyError)
            else reason_of(error)
        )
        raise ArgumentError(
            f"{str(path)!r} is not an onnxamp plan ({what}): write one with --save-plan."
        ) from None
