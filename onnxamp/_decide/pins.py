"""Pins: variables that are settled before the cut, each with its reason.

Precedence: what kernels and ties rule out; overrides of single nodes; hazards and the user's black list (or a plan);
the user's white list; the preset's black list, and what the level keeps in float32; the preset's white list, and what
the level lowers. Tied variables share their pins.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from onnx import NodeProto

from onnxamp._decide.hazards import beyond_init_max
from onnxamp._decide.listed import unmet_lists
from onnxamp._decide.ports import HIGH, Layout, PortVariables
from onnxamp._decide.problem import Problem
from onnxamp._decide.rescaling import unfit_nodes
from onnxamp._decide.straight import casts_of_constants, computed_high, reads_no_input, stacked_up, straight_pairs
from onnxamp._decide.variable_names import variable_names
from onnxamp._decide.verdicts import Hazard, Reason, Verdict
from onnxamp._dtypes import LowType
from onnxamp._errors import ArgumentError, ContradictionError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.kernel_limits import has_kernel_limits
from onnxamp._ops.profiles import Profile, computes_low, profile_of
from onnxamp._ops.signature import Signature
from onnxamp._options.options import Level, Options
from onnxamp._target.kernels import Freedom, freedom
from onnxamp._target.versions import device_of


@dataclass(frozen=True, slots=True)
class Pins:
    """What is settled before the cut.

    Attributes:
        verdicts: deciding variable -> its pin.
        implies: pairs (p, q) of variables: if p is low, q must be low.
        exact: variables whose low precision costs no accuracy.
        preferred: variables that gain by low precision.
        worthy: variables of white-listed products whose float16 sums have a price.
        fallbacks: nodes that run on CPU, since the target has no float32 kernel for them.
        warnings: about options that match nothing or cannot be obeyed, in sentences.
    """

    verdicts: Mapping[int, Verdict]
    implies: Sequence[tuple[int, int]]
    exact: frozenset[int]
    preferred: frozenset[int]
    worthy: frozenset[int]
    fallbacks: tuple[int, ...]
    warnings: tuple[str, ...]


def find_pins(
    problem: Problem,
    *,
    replay: Mapping[str, bool] | None = None,
    measured: Mapping[int, str] | None = None,
    freed: Mapping[int, frozenset[Reason]] | None = None,
) -> Pins:
    """Pin variables. Complexity: linear in nodes, with one kernel lookup per distinct type binding.

    Args:
        problem: the problem.
        replay: decisions of a plan by variable key; they replace lists, level and hazards.
        measured: nodes that broke in low precision when they ran -> the reason.
        freed: node -> reasons to ignore, to find out how many Casts they cause.
    """
    freed = freed or {}
    graph, options, ports = problem.graph, problem.options, problem.ports
    collector = _Collector(problem, freed)
    for variable in ports.fixed_high:
        collector.pin(variable, Verdict(variable, False, Reason.TIE, "shares its type with a float32 value"), hard=True)
    for variable in ports.requested_low:
        collector.requested(variable)
    for index, layout in ports.layouts.items():
        if index in ports.of_node and Reason.NO_KERNEL not in freed.get(index, ()):
            collector.kernels(graph.nodes[index], layout)
    collector.straight()
    collector.user_overrides()
    if replay is not None:
        collector.replay(replay)
        return collector.finish()
    for hazard in problem.hazards:
        if hazard.reason not in freed.get(hazard.node, ()) and collector.heeds(hazard):
            collector.keep(hazard)
    for found in beyond_init_max(graph, options) if options.init_max is not None else ():
        collector.keep(found)
    for index, why in (unfit_nodes(graph, options) | dict(measured or {})).items():
        for variable in ports.of_node.get(index, {}).values():
            collector.pin(variable, Verdict(variable, False, Reason.MEASURED, why))
    collector.lists()
    pins = collector.finish()
    made_up = options.rescaling is not None and options.rescaling.made_up
    warned = (_MADE_UP,) if made_up else ()
    if computes_low(options.target) and any(not verdict.low for verdict in pins.verdicts.values()):
        warned = (*warned, _NOT_HONOURED.format(target=options.target))
    return replace(pins, warnings=(*pins.warnings, *unmet_lists(problem, pins.verdicts), *warned))


_MADE_UP = "Exponents follow from made-up inputs, which reach other ranges than real ones: give samples (--inputs)."


_NOT_HONOURED = (
    "{target} computes float32 nodes in float16, too, so that no type protects a value: onnxamp check --target {target}"
    " tells what does not fit."
)

_IO = "keep_io_types is off for it"

_MEASURABLE = frozenset({Reason.EPSILON, Reason.DECOMPOSED, Reason.REDUCTION, Reason.PRODUCT})
"""Hazards that measurements confirm or refute; others appear only with inputs that samples may lack."""


@lru_cache(maxsize=1 << 12)
def _by_types(target: str, key: str, signature: Signature, layout: Layout, low: LowType) -> Freedom:
    """The choices that kernels leave to an op of which neither attributes nor inputs decide where it runs."""
    proto = NodeProto(domain=signature.domain, op_type=signature.op_type)
    return freedom(target, key, signature, layout.bound, layout.params, low, proto)


@dataclass(slots=True)
class _Collector:
    problem: Problem
    freed: Mapping[int, frozenset[Reason]]
    hard: dict[int, Verdict] = field(default_factory=dict)
    forced: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    kept: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    high: dict[int, Verdict] = field(default_factory=dict)
    asked: dict[int, Verdict] = field(default_factory=dict)
    """By the user's white list."""
    default: dict[int, Verdict] = field(default_factory=dict)
    """Float32 by the preset's black list or the level."""
    low: dict[int, Verdict] = field(default_factory=dict)
    implies: list[tuple[int, int]] = field(default_factory=list)
    exact: set[int] = field(default_factory=set)
    preferred: set[int] = field(default_factory=set)
    worthy: set[int] = field(default_factory=set)
    fallbacks: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    freedoms: dict[object, Freedom] = field(default_factory=dict)
    """Answers of the kernel tables by all that they depend on."""

    graph: Graph = field(init=False)
    options: Options = field(init=False)
    ports: PortVariables = field(init=False)
    profile: Profile | None = field(init=False)

    def __post_init__(self) -> None:
        self.profile = profile_of(self.problem.options.target)
        self.graph, self.options, self.ports = self.problem.graph, self.problem.options, self.problem.ports

    def pin(self, variable: int, verdict: Verdict, *, hard: bool = False) -> None:
        """Record a pin; the first of a kind is the explanation."""
        pins = self.hard if hard else self.low if verdict.low else self.high
        pins.setdefault(self.ports.root(variable), verdict)

    def keep(self, hazard: Hazard) -> None:
        """Pin a node to float32."""
        for variable in self.ports.of_node.get(hazard.node, {}).values():
            self.pin(variable, Verdict(variable, False, hazard.reason, hazard.detail))

    def heeds(self, hazard: Hazard) -> bool:
        """Whether the options let a hazard decide."""
        level, options = self.options.level, self.options
        keeps = options.hazards and (level != Level.AUTO or hazard.reason not in _MEASURABLE)
        if hazard.reason is Reason.FUSION:  # a white-listed producer stays low; its Cast is shielded
            return (keeps or level != Level.O3) and self.graph.nodes[hazard.node].key not in options.white
        return keeps

    def requested(self, variable: int) -> None:
        """Pin what is to be low: an input or output of the model, or a weight."""
        is_weight = self.ports.variables[variable].param == "value"
        said = (Reason.PATTERN, "low_weights (--low-weight)") if is_weight else (Reason.LEVEL, _IO)
        self.pin(variable, Verdict(variable, True, *said))

    def kernels(self, node: Node, layout: Layout) -> None:
        """Pins and implications from the target's kernels."""
        options, variables = self.options, self.ports.of_node[node.index]
        free = self.freedoms.get(layout) or self.freedom(node, layout)
        for param in free.high:
            assert node.signature is not None
            why = f"no {options.low.name} kernel for {node.key} (opset {node.signature.since}) on {options.target}"
            self.pin(variables[param], Verdict(variables[param], False, Reason.NO_KERNEL, why), hard=True)
        if self.profile is not None and reads_no_input(self.graph, self.ports, self.profile, node):
            why = f"{options.target} wants it to read an input of the model, without a Cast"
            for variable in variables.values():
                self.pin(variable, Verdict(variable, False, Reason.NO_KERNEL, why), hard=True)
        for p, q in free.implies:
            self.implies.append((variables[p], variables[q]))
        if free.falls_back:
            self.fallbacks.append(node.index)
        if free.only_low:
            able = (param for param in layout.params if param not in free.high)
            self.preferred.update(self.ports.root(variables[param]) for param in able)

    def freedom(self, node: Node, layout: Layout) -> Freedom:
        """What the target's kernels leave to the node."""
        target, signature, proto, low = self.options.target, node.signature, node.proto, self.options.low
        assert signature is not None
        has_say = node.key in op_facts().dtype_attribute or has_kernel_limits(device_of(target), node.key)
        if not signature.has_function and not has_say:
            found = self.freedoms[layout] = _by_types(target, node.key, signature, layout, low)
            return found
        key = (layout, tuple(map(bool, proto.input[:])), tuple(item.SerializeToString() for item in proto.attribute))
        if key not in self.freedoms:
            self.freedoms[key] = freedom(target, node.key, signature, layout.bound, layout.params, low, proto)
        return self.freedoms[key]

    def straight(self) -> None:
        """What the target's builder does not read through a Cast is low only where its reader is."""
        if self.profile is None:
            return
        device = self.options.target
        for nodes, why in (
            (stacked_up(self.graph, self.profile), f"{device} stacks it up in float32 alone"),
            ((node for node, _ in casts_of_constants(self.graph, self.profile)),
             f"{device} takes no constant there, only a Cast of it"),
            (computed_high(self.graph, self.profile), f"{device} wants its numbers as constants, or float32, here"),
        ):  # fmt: skip
            for node in nodes:
                for variable in self.ports.of_node.get(node.index, {}).values():
                    self.pin(variable, Verdict(variable, False, Reason.NO_KERNEL, why), hard=True)
        for made, reader in straight_pairs(self.graph, self.ports, self.profile):
            if reader == HIGH:
                why = f"its float32 reader takes no Cast on {self.options.target}"
                self.pin(made, Verdict(made, False, Reason.TIE, why), hard=True)
            else:
                self.implies.append((made, reader))

    def user_overrides(self) -> None:
        """Pins from overrides of single nodes."""
        self.warnings += self.problem.overrides.warnings
        for index, override in self.problem.overrides.of_node.items():
            pins = self.forced if override.low else self.kept
            for variable in self.ports.of_node.get(index, {}).values():
                verdict = Verdict(variable, override.low, override.reason, override.detail)
                pins.setdefault(self.ports.root(variable), (verdict, self.graph.nodes[index].label))

    def lists(self) -> None:
        """Pins from the lists and, for all other ops, from the level."""
        options, problem, all_exact = self.options, self.problem, self.graph.exact
        by_user = options.user_white if options.level != Level.O0 else ()
        gains, following = options.level == Level.O2, op_facts().following | op_facts().control_flow
        known: dict[object, tuple[bool, Reason, str] | None] = {}
        for index, variables in self.ports.of_node.items():
            node, exact = self.graph.nodes[index], index in all_exact
            follows = node.key in following or index in problem.folded or index in problem.constant_fed
            form = node.key, exact, follows, index in problem.folded, self.freed.get(index)
            if form not in known:
                judged = options.level != Level.AUTO or node.key in options.listed_by_user
                known[form] = self.listed(node, exact=exact, follows=follows) if judged else None
            pin = known[form]
            for variable in variables.values():
                root = self.ports.roots[variable]
                if exact:
                    self.exact.add(root)
                if node.key in by_user:
                    self.asked.setdefault(root, Verdict(variable, True, Reason.WHITE, node.key))
                elif pin is not None and not pin[0] and node.key not in options.user_black:
                    self.default.setdefault(root, Verdict(variable, *pin))
                elif pin is not None and index in problem.shares and pin[1] is Reason.WHITE:
                    self.worthy.add(root)  # its error has a price, which Casts may not be worth
                elif pin is not None:
                    self.pin(variable, Verdict(variable, *pin))
                elif not follows and (gains or node.key in options.white):
                    self.preferred.add(root)

    def listed(self, node: Node, *, exact: bool, follows: bool) -> tuple[bool, Reason, str] | None:
        """Whether lists or level lower the node, and why; None if they leave it to the cut."""
        options = self.options
        if options.level == Level.O0:
            return False, Reason.LEVEL, "O0 lowers nothing"
        is_black = node.key in options.black and Reason.BLACK not in self.freed.get(node.index, ())
        if is_black and (options.level != Level.O3 or node.key in op_facts().control_flow):
            return None if node.index in self.problem.folded else (False, Reason.BLACK, node.key)
        if node.key in options.white and not exact and not follows:
            return True, Reason.WHITE, node.key
        if not follows and (options.level == Level.O3 or (options.strict and options.level == Level.O2)):
            return True, Reason.LEVEL, f"{options.level} lowers every op it can"
        if options.level == Level.O1 and not exact and not follows:
            return False, Reason.LEVEL, "O1 lowers only white-listed ops"
        return None

    def replay(self, decisions: Mapping[str, bool]) -> None:
        """Pin the variables of all nodes as the plan says. Constants follow their readers and may be renamed."""
        keys = [str(name) for name in variable_names(self.graph, self.ports.variables)]
        for variable, key in zip(self.ports.variables, keys, strict=True):
            if variable.node == ABSENT or self.graph.nodes[variable.node].key == "Constant":
                continue
            if key not in decisions:
                raise ArgumentError(f"The plan does not know {key!r}: it was made for another model.")
            low = decisions[key]
            self.pin(variable.index, Verdict(variable.index, low, Reason.PLAN, "as the plan says"))

    def finish(self) -> Pins:
        """Let the strongest pin of each variable win, implications included."""
        self.contradictions()
        self.spread_forced()
        settled: dict[int, Verdict] = {}
        soft = ChainMap(self.high, self.asked, self.default, self.low)  # the strongest first
        for root in {*self.hard, *self.forced, *self.kept, *soft}:
            if root in self.hard:
                settled[root] = self.hard[root]
                if root in self.forced:
                    label = self.forced[root][1]
                    self.warnings.append(f"{label!r} cannot be forced low: {self.hard[root].detail}.")
            elif root in self.forced or root in self.kept:
                settled[root] = (self.forced.get(root) or self.kept[root])[0]
            else:
                settled[root] = soft[root]
        self.spread_high(settled)
        pairs = [(self.ports.root(p), self.ports.root(q)) for p, q in self.implies]
        exact, preferred, worthy = frozenset(self.exact), frozenset(self.preferred), frozenset(self.worthy)
        return Pins(settled, pairs, exact, preferred, worthy, tuple(self.fallbacks), tuple(self.warnings))

    def contradictions(self) -> None:
        """Refuse overrides that pull a variable both ways.

        Raises:
            ContradictionError: there are such overrides.
        """
        for root in self.forced.keys() & self.kept.keys():
            (low, first), (high, second) = self.forced[root], self.kept[root]
            raise ContradictionError(
                f"{first!r} ({low.detail}) and {second!r} ({high.detail}) share one precision: drop one of the two."
            )

    def spread_forced(self) -> None:
        """Force what a forced variable needs in low precision."""
        for first, second in self.implies:
            p, q = self.ports.root(first), self.ports.root(second)
            if p in self.forced and q not in self.kept:
                self.forced.setdefault(q, self.forced[p])

    def spread_high(self, settled: dict[int, Verdict]) -> None:
        """Pin to float32 what needs a float32 variable in low precision."""
        needed_by: dict[int, list[int]] = {}
        for p, q in self.implies:
            needed_by.setdefault(self.ports.root(q), []).append(p)
        stack = [root for root, verdict in settled.items() if not verdict.low]
        while stack:
            for p in needed_by.get(stack.pop(), ()):
                root = self.ports.root(p)
                if root not in settled or settled[root].low:
                    why = f"no kernel for this mix of types on {self.options.target}"
                    settled[root] = Verdict(p, False, Reason.NO_KERNEL, why)
                    stack.append(root)
