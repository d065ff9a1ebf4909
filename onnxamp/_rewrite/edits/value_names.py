"""The first step of planning edits: the names that each value has in each precision.

A value is produced in one precision, and read in that one, in the other one, or in both. Readers of the other one need
a second version of it: a Cast, a second copy of a constant, or a second node that dequantizes. This module names both,
and finds the original Casts that are needless once values have these names. :mod:`onnxamp._rewrite.edits.new_casts`
makes the versions.

Complexity: linear in ports.
"""

from dataclasses import field
from enum import Enum
from typing import NamedTuple

from onnxamp._base.records import record
from onnxamp._decide.precision import Decision
from onnxamp._decide.problem import Problem
from onnxamp._decide.variables.ports import LOW, NONE
from onnxamp._facts.dtypes import FLOAT
from onnxamp._graph.editor import NewNames
from onnxamp._graph.view import Node, Origin, Value, shadowing


class How(Enum):
    """The way in which the second version of a value is made."""

    CAST = "a Cast of the value, or of the integers that it is cast from"
    COPY = "a second copy of a constant, or of what is computed from constants"
    DEQUANTIZED = "a second node that dequantizes the same integers"


class Version(NamedTuple):
    """The version of a value in the precision that its producer does not deliver.

    Attributes:
        value: the value.
        name: the name of the version.
        source: the name of what a Cast reads.
        low: whether it is low precision.
        how: the way in which it is made.
    """

    value: int
    name: str
    source: str
    low: bool
    how: How


@record
class Names:
    """The names of all values.

    Attributes:
        of: value -> its name in float32 (False) and in low precision (True), as far as something reads it there.
        versions: the versions that have to be made.
        outputs: (node, output) -> its new name.
        renamed: values that are declared or stored under a new name.
        aliases: output of a needless Cast to low precision -> the value that it was cast from, which is low itself now.
        low_names: values whose own name stands for low precision, and is declared with it.
        low_stores: values that are low because the tensor or the attribute that determines their type becomes low.
        low_casts: outputs of original Casts to float32 that are to deliver low precision.
        moved: original Cast that serves all low readers of a value -> the value's producer, which it moves to.
        needless: original Casts that go, because values have these names.
    """

    of: dict[int, dict[bool, str]] = field(default_factory=dict)
    versions: list[Version] = field(default_factory=list)
    outputs: dict[tuple[int, int], str] = field(default_factory=dict)
    renamed: dict[int, str] = field(default_factory=dict)
    aliases: dict[int, int] = field(default_factory=dict)
    low_names: set[int] = field(default_factory=set)
    low_stores: set[int] = field(default_factory=set)
    low_casts: set[int] = field(default_factory=set)
    moved: dict[int, int] = field(default_factory=dict)
    needless: set[int] = field(default_factory=set)


def find_names(problem: Problem, decision: Decision, new: NewNames) -> Names:
    """Return the names of all values.

    Args:
        problem: the problem.
        decision: its solution.
        new: gives names that are not taken.
    """
    namer = _Namer(problem, decision, new)
    for value, variable in enumerate(problem.ports.produced):
        if variable != NONE:
            namer.name(problem.graph.values[value])
    # The names of values come first, because readers of a bypassed Cast get those of its source.
    for value, source in problem.ports.raised_from.items():
        namer.name_raised(value, source)
    namer.bypass_idle()
    return namer.names


class LowSource(NamedTuple):
    """The source of a low-precision value: its name, its scope, and the name of its float32 version if there is one."""

    name: str
    scope: int
    raised: str | None


def low_source(
    problem: Problem, decision: Decision, names: Names, value: int
) -> LowSource:
    """Return the source of a value that is low in the original model, through Casts that are needless."""
    ports, values = problem.ports, problem.graph.values
    while value in names.aliases:
        source = names.aliases[value]
        known = names.of.get(source, {})
        if True in known:
            is_low = decision.is_low(ports.produced[source])
            raised = known.get(False) if is_low else None
            return LowSource(known[True], values[source].scope, raised)
        value = ports.raised_from[source]
    return LowSource(values[value].name, values[value].scope, None)


class _Namer:
    """Names the values of one graph.

    Attributes:
        names: the names so far.
        shadowed: see :func:`shadowing`.
        hidden: the names of the graph's hidden values.
        low_of: variable -> whether it is low, as of ``Decision.of_ports``.
        down_casts: float32 value -> original Casts of it to low precision.
        doubled: nodes that dequantize in both precisions.
    """

    def __init__(self, problem: Problem, decision: Decision, new: NewNames) -> None:
        self.problem = problem
        self.decision = decision
        self.new = new
        self.graph = problem.graph
        self.ports = problem.ports
        self.suffix = problem.options.low.suffix
        self.is_low = decision.is_low
        self.low_of = decision.of_ports()
        self.names = Names()
        self.shadowed = self.graph.ask(shadowing)
        self.hidden = {self.graph.values[value].name for value in self.graph.hidden}
        self.down_casts = dict[int, list[Node]]()
        for node in self.graph.nodes_of({"Cast"}):
            if node.inputs and self.ports.consumed[node.index][0] == LOW:
                self.down_casts.setdefault(node.inputs[0], []).append(node)
        self.doubled = set[int]()
        # The last ones come first, which may dequantize the scale of another.
        for index in sorted(problem.twofold & self.ports.of_node.keys(), reverse=True):
            if len(self.needs(self.graph.nodes[index].outputs[0])) == 2:
                self.doubled.add(index)

    # -- where values are read -------------------------------------------------------------------------------------

    def needs(self, value: int) -> set[bool]:
        """Return whether the value is read or returned in low precision, in float32, or both, original Casts apart."""
        read = self.ports.read[value]
        if not self.doubled and LOW not in read:
            # Nearly all values: only Casts and results read one as LOW.
            return set(map(self.low_of.__getitem__, read))
        consumed = self.ports.consumed
        needed: set[bool] = set()
        for node, port in self.graph.uses[value]:
            # A node that dequantizes twice reads its scale in both precisions.
            if node in self.doubled:
                return {False, True}
            variable = consumed[node][port]
            is_own_cast = variable == LOW and self.graph.nodes[node].key == "Cast"
            if variable != NONE and not is_own_cast:
                needed.add(self.low_of[variable])
        for key in self.graph.results[value]:
            if key in self.ports.returned:
                needed.add(self.is_low(self.ports.returned[key]))
        return needed

    def public(self, value: int) -> bool | None:
        """Return whether the main graph returns the value in low precision; None if it does not return it."""
        for key in self.graph.results[value]:
            if key[0] == 0 and key in self.ports.returned:
                return self.is_low(self.ports.returned[key])
        return None

    def leaves_body(self, value: int, home: int) -> bool:
        """Return whether a body returns the value in low precision, which is a value of another scope."""
        returned = (
            self.ports.returned.get(key, NONE) for key in self.graph.results[value]
        )
        is_outer = home != self.graph.values[value].scope
        return is_outer and any(map(self.is_low, returned))

    # -- names -----------------------------------------------------------------------------------------------------

    def fresh(self, base: str, *, low: bool) -> str:
        """Return a new name for a value in the other precision."""
        return self.new.fresh(f"{base}_{self.suffix if low else 'fp32'}")

    def name(self, value: Value) -> None:
        """Name a value in the precisions in which it is read, and add the version that it needs."""
        index = value.index
        is_low = self.is_low(self.ports.produced[index])
        # No Cast can follow a sequence or an optional.
        if self.graph.types[index] != FLOAT:
            own = self.own_name(value, is_low=is_low)
            self.names.of[index] = {False: own, True: own}
            if is_low:
                self.make_low(index)
            return
        # The output of an original Cast from low precision: see name_raised.
        if index in self.ports.raised_from:
            return
        needed = self.needs(index)
        if index in self.ports.free and len(needed) == 1:
            # A Constant, or a Cast of integers, is made in the precision of its readers, whatever it is pinned to:
            # otherwise nothing would read it.
            is_low = True in needed
        if is_low:
            if index in self.down_casts:
                self.bypass_casts(index)
            self.make_low(index)
        needed.add(is_low)
        own = self.own_name(value, is_low=is_low)
        self.names.of[index] = dict.fromkeys(needed, own)
        if len(needed) == 2:
            self.name_twice(value, own, is_low=is_low)

    def name_twice(self, value: Value, own: str, *, is_low: bool) -> None:
        """Name a value that is read in both precisions."""
        index = value.index
        names = self.names.of[index]
        public = self.public(index)
        if self.is_constant(index):
            replaces_cast = own != value.name and index not in self.shadowed
            self.copy(value, base_low=bool(public) or replaces_cast)
            return
        keeps_name_low = is_low if public is None else public
        reused = None if is_low or keeps_name_low else self.reused(value)
        if reused is not None:
            names[True] = reused
            return
        other_low = not keeps_name_low
        names[other_low] = self.fresh(value.name, low=other_low)
        self.second_version(value, is_low=is_low)
        self.bypass_casts(index, nested=other_low)

    def second_version(self, value: Value, *, is_low: bool) -> None:
        """Add the precision that the producer does not deliver."""
        index = value.index
        own, other = self.names.of[index][is_low], self.names.of[index][not is_low]
        is_renamed = own != value.name and self.public(index) is not None
        if is_renamed and value.is_stored:
            self.names.renamed[index] = own
        elif is_renamed:
            # The output of the Cast takes the public name.
            self.names.outputs[value.producer, value.port] = own
            self.names.low_names.discard(index)
            if not is_low:
                self.names.low_names.add(index)
        producer = self.graph.producer(index)
        source = own
        if value.producer in self.doubled:
            how = How.DEQUANTIZED
        else:
            how = How.CAST
            if index in self.ports.free and producer is not None:
                source = producer.proto.input[0]
        self.names.versions.append(Version(index, other, source, not is_low, how))

    def copy(self, value: Value, *, base_low: bool) -> None:
        """Store a constant twice. The copy that keeps the name is float32 unless the model returns it low."""
        index = value.index
        other = self.fresh(value.name, low=not base_low)
        self.names.of[index][not base_low] = other
        version = Version(index, other, value.name, not base_low, How.COPY)
        self.names.versions.append(version)
        if base_low:
            self.make_low(index)
        else:
            self.names.low_names.discard(index)
            self.names.low_stores.discard(index)

    def make_low(self, value: int) -> None:
        """Note that a value is made in low precision, under its own name."""
        self.names.low_names.add(value)
        self.names.low_stores.add(value)

    def own_name(self, value: Value, *, is_low: bool) -> str:
        """Return the value's name, or a new one if it shadows an outer value that would get another type.

        onnx and ONNX Runtime infer one type per name wherever it is visible.
        """
        outer = self.shadowed.get(value.index)
        if outer is None:
            is_cast = is_low and value.index in self.down_casts
            return self.public_name(value) if is_cast else value.name
        if not is_low and not self.is_low(self.ports.produced[outer]):
            return value.name
        name = self.fresh(value.name, low=is_low)
        if value.origin is Origin.NODE:
            self.names.outputs[value.producer, value.port] = name
        # It is also declared there, or else the outer value would be.
        self.names.renamed[value.index] = name
        return name

    def public_name(self, value: Value) -> str:
        """Return the name of the graph output of a Cast that the value, now low itself, replaces."""
        is_made = value.origin is Origin.NODE and value.scope == 0
        if not is_made or self.graph.results[value.index]:
            return value.name
        for node in self.down_casts.get(value.index, ()):
            result = self.graph.values[node.outputs[0]]
            if node.scope == 0 and self.graph.results[result.index]:
                self.names.needless.add(node.index)
                self.names.outputs[value.producer, value.port] = result.name
                return result.name
        return value.name

    def is_constant(self, value: int) -> bool:
        """Return whether the value is an initializer or a Constant, which is stored twice if both precisions are
        needed.
        """
        producer = self.graph.producer(value)
        is_stored = producer is None or producer.key == "Constant"
        return value in self.ports.free and is_stored

    # -- original Casts --------------------------------------------------------------------------------------------

    def reused(self, value: Value) -> str | None:
        """Return the output of a Cast that serves all low-precision readers of a float32 value; None if there is none.

        The Cast moves right after the producer, to precede them.
        """
        for node in self.down_casts.get(value.index, ()):
            if node.scope == value.scope and node.outputs[0] not in self.graph.hidden:
                if node.index != value.producer + 1:
                    self.names.moved[node.index] = value.producer
                return self.graph.values[node.outputs[0]].name
        return None

    def bypass_casts(self, value: int, *, nested: bool = False) -> None:
        """Let readers of Casts to low precision read a value that exists in low precision anyway, if possible.

        Args:
            value: the value.
            nested: bypass only Casts in bodies; one in the value's own scope may produce its low version.
        """
        scope = self.graph.values[value].scope
        for node in self.down_casts.get(value, ()):
            result = node.outputs[0]
            returned = any(
                home == 0 or node.scope != scope
                for home, _ in self.graph.results[result]
            )
            if not returned and (node.scope != scope or not nested):
                self.names.needless.add(node.index)
                self.names.aliases[result] = value

    def name_raised(self, value: int, source: int) -> None:
        """Name a value that an original Cast raises from low precision: low-precision readers bypass the Cast."""
        origin = low_source(self.problem, self.decision, self.names, source)
        own = self.graph.values[value]
        is_kept = self.graph.results[value] or origin.raised in self.hidden
        raised = None if is_kept else origin.raised
        names = self.names.of[value] = {False: raised or own.name, True: origin.name}
        if not (self.public(value) or self.leaves_body(value, origin.scope)):
            return
        self.names.low_casts.add(value)
        self.names.low_names.add(value)
        names[True] = own.name
        if False not in self.needs(value):
            return
        if origin.raised is not None:
            names[False] = origin.raised
            return
        names[False] = self.fresh(own.name, low=False)
        version = Version(value, names[False], origin.name, False, How.CAST)
        self.names.versions.append(version)

    def bypass_idle(self) -> None:
        """Let readers of a Cast from float32 to float32 read its input, if both become low precision and the model does
        not return the output.
        """
        # Producers come first: a Cast of a bypassed Cast reads its input.
        for node in self.graph.order:
            sides = (
                self.ports.of_node.get(node.index, {}) if node.key == "Cast" else {}
            )
            if len(sides) < 2 or not all(map(self.is_low, sides.values())):
                continue
            source, result = node.inputs[0], node.outputs[0]
            low = self.names.of[source].get(True)
            names = self.names.of[result]
            if self.graph.results[result] or False in names:
                continue
            if low is not None and source not in self.graph.hidden:
                self.names.needless.add(node.index)
                names[True] = low
