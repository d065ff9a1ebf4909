"""Pins: variables that are settled before the cut, each with its reason."""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final, NamedTuple

from onnxamp._base.errors import ArgumentError, first_of, suggestion
from onnxamp._decide.builder import Builder, builder_of
from onnxamp._decide.exponents.rows import unfit_nodes
from onnxamp._decide.kinds import Harm, Hazard, HazardKind, asked_hazards
from onnxamp._decide.listed import unmet_lists
from onnxamp._decide.mincut import Question
from onnxamp._decide.overrides import forced_hazards, lost_weights
from onnxamp._decide.pins.builder import away_from_inputs, high_nodes, implications
from onnxamp._decide.pins.claims import Claims, Strength
from onnxamp._decide.pins.lists import claim_lists
from onnxamp._decide.problem import Problem
from onnxamp._decide.variables.names import variable_names
from onnxamp._decide.variables.ports import HIGH
from onnxamp._decide.variables.signature import signature_warnings
from onnxamp._decide.verdicts import Basis, Reason, Verdict
from onnxamp._facts.dtypes import retyped
from onnxamp._facts.providers import computes_low, kernel_limit
from onnxamp._facts.tables import device_of
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.values import Level


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

    verdicts: Mapping[Question, Verdict]
    implies: Sequence[tuple[Question, Question]]
    exact: AbstractSet[Question]
    preferred: AbstractSet[Question]
    worthy: Mapping[Question, HazardKind]
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
    claims = Claims(problem)
    # Of several pins of one strength, reports show the first, so facts about ports and kernels come before wishes.
    _claim_ports(claims)
    builder = builder_of(graph, options.target)
    _claim_kernels(claims, away_from_inputs(builder, problem.ports), freed)
    _claim_builder_rules(claims, builder)
    _claim_unsound(claims)
    claims.warnings += problem.overrides.warnings
    for index, override in problem.overrides.of_node.items():
        strength = Strength.FORCED if override.low else Strength.KEPT
        claims.pin_node(strength, index, *override)
    if replay is not None:
        _replay(claims, replay)
        return _pins_of(claims, claims.settled())
    heeded = [
        hazard for hazard in problem.hazards if _is_heeded(problem, hazard, freed)
    ]
    _claim_hazards(claims, [*heeded, *asked_hazards(graph, options)])
    if options.hazards and options.level != Level.O0:
        claims.warnings += signature_warnings(graph, options)
    for index, why in (unfit_nodes(graph, options) | dict(measured or {})).items():
        claims.pin_node(Strength.HIGH, index, False, Reason.MEASURED, why)
    claim_lists(claims, freed)
    verdicts = claims.settled()
    claims.warnings += _warnings(problem, verdicts, heeded)
    return _pins_of(claims, verdicts)


def _pins_of(claims: Claims, verdicts: Mapping[Question, Verdict]) -> Pins:
    """Return the pins that win, with all else that was claimed."""
    return Pins(
        verdicts=verdicts,
        implies=[(claims.ports.root(p), q) for p, q in claims.implies],
        exact=claims.exact,
        preferred=claims.preferred,
        worthy=claims.worthy,
        warnings=tuple(claims.warnings),
    )


def _warnings(
    problem: Problem, verdicts: Mapping[Question, Verdict], heeded: Sequence[Hazard]
) -> Iterator[str]:
    """Yield sentences about options that ask for what the pins or the hazards do not allow."""
    graph = problem.graph
    options = problem.options
    ports = problem.ports
    low = {root for root, verdict in verdicts.items() if verdict.low}
    lowered = list[Hazard]()
    for hazard in heeded:
        at_risk = ports.at(graph.nodes[hazard.node], hazard.value)
        if not low.isdisjoint(map(ports.root, at_risk)):
            lowered.append(hazard)
    yield from forced_hazards(graph, problem.overrides, lowered)
    yield from lost_weights(graph, problem.overrides, heeded, options.low)
    yield from unmet_lists(graph, options, problem.listed, ports, verdicts)
    chosen = options.rescaling
    if chosen is not None and chosen.made_up and (chosen.scaled or chosen.unfit):
        yield _MADE_UP
    is_high = any(not verdict.low for verdict in verdicts.values())
    if is_high and computes_low(options.target):
        yield _NOT_HONORED.format(target=options.target)


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


def _claim_ports(claims: Claims) -> None:
    """Pin variables that are tied to float32, and those for whose ports the user asks for low precision."""
    ports = claims.ports
    for variable in ports.fixed_high:
        why = "shares its type with a float32 value"
        claims.pin(Strength.HARD, variable, False, Reason.TIE, why)
    for variable in ports.requested_low:
        is_weight = ports.variables[variable].param == "value"
        reason = Reason.PATTERN if is_weight else Reason.LEVEL
        why = _LOW_WEIGHT if is_weight else _IO
        claims.pin(Strength.LOW, variable, True, reason, why)


# -- what the target can do ------------------------------------------------------------------------------------


def _claim_kernels(
    claims: Claims, away: AbstractSet[int], freed: Mapping[int, frozenset[Basis]]
) -> None:
    """Add the pins and implications of the target's kernels.

    Args:
        claims: the claims so far.
        away: nodes that cannot read an input of the model directly, and must.
        freed: node -> reasons to ignore.
    """
    ports = claims.ports
    target = claims.options.target
    for index, free in claims.problem.freedoms.items():
        if index not in ports.of_node or Reason.NO_KERNEL in freed.get(index, ()):
            continue
        variables = ports.of_node[index]
        for param in free.high:
            why = _no_kernel(claims.problem, claims.graph.nodes[index], param)
            pinned = variables[param]
            claims.pin(Strength.HARD, pinned, False, Reason.NO_KERNEL, why)
        if index in away:
            why = f"on {target}, it must read an input of the model directly, without a Cast"
            claims.pin_node(Strength.HARD, index, False, Reason.NO_KERNEL, why)
        for p, q in free.implies:
            claims.imply(variables[p], variables[q])
        # A kernel that exists in low precision alone is a gain to be weighed against Casts, not a pin.
        if free.only_low:
            able = variables.keys() - free.high
            claims.preferred.update(ports.root(variables[param]) for param in able)


def _no_kernel(problem: Problem, node: Node, param: str) -> str:
    """Return why the target has no kernel for a parameter in low precision."""
    target = problem.options.target
    low = problem.options.low
    signature = node.signature
    assert signature is not None
    bound = problem.ports.layouts[node.index].bound
    lowered = {**bound, param: retyped(bound[param], low)}
    limit = kernel_limit(device_of(target), node.proto, lowered)
    why = f"no {low.name} kernel for {node.key} (opset {signature.since}) on {target}"
    return why if limit is None else f"{why}, since {limit}"


def _claim_builder_rules(claims: Claims, builder: Builder) -> None:
    """Add the pins and implications of Casts that the target's builder rejects."""
    target = claims.options.target
    for node, fact in high_nodes(builder):
        why = f"on {target}, {fact}"
        claims.pin_node(Strength.HARD, node.index, False, Reason.NO_KERNEL, why)
    for producer, reader in implications(builder, claims.ports):
        if reader == HIGH:
            why = f"on {target}, its float32 reader cannot read a Cast"
            claims.pin(Strength.HARD, producer, False, Reason.TIE, why)
        else:
            claims.imply(producer, reader)


def _claim_unsound(claims: Claims) -> None:
    """Keep nodes in float32 where an earlier result was wrong, with a warning."""
    wrong = frozenset(claims.options.unsound)
    if not wrong:
        return
    nodes = [
        node for node in claims.graph.nodes if not wrong.isdisjoint(node.proto.output)
    ]
    for node in nodes:
        claims.pin_node(Strength.HARD, node.index, False, Reason.UNSOUND, "")
    if nodes:
        others = len(nodes) - 1
        more = f" and {others} more nodes stay" if others else " stays"
        claims.warnings.append(_UNSOUND.format(f"{nodes[0].label!r}{more}"))


# -- hazards ---------------------------------------------------------------------------------------------------


def _is_heeded(
    problem: Problem, hazard: Hazard, freed: Mapping[int, frozenset[Basis]]
) -> bool:
    """Return whether the options let a hazard decide."""
    if hazard.reason in freed.get(hazard.node, ()):
        return False
    options = problem.options
    may_measure = hazard.reason.is_measurable and not hazard.rare
    is_measured = options.level == Level.AUTO and may_measure
    keeps = options.hazards and not is_measured
    if hazard.reason.harm is not Harm.CAST:
        return keeps
    # A white-listed producer stays low; its Cast is shielded.
    is_white = problem.listed.is_white(hazard.node)
    return (keeps or options.level != Level.O3) and not is_white


def _claim_hazards(claims: Claims, hazards: Sequence[Hazard]) -> None:
    """Pin the ports that hazards are about to float32."""
    graph = claims.graph
    climbed = set[int]()
    for hazard in hazards:
        node = graph.nodes[hazard.node]
        for variable in claims.ports.at(node, hazard.value):
            claims.pin(Strength.HIGH, variable, False, hazard.reason, hazard.detail)
        if claims.options.user_white and hazard.reason.harm is not Harm.CAST:
            for value in node.inputs if hazard.value == ABSENT else (hazard.value,):
                _claim_makers(claims, value, hazard, climbed)


def _claim_makers(
    claims: Claims, value: int, hazard: Hazard, climbed: set[int]
) -> None:
    """Pin white-listed nodes to float32 that create or move a constant, which a hazard needs unrounded.

    ``climbed`` are constants whose makers are pinned already; this one and those before it are added.
    """
    graph = claims.graph
    why = f"computes a number for {graph.nodes[hazard.node].label!r}"
    while value != ABSENT and value not in climbed:
        if not graph.constants.is_constant(value):
            return
        climbed.add(value)
        maker = graph.producer(value)
        if maker is None:
            return
        if maker.key in claims.options.user_white:
            claims.pin_node(Strength.HIGH, maker.index, False, hazard.reason, why)
        value = maker.input(0)


# -- plans -----------------------------------------------------------------------------------------------------


def _replay(claims: Claims, decisions: Mapping[str, bool]) -> None:
    """Pin the variables of all nodes as the plan says. Constants follow their readers and may be renamed."""
    graph = claims.graph
    variables = claims.ports.variables
    keys = [str(name) for name in variable_names(graph, variables)]
    for variable, key in zip(variables, keys, strict=True):
        is_initializer = variable.node == ABSENT
        if is_initializer or graph.nodes[variable.node].key == "Constant":
            continue
        if key not in decisions:
            near = suggestion(decisions, key)
            raise ArgumentError(
                f"The plan does not contain {key!r}: it was made for another model.{near}"
            )
        low = decisions[key]
        strength = Strength.LOW if low else Strength.HIGH
        claims.pin(strength, variable.index, low, Reason.PLAN, "as the plan says")
    if unknown := sorted(decisions.keys() - set(keys)):
        text = f"The plan decides {first_of(unknown)}, which the model lacks: it was made for another model."
        if claims.options.strict_options:
            raise ArgumentError(text)
        claims.warnings.append(text)
