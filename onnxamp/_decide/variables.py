"""The precision variables of a model: one per type parameter of each node, and the ties between them."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import repeat

from onnxamp._decide.builder import builder_of
from onnxamp._decide.ports import (
    HIGH,
    LOW,
    NONE,
    Layout,
    PortVariables,
    Variable,
    layout_of,
)
from onnxamp._facts.dtypes import FLOAT, Format, holds_float, retyped
from onnxamp._facts.kernels import carries
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.index_paths import index_paths
from onnxamp._graph.view import (
    ABSENT,
    Node,
    Origin,
    Value,
    body_sources,
    body_targets,
    carried,
)
from onnxamp._model.constant_stats import tensor_stats
from onnxamp._options.options import Options
from onnxamp._options.values import Level


def unfit_defaults(graph: Graph, low: Format) -> Mapping[int, str]:
    """Return initializers that callers may override and whose numbers low precision breaks -> why."""
    overridable = graph.overridable()
    # Hardly any model has some, and what follows looks at every node and weight.
    if not overridable:
        return {}
    indices = graph.ask(index_paths).values
    tensors = {tensor.name: tensor for tensor in graph.model.graph.initializer}
    found: dict[int, str] = {}
    for named in overridable:
        value = named.index
        if graph.types[value] != FLOAT:
            continue
        stats = tensor_stats(tensors[named.name], graph.folder)
        if stats is None:
            continue
        readers = {node.key for node, _ in graph.consumers(value)}
        is_epsilon = not op_facts().epsilons.isdisjoint(readers)
        if stats.out_of_range(low) is not None:
            found[value] = (
                f"holds {stats.largest_number:.6g}, and {low.name} ends at {low.max_finite:.6g}"
            )
        elif is_epsilon and 0 < abs(stats.uniform or 0.0) < low.smallest_normal:
            found[value] = f"is {stats.uniform:.6g}, which {low.name} cannot hold"
        elif value in indices and stats.largest > low.exact_integers:
            found[value] = (
                f"holds {stats.largest:.6g} and {indices[value]}, and {_counts(low)}"
            )
    return found


def _counts(low: Format) -> str:
    """Return a clause about the last exact integer of a format."""
    return f"{low.name} counts only up to {low.exact_integers}"


def signature_warnings(graph: Graph, options: Options) -> Iterator[str]:
    """Yield warnings about inputs that need not keep their types, but stay in float32 or lose digits."""
    off = "keep_io_types (--io-types) is off for it"
    unfit = graph.ask(unfit_defaults, options.low)
    indices = graph.ask(index_paths).values
    for value in graph.scopes[0].inputs:
        named = graph.values[value]
        if graph.types[value] != FLOAT or options.keeps_io(named.name):
            continue
        if value in unfit:
            yield f"The input {named.name!r} stays in float32, although {off}: its default {unfit[value]}."
        elif value in indices and named.origin is Origin.INPUT:
            yield (
                f"The input {named.name!r} becomes {options.dtype}, since {off}, but it {indices[value]}, and"
                f" {_counts(options.low)}."
            )


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
        finder.scope_values(scope.index)
    for node in graph.nodes:
        finder.node(node)
    finder.results()
    finder.unexplained()
    finder.containers()
    for group in groups:
        joined = list[int]()
        for index in group:
            joined += finder.of_node.get(index, {}).values()
        finder.join(joined)
    finder.wholes(builder.nodes("whole_bodies"))
    return finder.finish()


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
    """Finds the precision variables of a graph, node by node.

    Args:
        uncast: values whose Cast the target may reject.

    Attributes:
        sparse: sparse float32 constants, which can be neither converted nor cast.
        kinds: type by value index.
        floats: the types among them that hold float32.
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
        self.variables = list[Variable]()
        self.parents = list[int]()
        self.produced = [NONE] * (len(graph.values) + 1)
        self.consumed = [[NONE] * len(node.inputs) for node in graph.nodes]
        self.returned = dict[tuple[int, int], int]()
        self.of_node = dict[int, dict[str, int]]()
        self.layouts = dict[int, Layout]()
        self.lowered = dict[int, int]()
        self.free = set[int]()
        self.sparse = set[int]()
        self.fixed_high = set[int]()
        self.requested_low = set[int]()

    # -- variables and ties ------------------------------------------------------------------------------------

    def new(self, node: int, *params: str, value: int = ABSENT) -> int:
        """Add a variable for each parameter, and return the index of the first one."""
        first = len(self.variables)
        own = range(first, first + len(params))
        self.variables += map(Variable, own, repeat(node), params, repeat(value))
        self.parents += own
        if node != ABSENT:
            self.of_node.setdefault(node, {}).update(zip(params, own, strict=True))
        return first

    def root(self, variable: int) -> int:
        """Return the variable that decides for this one."""
        while self.parents[variable] != variable:
            self.parents[variable] = self.parents[self.parents[variable]]
            variable = self.parents[variable]
        return variable

    def tie(self, first: int, second: int) -> None:
        """Make two variables equal."""
        # The older one decides, so that the order of ties does not matter.
        one, other = sorted((self.root(first), self.root(second)))
        self.parents[other] = one

    def readers(self) -> Sequence[Sequence[int]]:
        """Return the variables that read or return each value, once each. Complexity: linear in ports."""
        found: list[list[int]] = [[] for _ in self.produced]
        for node in self.graph.nodes:
            for value, variable in zip(
                node.inputs, self.consumed[node.index], strict=True
            ):
                if variable != NONE:
                    found[value].append(variable)
        for scope in self.graph.scopes:
            for position, value in enumerate(scope.outputs):
                variable = self.returned.get((scope.index, position), NONE)
                if variable != NONE:
                    found[value].append(variable)
        # Tuples, which take less memory.
        return [
            tuple(dict.fromkeys(variables) if len(variables) > 1 else variables)
            for variables in found
        ]

    def finish(self) -> PortVariables:
        """Return all variables and ports."""
        return PortVariables(
            variables=tuple(self.variables),
            produced=self.produced,
            consumed=self.consumed,
            read=self.readers(),
            returned=self.returned,
            of_node=self.of_node,
            free=frozenset(self.free),
            lowered=self.lowered,
            # Most variables are tied to none and decide for themselves.
            roots=[
                own if parent == own else self.root(own)
                for own, parent in enumerate(self.parents)
            ],
            layouts=self.layouts,
            fixed_high=frozenset(self.fixed_high),
            requested_low=frozenset(self.requested_low),
        )

    def is_float(self, value: int) -> bool:
        """Return whether a value holds float32."""
        return self.kinds[value] in self.floats

    # -- ports -------------------------------------------------------------------------------------------------

    def scope_values(self, index: int) -> None:
        """Assign variables to initializers and graph inputs; inputs of bodies belong to the bodies' owners."""
        scope = self.graph.scopes[index]
        for named in scope.names.values():
            value = self.graph.values[named]
            if value.origin is Origin.NODE or not self.is_float(named):
                continue
            self.produced[named] = HIGH
            if value.origin is Origin.SPARSE:
                self.sparse.add(named)
            elif value.origin is not Origin.INITIALIZER and index == 0:
                self.produced[named] = self.signature_variable(value)
            elif value.origin is Origin.INITIALIZER and not scope.opaque:
                self.produced[named] = self.new(ABSENT, "value", value=named)
                self.stored(named)

    def signature_variable(self, value: Value) -> int:
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
        variable = self.new(ABSENT, "signature", value=index)
        self.requested_low.add(variable)
        return variable

    def node(self, node: Node) -> None:
        """Assign variables to the ports of a node."""
        key = node.key
        is_opaque = node.signature is None or self.graph.scopes[node.scope].opaque
        if (
            is_opaque
            or (self.graph.untyped and unknown_floats(self.graph, node))
            or node.index in self.graph.shields
        ):
            self.fixed(node)
        elif key in self.facts.control_flow:
            self.control_flow(node)
        elif key == "Cast":
            self.cast(node)
        elif key == "Constant":
            self.constant(node)
        else:
            self.plain(node)

    def fixed(self, node: Node) -> None:
        """Keep all ports of a node in float32.

        Such nodes have no schema, read or write a value that may be any float, or shield an up-cast from a fusion.
        """
        for port, value in enumerate(node.inputs):
            if self.is_float(value):
                self.consumed[node.index][port] = HIGH
        for value in filter(self.is_float, node.outputs):
            self.produced[value] = HIGH

    def plain(self, node: Node) -> None:
        """Create a variable for each type parameter that is float32 and that the schema allows to be low."""
        index = node.index
        kinds = self.kinds
        inputs = (*map(kinds.__getitem__, node.inputs),)
        outputs = (*map(kinds.__getitem__, node.outputs),)
        layout = self.layouts[index] = layout_of(node, inputs, outputs, self.low)
        first = self.new(index, *layout.params) if layout.params else NONE
        if tied := self.facts.tied_parameters.get(node.key):
            own = self.of_node.get(index, {})
            self.join([own[param] for param in layout.params if param in tied])
        consumed = self.consumed[index]
        for port, place in enumerate(layout.inputs):
            consumed[port] = place + first if place >= 0 else place
        for value, place in zip(node.outputs, layout.outputs, strict=True):
            if place != NONE:
                self.produced[value] = place + first if place >= 0 else place

    def constant(self, node: Node) -> None:
        """Create a variable for a Constant: it is free, since it can be stored in either precision."""
        value = node.output(0)
        if not self.is_float(value):
            return
        if attribute(node.proto, "sparse_value") is not None:
            self.produced[value] = HIGH
            self.sparse.add(value)
        else:
            self.produced[value] = self.new(node.index, "value")
            self.stored(value)

    def stored(self, value: int) -> None:
        """Note that a constant can be stored in either precision, or is to be in the low one."""
        if value in self.low_weights:
            self.requested_low.add(self.produced[value])
        else:
            self.free.add(value)

    def cast(self, node: Node) -> None:
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
            stays |= source in self.uncast and source in self.lowered
            self.consumed[node.index][0] = HIGH if stays else LOW
        elif before == FLOAT:
            self.consumed[node.index][0] = self.new(node.index, "T1")
        if after != FLOAT:
            return
        is_free = before in self.facts.free_sources[node.key]
        self.produced[result] = HIGH
        if before == low and source not in self.graph.hidden:
            self.produced[result] = LOW
            self.lowered[result] = source
        elif before == FLOAT or is_free:
            # From float32, it changes nothing, so each side may have either precision.
            self.produced[result] = self.new(node.index, "T2")
        if is_free:
            self.free.add(result)

    # -- ties --------------------------------------------------------------------------------------------------

    def control_flow(self, node: Node) -> None:
        """Create one variable per value that enters or leaves the bodies: control flow moves data without rounding."""
        outer = dict[int, int]()
        untyped = set[int]()
        for _, body in node.bodies:
            scope = self.graph.scopes[body]
            sources = body_sources(node, len(scope.inputs))
            inner = {
                s: scope.inputs[k]
                for k, s in enumerate(sources)
                if s >= 0 and self.is_float(scope.inputs[k])
            }
            for source, value in inner.items():
                outer_value = node.input(source)
                if self.is_float(outer_value):
                    variable = self.flow(node, f"input {source}", outer_value)
                    self.consumed[node.index][source] = variable
                    self.produced[value] = variable
                else:
                    # The result of a function that is kept has no known type.
                    untyped.add(source)
            targets = body_targets(node, len(scope.outputs))
            for position, target in enumerate(targets):
                value = scope.outputs[position]
                if not 0 <= target < len(node.outputs) or not self.is_float(value):
                    continue
                if target not in outer:
                    outer[target] = self.flow(node, f"output {target}", value)
                self.returned[body, position] = outer[target]
                if node.outputs[target] != ABSENT:
                    self.produced[node.outputs[target]] = outer[target]
        for source, target in carried(self.graph, node):
            state = HIGH if source in untyped else self.consumed[node.index][source]
            self.join([state, outer.get(target, NONE)])

    def flow(self, node: Node, param: str, value: int) -> int:
        """Return the variable of a value that the node passes on; HIGH if the target's kernel cannot pass it on low."""
        kind = self.graph.types[value]
        assert kind is not None
        assert node.signature is not None
        low = retyped(kind, self.options.low)
        is_allowed = any(low in allowed for allowed in node.signature.params.values())
        movable = is_allowed and carries(
            self.options.target, node.key, node.signature, low
        )
        return self.new(node.index, param) if movable else HIGH

    def results(self) -> None:
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

    def unexplained(self) -> None:
        """Keep values in float32 that only their readers reveal to be floats, after ops of unknown types."""
        for value, variable in enumerate(self.produced):
            if variable == NONE and self.kinds[value] in self.floats:
                self.produced[value] = HIGH

    def containers(self) -> None:
        """Tie all ops that use a value that cannot be cast: a sequence, an optional, or a sparse constant."""
        containers = self.floats - {FLOAT}
        for value, kind in enumerate(self.graph.types):
            if kind not in containers and value not in self.sparse:
                continue
            variables = [self.produced[value]]
            variables += [
                self.returned.get(key, NONE) for key in self.graph.results[value]
            ]
            for node, port in self.graph.consumers(value):
                variables.append(self.consumed[node.index][port])
            for node in self.graph.around(value):
                if node.key not in self.facts.control_flow:
                    variables += self.of_node.get(node.index, {}).values()
            self.join(variables)

    def wholes(self, nodes: Sequence[Node]) -> None:
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
            self.join(variables)

    def join(self, joined: Sequence[int]) -> None:
        """Make variables equal; HIGH among them fixes them all."""
        first, *others = [variable for variable in joined if variable >= 0] or [NONE]
        for variable in others:
            self.tie(first, variable)
        if first >= 0 and HIGH in joined:
            self.fixed_high.add(first)
