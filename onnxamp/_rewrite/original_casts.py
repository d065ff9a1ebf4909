"""Casts that a model brings along, under a decision: which serve its readers, and which become redundant.

Complexity: linear in ports.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxamp._decide.ports import LOW, PortVariables
from onnxamp._graph.graph import Graph
from onnxamp._graph.names import Source, Versions
from onnxamp._graph.view import Node, Origin, Value
from onnxamp._rewrite.edits import Edits


@dataclass(slots=True)
class OriginalCasts:
    """The original Casts between float32 and low precision; what becomes of them is added to the edits."""

    graph: Graph
    ports: PortVariables
    low: Sequence[bool]
    """Whether a port with a variable is low precision: HIGH, LOW and NONE are -1, -2 and -3, and stand at the end."""
    edits: Edits
    names: dict[int, Versions] = field(default_factory=dict)
    """Value -> its name in each precision, as far as these are planned."""
    aliases: dict[int, int] = field(default_factory=dict)
    """Output of a removed Cast to low precision -> the value that it was cast from, which is low itself now."""
    down_casts: dict[int, list[Node]] = field(default_factory=dict)
    """float32 value -> Casts of it to low precision."""

    def __post_init__(self) -> None:
        for node in self.graph.nodes_of({"Cast"}):
            if node.inputs and self.ports.consumed[node.index][0] == LOW:
                self.down_casts.setdefault(node.inputs[0], []).append(node)

    def public_name(self, value: Value) -> str:
        """The name of the graph output of a Cast that the value, now low itself, replaces."""
        casts = self.down_casts.get(value.index)
        if not casts or value.origin is not Origin.NODE or value.scope != 0 or self.graph.results[value.index]:
            return value.name
        for node in casts:
            result = self.graph.values[node.outputs[0]]
            if node.scope == 0 and self.graph.results[result.index]:
                self.edits.removed.add(node.index)
                self.edits.outputs[value.producer, value.port] = result.name
                return result.name
        return value.name

    def reuse(self, value: Value) -> str | None:
        """The output of a Cast that serves all low-precision readers of a float32 value; None if there is none.

        The Cast moves right behind the producer, to precede them.
        """
        for node in self.down_casts.get(value.index, ()):
            if node.scope == value.scope and node.outputs[0] not in self.graph.hidden:
                if node.index != value.producer + 1:
                    self.edits.moved[node.index] = value.producer
                return self.graph.values[node.outputs[0]].name
        return None

    def remove(self, value: int, *, nested: bool = False) -> None:
        """Remove Casts of a value that exists in low precision anyway, where possible.

        Args:
            value: the value.
            nested: remove only Casts in bodies; one in the value's own scope may produce its low version.
        """
        scope = self.graph.values[value].scope
        for node in self.down_casts.get(value, ()):
            result = node.outputs[0]
            returned = any(home == 0 or node.scope != scope for home, _ in self.graph.results[result])
            if not returned and (node.scope != scope or not nested):
                self.edits.removed.add(node.index)
                self.aliases[result] = value

    def low_source(self, value: int) -> Source:
        """The source of a value that is low in the original model, through Casts that are removed."""
        while value in self.aliases:
            source = self.aliases[value]
            names = self.names.get(source)
            if names is not None and names.low is not None:
                raised = names.high if self.low[self.ports.produced[source]] else None
                return Source(names.low, self.graph.values[source].scope, raised)
            value = self.ports.lowered[source]
        return Source(self.graph.values[value].name, self.graph.values[value].scope, None)

    def remove_dead(self) -> None:
        """Remove Casts from low precision to float32 that lose all their readers."""
        for value in self.ports.lowered:
            producer = self.graph.producer(value)
            assert producer is not None
            reads = [key for key in self.graph.uses[value] if key[0] not in self.edits.removed]
            name = self.graph.values[value].name
            returned = self.graph.results[value]
            if any(self.edits.results.get(key, name) == name for key in returned):
                continue
            if (returned or self.graph.uses[value]) and all(self.edits.inputs.get(key, name) != name for key in reads):
                self.edits.removed.add(producer.index)

    def remove_idle(self) -> None:
        """Remove float32-to-float32 Casts that read and write low precision, unless the model returns them."""
        for index in self.graph.order:  # producers first: a Cast of a removed Cast reads what that one read
            node = self.graph.nodes[index]
            sides = self.ports.of_node.get(node.index, {}) if node.key == "Cast" else {}
            if len(sides) < 2 or not all(self.low[side] for side in sides.values()):
                continue
            source, result = node.inputs[0], node.outputs[0]
            low, names = self.names[source].low, self.names[result]
            if self.graph.results[result] or names.high is not None or low is None or source in self.graph.hidden:
                continue
            self.edits.removed.add(node.index)
            names.low = low
