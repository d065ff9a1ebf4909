"""The precision variables of a model: one per type parameter of each node, and the ties between them."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from onnxamp._decide.builder import builder_of
from onnxamp._decide.mincut import Question
from onnxamp._decide.variables.ports import (
    HIGH,
    LOW,
    NONE,
    Layout,
    PortVariables,
    layout_of,
)
from onnxamp._decide.variables.signature import unfit_defaults
from onnxamp._decide.variables.ties import TiedVariables
from onnxamp._facts.dtypes import FLOAT, holds_float, retyped
from onnxamp._facts.kernels import carries
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Origin,
    Scope,
    Value,
    carried,
    entering_values,
    leaving_values,
)
from onnxamp._options.options import Options
from onnxamp._options.values import Level


def find_variables(
    graph: Graph,
    options: Options,
    groups: Sequence[Sequence[int]] = (),
    low_weights: frozenset[int] = frozenset(),
) -> PortVariables:
    """Find all variables of a model, and tie those that must be equal. Complexity: near linear in ports.

    Args:
        graph: the prepared model.
        options: the options of the conversion.
        groups: nodes whose variables must all be equal (folded normalizations, decomposed patterns, mask paths).
        low_weights: constants to store in low precision.
    """
    builder = builder_of(graph, options.target)
    finder = _Finder(graph, options, low_weights, builder.uncast_values())
    for scope in graph.scopes:
        finder.add_scope(scope)
    for node in graph.nodes:
        finder.add_node(node)
    finder.add_results()
    finder.keep_unexplained()
    finder.tie_containers()
    for group in groups:
        finder.tie_nodes(group)
    finder.tie_bodies(builder.nodes("whole_bodies"))
    return finder.found()


def unknown_floats(graph: Graph, node: Node) -> list[int]:
    """Return values of unknown types that a node reads or writes and that its schema allows to be floats.

    It is unknown which types the node may have with them.
    """
    signature = node.signature
    if signature is None or not graph.untyped or node.key in op_facts().control_flow:
        return []
    return [
        value
        for value, port in node.formals()
        if value in graph.untyped
        and port is not None
        and any(map(holds_float, signature.params.get(port.type, ())))
    ]


class _Finder:
    """Finds the precision variables of a graph: first those of values and nodes, then the ties between them.

    Attributes:
        uncast: values whose Cast the target may reject.
        sparse: sparse float32 constants, which can be neither converted nor cast.
        kinds: type by value index.
        floats: the types among them that hold float32.

    All others are as in :class:`PortVariables`.
    """

    def __init__(
        self,
        graph: Graph,
        options: Options,
        low_weights: AbstractSet[int],
        uncast: AbstractSet[int],
    ) -> None:
        self.graph = graph
        self.options = options
        self.low_weights = low_weights
        self.uncast = uncast
        self.facts = op_facts()
        self.low = options.low
        self.kinds = graph.types
        self.floats = frozenset(filter(holds_float, set(self.kinds)))
        self.variables = TiedVariables()
        self.produced = [NONE] * (len(graph.values) + 1)
        self.consumed = [[NONE] * len(node.inputs) for node in graph.nodes]
        self.returned = dict[tuple[int, int], Question]()
        self.of_node = dict[int, dict[str, Question]]()
        self.layouts = dict[int, Layout]()
        self.raised_from = dict[int, int]()
        self.free = set[int]()
        self.sparse = set[int]()
        self.requested_low = set[Question]()

    def found(self) -> PortVariables:
        """Return all variables and ports."""
        return PortVariables(
            variables=tuple(self.variables.all),
            produced=self.produced,
            consumed=self.consumed,
            read=self.readers(),
            returned=self.returned,
            of_node=self.of_node,
            free=frozenset(self.free),
            raised_from=self.raised_from,
            roots=self.variables.roots(),
            layouts=self.layouts,
            fixed_high=frozenset(self.variables.fixed_high),
            requested_low=frozenset(self.requested_low),
        )

    def readers(self) -> Sequence[Sequence[Question]]:
        """Return the variables that read or return each value, once each. Complexity: linear in ports."""
        readers: list[list[Question]] = [[] for _ in self.produced]
        for node in self.graph.nodes:
            consumed = self.consumed[node.index]
            for value, variable in zip(node.inputs, consumed, strict=True):
                if variable != NONE:
                    readers[value].append(variable)
        for scope in self.graph.scopes:
            for position, value in enumerate(scope.outputs):
                variable = self.returned.get((scope.index, position), NONE)
                if variable != NONE:
                    readers[value].append(variable)
        # Tuples, which take less memory.
        return [
            tuple(dict.fromkeys(variables) if len(variables) > 1 else variables)
            for variables in readers
        ]

    def is_float(self, value: int) -> bool:
        """Return whether a value holds float32."""
        return self.kinds[value] in self.floats

    # -- values ------------------------------------------------------------------------------------------------

    def add_scope(self, scope: Scope) -> None:
        """Assign variables to initializers and graph inputs; inputs of bodies belong to the bodies' owners."""
        for named in scope.names.values():
            value = self.graph.values[named]
            if value.origin is Origin.NODE or not self.is_float(named):
                continue
            self.produced[named] = HIGH
            if value.origin is Origin.SPARSE:
                self.sparse.add(named)
            elif value.origin is not Origin.INITIALIZER and scope.index == 0:
                self.produced[named] = self.signature_variable(value)
            elif value.origin is Origin.INITIALIZER and not scope.opaque:
                self.add_weight(named)

    def add_weight(self, value: int, node: int = ABSENT) -> None:
        """Create a variable for an initializer or a Constant: it can be stored in either precision."""
        # A Constant is known by its node.
        initializer = value if node == ABSENT else ABSENT
        (variable,) = self.add(node, ("value",), initializer)
        self.produced[value] = variable
        if value in self.low_weights:
            self.requested_low.add(variable)
        else:
            self.free.add(value)

    def signature_variable(self, value: Value) -> Question:
        """Return the variable of a graph input or output: HIGH unless keep_io_types excludes it, and its default fits.

        A value that no Cast can follow is low only if its readers can be: containers, and values that the target reads
        without Casts.
        """
        index = value.index
        options = self.options
        outputs = self.graph.scopes[0].proto.output
        names = {value.name}
        for scope, port in self.graph.results[index]:
            if scope == 0:
                names.add(outputs[port].name)
        if options.level == Level.O0 or any(map(options.keeps_io, names)):
            return HIGH
        if options.hazards and index in self.graph.ask(unfit_defaults, self.low):
            return HIGH
        if self.kinds[index] == FLOAT and index not in self.uncast:
            return LOW
        (variable,) = self.add(ABSENT, ("signature",), index)
        self.requested_low.add(variable)
        return variable

    def add_results(self) -> None:
        """Assign variables to the outputs of the main graph and of opaque bodies."""
        for scope in self.graph.scopes:
            if scope.index != 0 and not scope.opaque:
                continue
            for position, value in enumerate(scope.outputs):
                if not self.is_float(value):
                    continue
                named = self.graph.values[value]
                variable = HIGH
                if not scope.opaque and named.origin in (Origin.INPUT, Origin.DEFAULT):
                    variable = self.produced[value]  # one name has one type
                elif not scope.opaque:
                    variable = self.signature_variable(named)
                self.returned[scope.index, position] = variable

    def keep_unexplained(self) -> None:
        """Keep values in float32 that only their readers reveal to be floats, after ops of unknown types."""
        for value, variable in enumerate(self.produced):
            if variable == NONE and self.kinds[value] in self.floats:
                self.produced[value] = HIGH

    # -- nodes -------------------------------------------------------------------------------------------------

    def add(
        self, node: int, params: Sequence[str], value: int = ABSENT
    ) -> Sequence[Question]:
        """Add a variable for each parameter of a node, or one for ``value``, and return their indices."""
        added = self.variables.add(node, params, value)
        if node != ABSENT:
            self.of_node.setdefault(node, {}).update(zip(params, added, strict=True))
        return added

    def add_node(self, node: Node) -> None:
        """Assign variables to the ports of a node."""
        graph = self.graph
        is_opaque = node.signature is None or graph.scopes[node.scope].opaque
        is_unknown = bool(graph.untyped) and bool(unknown_floats(graph, node))
        if is_opaque or is_unknown or node.index in graph.shields:
            self.keep_node(node)
        elif node.key in self.facts.control_flow:
            self.add_control_flow(node)
        elif node.key == "Cast":
            self.add_cast(node)
        elif node.key == "Constant":
            self.add_constant(node)
        else:
            self.add_parameters(node)

    def keep_node(self, node: Node) -> None:
        """Keep all ports of a node in float32.

        Such nodes have no schema, read or write a value that may be any float, or shield an up-cast from a fusion.
        """
        for port, value in enumerate(node.inputs):
            if self.is_float(value):
                self.consumed[node.index][port] = HIGH
        for value in filter(self.is_float, node.outputs):
            self.produced[value] = HIGH

    def add_parameters(self, node: Node) -> None:
        """Create a variable for each type parameter that is float32 and that the schema allows to be low."""
        index = node.index
        kinds = self.kinds
        inputs = (*map(kinds.__getitem__, node.inputs),)
        outputs = (*map(kinds.__getitem__, node.outputs),)
        layout = self.layouts[index] = layout_of(node, inputs, outputs, self.low)
        own = self.add(index, layout.params) if layout.params else ()
        if tied := self.facts.tied_parameters.get(node.key):
            named = zip(layout.params, own, strict=True)
            self.variables.join([one for param, one in named if param in tied])
        # A place in the layout is the number of a parameter; HIGH, LOW and NONE are negative, and count from the end.
        places = (*own, NONE, LOW, HIGH)
        consumed = self.consumed[index]
        for port, place in enumerate(layout.inputs):
            consumed[port] = places[place]
        for value, place in zip(node.outputs, layout.outputs, strict=True):
            if place != NONE:
                self.produced[value] = places[place]

    def add_constant(self, node: Node) -> None:
        """Create a variable for a Constant; a sparse one stays in float32."""
        value = node.output(0)
        if not self.is_float(value):
            return
        if attribute(node.proto, "sparse_value") is not None:
            self.produced[value] = HIGH
            self.sparse.add(value)
        else:
            self.add_weight(value, node.index)

    def add_cast(self, node: Node) -> None:
        """Assign variables to both sides of an original Cast."""
        source = node.input(0)
        result = node.output(0)
        if ABSENT in (source, result):
            return
        before = self.kinds[source]
        after = self.kinds[result]
        low = self.low.tensor
        if before == FLOAT and after == low:
            stays = self.options.level == Level.O0 or node.key in self.options.black
            stays |= source in self.uncast and source in self.raised_from
            self.consumed[node.index][0] = HIGH if stays else LOW
        elif before == FLOAT:
            (self.consumed[node.index][0],) = self.add(node.index, ("T1",))
        if after != FLOAT:
            return
        is_free = before in self.facts.free_sources[node.key]
        self.produced[result] = HIGH
        if before == low and source not in self.graph.hidden:
            self.produced[result] = LOW
            self.raised_from[result] = source
        elif before == FLOAT or is_free:
            # From float32, it changes nothing, so each side may have either precision.
            (self.produced[result],) = self.add(node.index, ("T2",))
        if is_free:
            self.free.add(result)

    # -- control flow ------------------------------------------------------------------------------------------

    def add_control_flow(self, node: Node) -> None:
        """Create one variable per value that enters or leaves the bodies: control flow moves data without rounding."""
        variables = dict[int, Question]()
        untyped = set[int]()
        for _, body in node.bodies:
            untyped |= self.enter_body(node, self.graph.scopes[body])
            self.leave_body(node, self.graph.scopes[body], variables)
        for source, target in carried(self.graph, node):
            state = HIGH if source in untyped else self.consumed[node.index][source]
            self.variables.join([state, variables.get(target, NONE)])

    def enter_body(self, node: Node, body: Scope) -> set[int]:
        """Assign variables to the values that enter a body, and return the inputs of the node without a known type."""
        untyped = set[int]()
        for source, value in entering_values(node, body).items():
            if not self.is_float(value):
                continue
            outer = node.input(source)
            if self.is_float(outer):
                variable = self.passed_variable(node, f"input {source}", outer)
                self.consumed[node.index][source] = variable
                self.produced[value] = variable
            else:
                # The result of a function that is kept has no known type.
                untyped.add(source)
        return untyped

    def leave_body(
        self, node: Node, body: Scope, variables: dict[int, Question]
    ) -> None:
        """Assign variables to the values that leave a body.

        Args:
            node: the node.
            body: one of its bodies.
            variables: output of the node -> its variable, which all bodies share; outputs are added.
        """
        leaving = leaving_values(node, body).items()
        for position, (target, value) in enumerate(leaving):
            if not 0 <= target < len(node.outputs) or not self.is_float(value):
                continue
            if target not in variables:
                name = f"output {target}"
                variables[target] = self.passed_variable(node, name, value)
            self.returned[body.index, position] = variables[target]
            if node.outputs[target] != ABSENT:
                self.produced[node.outputs[target]] = variables[target]

    def passed_variable(self, node: Node, param: str, value: int) -> Question:
        """Return the variable of a value that the node passes on; HIGH if the target's kernel cannot pass it on low."""
        kind = self.graph.types[value]
        signature = node.signature
        assert kind is not None
        assert signature is not None
        low = retyped(kind, self.options.low)
        is_allowed = any(low in allowed for allowed in signature.params.values())
        if not (is_allowed and carries(self.options.target, node.key, signature, low)):
            return HIGH
        (variable,) = self.add(node.index, (param,))
        return variable

    # -- ties --------------------------------------------------------------------------------------------------

    def tie_nodes(self, nodes: Sequence[int]) -> None:
        """Tie all variables of some nodes."""
        joined = list[Question]()
        for index in nodes:
            joined += self.of_node.get(index, {}).values()
        self.variables.join(joined)

    def tie_containers(self) -> None:
        """Tie all ops that use a value that cannot be cast: a sequence, an optional, or a sparse constant."""
        containers = self.floats - {FLOAT}
        for value, kind in enumerate(self.graph.types):
            if kind not in containers and value not in self.sparse:
                continue
            joined = [self.produced[value]]
            joined += [
                self.returned.get(key, NONE) for key in self.graph.results[value]
            ]
            for node, port in self.graph.consumers(value):
                joined.append(self.consumed[node.index][port])
            for node in self.graph.around(value):
                if node.key not in self.facts.control_flow:
                    joined += self.of_node.get(node.index, {}).values()
            self.variables.join(joined)

    def tie_bodies(self, nodes: Sequence[Node]) -> None:
        """Tie everything in the bodies of each node, and the values that it passes on, which need no Casts."""
        owners = dict[int, int]()
        for node in nodes:
            owners |= {body: node.index for _, body in node.bodies}
        joined = {node.index: [*self.consumed[node.index]] for node in nodes}
        # Outer scopes come first, so inner ones find the owner of their parent.
        for scope in self.graph.scopes:
            owner = owners.setdefault(scope.index, owners.get(scope.parent, ABSENT))
            if owner == ABSENT:
                continue
            floats = filter(self.is_float, scope.inputs)
            joined[owner] += [self.produced[value] for value in floats]
            for index in scope.nodes:
                joined[owner] += self.of_node.get(index, {}).values()
                joined[owner] += self.consumed[index]
        for variables in joined.values():
            self.variables.join(variables)
