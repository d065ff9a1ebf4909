"""Newer opsets that pay, because nodes can be low precision there that are float32 at the model's own opset.

If nodes are held back, the model is upgraded, and its problem is solved again. The upgrade pays if it removes Casts or
lowers such nodes, and if the target loses no kernel by it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from onnxamp._base.errors import OpsetError
from onnxamp._convert.analysis import Analysis, Decided, analyze
from onnxamp._convert.estimate import time_on_target
from onnxamp._convert.lost_kernels import fallen, lost_kernel, lost_low_kernel
from onnxamp._decide.listed import unmet_lists
from onnxamp._decide.variables.ports import Layout
from onnxamp._decide.verdicts import Reason
from onnxamp._facts.dtypes import FLOAT, retyped
from onnxamp._facts.ops import op_facts
from onnxamp._facts.signature import Signature, newer_versions
from onnxamp._facts.targets import release
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.freedom import Typed, freedom
from onnxamp._graph.types import bind_node
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite.passes.upgrade import Obstacle, Upgrade, plan_upgrade
from onnxamp._rewrite.passes.upgrade_rules import newest_loaded
from onnxamp._rewrite.prepare import Prepared


@dataclass(frozen=True)
class HeldBack:
    """Nodes that are float32 because of the model's opset.

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
        """The analysis that would result if missing kernels did not keep these nodes in float32."""
        return self.analysis.without(
            dict.fromkeys(self.able, frozenset({Reason.NO_KERNEL}))
        )

    def may_pay(self) -> bool:
        """Return whether low kernels may change anything."""
        of_node = self.analysis.ports.of_node
        exact = self.analysis.graph.exact
        # If the schema lacks the type, only the problem at the newer opset can tell.
        if any(not of_node.get(node) for node in self.able):
            return True
        if self.freed.casts < self.analysis.casts:
            return True
        inexact = (of_node[node].values() for node in self.able if node not in exact)
        return any(map(self.freed.decision.is_low, chain.from_iterable(inexact)))

    def lowered(self, after: Analysis) -> list[int]:
        """Return the nodes that are low in the analysis of the upgraded model."""
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
    """Return the nodes that are float32 only because of the model's opset.

    Complexity: linear in nodes.
    """
    first = dict[Signature, int]()
    steps = dict[int, int]()
    is_off = analysis.options.level == Level.O0
    for index in () if is_off else sorted(_without_kernel(analysis)):
        node = analysis.graph.nodes[index]
        signature = node.signature
        if signature is None or signature.domain or not _is_wanted(analysis, index):
            continue
        if signature not in first:
            first[signature] = _first_opset(analysis, node)
        steps[index] = first[signature]
    return HeldBack(analysis, steps)


def _without_kernel(analysis: Analysis) -> set[int]:
    """Return the nodes that are float32 because there is no kernel, or no schema, for low precision."""
    ports = analysis.ports
    nodes = analysis.graph.nodes
    pins = (
        pin
        for pin in analysis.pins.verdicts.values()
        if pin.reason is Reason.NO_KERNEL
    )
    kernelless = {
        ports.variables[pin.variable].node for pin in pins
    } & ports.layouts.keys()
    lacking = dict[Layout, bool]()
    for index, layout in ports.layouts.items():
        if layout not in lacking:
            pinned = op_facts().pinned_parameters.get(nodes[index].key, ())
            settled = {*pinned, *layout.params, *_given(nodes[index], layout)}
            floats = {param for param, kind in layout.bound.items() if kind == FLOAT}
            lacking[layout] = not floats <= settled
        if lacking[layout]:
            kernelless.add(index)
    return kernelless


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
    """Return the first opset at which all float32 parameters of a node can be low on the target; 0 if there is none."""
    options = analysis.options
    bound = analysis.ports.layouts[node.index].bound
    params = [param for param, kind in bound.items() if kind == FLOAT]
    assert node.signature is not None
    names_type = not node.signature.params.keys() >= set(params)
    # Neither ONNX Runtime nor the release that the target stands for loads newer ones.
    newest = min(newest_loaded(), release(analysis.options.target).opset)
    for signature in newer_versions(node.signature):
        if signature.since > newest:
            break
        low = retyped(FLOAT, options.low)
        # Where this version names a type instead of a parameter, a newer one may have a parameter.
        if names_type:
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


class Upgrades:
    """A prepared model at newer opsets, each planned once.

    Attributes:
        original: the model at its own opset.
        current: that opset.
    """

    def __init__(self, original: Prepared) -> None:
        self.original = original
        self.current = original.graph.book.opsets[""]
        self._plans = dict[int, Upgrade]()

    def plan(self, opset: int) -> Upgrade:
        """Return the changes for an opset, as far as it can be reached."""
        if opset not in self._plans:
            self._plans[opset] = plan_upgrade(self.original.graph, opset)
        return self._plans[opset]

    def at(self, opset: int) -> Prepared:
        """Return the model upgraded to an opset.

        Raises:
            OpsetError: it cannot be reached.
        """
        plan = self.plan(opset)
        if plan.obstacle is not None:
            raise OpsetError(
                f"The model cannot be upgraded to opset {opset}: {plan.obstacle}."
            )
        return replace(self.original, graph=plan.result)

    def at_least(self, options: Options) -> Prepared:
        """Return the model at the least opset at which it can be converted: its own, unless the low type needs more.

        It stays at its own if the user requested that, or if nothing becomes low.

        Raises:
            OpsetError: the model cannot reach it.
        """
        low = options.low
        opset = low.min_opset
        if not options.may_upgrade or opset <= self.current:
            return self.original
        try:
            prepared = self.at(opset)
        except OpsetError as error:
            raise OpsetError(
                f"{low.name} needs opset {opset} or newer. {error}"
            ) from None
        note = f"Upgraded from opset {self.current} to {opset}, the first with {low.name}."
        return replace(prepared, notes=(*prepared.notes, note))

    def paying(self, own: Decided) -> Iterator[Decided]:
        """Yield the model at newer opsets that pay, the newest first, and at last as it is.

        Args:
            own: the model at the least opset at which it can be converted.

        Complexity: one problem for each opset that is tried.
        """
        options = own.analysis.options
        held = held_back(own.analysis)
        opsets = sorted({*held.first.values()} - {0}, reverse=True)
        if opsets and options.opset != "auto":
            yield explained(own, held, _stays(self.current, opsets[-1]))
            return
        if not options.may_upgrade or not opsets or not held.may_pay():
            yield own
            return
        reach = self.plan(opsets[0])
        obstacle = reach.obstacle
        refused = list[str]()
        yielded = set[int]()
        for opset in opsets:
            # The upgrade ends before this opset, at an obstacle.
            if opset > reach.opset:
                continue
            lost = _lost(own.graph, opset, options.target)
            if lost is not None:
                obstacle = lost
                continue
            upgraded = self._decided(opset, options)
            if not _pays(upgraded, own, held):
                continue
            slow = _lost_time(upgraded.analysis, own.analysis)
            if slow:
                refused.append(
                    f"Not upgraded to opset {opset}, where {slow} (--opset {opset} does it anyway)."
                )
                continue
            best = self._least(upgraded, held)
            reached = best.graph.book.opsets[""]
            if reached in yielded:
                continue
            yielded.add(reached)
            notes = (self._gain(own, best, held), *_out_of_reach(obstacle))
            yield best.told(*notes, refused=refused)
        own = explained(own, held, *refused, *_out_of_reach(obstacle))
        yield own.told(*_out_of_reach(obstacle), refused=refused)

    def _decided(self, opset: int, options: Options) -> Decided:
        """Return what is decided at an opset."""
        prepared = self.at(opset)
        return Decided(
            prepared=prepared,
            analysis=analyze(prepared.graph, options),
            refusal=refusal_at(opset),
        )

    def _least(self, best: Decided, held: HeldBack) -> Decided:
        """Return the model at the least opset that does as much."""
        opset = best.graph.book.opsets[""]
        lowered = held.lowered(best.analysis)
        enough = max((held.first[node] for node in lowered), default=opset)
        if enough >= opset:
            return best
        less = self._decided(enough, best.analysis.options)
        as_low = len(held.lowered(less.analysis)) >= len(lowered)
        return less if as_low and less.analysis.casts <= best.analysis.casts else best

    def _gain(self, own: Decided, best: Decided, held: HeldBack) -> str:
        """Return a sentence about the benefits of an upgrade."""
        before = own.analysis
        after = best.analysis
        why = list[str]()
        if after.casts < before.casts:
            saved = before.casts - after.casts
            why.append(f"saves {saved} of {before.casts} new Casts")
        ops = {before.graph.nodes[node].key for node in held.lowered(after)}
        if ops:
            kernels = f"{after.options.low.name} kernels"
            why.append(f"brings {kernels} for {', '.join(sorted(ops))}")
        text = f"Upgraded from opset {self.current} to {best.graph.book.opsets['']}"
        text += f", which {' and '.join(why)}"
        if lost := fallen(before, after):
            text += f"; there, {after.options.target} has no kernel for {lost}"
        return f"{text}."


def explained(decided: Decided, held: HeldBack, *refused: str) -> Decided:
    """Return the same, with the reason why the model is not upgraded in warnings about nodes that this would lower.

    Args:
        decided: the model at an opset that holds nodes back.
        held: these nodes.
        refused: sentences about upgrades that were not made, the most important first.
    """
    if not refused or not held.able:
        return decided
    analysis = decided.analysis
    pins = analysis.pins
    listed = analysis.problem.listed
    known = analysis.graph, analysis.options, listed, analysis.ports, pins.verdicts
    reasons = dict.fromkeys(held.able, refused[0])
    texts = zip(unmet_lists(*known), unmet_lists(*known, reasons), strict=True)
    longer = dict(texts)
    warnings = (longer.get(text, text) for text in pins.warnings)
    return replace(decided, analysis=analysis.with_warnings(warnings))


def _stays(current: int, enough: int) -> str:
    """Return a sentence about a request to stay at an opset."""
    return f"Opset {enough} would help, but the model was to stay at opset {current} (--opset)."


def refusal_at(opset: int) -> str:
    """Return the beginning of a sentence that refuses an upgrade."""
    return f"Not upgraded to opset {opset}, where"


def _out_of_reach(obstacle: Obstacle | None) -> Iterator[str]:
    """Yield a sentence about what stands in the way of a newer opset, if anything does."""
    if obstacle is not None:
        yield f"A newer opset would lower more, but {obstacle}."


def _lost(graph: Graph, opset: int, target: str) -> Obstacle | None:
    """Return a node that would lose its kernel by an upgrade; None if there is none."""
    lost = lost_kernel(graph, opset, target)
    return lost or lost_low_kernel(graph, opset, target)


def _pays(upgraded: Decided, own: Decided, held: HeldBack) -> bool:
    """Return whether an upgrade saves Casts, or lowers more than nodes that merely move data."""
    if upgraded.analysis.casts < own.analysis.casts:
        return True
    return not own.graph.exact.issuperset(held.lowered(upgraded.analysis))


def _lost_time(after: Analysis, before: Analysis) -> str:
    """Return a clause if nodes fall to the CPU by an upgrade, and the result is slower; "" otherwise."""
    lost = fallen(before, after)
    if not lost or time_on_target(after) < time_on_target(before):
        return ""
    target = after.options.target
    return f"{target} has no kernel for {lost}, and the CPU would take longer than low precision saves"
