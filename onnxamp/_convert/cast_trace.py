"""The origin of a Cast: the step of the conversion that put it there, and the nodes that asked for its precisions.

Values that a model already has in low precision, as converted models do, are not decided. To give reasons, the model is
analyzed again with these values shown as float32: their nodes then have the same reasons as in the original.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Final, NamedTuple

from onnxamp._base.errors import ArgumentError, suggestion
from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis, analyze
from onnxamp._convert.raising import raised as raised_model
from onnxamp._decide.mincut import Question
from onnxamp._decide.variables.ports import HIGH, LOW, NONE, PortVariables
from onnxamp._decide.verdicts import Verdict, as_pattern, option_for, reason_text
from onnxamp._facts.dtypes import (
    FLOAT,
    FLOAT_TENSORS,
    FORMATS,
    LOW_TENSORS,
    readable_types,
)
from onnxamp._facts.tables import read_table
from onnxamp._graph.raised import raised_graph
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes
from onnxamp._rewrite import Draft
from onnxamp._rewrite.edits.apply import NewCast
from onnxamp._rewrite.prepare import PASSES

_CASTING: Final = frozenset({"Cast", "CastLike"})


@record
class Side:
    """A node, input, output or weight that makes or reads a value, with its precision and the reason.

    Attributes:
        node: the node, or the input, output or weight.
        op: its op type; "input", "output" or "weight" if it is no node, and "body input" or "body output" in a body.
        precision: the type that it makes or reads.
        why: the reason in plain words.
        asked_by: the nearest node whose precision is pinned and asks for this one, if it is another node.
        option: the options that would change it, in a clause.
    """

    node: str
    op: str
    precision: str
    why: str
    asked_by: str = ""
    option: str = ""


@record
class TracedCast:
    """A Cast, or what stands in its place.

    Attributes:
        step: the step that put it there, or removed it; ``_data/cast_steps.toml`` lists all of them.
        text: what the step did.
        cast: the name of the Cast's output.
        source: the name of the value that it reads.
        before: the type of that value.
        after: the type of the output.
        option: the option that would change the step, in a clause.
    """

    step: str
    text: str
    cast: str
    source: str
    before: str
    after: str
    option: str = ""


@record
class CastTrace:
    """All Casts of a value.

    Attributes:
        value: the value.
        body: the node in whose body it is; "" in the main graph.
        casts: its Casts.
        made: its producer.
        read: its consumers, Casts aside.
    """

    value: str
    body: str
    casts: tuple[TracedCast, ...]
    made: Side
    read: tuple[Side, ...]


def trace_casts(
    model: Model, analysis: Analysis, names: Iterable[str]
) -> list[CastTrace]:
    """Return the traces of values.

    Args:
        model: the original model.
        analysis: the analysis of the prepared model.
        names: the names of values of the model or of the result, or of their Casts.

    Raises:
        ArgumentError: neither the model nor the result has such a value.
    """
    tracer = _Tracer(model, analysis)
    values = chain.from_iterable(map(tracer.values_named, names))
    return [tracer.trace(value) for value in dict.fromkeys(values)]


class _Port(NamedTuple):
    """A place where a value is made, or else read by a node (node, input) or returned by a scope (scope, output)."""

    value: int
    read: tuple[int, int] | None = None
    returned: tuple[int, int] | None = None

    def variable(self, ports: PortVariables) -> Question:
        """Return the variable of the place."""
        if self.read is not None:
            node, port = self.read
            return ports.consumed[node][port]
        if self.returned is not None:
            return ports.returned.get(self.returned, NONE)
        return ports.produced[self.value]


class _Tracer:
    """Traces the Casts of one analysis."""

    def __init__(self, model: Model, analysis: Analysis) -> None:
        self.analysis = analysis
        self.graph = analysis.graph
        self.edits = analysis.edits
        self.ports = analysis.ports
        self.types = self.graph.types
        self.passes = _casts_of_passes(model, analysis)
        self.raised = dict[str, Analysis]()
        self.new = defaultdict[int, list[NewCast]](list)
        for cast in self.edits.casts:
            self.new[cast.value].append(cast)

    # -- values -------------------------------------------------------------------------------------------------

    def values_named(self, name: str) -> list[int]:
        """Return the values that have a name now or in the result, or whose Casts have it.

        Raises:
            ArgumentError: there is none.
        """
        known = self._names()
        if name not in known:
            raise ArgumentError(
                f"Neither the model nor the result has a value {name!r}.{suggestion(known, name)} A result that was"
                " repaired after its validation keeps more nodes in float32: repeat the options that its report names."
            )
        return list(dict.fromkeys(map(self._cast_value, known[name])))

    def _names(self) -> Mapping[str, Sequence[int]]:
        """Return all names, with their values."""
        graph, edits = self.graph, self.edits
        names = defaultdict[str, list[int]](list)
        for named in graph.values:
            names[named.name].append(named.index)
        for (node, port), name in edits.outputs.items():
            names[name].append(graph.nodes[node].outputs[port])
        for value, name in edits.renamed.items():
            names[name].append(value)
        for cast in edits.casts:
            for name in {cast.target, cast.name, cast.shield} - {""}:
                names[name].append(cast.value)
        for copy in edits.copies:
            names[copy.name].append(copy.value)
        for second in edits.dequantized:
            names[second.target].append(graph.nodes[second.node].outputs[0])
        for cast_node in graph.nodes_of(_CASTING):
            names[cast_node.label].append(cast_node.outputs[0])
        # Of a Cast that a pass removed, only its source is left.
        for name, (_, source) in self.passes.items():
            if name not in names:
                names[name] += names.get(source, ())
        return {name: values for name, values in names.items() if name and values}

    def _cast_value(self, value: int) -> int:
        """Return the value that a Cast reads if the value is its result; else the value itself."""
        maker = self.graph.producer(value)
        is_cast = maker is not None and maker.key in _CASTING and maker.inputs
        if (
            maker is None
            or not is_cast
            or self.types[maker.inputs[0]] not in FLOAT_TENSORS
        ):
            return value
        return maker.inputs[0]

    def trace(self, value: int) -> CastTrace:
        """Return the Casts of a value, and its sides."""
        casts = (*self._new_casts(value), *self._own_casts(value), *self._gone(value))
        owner = self.graph.scopes[self.graph.values[value].scope].owner
        return CastTrace(
            value=self.graph.values[value].name,
            body="" if owner == ABSENT else self.graph.nodes[owner].label,
            casts=casts,
            made=self._maker(value),
            read=tuple(self._readers(value)),
        )

    # -- Casts --------------------------------------------------------------------------------------------------

    def _new_casts(self, value: int) -> Iterator[TracedCast]:
        """Yield the Casts that the decision adds, and the copies that stand in their place."""
        low = self.edits.low
        own = self.graph.values[value].name
        for cast in self.new[value]:
            is_up = cast.elem != low.elem
            before, after = (low.name, "float32") if is_up else ("float32", low.name)
            maker = self.graph.producer(value)
            step = "shielded" if cast.shield else "decision"
            step = step if cast.bound is None else "bounded"
            if maker is not None and cast.source in maker.proto.input:
                step = "integers"
                before = _named(self.types[maker.inputs[0]])
            yield _traced(step, cast.target, cast.source, before, after)
        for copy in self.edits.copies:
            if copy.value == value:
                pair = ("float32", low.name) if copy.low else (low.name, "float32")
                yield _traced("stored", copy.name, own, *pair)
        for second in self.edits.dequantized:
            if value in self.graph.nodes[second.node].outputs:
                is_low = second.elem == low.elem
                pair = ("float32", low.name) if is_low else (low.name, "float32")
                yield _traced("dequantized", second.target, own, *pair)

    def _own_casts(self, value: int) -> Iterator[TracedCast]:
        """Yield the Casts that make or read the value before anything is decided."""
        maker = self.graph.producer(value)
        if maker is not None and maker.key in _CASTING:
            yield self._own_cast(maker)
        for reader, port in self.graph.consumers(value):
            if reader.key in _CASTING and port == 0:
                yield self._own_cast(reader)

    def _own_cast(self, node: Node) -> TracedCast:
        """Return a Cast of the model, and what becomes of it."""
        source = node.inputs[0]
        result = node.outputs[0]
        names = [self.graph.values[value].name for value in (result, source)]
        types = [_named(self.types[value]) for value in (source, result)]
        if node.index in self.edits.attributes:
            types[1] = self.edits.low.name
        return _traced(self._step_of(node), *names, *types)

    def _step_of(self, node: Node) -> str:
        """Return what becomes of a Cast of the model, or which pass added it."""
        if node.index in self.edits.removed:
            if node.outputs[0] in self.ports.raised_from:
                return "removed-high"
            is_down = self.types[node.outputs[0]] in LOW_TENSORS
            return "removed-low" if is_down else "removed-idle"
        if node.index in self.edits.moved:
            return "moved"
        added = self.passes.get(node.proto.output[0])
        if added is not None:
            return added[0]
        is_retyped = node.index in self.edits.attributes
        return "retyped" if is_retyped else self._earlier_step(node)

    def _earlier_step(self, node: Node) -> str:
        """Return the step of an earlier conversion that added a Cast, by the names that conversions give."""
        # A file keeps no record of its conversion, so names and neighbors must do.
        result = node.outputs[0]
        ends = {self.types[node.inputs[0]], self.types[result]}
        is_ours = node.proto.name.endswith("/Cast")
        if not (FLOAT in ends and ends & LOW_TENSORS.keys() and is_ours):
            return "kept"
        if node.proto.input[0].endswith("_bounded"):
            return "converted-bounded"
        is_shielded = any(
            reader.key == "Max" for reader, _ in self.graph.consumers(result)
        )
        is_shielded = is_shielded and node.proto.output[0].endswith("_cast")
        return "converted-shielded" if is_shielded else "converted"

    def _gone(self, value: int) -> Iterator[TracedCast]:
        """Yield the Casts of a value that passes removed before the decision."""
        own = self.graph.values[value].name
        present = {node.proto.output[0] for node in self.graph.nodes_of(_CASTING)}
        for name, (step, source) in self.passes.items():
            if source == own and name not in present:
                yield _traced(step, name, source, "", "")

    # -- sides --------------------------------------------------------------------------------------------------

    def _maker(self, value: int) -> Side:
        """Return the producer of a value."""
        node = self.graph.producer(value)
        if node is None:
            named = self.graph.values[value]
            is_input = named.origin is Origin.INPUT
            op = _in_scope("input", named.scope) if is_input else "weight"
            return self._side(_Port(value), named.name, op)
        return self._side(_Port(value), node.label, node.key)

    def _readers(self, value: int) -> Iterator[Side]:
        """Yield the consumers of a value, one side for each node, with Casts of floats replaced by their readers."""
        stack = [value]
        seen = {value}
        while stack:
            current = stack.pop()
            for node, port in self.graph.consumers(current):
                if (
                    node.key in _CASTING
                    and self.types[node.outputs[0]] in FLOAT_TENSORS
                ):
                    stack += {node.outputs[0]} - seen
                    seen.add(node.outputs[0])
                    continue
                read = _Port(current, read=(node.index, port))
                yield self._side(read, node.label, node.key)
            for scope, position in self.graph.results[current]:
                name = self.graph.scopes[scope].proto.output[position].name
                returned = _Port(current, returned=(scope, position))
                yield self._side(returned, name, _in_scope("output", scope))

    def _side(self, port: _Port, label: str, op: str) -> Side:
        """Return a side, by its variable or else by the one that it has if low precision is shown as float32."""
        stored = readable_types(self.types[port.value] or "unknown")
        variable = port.variable(self.ports)
        if variable >= 0:
            verdict = self.analysis.verdict(variable)
            precision = self.edits.low.name if verdict.low else "float32"
            return self._reasoned(
                self.analysis, variable, Side(label, op, precision, "")
            )
        # Reasons explain a precision only if the decision would choose it again.
        if stored in FORMATS and op != "weight":
            as_float = self._as_float(stored)
            other = port.variable(as_float.ports)
            if other >= 0 and as_float.verdict(other).low:
                return self._reasoned(as_float, other, Side(label, op, stored, ""))
        why, option = _FIXED[variable, op in ("input", "output")]
        return Side(label, op, stored, why, option=option)

    def _as_float(self, dtype: str) -> Analysis:
        """Return the analysis with values of a low-precision type shown as float32."""
        if dtype not in self.raised:
            shown = raised_graph(self.graph, FORMATS[dtype], self.graph.shapes)
            options = replace(self.analysis.options, dtype=dtype)
            self.raised[dtype] = analyze(shown, options)
        return self.raised[dtype]

    def _reasoned(self, analysis: Analysis, variable: Question, side: Side) -> Side:
        """Return a side with the reason of its variable."""
        verdict = analysis.verdict(variable)
        pin = _nearest_pin(analysis, variable)
        asking = None if pin is None else analysis.ports.variables[pin.variable]
        node, op, asked_by = side.node, side.op, ""
        if asking is not None and asking.node != ABSENT:
            asker = analysis.graph.nodes[asking.node]
            node = asker.label
            op = asker.key
        if pin is not None and node != side.node:
            asked_by = (
                f"{node}: {reason_text(pin.reason.value, pin.detail, low=pin.low)}"
            )
        return replace(
            side,
            why=reason_text(verdict.reason.value, verdict.detail, low=verdict.low),
            asked_by=asked_by,
            option=option_for((pin or verdict).reason, node, op),
        )


def _in_scope(op: str, scope: int) -> str:
    """Return what an input or output of a scope is called."""
    return f"body {op}" if scope else op


def _nearest_pin(analysis: Analysis, start: Question) -> Verdict | None:
    """Return the pin of a variable, or the nearest one that is reached through nodes of the same precision.

    Complexity: linear in ports.
    """
    low = analysis.decision.low
    pins = analysis.pins.verdicts
    ports = analysis.ports
    members = defaultdict[Question, list[Question]](list)
    for variable in ports.variables:
        members[ports.root(variable.index)].append(variable.index)
    seen = {ports.roots[start]}
    queue = deque(seen)
    while queue:
        root = queue.popleft()
        if root in pins:
            return pins[root]
        for member in members[root]:
            for neighbor in _neighbors(analysis, member):
                other = ports.root(neighbor)
                if other >= 0 and other not in seen and low[neighbor] == low[start]:
                    seen.add(other)
                    queue.append(other)
    return None


def _neighbors(analysis: Analysis, variable: Question) -> Iterator[Question]:
    """Yield the variables on the other side of the values that a variable's node reads and makes."""
    graph, ports = analysis.graph, analysis.ports
    own = ports.variables[variable]
    if own.node == ABSENT:
        yield from ports.read[own.value]
        return
    node = graph.nodes[own.node]
    yield from (ports.produced[value] for value in node.reads)
    for value in node.writes:
        yield from ports.read[value]


_FIXED: Final = {
    (HIGH, True): ("inputs and outputs keep their types", "--io-types low"),
    (HIGH, False): (
        "the schema, or that of an op around it, allows only float32 here",
        "a newer --opset may allow more",
    ),
    (LOW, True): ("your options lower inputs and outputs", "--io-types keep"),
    (LOW, False): ("the model has low precision here", ""),
    (NONE, True): ("the model has this type here", ""),
    (NONE, False): ("the model has this type here", ""),
}
"""(Variable, whether the side is an input or output of the model) -> the reason for its fixed type, and the option."""


def _casts_of_passes(
    model: Model, analysis: Analysis
) -> Mapping[str, tuple[str, str]]:
    """Return the Casts that passes added or removed: name of the output -> (module of the last pass, source).

    Complexity: that of the passes, which run again.
    """
    # Passes do not record what they change, so Casts are compared before and after each of them.
    given = _casts(Draft(model.proto, model.folder))
    source = raised_model(model, analysis.options)
    draft = Draft(source.proto, source.folder)
    before = _casts(draft)
    changed = {name: ("raised", read) for name, read in given ^ before}
    for apply in PASSES:
        draft = apply(draft, analysis.options).draft
        after = _casts(draft)
        step = apply.__module__.rpartition(".")[2]
        changed |= {name: (step, source) for name, source in before ^ after}
        before = after
    final = _casts(Draft.of(analysis.graph))
    return changed | {name: ("upgrade", source) for name, source in before ^ final}


def _casts(draft: Draft) -> frozenset[tuple[str, str]]:
    """Return the outputs of all Casts, each with what it reads."""
    casts = (
        node for node in all_nodes(draft.proto.graph.node) if node.op_type in _CASTING
    )
    return frozenset((node.output[0], node.input[0]) for node in casts)


def _named(kind: str | None) -> str:
    """Return a type as messages show it."""
    return readable_types(kind or "unknown")


def _traced(step: str, cast: str, source: str, before: str, after: str) -> TracedCast:
    """Return the trace of a Cast, with the text and the option of the step."""
    words = _steps()[step]
    text = words["text"].format(source=source, before=before, after=after)
    option = words.get("option", "").format(name=as_pattern(source))
    return TracedCast(step, text, cast, source, before, after, option)


@cache
def _steps() -> dict[str, dict[str, str]]:
    """Return step -> its text, and its option if there is one."""
    return read_table("cast_steps")
