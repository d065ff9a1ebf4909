"""The opset at which a model is converted: its own, or the lowest at which the wanted nodes can be low precision.

If nodes are held back (:mod:`onnxamp._convert.upgrades`), the model is upgraded, and the problem solved again. The
upgrade stays if it removes Casts or lowers such nodes, and if the caller, who may run both, confirms that the float32
model computes the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain
from typing import Final

from onnxamp._base.errors import OpsetError
from onnxamp._convert.analysis import Analysis, analyze, time_on_target
from onnxamp._convert.misspelled import prepared as raised
from onnxamp._convert.plan import Plan
from onnxamp._decide.ports import Layout
from onnxamp._decide.verdicts import Reason
from onnxamp._facts.dtypes import FLOAT, LOW_TENSORS, retyped
from onnxamp._facts.kernels import float_types
from onnxamp._facts.ops import op_facts
from onnxamp._facts.signature import Signature, lookup, newer_versions
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import CPU, cpu_of, release, target_of, with_kernels
from onnxamp._graph.freedom import Typed, freedom, runs_on
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import bind_node
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.model import Model
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.prepare import Prepared
from onnxamp._rewrite.upgrade import Obstacle, plan_upgrade
from onnxamp._rewrite.upgrade_rules import newest_loaded, steps_of


@dataclass(frozen=True)
class HeldBack:
    """The nodes that are float32 because of the model's opset.

    ``first`` is the first opset at which the target has a low-precision kernel for each; 0 for none.
    """

    analysis: Analysis
    first: Mapping[int, int]

    @property
    def able(self) -> list[int]:
        """The nodes that a newer opset would help."""
        return [node for node, opset in self.first.items() if opset]

    @property
    def ops(self) -> list[str]:
        """The op types that a newer opset would help."""
        return sorted({self.analysis.graph.nodes[node].key for node in self.able})

    @cached_property
    def freed(self) -> Analysis:
        """The analysis if kernels did not keep them in float32."""
        return self.analysis.without(
            dict.fromkeys(self.able, frozenset({Reason.NO_KERNEL}))
        )

    def may_pay(self) -> bool:
        """Return whether low kernels may change anything. If a schema lacks the type, only the newer one decides."""
        of_node = self.analysis.ports.of_node
        exact = self.analysis.graph.exact
        if any(not of_node.get(node) for node in self.able):
            return True
        if self.freed.casts < self.analysis.casts:
            return True
        inexact = (of_node[node].values() for node in self.able if node not in exact)
        return any(map(self.freed.decision.is_low, chain.from_iterable(inexact)))

    def lowered(self, after: Analysis) -> list[int]:
        """The nodes that are low in the analysis of the upgraded model."""
        if after.graph is self.analysis.graph:
            return []
        makers = {value.name: value.producer for value in after.graph.values}
        lowered = list[int]()
        for node in self.first:
            name = self.analysis.graph.nodes[node].first_output
            roots = after.ports.deciding(makers.get(name, ABSENT))
            if any(map(after.decision.is_low, roots)):
                lowered.append(node)
        return lowered


def held_back(analysis: Analysis) -> HeldBack:
    """The nodes that are float32 because of the model's opset, but for those that would be in any case.

    Complexity: linear in nodes.
    """
    first = dict[Signature, int]()
    found = dict[int, int]()
    is_off = analysis.options.level == Level.O0
    for index in () if is_off else sorted(_without_kernel(analysis)):
        node = analysis.graph.nodes[index]
        signature = node.signature
        if signature is None or signature.domain or not _is_wanted(analysis, index):
            continue
        if signature not in first:
            first[signature] = _first_opset(analysis, node)
        found[index] = first[signature]
    return HeldBack(analysis, found)


def _without_kernel(analysis: Analysis) -> set[int]:
    """The nodes that are float32 because there is no kernel, or no schema, for low precision."""
    ports = analysis.ports
    nodes = analysis.graph.nodes
    pins = (
        pin
        for pin in analysis.pins.verdicts.values()
        if pin.reason is Reason.NO_KERNEL
    )
    found = {ports.variables[pin.variable].node for pin in pins} & ports.layouts.keys()
    lacking = dict[Layout, bool]()
    for index, layout in ports.layouts.items():
        if layout not in lacking:
            pinned = op_facts().pinned_parameters.get(nodes[index].key, ())
            settled = {*pinned, *layout.params, *_given(nodes[index], layout)}
            floats = {param for param, kind in layout.bound.items() if kind == FLOAT}
            lacking[layout] = not floats <= settled
        if lacking[layout]:
            found.add(index)
    return found


def _given(node: Node, layout: Layout) -> Iterator[str]:
    """Yield the parameters of outputs whose type an input of another parameter gives."""
    signature = node.signature
    assert signature is not None
    for position, place in enumerate(layout.outputs):
        port = signature.output(position)
        if place >= 0 and port is not None:
            yield signature.param(port, position)


def _is_wanted(analysis: Analysis, node: int) -> bool:
    """Return whether the user, lists and level leave the node low if it can be."""
    problem = analysis.problem
    level = analysis.options.level
    override = problem.overrides.of_node.get(node)
    if override is not None:
        return override.low
    if level == Level.O1:
        return problem.listed.is_white(node) or node in analysis.graph.exact
    return level == Level.AUTO or problem.listed.black_entry(node) is None


def _first_opset(analysis: Analysis, node: Node) -> int:
    """First opset at which all of the node's float32 parameters can be low on the target; 0 if there is none."""
    options = analysis.options
    bound = analysis.ports.layouts[node.index].bound
    params = [param for param, kind in bound.items() if kind == FLOAT]
    assert node.signature is not None
    names_type = not node.signature.params.keys() >= set(params)
    newest = min(newest_loaded(), release(analysis.options.target).opset)
    for signature in newer_versions(node.signature):
        if signature.since > newest:
            break
        low = retyped(FLOAT, options.low)
        if names_type:  # if newer versions have a parameter
            bound = bind_node(replace(node, signature=signature), analysis.graph.types)
            params = [param for param, kind in bound.items() if kind == FLOAT]
        if not params or any(
            low not in signature.params.get(param, ()) for param in params
        ):
            continue
        typed = Typed(signature, bound, node.proto)
        if not freedom(options.target, typed, params, options.low).high:
            return signature.since
    return 0


Proof = Callable[[Graph], str | None]
"""Returns the fault of an upgraded float32 model, in a clause; None if it computes what the original does."""


def at_best_opset(
    model: Model,
    options: Options,
    plan: Plan | None = None,
    proof: Proof | None = None,
) -> tuple[Prepared, Analysis]:
    """Prepare a model and decide its precision, at the opset that ``options.opset`` asks for or that pays.

    Arguments and errors are those of :func:`onnxamp._convert.convert.analyse_model`.
    """
    prepared = raised(model, options)
    current = prepared.graph.book.opsets[""]
    is_fixed = options.opset != "auto" or options.level == Level.O0
    choice = _Choice(prepared, options, proof)
    if plan is None and not is_fixed:
        if current < options.low.min_opset:
            choice.need(options.low.min_opset)
        return choice.best()
    if plan is not None and plan.opset > current and not is_fixed:
        note = f"Upgraded from opset {current} to {plan.opset}, as the plan says."
        prepared = choice.at(plan.opset)
        prepared = replace(prepared, notes=(*prepared.notes, note))
    replay = None if plan is None else plan.of_nodes()
    return prepared, analyze(prepared.graph, options, replay)


class _Choice:
    """The search for the opset of one prepared model.

    Attributes:
        base: the model at the lowest opset at which it can be converted.
        current: the opset of the original model.
        refused: sentences about upgrades that were rejected.
    """

    def __init__(
        self, original: Prepared, options: Options, proof: Proof | None
    ) -> None:
        self.original = self.base = original
        self.options = options
        self.proof = proof
        self.current = original.graph.book.opsets[""]
        self.refused = list[str]()
        self.plan = cache(partial(plan_upgrade, original.graph))

    def at(self, opset: int) -> Prepared:
        """Return the model upgraded to an opset that it can reach."""
        plan = self.plan(opset)
        if plan.obstacle is not None:
            raise OpsetError(
                f"The model cannot be upgraded to opset {opset}: {plan.obstacle}."
            )
        return replace(self.original, graph=plan.result)

    def need(self, opset: int) -> None:
        """Let an opset be the least.

        Raises:
            OpsetError: the model cannot reach it.
        """
        try:
            self.base = self.at(opset)
        except OpsetError as error:
            is_of_type = opset == self.options.low.min_opset
            what = self.options.low.name if is_of_type else "This"
            raise OpsetError(f"{what} needs opset {opset} or newer. {error}") from None

    def best(self) -> tuple[Prepared, Analysis]:
        """Return the prepared model and its analysis at the opset that pays."""
        before = analyze(self.base.graph, self.options)
        held = held_back(before)
        candidates = sorted({*held.first.values()} - {0}, reverse=True)
        if not candidates or not held.may_pay():
            return self.settled(self.base, before, ())
        reach = self.plan(candidates[0])
        result = (self.base, before)
        obstacle = reach.obstacle
        target = self.options.target
        for opset in candidates:
            if opset > reach.opset:
                continue
            lost = lost_kernel(self.base.graph, opset, target)
            lost = lost or lost_low_kernel(self.base.graph, opset, target)
            if lost is not None:
                obstacle = lost
                continue
            found = self.attempt(opset, before, held)
            if found is not None:
                result = found
                break
        return self.settled(*result, self.stories(before, result[1], held, obstacle))

    def attempt(
        self, opset: int, before: Analysis, held: HeldBack
    ) -> tuple[Prepared, Analysis] | None:
        """Return the model at an opset, or at the least that does as much; None if it does not pay, or changes
        results.
        """
        prepared = self.at(opset)
        after = analyze(prepared.graph, self.options)
        lowered = held.lowered(after)
        saves = after.casts < before.casts
        if not saves and before.graph.exact.issuperset(lowered):
            return None  # moving data alone wins nothing
        lost = fallen(before, after)
        if lost and time_on_target(after) >= time_on_target(before):
            what = f"{self.options.target} has no kernel for {lost}, and the CPU would take longer than low precision saves"
            self.refused.append(
                f"Not upgraded to opset {opset}, where {what} (--opset {opset} does it anyway)."
            )
            return None
        enough = max((held.first[node] for node in lowered), default=opset)
        if enough < opset:
            less = self.at(enough)
            other = analyze(less.graph, self.options)
            as_low = len(held.lowered(other)) >= len(lowered)
            if as_low and other.casts <= after.casts:
                opset = enough
                prepared = less
                after = other
        return (prepared, after) if self.is_proven(prepared.graph) else None

    def is_proven(self, graph: Graph) -> bool:
        """Return whether the upgraded model computes the same, as far as can be checked."""
        why = self.proof(graph) if self.proof is not None else None
        if why is not None:
            self.refused.append(
                f"Not upgraded to opset {graph.book.opsets['']}, where {why}."
            )
        return why is None

    def settled(
        self, prepared: Prepared, analysis: Analysis, notes: Iterable[str]
    ) -> tuple[Prepared, Analysis]:
        """Return the outcome, with its notes.

        Raises:
            OpsetError: it is the least opset, and not even that one computes the same.
        """
        graph = prepared.graph
        if graph is self.base.graph and graph is not self.original.graph:
            if not self.is_proven(graph):
                raise OpsetError(
                    f"{self.options.low.name} needs a newer opset than {self.current}. {self.refused[-1]}"
                )
            notes = notes or (self._needed(),)
        notes = (*prepared.notes, *notes)
        return replace(prepared, notes=notes, refused=tuple(self.refused)), analysis

    def _needed(self) -> str:
        opset = self.base.graph.book.opsets[""]
        low = self.options.low
        why = f", the first with {low.name}" if self.current < low.min_opset else ""
        return f"Upgraded from opset {self.current} to {opset}{why}."

    def stories(
        self,
        before: Analysis,
        after: Analysis,
        held: HeldBack,
        obstacle: Obstacle | None,
    ) -> tuple[str, ...]:
        """Return sentences about the benefits and obstacles of an upgrade."""
        graph = after.graph
        told = list[str]()
        why = list[str]()
        if graph is not before.graph:
            if after.casts < before.casts:
                saved = before.casts - after.casts
                why.append(f"saves {saved} of {before.casts} new Casts")
            ops = {before.graph.nodes[node].key for node in held.lowered(after)}
            if ops:
                kernels = f"{self.options.low.name} kernels"
                why.append(f"brings {kernels} for {', '.join(sorted(ops))}")
            text = f"Upgraded from opset {self.current} to {graph.book.opsets['']}"
            text += f", which {' and '.join(why)}"
            if lost := fallen(before, after):
                text += f"; there, {self.options.target} has no kernel for {lost}"
            told.append(f"{text}.")
        elif graph is not self.original.graph:
            told.append(self._needed())
        if obstacle is not None:
            told.append(f"A newer opset would lower more, but {obstacle}.")
        return tuple(told)


def fallen(before: Analysis, after: Analysis) -> str:
    """Return the op types of nodes that the target leaves to the CPU after an upgrade, although it ran them before.

    Types count: where only some nodes of an op have a kernel, the others were on the CPU before.
    """
    graph = before.graph
    target = before.options.target
    lost = set[str]()
    makers = {value.name: value.producer for value in graph.values}
    for index, free in after.problem.freedoms.items():
        node = after.graph.nodes[index]
        if not free.falls_back or node.key in lost:
            continue
        maker = makers.get(node.first_output, ABSENT)
        was_here = maker == ABSENT or runs_on(
            target, Typed.of(graph.nodes[maker], graph.types)
        )
        if was_here:
            lost.add(node.key)
    return ", ".join(sorted(lost))


def lost_kernel(graph: Graph, opset: int, target: str) -> Obstacle | None:
    """Return a node that ONNX Runtime no longer runs in float32 at that opset; None if there is none.

    Nodes that the target leaves to the CPU do run. Without a device, a node that the CPU cannot run cannot be
    validated.
    """
    current = graph.book.opsets[""]
    place = target_of(target)
    places = {target, cpu_of(target)} if place.limits_types else {*with_kernels()}
    places |= {CPU} if place.builds else set()
    for key, nodes in graph.by_key.items():
        node = nodes[0]
        steps = steps_of(key, current, opset)
        if not steps or node.signature is None or key in op_facts().kernel_free:
            continue
        op = steps[-1].op
        version = steps[-1].version
        newer = lookup("", op, opset)
        if newer is None:
            continue
        before = set[str]()
        after = set[str]()
        old = Typed.of(node, graph.types)
        for one in places:
            if newer.has_function:
                runs = runs_on(one, old), runs_on(one, old._replace(signature=newer))
            else:
                then = float_types(one, key, node.signature.since)
                runs = FLOAT in then, FLOAT in float_types(one, op, version)
            before.update([one] if runs[0] else [])
            after.update([one] if runs[1] else [])
        lost = {device_of(one) for one in before - after}
        is_needed = any(device == CPU or target_of(device).builds for device in lost)
        if before and (not after or is_needed):
            taker = f"{place.title} does not support it" if place.builds else _UNKNOWN
            return Obstacle(opset, node.label, key, f"{taker} there")
    return None


_UNKNOWN: Final = "ONNX Runtime has no kernel for it"


def lost_low_kernel(graph: Graph, opset: int, target: str) -> Obstacle | None:
    """A node that is low precision already, and that the target runs only as long as the opset stays."""
    current = graph.book.opsets[""]
    for key, nodes in graph.by_key.items():
        steps = steps_of(key, current, opset)
        signature = nodes[0].signature
        op = steps[-1].op if steps else key
        has_body = (
            signature is not None and signature.has_function
        )  # which is of the new opset
        newer = lookup("", op, opset) if steps or has_body else None
        if newer is None:
            continue
        for node in nodes:
            kinds = graph.types_of((*node.inputs, *node.outputs))
            if node.signature is None or LOW_TENSORS.keys().isdisjoint(kinds):
                continue
            old = Typed.of(node, graph.types)
            new = old._replace(signature=newer)
            if runs_on(target, old) and not runs_on(target, new):
                why = f"{target} has no kernel for its types there"
                return Obstacle(opset, node.label, key, why)
    return None
