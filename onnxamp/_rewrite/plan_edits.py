"""The edits that carry out a decision: names in each precision, and new Casts.

Complexity: linear in ports.
"""

from typing import Final, NamedTuple

from onnx import TensorProto

from onnxamp._decide.hazards.scales import vanishing_scales
from onnxamp._decide.ports import LOW, NONE
from onnxamp._decide.precision import Decision
from onnxamp._decide.problem import Problem
from onnxamp._facts.dtypes import FLOAT, retyped
from onnxamp._facts.ops import op_facts
from onnxamp._graph.editor import NewNames
from onnxamp._graph.view import ABSENT, Node, Origin, Value, shadowing
from onnxamp._model.blobs import Chosen
from onnxamp._model.weights import Scratch, lower
from onnxamp._rewrite.apply import Edits, NewCast, NewConstant, NewDequantize

_STORED: Final = (Origin.INITIALIZER, Origin.DEFAULT)


class Source(NamedTuple):
    """The source of a low-precision value: its name, its scope, and the name of its float32 version if there is one."""

    name: str
    scope: int
    raised: str | None


def plan_edits(problem: Problem, decision: Decision) -> Edits:
    """Plan the edits that carry out a decision."""
    planner = _Planner(problem, decision)
    planner.values()
    planner.lowered_values()
    planner.dequantize_twice()
    planner.remove_idle()
    planner.readers()
    planner.returns()
    planner.remove_dead()
    planner.halve_sentinels()
    planner.keep_positive()
    planner.bound_sums()
    return planner.edits


class _Planner:
    """Plans the edits of values, of those that read and return them, and of the original Casts around them.

    Attributes:
        low: whether a port with a variable is low precision: HIGH, LOW and NONE are -1, -2 and -3, and stand at the
            end.
        names: value -> its name in float32 (False) and in low precision (True), as far as something reads it there.
        shadowed: see :func:`shadowing`.
        down_casts: float32 value -> original Casts of it to low precision.
        aliases: output of a removed Cast to low precision -> the value that it was cast from, which is low itself now.
        doubled: nodes that dequantize in both precisions -> the name of their second result. The last ones come
            first, which may dequantize the scale of another.
    """

    def __init__(self, problem: Problem, decision: Decision) -> None:
        self.problem = problem
        self.graph = problem.graph
        self.ports = problem.ports
        self.low = [*decision.low, False, True, False]
        self.edits, self.new = (
            Edits(problem.options.low),
            NewNames(self.graph.all_names()),
        )
        self.names = dict[int, dict[bool, str]]()
        self.shadowed = self.graph.ask(shadowing)
        self.down_casts, self.aliases = dict[int, list[Node]](), dict[int, int]()
        for node in self.graph.nodes_of({"Cast"}):
            if node.inputs and self.ports.consumed[node.index][0] == LOW:
                self.down_casts.setdefault(node.inputs[0], []).append(node)
        self.doubled = dict[int, str]()
        for index in sorted(problem.twofold & self.ports.of_node.keys(), reverse=True):
            if len(self.needs(self.graph.nodes[index].outputs[0])) == 2:
                self.doubled[index] = ""

    # -- original Casts ----------------------------------------------------------------------------------------

    def public_name(self, value: Value) -> str:
        """Return the name of the graph output of a Cast that the value, now low itself, replaces."""
        casts = self.down_casts.get(value.index)
        if (
            not casts
            or value.origin is not Origin.NODE
            or value.scope != 0
            or self.graph.results[value.index]
        ):
            return value.name
        for node in casts:
            result = self.graph.values[node.outputs[0]]
            if node.scope == 0 and self.graph.results[result.index]:
                self.edits.removed.add(node.index)
                self.edits.outputs[value.producer, value.port] = result.name
                return result.name
        return value.name

    def reuse(self, value: Value) -> str | None:
        """Return the output of a Cast that serves all low-precision readers of a float32 value; None if there is none.

        The Cast moves right after the producer, to precede them.
        """
        for node in self.down_casts.get(value.index, ()):
            if node.scope == value.scope and node.outputs[0] not in self.graph.hidden:
                if node.index != value.producer + 1:
                    self.edits.moved[node.index] = value.producer
                return self.graph.values[node.outputs[0]].name
        return None

    def remove(self, value: int, *, nested: bool = False) -> None:
        """Remove Casts of a value that exists in low precision anyway, if possible.

        Args:
            value: the value.
            nested: remove only Casts in bodies; one in the value's own scope may produce its low version.
        """
        scope = self.graph.values[value].scope
        for node in self.down_casts.get(value, ()):
            result = node.outputs[0]
            returned = any(
                home == 0 or node.scope != scope
                for home, _ in self.graph.results[result]
            )
            if not returned and (node.scope != scope or not nested):
                self.edits.removed.add(node.index)
                self.aliases[result] = value

    def low_source(self, value: int) -> Source:
        """Return the source of a value that is low in the original model, through Casts that are removed."""
        while value in self.aliases:
            source = self.aliases[value]
            names = self.names.get(source, {})
            if True in names:
                is_low = self.low[self.ports.produced[source]]
                raised = names.get(False) if is_low else None
                return Source(names[True], self.graph.values[source].scope, raised)
            value = self.ports.lowered[source]
        held = self.graph.values[value]
        return Source(held.name, held.scope, None)

    def remove_dead(self) -> None:
        """Remove Casts from low precision to float32 that lose all their readers."""
        for value in self.ports.lowered:
            producer = self.graph.producer(value)
            assert producer is not None
            reads = [
                key
                for key in self.graph.uses[value]
                if key[0] not in self.edits.removed
            ]
            name = self.graph.values[value].name
            returned = self.graph.results[value]
            if any(self.edits.results.get(key, name) == name for key in returned):
                continue
            if (returned or self.graph.uses[value]) and all(
                self.edits.inputs.get(key, name) != name for key in reads
            ):
                self.edits.removed.add(producer.index)

    def remove_idle(self) -> None:
        """Remove float32-to-float32 Casts that read and write low precision, unless the model returns them."""
        # producers first: a Cast of a removed Cast reads its input
        for node in self.graph.order:
            sides = (
                self.ports.of_node.get(node.index, {}) if node.key == "Cast" else {}
            )
            if len(sides) < 2 or not all(self.low[side] for side in sides.values()):
                continue
            source = node.inputs[0]
            result = node.outputs[0]
            low = self.names[source].get(True)
            names = self.names[result]
            if self.graph.results[result] or False in names:
                continue
            if low is not None and source not in self.graph.hidden:
                self.edits.removed.add(node.index)
                names[True] = low

    # -- values --------------------------------------------------------------------------------------------------

    def values(self) -> None:
        """Plan the names and types of all values."""
        for value, variable in enumerate(self.ports.produced):
            if variable != NONE:
                self.value(self.graph.values[value])

    def dequantize_twice(self) -> None:
        """Add the second nodes for nodes that dequantize in both precisions."""
        for index, target in self.doubled.items():
            node = self.graph.nodes[index]
            is_low = self.low[self.ports.produced[node.outputs[0]]]
            scale = self.names[node.inputs[1]][not is_low]
            name = self.new.fresh(f"{target}/{node.proto.op_type}")
            elem = TensorProto.FLOAT if is_low else self.edits.low.elem
            self.edits.dequantized.append(
                NewDequantize(index, scale, target, name, elem)
            )

    def halve_sentinels(self) -> None:
        """Let sentinels on low mask paths saturate to half the range, so that mask + score stays finite."""
        constants = self.graph.constants
        for index in {node for path in self.problem.sentinels for node in path}:
            for value, variable in zip(
                self.graph.nodes[index].inputs, self.ports.consumed[index], strict=True
            ):
                stats = constants.stats(value) if self.low[variable] else None
                if stats is not None and stats.has_sentinel(self.edits.low):
                    self.edits.halved.add(constants.source(value))

    def bound_sums(self) -> None:
        """Bound low sums of scores and a mask among the inputs.

        Where a type is narrow, a score beside its largest number overflows, or leaves traces, by which a fully masked
        row would not be uniform.
        """
        sums = self.problem.masks.sums if self.edits.low.is_narrow else ()
        for node in self.graph.at(sums):
            value = node.outputs[0]
            variable = self.ports.produced[value]
            if variable >= 0 and self.low[variable] and self.names[value].get(True):
                name = self.edits.outputs.get(
                    (node.index, 0), self.graph.values[value].name
                )
                self.edits.outputs[node.index, 0] = self.new.fresh(f"{name}_unbounded")
                self.edits.sums[node.index] = name
        if self.edits.sums:
            self.edits.low_floor = self.new.fresh("sum_floor")

    def keep_positive(self) -> None:
        """Let low scales of weights that would become 0 be the smallest number."""
        low = self.edits.low
        stored = {copy.value for copy in self.edits.copies}
        for scale, numbers in vanishing_scales(self.graph, low):
            if scale in self.edits.weights | stored:
                flat = numbers.reshape(-1)
                bits, counts = lower(flat, low, low.max_finite, Scratch(flat.size))
                bits[(bits == 0) & (flat != 0)] = 1
                self.edits.rounded[scale] = Chosen(bits, counts)

    def fresh(self, base: str, *, low: bool) -> str:
        """Return a new name for a value in the other precision."""
        return self.new.fresh(f"{base}_{self.edits.low.suffix if low else 'fp32'}")

    def add_cast(self, value: Value, source: str, target: str, elem: int) -> None:
        """Insert a Cast right after the value's producer, shielded if a fusion would absorb it, of a bounded mask."""
        shielded = elem == TensorProto.FLOAT and value.index in self.problem.absorbed
        shield = self.new.fresh(f"{target}_cast") if shielded else ""
        is_mask = (
            elem == self.edits.low.elem and value.index in self.problem.masks.values
        )
        bounded = self.new.fresh(f"{source}_bounded") if is_mask else ""
        if is_mask and not self.edits.floor:
            self.edits.floor = self.new.fresh("mask_floor")
        name = self.new.fresh(f"{target}/Cast")
        self.edits.casts.append(
            NewCast(
                value.scope,
                value.producer,
                source,
                target,
                elem,
                name,
                shield,
                bounded,
            )
        )

    def needs(self, value: int) -> set[bool]:
        """Return whether the value is read or returned in low precision, in float32, or both, original Casts apart."""
        consumed = self.ports.consumed
        low = self.low
        nodes = self.graph.nodes
        needed = set[bool]()
        for node, port in self.graph.uses[value]:
            if node in self.doubled:
                return {False, True}  # its scale
            variable = consumed[node][port]
            is_own_cast = variable == LOW and nodes[node].key == "Cast"
            if variable != NONE and not is_own_cast:
                needed.add(low[variable])
        for key in self.graph.results[value]:
            if key in self.ports.returned:
                needed.add(low[self.ports.returned[key]])
        return needed

    def public(self, value: int) -> bool | None:
        """Return whether the main graph returns the value in low precision; None if it does not return it."""
        keys = [
            key
            for key in self.graph.results[value]
            if key[0] == 0 and key in self.ports.returned
        ]
        return self.low[self.ports.returned[keys[0]]] if keys else None

    def value(self, value: Value) -> None:
        """Plan the names and the type of a value, and the Cast or copy that it needs."""
        index = value.index
        kind = self.graph.types[value.index]
        assert kind is not None
        is_low = self.low[self.ports.produced[index]]
        if kind != FLOAT:
            own = self.own_name(value, is_low=is_low)
            self.names[index] = {False: own, True: own}
            if is_low:
                self.make_low(value)
            return
        if index in self.ports.lowered:
            return  # the output of an original Cast from low precision: see lowered_values
        needed = self.needs(index)
        if index in self.ports.free and len(needed) == 1:
            # Whatever a Constant, or a Cast of integers, is pinned to, because nothing would read it.
            is_low = True in needed
        if is_low:
            self.remove(index)
            self.make_low(value)
        needed.add(is_low)
        own = self.own_name(value, is_low=is_low)
        names = self.names[index] = dict.fromkeys(needed, own)
        if len(needed) == 1:
            return
        public = self.public(index)
        if self.is_constant(index):
            replaces_cast = own != value.name and index not in self.shadowed
            self.copy(value, names, base_low=bool(public) or replaces_cast)
            return
        keeps_name_low = is_low if public is None else public
        reused = None if is_low or keeps_name_low else self.reuse(value)
        if reused is not None:
            names[True] = reused
            return
        other_low = not keeps_name_low
        names[other_low] = self.fresh(value.name, low=other_low)
        self.second_version(value, names, is_low=is_low)
        self.remove(index, nested=other_low)

    def second_version(
        self, value: Value, names: dict[bool, str], *, is_low: bool
    ) -> None:
        """Add the precision that the producer does not deliver, by a Cast of the value or of its integer source."""
        own = names[is_low]
        other = names[not is_low]
        is_renamed = own != value.name and self.public(value.index) is not None
        if is_renamed and value.origin in _STORED:
            self.edits.renamed[value.index] = own
        elif is_renamed:  # the Cast's output takes the public name
            self.edits.outputs[value.producer, value.port] = own
            self.edits.types.pop(value.index, None)
            if not is_low:
                self.edits.types[value.index] = self.edits.low.tensor
        producer = self.graph.producer(value.index)
        if value.producer in self.doubled:
            self.doubled[value.producer] = other
            return
        source = own
        if value.index in self.ports.free and producer is not None:
            source = producer.proto.input[0]
        elem = TensorProto.FLOAT if is_low else self.edits.low.elem
        self.add_cast(value, source, other, elem)

    def own_name(self, value: Value, *, is_low: bool) -> str:
        """Return the value's name, or a new one if it shadows an outer value that would get another type.

        onnx and ONNX Runtime infer one type per name wherever it is visible.
        """
        outer = self.shadowed.get(value.index)
        if outer is None:
            return self.public_name(value) if is_low else value.name
        if not is_low and not self.low[self.ports.produced[outer]]:
            return value.name
        name = self.fresh(value.name, low=is_low)
        if value.origin is Origin.NODE:
            self.edits.outputs[value.producer, value.port] = name
        self.edits.renamed[value.index] = (
            name  # where it is also declared, or the outer value would be
        )
        return name

    def is_constant(self, value: int) -> bool:
        """Return whether the value is an initializer or a Constant, which is stored twice if both precisions are
        needed.
        """
        producer = self.graph.producer(value)
        return value in self.ports.free and (
            producer is None or producer.key == "Constant"
        )

    def copy(self, value: Value, names: dict[bool, str], *, base_low: bool) -> None:
        """Store a constant twice. The copy that keeps the name is float32 unless the model returns it low."""
        other = names[not base_low] = self.fresh(value.name, low=not base_low)
        node_name = (
            self.new.fresh(f"{other}/Constant") if value.producer != ABSENT else ""
        )
        self.edits.copies.append(
            NewConstant(value.index, other, node_name, low=not base_low)
        )
        if base_low:
            self.make_low(value)
        else:
            self.edits.weights.discard(value.index)
            self.edits.attributes.discard(value.producer)
            self.edits.types.pop(value.index, None)

    def make_low(self, value: Value) -> None:
        """Lower the type of a value, and the producer's weight or attribute if that determines it."""
        kind = self.graph.types[value.index]
        assert kind is not None
        self.edits.types[value.index] = retyped(kind, self.edits.low)
        if value.origin in _STORED:
            self.edits.weights.add(value.index)
            return
        if value.producer == ABSENT or value.port != 0:
            return
        node = self.graph.nodes[value.producer]
        rule = op_facts().dtype_attribute.get(node.key)
        written = rule is not None and (
            rule.default not in ("input", "scale")
            or any(a.name == rule.attribute for a in node.proto.attribute)
        )
        if (
            node.key == "Constant"
            or written
            or (node.key == "Optional" and not node.inputs)
        ):
            self.edits.attributes.add(node.index)

    def lowered_values(self) -> None:
        """Name values that an original Cast raises from low precision: low-precision readers bypass the Cast."""
        hidden = {self.graph.values[value].name for value in self.graph.hidden}
        for value, source in self.ports.lowered.items():
            origin = self.low_source(source)
            own = self.graph.values[value]
            is_kept = self.graph.results[value] or origin.raised in hidden
            raised = None if is_kept else origin.raised
            names = {False: raised or own.name, True: origin.name}
            self.names[value] = names
            if self.public(value) or self.leaves_body(value, origin.scope):
                self.edits.attributes.add(own.producer)
                self.edits.types[value] = self.edits.low.tensor
                names[True] = own.name
                if False not in self.needs(value):
                    continue
                if origin.raised is not None:
                    names[False] = origin.raised
                    continue
                names[False] = self.fresh(own.name, low=False)
                self.add_cast(own, origin.name, names[False], TensorProto.FLOAT)

    def leaves_body(self, value: int, home: int) -> bool:
        """Return whether a body returns the value in low precision, which is a value of another scope."""
        returned = (
            self.ports.returned.get(key, NONE) for key in self.graph.results[value]
        )
        return home != self.graph.values[value].scope and any(
            self.low[variable] for variable in returned
        )

    def readers(self) -> None:
        """Point each input to the version of the value that it reads."""
        for node in self.graph.nodes:
            consumed = self.ports.consumed[node.index]
            for port, value in enumerate(node.inputs):
                variable = consumed[port]
                is_alias = value in self.aliases
                if value == ABSENT or (variable == NONE and not is_alias):
                    continue
                is_low = self.low[variable]
                if variable == LOW and node.key == "Cast":
                    # An original Cast reads what the producer delivers.
                    is_low = (
                        value not in self.ports.lowered
                        and self.low[self.ports.produced[value]]
                    )
                if is_alias:
                    name: str | None = self.low_source(value).name
                else:
                    name = self.names[value].get(is_low)
                if name is not None and name != self.graph.values[value].name:
                    self.edits.inputs[node.index, port] = name

    def returns(self) -> None:
        """Set names and types of the outputs of bodies and of the main graph."""
        for scope in self.graph.scopes:
            for position, value in enumerate(scope.outputs):
                key = (scope.index, position)
                if value in self.aliases:
                    self.edits.results[key] = self.low_source(value).name
                if key not in self.ports.returned:
                    continue
                is_low = self.low[self.ports.returned[key]]
                kind = self.graph.types[value]
                assert kind is not None
                name = self.names[value].get(is_low)
                if name is not None and name != scope.proto.output[position].name:
                    self.edits.results[key] = name
                if is_low:
                    self.edits.result_types[key] = retyped(kind, self.edits.low)
