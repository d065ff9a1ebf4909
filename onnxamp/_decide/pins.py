"""From overrides and facts to pins: for each variable what holds it low or float32, and who wins.

Precedence: what cannot be (kernels, ties), what the user says of single nodes, then hazards and black list (or a plan),
then white list and level: there a pin to float32 beats one to low. Ties share all pins.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from onnxamp._decide.problem import Problem
from onnxamp._decide.terms import Terms, Variable
from onnxamp._decide.verdicts import Reason, Verdict
from onnxamp._errors import ArgumentError, ContradictionError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import is_exact, op_facts
from onnxamp._ops.kernel_limits import has_refusals
from onnxamp._options.options import Level, Options
from onnxamp._target.kernels import Freedom, freedom


@dataclass(frozen=True, slots=True)
class Pins:
    """What is settled before the cut.

    ``verdicts``: deciding variable -> its pin; ``implies``: (p, q) variables where p low needs q low;
    ``exact`` and ``preferred``: variables that cost no accuracy, and those that gain by being low;
    ``fallbacks``: nodes without a kernel on the target in float32, which run on CPU; ``warnings``: sentences.
    """

    verdicts: Mapping[int, Verdict]
    implies: Sequence[tuple[int, int]]
    exact: frozenset[int]
    preferred: frozenset[int]
    fallbacks: tuple[int, ...]
    warnings: tuple[str, ...]


def find_pins(
    problem: Problem,
    *,
    replay: Mapping[str, bool] | None = None,
    measured: Mapping[int, str] | None = None,
    freed: Mapping[int, frozenset[Reason]] | None = None,
) -> Pins:
    """Judge every variable. Complexity: linear in nodes, with one kernel look-up per distinct binding.

    Args:
        replay: decisions of a plan by variable key; they stand for lists, level and hazards.
        measured: nodes that were seen to break in low precision, with the reason.
        freed: reasons that shall not hold a node in float32, to see what a model without them would save.
    """
    freed = freed or {}
    graph, options, terms = problem.graph, problem.options, problem.terms
    collector = _Collector(problem, freed)
    for variable in terms.fixed_high:
        collector.pin(variable, Verdict(variable, False, Reason.TIE, "shares its type with a float32 value"), hard=True)
    for variable in terms.wanted_low:
        collector.pin(variable, Verdict(variable, True, Reason.LEVEL, "inputs and outputs shall be low"))
    for node in graph.nodes:
        if Reason.NO_KERNEL not in freed.get(node.index, ()):
            collector.kernels(node)
    collector.user_overrides()
    if replay is not None:
        collector.replay(replay)
        return collector.finish()
    for hazard in problem.hazards:
        if hazard.reason in freed.get(hazard.node, ()):
            continue
        keeps = options.hazards and (options.level != Level.AUTO or hazard.reason not in _MEASURABLE)
        if hazard.reason is Reason.FUSION:  # a white-listed producer stays low: its Cast is shielded instead
            keeps = (keeps or options.level != Level.O3) and graph.nodes[hazard.node].key not in options.white
        for variable in terms.of_node.get(hazard.node, {}).values() if keeps else ():
            collector.pin(variable, Verdict(variable, False, hazard.reason, hazard.detail))
    for index, why in (measured or {}).items():
        for variable in terms.of_node.get(index, {}).values():
            collector.pin(variable, Verdict(variable, False, Reason.MEASURED, why))
    for node in graph.nodes:
        collector.lists(node)
    return collector.finish()


_MEASURABLE = frozenset({Reason.EPSILON, Reason.ISLAND, Reason.REDUCTION})
"""Hazards that measured ranges confirm or refute. Others show only for inputs that samples may lack."""


@dataclass(frozen=True, slots=True)
class VariableName:
    """A name that survives re-exporting: the scopes, the node (or the weight), and the type parameter.

    ``rank`` counts the variables that share all three, from 0.
    """

    scope: str
    node: str
    param: str
    rank: int

    def __str__(self) -> str:
        path = f"{self.scope}/{self.node}" if self.scope else self.node
        return f"{path}:{self.param}" + (f" ({self.rank + 1})" if self.rank else "")


def variable_names(graph: Graph, variables: Sequence[Variable]) -> list[VariableName]:
    """The name of each variable."""
    names, taken = [], Counter[VariableName]()
    for variable in variables:
        name = _variable_name(graph, variable)
        names.append(replace(name, rank=taken[name]))
        taken[name] += 1
    return names


def _variable_name(graph: Graph, variable: Variable) -> VariableName:
    if variable.node == ABSENT:
        scope, own = graph.values[variable.value].scope, graph.values[variable.value].name
    else:
        scope, own = graph.nodes[variable.node].scope, graph.nodes[variable.node].label
    path: list[str] = []
    while scope:
        owner = graph.nodes[graph.scopes[scope].owner]
        attribute = next(name for name, body in owner.bodies if body == scope)
        path.append(f"{owner.label}.{attribute}")
        scope = owner.scope
    return VariableName("/".join(reversed(path)), own, variable.param, 0)


@dataclass(slots=True)
class _Collector:
    problem: Problem
    freed: Mapping[int, frozenset[Reason]]
    hard: dict[int, Verdict] = field(default_factory=dict)
    forced: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    kept: dict[int, tuple[Verdict, str]] = field(default_factory=dict)
    high: dict[int, Verdict] = field(default_factory=dict)
    low: dict[int, Verdict] = field(default_factory=dict)
    implies: list[tuple[int, int]] = field(default_factory=list)
    exact: set[int] = field(default_factory=set)
    preferred: set[int] = field(default_factory=set)
    fallbacks: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    known: dict[object, Freedom] = field(default_factory=dict)

    graph: Graph = field(init=False)
    options: Options = field(init=False)
    terms: Terms = field(init=False)

    def __post_init__(self) -> None:
        self.graph, self.options, self.terms = self.problem.graph, self.problem.options, self.problem.terms

    def pin(self, variable: int, verdict: Verdict, *, hard: bool = False) -> None:
        """Note a pin; the first one of a kind explains the variable."""
        root = self.terms.root(variable)
        pins = self.hard if hard else self.low if verdict.low else self.high
        pins.setdefault(root, verdict)

    def kernels(self, node: Node) -> None:
        """Pins and implications from the target's kernels."""
        variables = self.terms.of_node.get(node.index)
        bound = self.terms.bound.get(node.index)
        if not variables or bound is None or node.signature is None:
            return
        params = tuple(variables)
        by_itself = not node.signature.has_function and not has_refusals(self.options.target, node.key)
        shape = () if by_itself else tuple(bool(name) for name in node.proto.input)
        body = () if by_itself else node.proto.attribute
        key = (
            node.key,
            params,
            tuple(sorted(bound.items())),
            shape,
            tuple(a.SerializeToString() for a in body),
        )
        if key not in self.known:
            options = self.options
            self.known[key] = freedom(options.target, node.key, node.signature, bound, params, options.low, node.proto)
        found = self.known[key]
        for param in found.high:
            kernel = f"{self.options.low.name} kernel for {node.key} (opset {node.signature.since})"
            why = f"no {kernel} on {self.options.target}"
            self.pin(variables[param], Verdict(variables[param], False, Reason.NO_KERNEL, why), hard=True)
        self.implies += [(variables[p], variables[q]) for p, q in found.implies]
        if found.falls_back:
            self.fallbacks.append(node.index)
        if found.only_low:
            self.preferred.update(self.terms.root(variables[param]) for param in params if param not in found.high)

    def user_overrides(self) -> None:
        """What the user says of single nodes."""
        self.warnings += self.problem.overrides.warnings
        for index, override in self.problem.overrides.of_node.items():
            pins = self.forced if override.low else self.kept
            for variable in self.terms.of_node.get(index, {}).values():
                verdict = Verdict(variable, override.low, override.reason, override.detail)
                pins.setdefault(self.terms.root(variable), (verdict, self.graph.nodes[index].label))

    def lists(self, node: Node) -> None:
        """Black list, white list, and what the level says of all other ops."""
        exact = is_exact(node.proto)
        follows = node.key in op_facts().following | op_facts().control_flow
        follows = follows or node.index in self.problem.folded or node.index in self.problem.moved
        judged = self.options.level != Level.AUTO or node.key in self.options.listed_by_user
        pin = self.listed(node, exact=exact, follows=follows) if judged else None
        for variable in self.terms.of_node.get(node.index, {}).values():
            root = self.terms.root(variable)
            if exact:
                self.exact.add(root)
            if pin is not None:
                self.pin(variable, Verdict(variable, *pin))
            elif not follows and (self.options.level == Level.O2 or node.key in self.options.white):
                self.preferred.add(root)

    def listed(self, node: Node, *, exact: bool, follows: bool) -> tuple[bool, Reason, str] | None:
        """Whether lists or level want the node low, and why; None where they leave it to the cut."""
        options = self.options
        if options.level == Level.O0:
            return False, Reason.LEVEL, "O0 lowers nothing"
        is_black = node.key in options.black and Reason.BLACK not in self.freed.get(node.index, ())
        if is_black and (options.level != Level.O3 or node.key in op_facts().control_flow):
            return None if node.index in self.problem.folded else (False, Reason.BLACK, node.key)
        if node.key in options.white and not exact and not follows:
            return True, Reason.WHITE, node.key
        if not follows and (options.level == Level.O3 or (options.strict and options.level == Level.O2)):
            return True, Reason.LEVEL, f"{options.level} lowers all that it can"
        if options.level == Level.O1 and not exact and not follows:
            return False, Reason.LEVEL, "O1 lowers white-listed ops alone"
        return None

    def replay(self, decisions: Mapping[str, bool]) -> None:
        """Pin the variables of all nodes as the plan says. Constants follow their readers, whatever they are called."""
        keys = [str(name) for name in variable_names(self.graph, self.terms.variables)]
        for variable, key in zip(self.terms.variables, keys, strict=True):
            if variable.node == ABSENT or self.graph.nodes[variable.node].key == "Constant":
                continue
            if key not in decisions:
                raise ArgumentError(f"The plan does not know {key!r}: it was made for another model.")
            low = decisions[key]
            self.pin(variable.index, Verdict(variable.index, low, Reason.PLAN, "as the plan says"))

    def finish(self) -> Pins:
        """Settle who wins on each variable, implications included."""
        self.contradictions()
        self.spread_forced()
        settled: dict[int, Verdict] = {}
        for root in {*self.hard, *self.forced, *self.kept, *self.high, *self.low}:
            if root in self.hard:
                settled[root] = self.hard[root]
                if root in self.forced:
                    label = self.forced[root][1]
                    self.warnings.append(f"{label!r} cannot be forced low: {self.hard[root].detail}.")
            elif root in self.forced or root in self.kept:
                settled[root] = (self.forced.get(root) or self.kept[root])[0]
            else:
                settled[root] = self.high.get(root) or self.low[root]
        self.spread_high(settled)
        pairs = [(self.terms.root(p), self.terms.root(q)) for p, q in self.implies]
        return Pins(
            settled,
            pairs,
            frozenset(self.exact),
            frozenset(self.preferred),
            tuple(self.fallbacks),
            tuple(self.warnings),
        )

    def contradictions(self) -> None:
        for root in self.forced.keys() & self.kept.keys():
            (low, first), (high, second) = self.forced[root], self.kept[root]
            raise ContradictionError(
                f"{first!r} ({low.detail}) and {second!r} ({high.detail}) must have one precision; drop one override."
            )

    def spread_forced(self) -> None:
        """What a forced variable needs low is forced, too."""
        for first, second in self.implies:
            p, q = self.terms.root(first), self.terms.root(second)
            if p in self.forced and q not in self.kept:
                self.forced.setdefault(q, self.forced[p])

    def spread_high(self, settled: dict[int, Verdict]) -> None:
        """What needs a float32 variable low is float32, too."""
        needed_by: dict[int, list[int]] = {}
        for p, q in self.implies:
            needed_by.setdefault(self.terms.root(q), []).append(p)
        stack = [root for root, verdict in settled.items() if not verdict.low]
        while stack:
            for p in needed_by.get(stack.pop(), ()):
                root = self.terms.root(p)
                if root not in settled or settled[root].low:
                    why = f"no kernel for these types mixed on {self.options.target}"
                    settled[root] = Verdict(p, False, Reason.NO_KERNEL, why)
                    stack.append(root)
