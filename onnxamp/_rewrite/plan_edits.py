"""From a decision to edits: which names exist in which precision, which Casts are needed, which are not any more.

Complexity: linear in ports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnx import TensorProto

from onnxamp._decide.ports import LOW, NONE, PortVariables
from onnxamp._decide.precision import Decision
from onnxamp._decide.problem import Problem
from onnxamp._dtypes import FLOAT, retyped
from onnxamp._graph.graph import Graph
from onnxamp._graph.names import NewNames, Source, Versions
from onnxamp._graph.view import ABSENT, Node, Origin, Value, shadowing
from onnxamp._ops.facts import op_facts
from onnxamp._rewrite.edits import Edits, NewCast, NewConstant


def plan_edits(problem: Problem, decision: Decision) -> Edits:
    """The edits that turn the model into what the decision says."""
    graph, ports = problem.graph, problem.ports
    maker = _Maker(graph, ports, decision, Edits(problem.options.low), NewNames(graph.all_names()), problem.absorbed)
    for value, variable in enumerate(ports.produced):
        if variable != NONE:
            maker.value(graph.values[value])
    maker.lowered_values()
    for node in graph.nodes:
        maker.node(node)
    maker.returns()
    maker.idle_casts()
    maker.dead_casts()
    maker.halve_sentinels(problem.sentinels)
    return maker.edits


@dataclass(slots=True)
class _Maker:
    graph: Graph
    ports: PortVariables
    decision: Decision
    edits: Edits
    new: NewNames
    absorbed: frozenset[int]
    names: dict[int, Versions] = field(default_factory=dict)
    aliases: dict[int, int] = field(default_factory=dict)
    """Low value of the user's whose Cast became void -> the float32 value whose low version it is."""

    def halve_sentinels(self, paths: Sequence[Sequence[int]]) -> None:
        """Sentinels on a mask path that is low saturate to half the range, so that mask + score stays finite."""
        constants = self.graph.constants
        for index in {node for path in paths for node in path}:
            for value, variable in zip(self.graph.nodes[index].inputs, self.ports.consumed[index], strict=True):
                stats = constants.stats(value) if self.decision.is_low(variable) else None
                if stats is not None and stats.has_sentinel(self.edits.low):
                    self.edits.halved.add(constants.source(value))

    def fresh(self, base: str, *, low: bool) -> str:
        """A new name for a value in the other precision."""
        return self.new.fresh(f"{base}_{self.edits.low.suffix if low else 'fp32'}")

    def add_cast(self, value: Value, source: str, target: str, elem: int) -> None:
        """A Cast right behind the value's producer."""
        shielded = elem == TensorProto.FLOAT and value.index in self.absorbed
        shield = self.new.fresh(f"{target}_cast") if shielded else ""
        name = self.new.fresh(f"{target}/Cast")
        self.edits.casts.append(NewCast(value.scope, value.producer, source, target, elem, name, shield))

    def needs(self, value: int) -> tuple[bool, bool]:
        """Whether somebody reads or returns the value in float32, and in low precision, the user's Casts apart."""
        high = low = False
        for node, port in self.graph.uses[value]:
            variable = self.ports.consumed[node][port]
            if variable == NONE or (variable == LOW and self.graph.nodes[node].key == "Cast"):
                continue
            is_low = self.decision.is_low(variable)
            high, low = high or not is_low, low or is_low
        for key in self.graph.results[value]:
            if key in self.ports.returned:
                is_low = self.decision.is_low(self.ports.returned[key])
                high, low = high or not is_low, low or is_low
        return high, low

    def public(self, value: int) -> bool | None:
        """Precision (True: low) in which the main graph returns the value; None where it does not."""
        keys = [key for key in self.graph.results[value] if key[0] == 0 and key in self.ports.returned]
        return self.decision.is_low(self.ports.returned[keys[0]]) if keys else None

    def value(self, value: Value) -> None:
        """Names, type, and the Cast or copy that the value needs."""
        index, found = value.index, self.graph.types[value.index]
        assert found is not None
        is_low = self.decision.is_low(self.ports.produced[index])
        if found != FLOAT:
            own = self.own_name(value, is_low=is_low)
            self.names[index] = Versions(high=own, low=own)
            if is_low:
                self.edits.types[index] = retyped(found, self.edits.low)
                self.make_low(value)
            return
        if index in self.ports.lowered:
            return  # the user's Cast from low: see lowered_values
        need_high, need_low = self.needs(index)
        reused = None if is_low else self.reusable(index)
        if is_low:
            self.void_casts(index)
            need_low = True
            self.make_low(value)
            self.edits.types[index] = retyped(found, self.edits.low)
        else:
            need_high = True
        own = self.own_name(value, is_low=is_low)
        names = Versions(own if need_high else None, own if need_low else None)
        self.names[index] = names
        if not (need_high and need_low):
            return
        public = self.public(index)
        if self.is_constant(index):
            self.copy(value, names, base_low=bool(public))
            return
        keeps_name_low = is_low if public is None else public
        if reused is not None and not keeps_name_low:
            names.low = self.reuse(reused, value)
            return
        other = self.fresh(value.name, low=not keeps_name_low)
        names.high, names.low = (other, own) if keeps_name_low else (own, other)
        self.second_version(value, names, is_low=is_low)
        self.void_casts(index, nested=not keeps_name_low)

    def second_version(self, value: Value, names: Versions, *, is_low: bool) -> None:
        """Make the precision that the producer does not: by a copy, a Cast from the same integers, or a Cast."""
        assert names.high is not None
        assert names.low is not None
        own, other = (names.low, names.high) if is_low else (names.high, names.low)
        if self.public(value.index) is not None and own != value.name:  # the Cast's output takes the public name
            self.edits.outputs[value.producer, value.port] = own
            self.edits.types.pop(value.index, None)
            if not is_low:
                self.edits.types[value.index] = self.edits.low.tensor
        producer = self.graph.producer(value.index)
        source = own
        if value.index in self.ports.free and producer is not None:
            source = producer.proto.input[0]
        elem = TensorProto.FLOAT if is_low else self.edits.low.elem
        self.add_cast(value, source, other, elem)

    def own_name(self, value: Value, *, is_low: bool) -> str:
        """The value's name, or a new one where it shadows an outer value of what would be another type.

        ONNX's inference, and ONNX Runtime's, want one type for a name wherever it is visible.
        """
        outer = self.graph.ask(shadowing).get(value.index)
        if outer is None:
            return self.public_name(value) if is_low else value.name
        if not is_low and not self.decision.is_low(self.ports.produced[outer]):
            return value.name
        name = self.fresh(value.name, low=is_low)
        if value.origin is Origin.NODE:
            self.edits.outputs[value.producer, value.port] = name
        else:
            self.edits.renamed[value.index] = name
        return name

    def public_name(self, value: Value) -> str:
        """The name of the output that a Cast of the user's made of a value that is low now; the Cast goes."""
        producible = value.origin is Origin.NODE and value.scope == 0 and not self.graph.results[value.index]
        for node in self.down_casts(value.index) if producible else ():
            result = self.graph.values[node.outputs[0]]
            if node.scope == 0 and self.graph.results[result.index]:
                self.edits.removed.add(node.index)
                self.edits.outputs[value.producer, value.port] = result.name
                return result.name
        return value.name

    def is_constant(self, value: int) -> bool:
        """Whether the value is an initializer or a Constant: wanted in both precisions, it is stored twice."""
        producer = self.graph.producer(value)
        return value in self.ports.free and (producer is None or producer.key == "Constant")

    def copy(self, value: Value, names: Versions, *, base_low: bool) -> None:
        """Store a constant twice; the one that keeps the name is float32 unless the model returns it low."""
        other, own = self.fresh(value.name, low=not base_low), names.high
        names.high, names.low = (other, own) if base_low else (own, other)
        node_name = self.new.fresh(f"{other}/Constant") if value.producer != ABSENT else ""
        self.edits.copies.append(NewConstant(value.index, other, node_name, low=not base_low))
        if base_low:
            self.make_low(value)
            self.edits.types[value.index] = self.edits.low.tensor
        else:
            self.edits.weights.discard(value.index)
            self.edits.attributes.discard(value.producer)
            self.edits.types.pop(value.index, None)

    def make_low(self, value: Value) -> None:
        """Edit the producer where its type is written down."""
        if value.origin in (Origin.INITIALIZER, Origin.DEFAULT):
            self.edits.weights.add(value.index)
            return
        node = self.graph.producer(value.index)
        if node is None or value.port != 0:
            return
        rule = op_facts().dtype_attribute.get(node.key)
        written = rule is not None and (
            rule.default not in ("input", "scale") or any(a.name == rule.attribute for a in node.proto.attribute)
        )
        if node.key == "Constant" or written or (node.key == "Optional" and not node.inputs):
            self.edits.attributes.add(node.index)

    # -- the user's Casts --------------------------------------------------------------------------------------

    def down_casts(self, value: int) -> list[Node]:
        """The user's Casts of a float32 value to the low type."""
        return [
            self.graph.nodes[node]
            for node, port in self.graph.uses[value]
            if self.ports.consumed[node][port] == LOW and self.graph.nodes[node].key == "Cast"
        ]

    def reusable(self, value: int) -> Node | None:
        """A Cast of the user's that can serve all low readers of a float32 value."""
        scope = self.graph.values[value].scope
        for node in self.down_casts(value):
            if node.scope == scope and node.outputs[0] not in self.graph.hidden:
                return node
        return None

    def reuse(self, node: Node, value: Value) -> str:
        """Let all low readers use the user's Cast, moved right behind the producer so that it comes before them."""
        if node.index != value.producer + 1:
            self.edits.moved[node.index] = value.producer
        return self.graph.values[node.outputs[0]].name

    def void_casts(self, value: int, *, nested: bool = False) -> None:
        """The value exists in low precision: the user's Casts of it say nothing new, and go where they can.

        Args:
            nested: only those in bodies; one beside the value may be what makes the low version.
        """
        scope = self.graph.values[value].scope
        for node in self.down_casts(value):
            result = node.outputs[0]
            returned = any(home == 0 or node.scope != scope for home, _ in self.graph.results[result])
            if not returned and (node.scope != scope or not nested):
                self.edits.removed.add(node.index)
                self.aliases[result] = value

    def lowered_values(self) -> None:
        """Values that the user cast up from low: low readers take what was cast, the others the Cast's output."""
        for value, source in self.ports.lowered.items():
            made = self.low_source(source)
            self.names[value] = Versions(high=self.graph.values[value].name, low=made.name)
            if self.public(value) or self.leaves_body(value, made.scope):
                producer = self.graph.producer(value)
                assert producer is not None
                self.edits.attributes.add(producer.index)
                self.edits.types[value] = self.edits.low.tensor
                own = self.graph.values[value]
                self.names[value].low = own.name
                need_high, _ = self.needs(value)
                if need_high and made.raised is None:
                    high = self.fresh(own.name, low=False)
                    self.names[value].high = high
                    self.add_cast(own, made.name, high, TensorProto.FLOAT)
                elif need_high:
                    self.names[value].high = made.raised

    def leaves_body(self, value: int, home: int) -> bool:
        """Whether a body returns the value in low precision although that is a value of another scope."""
        returned = (self.ports.returned.get(key, NONE) for key in self.graph.results[value])
        return home != self.graph.values[value].scope and any(map(self.decision.is_low, returned))

    def low_source(self, value: int) -> Source:
        """Where a low value of the user's comes from, through Casts that were removed."""
        while value in self.aliases:
            source = self.aliases[value]
            found = self.names.get(source)
            if found is not None and found.low is not None:
                raised = found.high if self.decision.is_low(self.ports.produced[source]) else None
                return Source(found.low, self.graph.values[source].scope, raised)
            value = self.ports.lowered[source]
        return Source(self.graph.values[value].name, self.graph.values[value].scope, None)

    def low_name(self, value: int) -> str:
        """The name that :meth:`low_source` finds."""
        return self.low_source(value).name

    def dead_casts(self) -> None:
        """The user's Casts from low to float32 that nobody reads any more, though somebody did before."""
        for value in self.ports.lowered:
            producer = self.graph.producer(value)
            assert producer is not None
            reads = [key for key in self.graph.uses[value] if key[0] not in self.edits.removed]
            name = self.graph.values[value].name
            if self.graph.results[value] or not self.graph.uses[value]:
                continue
            if all(self.edits.inputs.get(key, name) != name for key in reads):
                self.edits.removed.add(producer.index)

    def idle_casts(self) -> None:
        """The user's Casts from float32 to float32 that read and write low: they go, unless the model returns them."""
        for node in map(
            self.graph.nodes.__getitem__, self.graph.order
        ):  # a Cast behind another reads what that one read
            sides = self.ports.of_node.get(node.index, {}) if node.key == "Cast" else {}
            if len(sides) < 2 or not all(self.decision.low[side] for side in sides.values()):
                continue
            source, result = node.inputs[0], node.outputs[0]
            stands_in, names = self.names[source].low, self.names[result]
            if self.graph.results[result] or names.high is not None or stands_in is None or source in self.graph.hidden:
                continue
            self.edits.removed.add(node.index)
            names.low = stands_in
            for reader, port in self.graph.uses[result]:
                self.edits.inputs[reader, port] = stands_in

    # -- readers -----------------------------------------------------------------------------------------------

    def node(self, node: Node) -> None:
        """Point each input to the version that it reads."""
        for port, value in enumerate(node.inputs):
            if value == ABSENT:
                continue
            variable = self.ports.consumed[node.index][port]
            if value in self.aliases:
                name: str | None = self.low_name(value)
            elif variable == NONE:
                continue
            else:
                name = self.version(value, variable, node)
            if name is not None and name != node.proto.input[port]:
                self.edits.inputs[node.index, port] = name

    def version(self, value: int, variable: int, node: Node) -> str | None:
        names = self.names[value]
        if variable == LOW and node.key == "Cast":  # a Cast of the user's: it reads what the producer makes
            made_low = value not in self.ports.lowered and self.decision.is_low(self.ports.produced[value])
            return names.low if made_low else names.high
        return names.low if self.decision.is_low(variable) else names.high

    def returns(self) -> None:
        """Names and types of what bodies and the main graph return."""
        for scope in self.graph.scopes:
            for position, value in enumerate(scope.outputs):
                key = (scope.index, position)
                if value in self.aliases:
                    self.edits.results[key] = self.low_name(value)
                if key not in self.ports.returned:
                    continue
                is_low = self.decision.is_low(self.ports.returned[key])
                found, names = self.graph.types[value], self.names[value]
                assert found is not None
                name = names.low if is_low else names.high
                if name is not None and name != scope.proto.output[position].name:
                    self.edits.results[key] = name
                if is_low:
                    self.edits.result_types[key] = retyped(found, self.edits.low)
