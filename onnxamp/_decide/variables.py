"""Finding the precision variables of a model: one per type parameter of each node, and the ties between them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from onnxamp._decide.ports import HIGH, LOW, NONE, PortVariables, Variable
from onnxamp._dtypes import FLOAT, holds_float, retyped
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import bind, body_sources, body_targets, carried
from onnxamp._graph.view import ABSENT, Node, Origin, Value
from onnxamp._ops.facts import attribute, op_facts
from onnxamp._ops.signature import Port
from onnxamp._options.options import Level, Options
from onnxamp._target.kernels import carries


def find_variables(graph: Graph, options: Options, groups: Sequence[Sequence[int]] = ()) -> PortVariables:
    """All variables of a model, joined by its ties. Complexity: near linear in ports.

    Args:
        groups: nodes that must share one precision, with all their variables (folds, decomposed activations, masks).
    """
    finder = _Finder(graph, options)
    for scope in graph.scopes:
        finder.scope_values(scope.index)
    for node in graph.nodes:
        finder.node(node)
    finder.results()
    finder.unexplained()
    finder.containers()
    for group in groups:
        finder.join([variable for node in group for variable in finder.of_node.get(node, {}).values()])
    return finder.finish()


@dataclass(slots=True)
class _Finder:
    graph: Graph
    options: Options
    variables: list[Variable] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    produced: list[int] = field(default_factory=list)
    consumed: list[list[int]] = field(default_factory=list)
    returned: dict[tuple[int, int], int] = field(default_factory=dict)
    of_node: dict[int, dict[str, int]] = field(default_factory=dict)
    free: set[int] = field(default_factory=set)
    lowered: dict[int, int] = field(default_factory=dict)
    bound: dict[int, dict[str, str]] = field(default_factory=dict)
    fixed_high: set[int] = field(default_factory=set)
    requested_low: set[int] = field(default_factory=set)
    hidden: frozenset[int] = frozenset()
    """Values that a body's value of the same name hides."""

    def __post_init__(self) -> None:
        self.produced = [NONE] * len(self.graph.values)
        self.consumed = [[NONE] * len(node.inputs) for node in self.graph.nodes]
        self.hidden = self.graph.hidden

    # -- variables and ties ------------------------------------------------------------------------------------

    def new(self, node: int, param: str, value: int = ABSENT) -> int:
        index = len(self.variables)
        self.variables.append(Variable(index, node, param, value))
        self.parents.append(index)
        if node != ABSENT:
            self.of_node.setdefault(node, {})[param] = index
        return index

    def root(self, variable: int) -> int:
        while self.parents[variable] != variable:
            self.parents[variable] = self.parents[self.parents[variable]]
            variable = self.parents[variable]
        return variable

    def tie(self, first: int, second: int) -> None:
        one, other = sorted((self.root(first), self.root(second)))
        self.parents[other] = one

    def finish(self) -> PortVariables:
        roots = [self.root(variable.index) for variable in self.variables]
        return PortVariables(
            tuple(self.variables), self.produced, self.consumed, self.returned, self.of_node,
            frozenset(self.free), self.lowered, roots, self.bound, frozenset(self.fixed_high),
            frozenset(self.requested_low),
        )  # fmt: skip

    def is_float(self, value: int) -> bool:
        return value != ABSENT and holds_float(self.graph.types[value])

    # -- ports -------------------------------------------------------------------------------------------------

    def scope_values(self, index: int) -> None:
        """PortVariables of initializers and of the main graph's inputs; body inputs belong to their owner."""
        scope = self.graph.scopes[index]
        for value in (self.graph.values[found] for found in scope.names.values()):
            if not self.is_float(value.index):
                continue
            if value.origin in (Origin.INPUT, Origin.DEFAULT):
                self.produced[value.index] = self.signature_variable(value) if index == 0 else HIGH
            elif value.origin is Origin.INITIALIZER and not scope.opaque:
                self.produced[value.index] = self.new(ABSENT, "value", value.index)
                self.free.add(value.index)
            elif value.origin is Origin.SPARSE or scope.opaque:
                self.produced[value.index] = HIGH

    def signature_variable(self, value: Value) -> int:
        """Term of a graph input or output: kept, or low where the user wants low inputs and outputs."""
        names = {value.name} | {
            self.graph.scopes[0].proto.output[port].name for s, port in self.graph.results[value.index] if s == 0
        }
        if self.options.level == Level.O0 or any(self.options.keeps_io(name) for name in names):
            return HIGH
        if self.graph.types[value.index] == FLOAT:
            return LOW
        variable = self.new(ABSENT, "signature", value.index)  # containers follow their readers if these cannot be low
        self.requested_low.add(variable)
        return variable

    def node(self, node: Node) -> None:
        if node.signature is None or self.graph.scopes[node.scope].opaque:
            self.fixed(node)
        elif node.key in op_facts().control_flow:
            self.control_flow(node)
        elif node.key == "Cast":
            self.cast(node)
        elif node.key == "Constant":
            self.constant(node)
        else:
            self.plain(node)

    def fixed(self, node: Node) -> None:
        """A node without schema: float32 on all sides."""
        for port, value in enumerate(node.inputs):
            if self.is_float(value):
                self.consumed[node.index][port] = HIGH
        for value in node.outputs:
            if self.is_float(value):
                self.produced[value] = HIGH

    def plain(self, node: Node) -> None:
        """One variable per type parameter that is float32 now and may be low by the schema."""
        signature = node.signature
        assert signature is not None
        bound = bind(signature, [None if value == ABSENT else self.graph.types[value] for value in node.inputs])
        driven = set(bound)
        for position, value in enumerate(node.outputs):
            port = signature.output(position)
            if port is not None and value != ABSENT and self.graph.types[value] is not None:
                bound.setdefault(signature.param(port, position), str(self.graph.types[value]))
        self.bound[node.index] = bound
        for position, value in enumerate(node.inputs):
            port = signature.input(position)
            if port is not None and self.is_float(value):
                self.consumed[node.index][position] = self.port_variable(node, port, position)
        inherited = self.inherited(node)
        for position, value in enumerate(node.outputs):
            port = signature.output(position)
            if port is None or not self.is_float(value):
                continue
            if position == 0 and inherited != ABSENT:
                self.produced[value] = self.consumed[node.index][inherited]
            elif signature.param(port, position) in driven or (position == 0 and _is_settable(node)):
                self.produced[value] = self.port_variable(node, port, position)
            else:  # fixed by the op and not by its inputs, as LayerNormalization's Mean
                self.produced[value] = HIGH

    def port_variable(self, node: Node, port: Port, position: int) -> int:
        """The variable of the port's type parameter, or HIGH where schema or facts forbid the low type."""
        assert node.signature is not None
        param = node.signature.param(port, position)
        if param in self.of_node.get(node.index, {}):
            return self.of_node[node.index][param]
        bound = self.bound[node.index].get(param)
        allowed = node.signature.params.get(port.type, frozenset())
        movable = bound is not None and holds_float(bound) and retyped(bound, self.options.low) in allowed
        pinned = op_facts().pinned_parameters.get(node.key, frozenset())
        return self.new(node.index, param) if movable and param not in pinned else HIGH

    def inherited(self, node: Node) -> int:
        """Input whose type output 0 takes where the dtype attribute is absent; ABSENT where there is none."""
        rule = op_facts().dtype_attribute.get(node.key)
        if rule is None or rule.default not in ("input", "scale") or attribute(node.proto, rule.attribute):
            return ABSENT
        position = 0 if rule.default == "input" else 1
        return position if self.is_float(node.input(position)) else ABSENT

    def constant(self, node: Node) -> None:
        value = node.outputs[0] if node.outputs else ABSENT
        if not self.is_float(value):
            return
        if attribute(node.proto, "sparse_value") is not None:
            self.produced[value] = HIGH
        else:
            self.produced[value] = self.new(node.index, "value")
            self.free.add(value)

    def cast(self, node: Node) -> None:
        """The user's Casts, each with its own meaning; see the design's section on existing Casts."""
        source, result = node.input(0), node.outputs[0] if node.outputs else ABSENT
        if ABSENT in (source, result):
            return
        before, after, low = self.graph.types[source], self.graph.types[result], self.options.low.tensor
        if before == FLOAT:
            down = HIGH if self.options.level == Level.O0 or node.key in self.options.black else LOW
            self.consumed[node.index][0] = down if after == low else self.new(node.index, "T1")
        if after != FLOAT:
            return
        if before == FLOAT:  # a Cast that changes nothing yet reads and writes either precision
            self.produced[result] = self.new(node.index, "T2")
        elif before == low:
            visible = source not in self.hidden
            self.produced[result] = LOW if visible else HIGH
            if visible:
                self.lowered[result] = source
        elif before in op_facts().free_sources[node.key]:
            self.produced[result] = self.new(node.index, "T2")
            self.free.add(result)
        else:
            self.produced[result] = HIGH

    # -- ties --------------------------------------------------------------------------------------------------

    def control_flow(self, node: Node) -> None:
        """One variable per carried, scanned or branched value: it moves data and rounds nothing."""
        outer: dict[int, int] = {}
        for _, body in node.bodies:
            scope = self.graph.scopes[body]
            sources = body_sources(node, len(scope.inputs))
            inner = {s: scope.inputs[k] for k, s in enumerate(sources) if s >= 0 and self.is_float(scope.inputs[k])}
            for source, value in inner.items():
                if source < len(node.inputs) and self.is_float(node.inputs[source]):
                    variable = self.flow(node, f"input {source}", node.inputs[source])
                    self.consumed[node.index][source] = variable
                    self.produced[value] = variable
            targets = body_targets(node, len(scope.outputs))
            for position, target in enumerate(targets):
                if not 0 <= target < len(node.outputs) or not self.is_float(scope.outputs[position]):
                    continue
                if target not in outer:
                    outer[target] = self.flow(node, f"output {target}", scope.outputs[position])
                self.returned[body, position] = outer[target]
                if node.outputs[target] != ABSENT:
                    self.produced[node.outputs[target]] = outer[target]
        for source, target in carried(self.graph, node):
            self.join([self.consumed[node.index][source], outer.get(target, NONE)])

    def flow(self, node: Node, param: str, value: int) -> int:
        """Term of a value that the node passes on, if the target's kernel passes it on in low precision."""
        found = self.graph.types[value]
        assert found is not None
        assert node.signature is not None
        wanted = retyped(found, self.options.low)
        admitted = any(wanted in allowed for allowed in node.signature.params.values())
        movable = admitted and carries(self.options.target, node.key, node.signature, wanted)
        return self.new(node.index, param) if movable else HIGH

    def results(self) -> None:
        """PortVariables of the main graph's outputs, and of what opaque bodies return."""
        for scope in self.graph.scopes:
            if scope.index != 0 and not scope.opaque:
                continue
            for position, value in enumerate(scope.outputs):
                if self.is_float(value):
                    variable = HIGH if scope.opaque else self.signature_variable(self.graph.values[value])
                    self.returned[scope.index, position] = variable

    def unexplained(self) -> None:
        """Floats that only their readers tell of, behind ops of unknown types: float32."""
        for value, variable in enumerate(self.produced):
            if variable == NONE and self.is_float(value):
                self.produced[value] = HIGH

    def containers(self) -> None:
        """What cannot be cast (sequences, optionals, sparse constants): all ops that touch it decide together."""
        for value, found in enumerate(self.graph.types):
            if not holds_float(found) or (found == FLOAT and not self.is_sparse(value)):
                continue
            ports = [self.produced[value]]
            ports += [self.consumed[node.index][port] for node, port in self.graph.consumers(value)]
            ports += [self.returned[key] for key in self.graph.results[value] if key in self.returned]
            touching = [self.graph.producer(value), *(node for node, _ in self.graph.consumers(value))]
            for node in touching:
                if node is not None and node.key not in op_facts().control_flow:
                    ports += self.of_node.get(node.index, {}).values()
            self.join(ports)

    def is_sparse(self, value: int) -> bool:
        """Whether the value is a sparse constant, which neither converts nor casts."""
        producer = self.graph.producer(value)
        is_node = producer is not None and attribute(producer.proto, "sparse_value") is not None
        return is_node or self.graph.values[value].origin is Origin.SPARSE

    def join(self, ports: Sequence[int]) -> None:
        variables = [variable for variable in ports if variable >= 0]
        for variable in variables[1:]:
            self.tie(variables[0], variable)
        if variables and HIGH in ports:
            self.fixed_high.add(variables[0])


def _is_settable(node: Node) -> bool:
    """Whether output 0 of the node can change its type although no input shares its parameter."""
    return node.key in op_facts().follows_type or node.key in op_facts().dtype_attribute
