"""Pins: variables that are settled before the cut, each with its reason."""

from collections import ChainMap, Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import lru_cache
from typing import NamedTuple

from onnx import NodeProto

from onnxamp._decide.builder import builder_of
from onnxamp._decide.hazards.ranges import beyond_init_max
from onnxamp._decide.listed import listed, unmet_lists
from onnxamp._decide.overrides import forced_hazards, lost_weights
from onnxamp._decide.ports import HIGH, Layout, Variable
from onnxamp._decide.problem import Problem
from onnxamp._decide.rescaling import unfit_nodes
from onnxamp._decide.variables import signature_warnings
from onnxamp._decide.verdicts import Hazard, Reason, Verdict
from onnxamp._dtypes import Format, retyped
from onnxamp._errors import ArgumentError, ContradictionError, suggestion
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, scope_path
from onnxamp._ops.facts import op_facts
from onnxamp._ops.kernel_limits import has_kernel_limits, kernel_limit
from onnxamp._ops.profiles import computes_low
from onnxamp._ops.signature import Signature
from onnxamp._ops.targets import device_of
from onnxamp._options.levels import Level
from onnxamp._target.kernels import Freedom, Typed, freedom
from onnxamp._target.targets import cpu_of


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
    """One name per variable."""
    names, taken = [], Counter[VariableName]()
    for variable in variables:
        name = _variable_name(graph, variable)
        names.append(name._replace(rank=taken[name]))
        taken[name] += 1
    return names


def _variable_name(graph: Graph, variable: Variable) -> VariableName:
    if variable.node == ABSENT:
        scope, own = (
            graph.values[variable.value].scope,
            graph.values[variable.value].name,
        )
    else:
        scope, own = graph.nodes[variable.node].scope, graph.nodes[variable.node].label
    return VariableName(scope_path(graph, scope), own, variable.param, 0)


class Pins(NamedTuple):
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
    exact: AbstractSet[int]
    preferred: AbstractSet[int]
    worthy: AbstractSet[int]
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
    claims = _Claims(problem, freed)
    for variable in ports.fixed_high:
        verdict = Verdict(
            variable, False, Reason.TIE, "shares its type with a float32 value"
        )
        claims.pin(variable, verdict, hard=True)
    for variable in ports.requested_low:
        claims.requested(variable)
    for index, layout in ports.layouts.items():
        if index in ports.of_node and Reason.NO_KERNEL not in freed.get(index, ()):
            claims.kernels(graph.nodes[index], layout)
    claims.straight()
    claims.unsound()
    claims.user_overrides()
    if replay is not None:
        claims.replay(replay)
        return claims.finish()
    heeded = [
        one
        for one in problem.hazards
        if one.reason not in freed.get(one.node, ()) and claims.heeds(one)
    ]
    beyond = beyond_init_max(graph, options) if options.init_max is not None else ()
    for hazard in (*heeded, *beyond):
        claims.heed(hazard)
    if options.hazards and options.level != Level.O0:
        claims.warnings += signature_warnings(graph, options)
    for index, why in (unfit_nodes(graph, options) | dict(measured or {})).items():
        claims.keep(index, Reason.MEASURED, why)
    claims.lists()
    pins = claims.finish()
    low = (hazard for hazard in heeded if _is_low(problem, pins, hazard))
    warnings = [
        *pins.warnings,
        *forced_hazards(graph, problem.overrides, low),
        *lost_weights(graph, problem.overrides, heeded, options.low),
        *unmet_lists(problem, pins.verdicts),
    ]
    if options.rescaling is not None and options.rescaling.made_up:
        warnings.append(_MADE_UP)
    if computes_low(options.target) and any(
        not verdict.low for verdict in pins.verdicts.values()
    ):
        warnings.append(_NOT_HONOURED.format(target=options.target))
    return pins._replace(warnings=tuple(warnings))


def _is_low(problem: Problem, pins: Pins, hazard: Hazard) -> bool:
    """Whether what a hazard is about is pinned to low precision."""
    variables = problem.ports.at(problem.graph.nodes[hazard.node], hazard.value)
    found = map(pins.verdicts.get, map(problem.ports.root, variables))
    return any(verdict.low for verdict in found if verdict is not None)


_MADE_UP = "Exponents follow from made-up inputs, which reach other ranges than real ones: give samples (--inputs)."


_NOT_HONOURED = (
    "{target} computes float32 nodes in float16, too, so that no type protects a value: onnxamp check --target {target}"
    " tells what does not fit."
)

_UNSOUND = "{} float32, since the converted model would be wrong there otherwise. This is a bug: please report the model."

_IO = "keep_io_types is off for it"


@lru_cache(maxsize=1 << 12)
def _by_types(
    target: str, signature: Signature, layout: Layout, low: Format
) -> Freedom:
    """The choices that kernels leave to an op of which neither attributes nor inputs decide where it runs."""
    proto = NodeProto(domain=signature.domain, op_type=signature.op_type)
    return freedom(target, Typed(signature, layout.bound, proto), layout.params, low)


class _Claims:
    """What facts, the user, lists and the level want of variables, by deciding variable.

    Attributes:
        hard: float32 by kernels and ties.
        forced, kept: low and float32 by an override, with the label of its node.
        high: float32 by hazards, the user's black list or a plan.
        asked: low by the user's white list.
        default: float32 by the preset's black list or the level.
        low: low by the preset's white list, the level or a plan.
        implies: pairs (p, q) of variables: if p is low, q must be low.
        climbed: constants that :meth:`constant` has seen to.
        freedoms: answers of the kernel tables by all that they depend on.
    """

    def __init__(
        self, problem: Problem, freed: Mapping[int, frozenset[Reason]]
    ) -> None:
        self.problem, self.freed = problem, freed
        self.graph, self.options, self.ports = (
            problem.graph,
            problem.options,
            problem.ports,
        )
        self.builder = builder_of(self.graph, self.options.target)
        self.hard, self.high, self.asked, self.default, self.low = (
            dict[int, Verdict]() for _ in range(5)
        )
        self.forced, self.kept = (
            dict[int, tuple[Verdict, str]](),
            dict[int, tuple[Verdict, str]](),
        )
        self.implies = list[tuple[int, int]]()
        self.exact, self.preferred, self.worthy = set[int](), set[int](), set[int]()
        self.climbed = set[int]()
        self.fallbacks = list[int]()
        self.warnings = list[str]()
        self.freedoms = dict[object, Freedom]()

    def keep(self, node: int, reason: Reason, why: str, *, hard: bool = False) -> None:
        """Pin a node to float32."""
        for variable in self.ports.of_node.get(node, {}).values():
            self.pin(variable, Verdict(variable, False, reason, why), hard=hard)

    def heed(self, hazard: Hazard) -> None:
        """Pin what a hazard is about to float32."""
        node = self.graph.nodes[hazard.node]
        for variable in self.ports.at(node, hazard.value):
            self.pin(variable, Verdict(variable, False, hazard.reason, hazard.detail))
        if self.options.user_white and not hazard.reason.is_shielded:
            for value in node.inputs if hazard.value == ABSENT else (hazard.value,):
                self.constant(value, hazard)

    def constant(self, value: int, hazard: Hazard) -> None:
        """Pin what makes and moves a constant that a hazard needs as it is, where the user's white list has it."""
        constants = self.graph.constants
        while (
            value != ABSENT
            and value not in self.climbed
            and constants.is_constant(value)
        ):
            self.climbed.add(value)
            maker = self.graph.producer(value)
            if maker is None:
                return
            if maker.key in self.options.user_white:
                self.keep(
                    maker.index,
                    hazard.reason,
                    f"makes a number for {self.graph.nodes[hazard.node].label!r}",
                )
            value = maker.input(0)

    def heeds(self, hazard: Hazard) -> bool:
        """Whether the options let a hazard decide."""
        level, options = self.options.level, self.options
        is_measured = (
            level == Level.AUTO and hazard.reason.is_measurable and not hazard.rare
        )
        keeps = options.hazards and not is_measured
        if (
            hazard.reason.is_shielded
        ):  # a white-listed producer stays low; its Cast is shielded
            is_white = self.graph.nodes[hazard.node].key in options.white
            return (keeps or level != Level.O3) and not is_white
        return keeps

    def requested(self, variable: int) -> None:
        """Pin what is to be low: an input or output of the model, or a weight."""
        is_weight = self.ports.variables[variable].param == "value"
        said = (
            (Reason.PATTERN, "low_weights (--low-weight)")
            if is_weight
            else (Reason.LEVEL, _IO)
        )
        self.pin(variable, Verdict(variable, True, *said))

    def kernels(self, node: Node, layout: Layout) -> None:
        """Pins and implications from the target's kernels."""
        options, variables = self.options, self.ports.of_node[node.index]
        free = self.freedoms.get(layout) or self.freedom(node, layout)
        for param in free.high:
            why = self.no_kernel(node, layout, param)
            self.pin(
                variables[param],
                Verdict(variables[param], False, Reason.NO_KERNEL, why),
                hard=True,
            )
        if self.builder.reads_no_input(self.ports, node):
            why = f"{options.target} wants it to read an input of the model, without a Cast"
            self.keep(node.index, Reason.NO_KERNEL, why, hard=True)
        for p, q in free.implies:
            self.implies.append((variables[p], variables[q]))
        if free.falls_back:
            self.fallbacks.append(node.index)
        if free.only_low:
            able = (
                variables[param] for param in layout.params if param not in free.high
            )
            self.preferred.update(map(self.ports.root, able))

    def no_kernel(self, node: Node, layout: Layout, param: str) -> str:
        """Why the target's kernels do not take a parameter in low precision."""
        target, signature, low = self.options.target, node.signature, self.options.low
        assert signature is not None
        lowered = {**layout.bound, param: retyped(layout.bound[param], low)}
        limit = kernel_limit(device_of(target), node.proto, lowered)
        why = (
            f"no {low.name} kernel for {node.key} (opset {signature.since}) on {target}"
        )
        return why if limit is None else f"{why}, since {limit}"

    def freedom(self, node: Node, layout: Layout) -> Freedom:
        """What the target's kernels leave to the node."""
        target, low = self.options.target, self.options.low
        signature, proto = node.signature, node.proto
        assert signature is not None
        devices = (device_of(target), device_of(cpu_of(target)))
        has_say = node.key in op_facts().dtype_attribute or any(
            has_kernel_limits(one, node.key) for one in devices
        )
        if not signature.has_function and not has_say:
            found = self.freedoms[layout] = _by_types(target, signature, layout, low)
            return found
        present = tuple(
            tuple(map(bool, names)) for names in (proto.input[:], proto.output[:])
        )
        key = (
            layout,
            present,
            tuple(item.SerializeToString() for item in proto.attribute),
        )
        if key not in self.freedoms:
            typed = Typed(signature, layout.bound, proto)
            self.freedoms[key] = freedom(target, typed, layout.params, low)
        return self.freedoms[key]

    def straight(self) -> None:
        """What the target's builder does not read through a Cast is low only where its reader is."""
        for node, fact in self.builder.high_nodes():
            self.keep(
                node.index,
                Reason.NO_KERNEL,
                f"on {self.options.target}, {fact}",
                hard=True,
            )
        for made, reader in self.builder.implications(self.ports):
            if reader == HIGH:
                why = f"its float32 reader takes no Cast on {self.options.target}"
                self.pin(made, Verdict(made, False, Reason.TIE, why), hard=True)
            else:
                self.implies.append((made, reader))

    def unsound(self) -> None:
        """Keep the nodes in float32 around which a result was wrong, with a warning."""
        wrong = frozenset(self.options.unsound)
        among = self.graph.nodes if wrong else ()
        nodes = [node for node in among if not wrong.isdisjoint(node.proto.output)]
        for node in nodes:
            self.keep(node.index, Reason.UNSOUND, "", hard=True)
        if nodes:
            more = (
                f" and {len(nodes) - 1} more nodes stay" if len(nodes) > 1 else " stays"
            )
            self.warnings.append(_UNSOUND.format(f"{nodes[0].label!r}{more}"))

    def user_overrides(self) -> None:
        """Pins from overrides of single nodes."""
        self.warnings += self.problem.overrides.warnings
        for index, override in self.problem.overrides.of_node.items():
            pins = self.forced if override.low else self.kept
            for variable in self.ports.of_node.get(index, {}).values():
                verdict = Verdict(
                    variable, override.low, override.reason, override.detail
                )
                pins.setdefault(
                    self.ports.root(variable), (verdict, self.graph.nodes[index].label)
                )

    def lists(self) -> None:
        """Pins from the lists and, for all other ops, from the level."""
        options, problem, all_exact = self.options, self.problem, self.graph.exact
        by_user = options.user_white if options.level != Level.O0 else ()
        gains, following = options.level == Level.O2, op_facts().following
        known: dict[object, tuple[bool, Reason, str] | None] = {}
        for index, variables in self.ports.of_node.items():
            node, exact = self.graph.nodes[index], index in all_exact
            follows = (
                node.key in following
                or index in problem.folded
                or index in problem.constant_fed
            )
            form = (
                node.key,
                exact,
                follows,
                index in problem.folded,
                self.freed.get(index),
            )
            if form not in known:
                freed = self.freed.get(index, frozenset())
                known[form] = listed(
                    problem, node, exact=exact, follows=follows, freed=freed
                )
            pin = known[form]
            for variable in variables.values():
                root = self.ports.roots[variable]
                if exact:
                    self.exact.add(root)
                if node.key in by_user and not (
                    node.key == "Cast" and len(variables) > 1
                ):  # which changes no type
                    self.asked.setdefault(
                        root, Verdict(variable, True, Reason.WHITE, node.key)
                    )
                elif (
                    pin is not None
                    and not pin[0]
                    and node.key not in options.user_black
                ):
                    self.default.setdefault(root, Verdict(variable, *pin))
                elif (
                    pin is not None
                    and index in problem.shares
                    and pin[1] is Reason.WHITE
                ):
                    self.worthy.add(
                        root
                    )  # its error has a price, which Casts may not be worth
                elif pin is not None:
                    self.pin(variable, Verdict(variable, *pin))
                elif not follows and (gains or node.key in options.white):
                    self.preferred.add(root)

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
                    f"The plan does not know {key!r}: it was made for another model.{near}"
                )
            low = decisions[key]
            self.pin(
                variable.index,
                Verdict(variable.index, low, Reason.PLAN, "as the plan says"),
            )
        if unknown := sorted(decisions.keys() - set(keys)):
            more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
            text = f"The plan decides {unknown[0]!r}{more}, which the model lacks: it was made for another model."
            if self.options.strict_options:
                raise ArgumentError(text)
            self.warnings.append(text)

    def finish(self) -> Pins:
        """The pins that win."""
        root = self.ports.root
        return Pins(
            verdicts=self.settled(),
            implies=[(root(p), root(q)) for p, q in self.implies],
            exact=self.exact,
            preferred=self.preferred,
            worthy=self.worthy,
            fallbacks=tuple(self.fallbacks),
            warnings=tuple(self.warnings),
        )

    def pin(self, variable: int, verdict: Verdict, *, hard: bool = False) -> None:
        """Record a pin; the first of a kind is the explanation."""
        pins = self.hard if hard else self.low if verdict.low else self.high
        pins.setdefault(self.ports.root(variable), verdict)

    def settled(self) -> dict[int, Verdict]:
        """The strongest pin of each variable, implications included.

        Raises:
            ContradictionError: overrides pull a variable both ways.
        """
        self._refuse_contradictions()
        self._spread_forced()
        soft = ChainMap(
            self.high, self.asked, self.default, self.low
        )  # the strongest first
        settled: dict[int, Verdict] = {}
        for root in {*self.hard, *self.forced, *self.kept, *soft}:
            if root in self.hard:
                settled[root] = self.hard[root]
                if root in self.forced:
                    label = self.forced[root][1]
                    self.warnings.append(
                        f"{label!r} cannot be forced low: {self.hard[root].detail}."
                    )
            elif root in self.forced or root in self.kept:
                settled[root] = (self.forced.get(root) or self.kept[root])[0]
            else:
                settled[root] = soft[root]
        self._spread_high(settled)
        return settled

    def _refuse_contradictions(self) -> None:
        for root in self.forced.keys() & self.kept.keys():
            (low, first), (high, second) = self.forced[root], self.kept[root]
            raise ContradictionError(
                f"{first!r} ({low.detail}) and {second!r} ({high.detail}) share one precision: drop one of the two."
            )

    def _spread_forced(self) -> None:
        """Force what a forced variable needs in low precision."""
        for first, second in self.implies:
            p, q = self.ports.root(first), self.ports.root(second)
            if p in self.forced and q not in self.kept:
                self.forced.setdefault(q, self.forced[p])

    def _spread_high(self, settled: dict[int, Verdict]) -> None:
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
