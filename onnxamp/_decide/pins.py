"""Pins: variables that are settled before the cut, each with its reason."""

from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias

from onnxamp._base.errors import (
    ArgumentError,
    ContradictionError,
    first_of,
    suggestion,
)
from onnxamp._decide.builder import builder_of
from onnxamp._decide.exponent_rows import unfit_nodes
from onnxamp._decide.kinds import Harm, Hazard, HazardKind, asked_hazards
from onnxamp._decide.listed import unmet_lists
from onnxamp._decide.neighbors import followers, stranded
from onnxamp._decide.overrides import DECIDED, forced_hazards, lost_weights
from onnxamp._decide.ports import HIGH, Variable
from onnxamp._decide.problem import Problem
from onnxamp._decide.signature import signature_warnings
from onnxamp._decide.verdicts import Basis, Reason, Verdict
from onnxamp._facts.dtypes import FLOAT16, retyped
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import computes_low, kernel_limit
from onnxamp._facts.tables import device_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, scope_path
from onnxamp._options.values import Level


class VariableName(NamedTuple):
    """A name that survives re-exporting a model: scopes, node (or weight), and type parameter.

    ``rank`` numbers the variables that share all three, from 0.
    """

    scope: str
    node: str
    param: str
    rank: int

    def __str__(self) -> str:
        path = f"{self.scope}/{self.node}" if self.scope else self.node
        return f"{path}:{self.param}" + (f" ({self.rank + 1})" if self.rank else "")


def variable_names(graph: Graph, variables: Sequence[Variable]) -> list[VariableName]:
    """Return the names of variables, one for each."""
    names = list[VariableName]()
    taken = Counter[tuple[str, str, str]]()
    for variable in variables:
        if variable.node == ABSENT:
            value = graph.values[variable.value]
            scope = value.scope
            label = value.name
        else:
            node = graph.nodes[variable.node]
            scope = node.scope
            label = node.label
        key = scope_path(graph, scope), label, variable.param
        names.append(VariableName(*key, rank=taken[key]))
        taken[key] += 1
    return names


class Pins(NamedTuple):
    """Decisions made before the cut.

    Attributes:
        verdicts: deciding variable -> its pin.
        implies: pairs (p, q) of variables: if p is low, q must be low.
        exact: variables whose low precision costs no accuracy.
        preferred: variables that gain by low precision.
        worthy: variables of white-listed nodes whose error has a price -> the hazard that it is due to.
        warnings: sentences about options that match nothing or cannot be followed.
    """

    verdicts: Mapping[int, Verdict]
    implies: Sequence[tuple[int, int]]
    exact: AbstractSet[int]
    preferred: AbstractSet[int]
    worthy: Mapping[int, HazardKind]
    warnings: tuple[str, ...]


def find_pins(
    problem: Problem,
    *,
    replay: Mapping[str, bool] | None = None,
    measured: Mapping[int, str] | None = None,
    freed: Mapping[int, frozenset[Basis]] | None = None,
) -> Pins:
    """Pin variables. Complexity: linear in nodes, with one kernel lookup per distinct type binding.

    Args:
        problem: the problem.
        replay: decisions of a plan by variable key; they replace lists, level and hazards.
        measured: nodes that broke in low precision when they ran -> the reason.
        freed: node -> reasons to ignore, to find out how many Casts they cause.
    """
    freed = freed or {}
    graph = problem.graph
    options = problem.options
    ports = problem.ports
    claims = _Claims(problem, freed)
    # Of several pins of one strength, reports show the first, so facts about ports and kernels come before wishes.
    for variable in ports.fixed_high:
        why = "shares its type with a float32 value"
        claims.pin(_Strength.HARD, variable, False, Reason.TIE, why)
    for variable in ports.requested_low:
        is_weight = ports.variables[variable].param == "value"
        said = (Reason.PATTERN, _LOW_WEIGHT) if is_weight else (Reason.LEVEL, _IO)
        claims.pin(_Strength.LOW, variable, True, *said)
    for index in problem.freedoms:
        if index in ports.of_node and Reason.NO_KERNEL not in freed.get(index, ()):
            claims.kernels(graph.nodes[index])
    claims.builder_rules()
    claims.unsound()
    claims.user_overrides()
    if replay is not None:
        claims.replay(replay)
        return claims.finish(claims.settled())
    heeded = [
        one
        for one in problem.hazards
        if one.reason not in freed.get(one.node, ()) and claims.heeds(one)
    ]
    for hazard in (*heeded, *asked_hazards(graph, options)):
        claims.heed(hazard)
    if options.hazards and options.level != Level.O0:
        claims.warnings += signature_warnings(graph, options)
    for index, why in (unfit_nodes(graph, options) | dict(measured or {})).items():
        claims.keep(_Strength.HIGH, index, Reason.MEASURED, why)
    claims.lists()
    verdicts = claims.settled()
    low = {root for root, verdict in verdicts.items() if verdict.low}
    lowered = (
        one
        for one in heeded
        if not low.isdisjoint(
            map(ports.root, ports.at(graph.nodes[one.node], one.value))
        )
    )
    claims.warnings += [
        *forced_hazards(graph, problem.overrides, lowered),
        *lost_weights(graph, problem.overrides, heeded, options.low),
        *unmet_lists(graph, options, problem.listed, ports, verdicts),
    ]
    chosen = options.rescaling
    if chosen is not None and chosen.made_up and (chosen.scaled or chosen.unfit):
        claims.warnings.append(_MADE_UP)
    is_high = any(not verdict.low for verdict in verdicts.values())
    if is_high and computes_low(options.target):
        claims.warnings.append(_NOT_HONORED.format(target=options.target))
    return claims.finish(verdicts)


_MADE_UP: Final = "Exponents were chosen for random inputs, whose ranges differ from real ones: pass samples (--inputs)."
_NOT_HONORED: Final = (
    "{target} computes float32 nodes in float16 as well, so keeping a node in float32 protects nothing: onnxamp check"
    " --target {target} lists the values that do not fit."
)
_UNSOUND: Final = (
    "{} in float32, since the converted model would be wrong there otherwise. This is a bug: please"
    " report the model."
)

_IO: Final = "keep_io_types excludes it"
_LOW_WEIGHT: Final = "low_weights (--low-weight)"

_Pinned: TypeAlias = dict[int, Verdict]
"""Pins of one strength, by deciding variable; the first one of a variable explains it."""


class _Strength(IntEnum):
    """The strength of a pin, the strongest first: a pin beats all those below it."""

    HARD = 0
    """Pinned to float32 by kernels and ties, which no option overrules."""
    FORCED = 1
    """Pinned low by the user's override of a node; an override to float32 of the same variable contradicts it."""
    KEPT = 2
    """Pinned to float32 by an override."""
    HIGH = 3
    """Pinned to float32 by hazards, measurements, the user's black list or a plan."""
    ASKED = 4
    """Pinned low by the user's white list, which hazards overrule."""
    DEFAULT = 5
    """Pinned to float32 by the preset's black list or the level."""
    LOW = 6
    """Pinned low by the preset's white list, the level or a plan."""


class _Claims:
    """The precision that facts, the user, lists and the level demand of variables.

    Attributes:
        pinned: strength -> the pins of it.
        implies: pairs (p, q) of variables: if p is low, q must be low.
        climbed: constants that :meth:`constant` has visited.
        followers: nodes on no list that are low because everything they read is, if the preset says so.
        stranded: exact ops between nodes without a low-precision kernel, which the level would otherwise lower.
    """

    def __init__(
        self, problem: Problem, freed: Mapping[int, frozenset[Basis]]
    ) -> None:
        self.problem = problem
        self.freed = freed
        self.graph = problem.graph
        self.options = problem.options
        self.ports = problem.ports
        self.builder = builder_of(self.graph, self.options.target)
        self.pinned = {strength: _Pinned() for strength in _Strength}
        self.implies = list[tuple[int, int]]()
        self.exact = set[int]()
        self.preferred = set[int]()
        self.worthy = dict[int, HazardKind]()
        self.climbed = set[int]()
        self.warnings = list[str]()
        self.followers = frozenset[int]()
        self.stranded = frozenset[int]()

    def pin(
        self, strength: _Strength, variable: int, low: bool, reason: Basis, why: str
    ) -> None:
        """Add a pin to those of its strength."""
        verdict = Verdict(variable, low, reason, why)
        self.pinned[strength].setdefault(self.ports.root(variable), verdict)

    def keep(self, strength: _Strength, node: int, reason: Basis, why: str) -> None:
        """Pin a node to float32."""
        for variable in self.ports.of(node):
            self.pin(strength, variable, False, reason, why)

    def heed(self, hazard: Hazard) -> None:
        """Pin the ports that a hazard is about to float32."""
        node = self.graph.nodes[hazard.node]
        for variable in self.ports.at(node, hazard.value):
            self.pin(_Strength.HIGH, variable, False, hazard.reason, hazard.detail)
        if self.options.user_white and hazard.reason.harm is not Harm.CAST:
            for value in node.inputs if hazard.value == ABSENT else (hazard.value,):
                self.constant(value, hazard)

    def constant(self, value: int, hazard: Hazard) -> None:
        """Pin white-listed nodes to float32 that create or move a constant, which a hazard needs unrounded."""
        is_constant = self.graph.constants.is_constant
        why = f"computes a number for {self.graph.nodes[hazard.node].label!r}"
        while value != ABSENT and value not in self.climbed and is_constant(value):
            self.climbed.add(value)
            maker = self.graph.producer(value)
            if maker is None:
                return
            if maker.key in self.options.user_white:
                self.keep(_Strength.HIGH, maker.index, hazard.reason, why)
            value = maker.input(0)

    def heeds(self, hazard: Hazard) -> bool:
        """Return whether the options let a hazard decide."""
        level = self.options.level
        options = self.options
        is_measured = (
            level == Level.AUTO and hazard.reason.is_measurable and not hazard.rare
        )
        keeps = options.hazards and not is_measured
        if hazard.reason.harm is Harm.CAST:
            # A white-listed producer stays low; its Cast is shielded.
            is_white = self.problem.listed.is_white(hazard.node)
            return (keeps or level != Level.O3) and not is_white
        return keeps

    def kernels(self, node: Node) -> None:
        """Add the pins and implications of the target's kernels."""
        variables = self.ports.of_node[node.index]
        free = self.problem.freedoms[node.index]
        for param in free.high:
            why = self.no_kernel(node, param)
            self.pin(_Strength.HARD, variables[param], False, Reason.NO_KERNEL, why)
        if self.builder.binds_inputs and self.builder.reads_no_input(self.ports, node):
            why = f"on {self.options.target}, it must read an input of the model directly, without a Cast"
            self.keep(_Strength.HARD, node.index, Reason.NO_KERNEL, why)
        for p, q in free.implies:
            self.imply(variables[p], variables[q])
        # A kernel that exists in low precision alone is a gain to be weighed against Casts, not a pin.
        if free.only_low:
            able = variables.keys() - free.high
            self.preferred.update(self.ports.root(variables[param]) for param in able)

    def no_kernel(self, node: Node, param: str) -> str:
        """Return why the target has no kernel for a parameter in low precision."""
        target = self.options.target
        low = self.options.low
        signature = node.signature
        assert signature is not None
        bound = self.ports.layouts[node.index].bound
        lowered = {**bound, param: retyped(bound[param], low)}
        limit = kernel_limit(device_of(target), node.proto, lowered)
        why = f"no {low.name} kernel for {node.key} (opset {signature.since}) on {target}"
        return why if limit is None else f"{why}, since {limit}"

    def imply(self, p: int, q: int) -> None:
        """Note that variable ``q`` must be low if ``p`` is."""
        self.implies.append((p, self.ports.root(q)))

    def builder_rules(self) -> None:
        """Add the pins and implications of Casts that the target's builder rejects."""
        target = self.options.target
        for node, fact in self.builder.high_nodes():
            self.keep(
                _Strength.HARD, node.index, Reason.NO_KERNEL, f"on {target}, {fact}"
            )
        for made, reader in self.builder.implications(self.ports):
            if reader == HIGH:
                why = f"on {target}, its float32 reader cannot read a Cast"
                self.pin(_Strength.HARD, made, False, Reason.TIE, why)
            else:
                self.imply(made, reader)

    def unsound(self) -> None:
        """Keep nodes in float32 where an earlier result was wrong, with a warning."""
        wrong = frozenset(self.options.unsound)
        among = self.graph.nodes if wrong else ()
        nodes = [node for node in among if not wrong.isdisjoint(node.proto.output)]
        for node in nodes:
            self.keep(_Strength.HARD, node.index, Reason.UNSOUND, "")
        if nodes:
            more = (
                f" and {len(nodes) - 1} more nodes stay"
                if len(nodes) > 1
                else " stays"
            )
            self.warnings.append(_UNSOUND.format(f"{nodes[0].label!r}{more}"))

    def user_overrides(self) -> None:
        """Add the pins of overrides of single nodes."""
        self.warnings += self.problem.overrides.warnings
        for index, override in self.problem.overrides.of_node.items():
            strength = _Strength.FORCED if override.low else _Strength.KEPT
            for variable in self.ports.of(index):
                self.pin(strength, variable, *override)

    def lists(self) -> None:
        """Add the pins of the lists and, for all other ops, of the level."""
        options = self.options
        problem = self.problem
        all_exact = self.graph.exact
        listed = problem.listed
        by_user = listed.white if options.level != Level.O0 else {}
        if options.level == Level.O1 and options.preset.follows:
            self.followers = self.find_followers()
        # In float16 few ops lack a kernel, and most of those get one by an upgrade, for which exact ops speak.
        if options.level == Level.O2 and options.strict and options.low is not FLOAT16:
            forced = self.pinned[_Strength.FORCED]
            settled = set(forced).union(*map(self.ports.deciding, by_user))
            hard = self.pinned[_Strength.HARD].keys()
            self.stranded = stranded(self.graph, self.ports, hard, settled)
        gains = options.level == Level.O2
        following = op_facts().following
        # A mean is smaller than what it averages: after float32 nodes, whose values may not fit, it is cheaper to cast.
        spared = options.trusted & op_facts().means
        for index, variables in self.ports.of_node.items():
            node = self.graph.nodes[index]
            exact = index in all_exact
            follows = (
                node.key in following
                or index in problem.folded
                or index in problem.constant_fed
            )
            # A Cast with two variables changes no type.
            is_asked = index in by_user and (node.key, len(variables)) != ("Cast", 2)
            pin = self.listed(node, exact=exact, follows=follows)
            for variable in variables.values():
                root = self.ports.roots[variable]
                if exact:
                    self.exact.add(root)
                if is_asked:
                    self.pin(
                        _Strength.ASKED, variable, True, Reason.WHITE, by_user[index]
                    )
                elif pin is None:
                    is_neutral = follows or node.key in spared
                    if not is_neutral and (gains or listed.is_white(index)):
                        self.preferred.add(root)
                elif not pin[0]:
                    is_own = index in listed.black
                    strength = _Strength.HIGH if is_own else _Strength.DEFAULT
                    self.pin(strength, variable, *pin)
                elif index in problem.shares and pin[1] is Reason.WHITE:
                    # Casts may cost more than its error is worth.
                    self.worthy.setdefault(root, problem.shares[index][0])
                else:
                    self.pin(_Strength.LOW, variable, *pin)

    def listed(
        self, node: Node, *, exact: bool, follows: bool
    ) -> tuple[bool, Basis, str] | None:
        """Return whether lists or the level lower a node, and why; None if they leave it to the cut.

        Args:
            node: the node.
            exact: whether low precision costs it no accuracy.
            follows: whether it has no preference of its own.
        """
        options = self.options
        level = self.options.level
        index = node.index
        listed = self.problem.listed
        is_own = index in listed.white or index in listed.black
        if level == Level.AUTO and not is_own:
            return None
        if level == Level.O0:
            return False, Reason.LEVEL, "O0 lowers nothing"
        black = self.black_entry(index)
        if black is not None and Reason.BLACK not in self.freed.get(index, ()):
            is_folded = index in self.problem.folded
            return None if is_folded else (False, Reason.BLACK, black)
        if listed.is_white(index) and not exact and not follows:
            return True, Reason.WHITE, node.key
        lowers = level == Level.O3 or (options.strict and level == Level.O2)
        lowers = lowers and index not in self.stranded
        is_follower = index in self.followers
        if follows or not (lowers or (level == Level.O1 and not exact)):
            return None
        lowered = "every op it can" if lowers else "only white-listed ops"
        lowered = "nodes that read only low precision" if is_follower else lowered
        return lowers or is_follower, Reason.LEVEL, f"{level} lowers {lowered}"

    def find_followers(self) -> frozenset[int]:
        """Return the nodes on no list that are low because everything they read is."""
        strongest = (_Strength.HARD, _Strength.KEPT, _Strength.HIGH)
        high = set[int]().union(*(self.pinned[strength] for strength in strongest))
        forced = self.pinned[_Strength.FORCED].keys()
        low = set[int]()
        for index in self.ports.of_node:
            roots = self.ports.deciding(index)
            if self.black_entry(index) is not None:
                high.update(roots)
            is_white = self.problem.listed.is_white(index)
            if is_white or not forced.isdisjoint(roots):
                low.add(index)
        return followers(self.graph, self.ports, high, low)

    def black_entry(self, node: int) -> str | None:
        """Return the entry of a black list that contains the node; presets ignore nodes bounded by integers."""
        listed = self.problem.listed
        if node in self.problem.bounded:
            return listed.black.get(node)
        return listed.black_entry(node)

    def replay(self, decisions: Mapping[str, bool]) -> None:
        """Pin the variables of all nodes as the plan says. Constants follow their readers and may be renamed."""
        keys = [str(name) for name in variable_names(self.graph, self.ports.variables)]
        for variable, key in zip(self.ports.variables, keys, strict=True):
            if (
                variable.node == ABSENT
                or self.graph.nodes[variable.node].key == "Constant"
            ):
                continue
            if key not in decisions:
                near = suggestion(decisions, key)
                raise ArgumentError(
                    f"The plan does not contain {key!r}: it was made for another model.{near}"
                )
            low = decisions[key]
            strength = _Strength.LOW if low else _Strength.HIGH
            self.pin(strength, variable.index, low, Reason.PLAN, "as the plan says")
        if unknown := sorted(decisions.keys() - set(keys)):
            text = f"The plan decides {first_of(unknown)}, which the model lacks: it was made for another model."
            if self.options.strict_options:
                raise ArgumentError(text)
            self.warnings.append(text)

    def finish(self, verdicts: Mapping[int, Verdict]) -> Pins:
        """Return the pins, given those that win."""
        return Pins(
            verdicts=verdicts,
            implies=[(self.ports.root(p), q) for p, q in self.implies],
            exact=self.exact,
            preferred=self.preferred,
            worthy=self.worthy,
            warnings=tuple(self.warnings),
        )

    def settled(self) -> dict[int, Verdict]:
        """Return the strongest pin of each variable, implications included.

        Raises:
            ContradictionError: overrides pull a variable both ways.
        """
        hard = self.pinned[_Strength.HARD]
        forced = self.pinned[_Strength.FORCED]
        kept = self.pinned[_Strength.KEPT]
        for root in forced.keys() & kept.keys():
            if forced[root].detail == DECIDED:
                # No user said so, and in another graph other nodes may share its type.
                del forced[root]
                continue
            pins = forced[root], kept[root]
            one, other = (f"{self.label(pin)!r} ({pin.detail})" for pin in pins)
            raise ContradictionError(
                f"{one} and {other} share one precision: drop one of the two."
            )
        # What a variable that is forced low needs in low precision is forced as well, unless an override keeps it.
        for p, q in self.implies:
            own = self.ports.root(p)
            if own in forced and q not in kept:
                forced.setdefault(q, forced[own])
        for root in sorted(hard.keys() & forced.keys()):
            if forced[root].detail == DECIDED:
                continue
            label = self.label(forced[root])
            why = hard[root].detail
            self.warnings.append(f"{label!r} cannot be forced low: {why}.")
        # A ChainMap takes each variable from the first map that has it: the strongest.
        settled = dict(ChainMap(*(self.pinned[strength] for strength in _Strength)))
        self._spread_high(settled)
        return settled

    def label(self, verdict: Verdict) -> str:
        """Return the label of the node that a verdict is about."""
        return self.graph.nodes[self.ports.variables[verdict.variable].node].label

    def _spread_high(self, settled: dict[int, Verdict]) -> None:
        """Pin variables to float32 that may be low only together with a variable that is float32."""
        needed_by: dict[int, list[int]] = {}
        for p, q in self.implies:
            needed_by.setdefault(q, []).append(p)
        stack = [root for root, verdict in settled.items() if not verdict.low]
        while stack:
            for p in needed_by.get(stack.pop(), ()):
                root = self.ports.root(p)
                if root not in settled or settled[root].low:
                    why = f"no kernel for this mix of types on {self.options.target}"
                    settled[root] = Verdict(p, False, Reason.NO_KERNEL, why)
                    stack.append(root)
