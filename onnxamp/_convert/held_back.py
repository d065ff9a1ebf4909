"""Nodes that are held back by the model's opset.

Its version of an op has no schema or no kernel for low precision, and a newer one has.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.ports import Layout
from onnxamp._decide.verdicts import Reason
from onnxamp._dtypes import FLOAT, retyped
from onnxamp._graph.view import Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.signature import newer_versions
from onnxamp._options.levels import Level
from onnxamp._rewrite.upgrade.steps import newest_loaded
from onnxamp._target.freedom import freedom
from onnxamp._target.versions import release


@dataclass(frozen=True, slots=True)
class HeldBack:
    """The nodes that are float32 because of the model's opset.

    ``first`` tells for each the first opset at which the target has a kernel for it in low precision; 0: at none.
    """

    analysis: Analysis
    first: Mapping[int, int]

    @property
    def able(self) -> list[int]:
        """Those that a newer opset would help."""
        return [node for node, opset in self.first.items() if opset]

    @property
    def ops(self) -> list[str]:
        """The op types that a newer opset would help."""
        return sorted({self.analysis.graph.nodes[node].key for node in self.able})

    def casts_without(self) -> int:
        """Number of new Casts if kernels did not keep them in float32."""
        return len(self._freed().edits.casts)

    def may_pay(self) -> bool:
        """Whether low kernels may change anything. Where a schema lacks the type, only the newer one can tell."""
        of_node, exact = self.analysis.ports.of_node, self.analysis.graph.exact
        if any(not of_node.get(node) for node in self.able):
            return True
        freed = self._freed()
        variables = {variable for node in self.able if node not in exact for variable in of_node[node].values()}
        fewer = len(freed.edits.casts) < len(self.analysis.edits.casts)
        return fewer or any(freed.decision.is_low(variable) for variable in variables)

    def _freed(self) -> Analysis:
        """The analysis if kernels did not keep them in float32."""
        return self.analysis.without(dict.fromkeys(self.able, frozenset({Reason.NO_KERNEL})))

    def lowered(self, after: Analysis) -> list[int]:
        """Those that are low in the analysis of the upgraded model."""
        if after.graph is self.analysis.graph:
            return []
        names = {value.name: value.producer for value in after.graph.values}
        nodes = ((node, next(filter(None, self.analysis.graph.nodes[node].proto.output), "")) for node in self.first)
        found = ((node, after.ports.of_node.get(names.get(name, -1), {})) for node, name in nodes)
        return [node for node, sides in found if any(after.decision.low[variable] for variable in sides.values())]


def held_back(analysis: Analysis) -> HeldBack:
    """The nodes that are float32 because of the model's opset, but for those that would be in any case.

    Complexity: linear in nodes.
    """
    first = dict[tuple[str, int], int]()
    found = dict[int, int]()
    for node in sorted(_without_kernel(analysis)) if analysis.options.level != Level.O0 else ():
        signature, key = analysis.graph.nodes[node].signature, analysis.graph.nodes[node].key
        if signature is None or signature.domain or not _is_wanted(analysis, node):
            continue
        form = (key, signature.since)
        if form not in first:
            first[form] = _first_opset(analysis, analysis.graph.nodes[node])
        found[node] = first[form]
    return HeldBack(analysis, found)


def _without_kernel(analysis: Analysis) -> set[int]:
    """The nodes that are float32 because there is no kernel, or no schema, for low precision."""
    ports, nodes = analysis.ports, analysis.graph.nodes
    pins = (pin for pin in analysis.pins.verdicts.values() if pin.reason is Reason.NO_KERNEL)
    found, lacking = {ports.variables[pin.variable].node for pin in pins} & ports.layouts.keys(), dict[Layout, bool]()
    for index, layout in ports.layouts.items():
        if layout not in lacking:
            settled = op_facts().pinned_parameters.get(nodes[index].key, frozenset()).union(layout.params)
            lacking[layout] = any(kind == FLOAT and param not in settled for param, kind in layout.bound.items())
        if lacking[layout]:
            found.add(index)
    return found


def _is_wanted(analysis: Analysis, node: int) -> bool:
    """Whether lists and level leave the node low if it can be."""
    options, key = analysis.options, analysis.graph.nodes[node].key
    if options.level == Level.O1:
        return key in options.white or node in analysis.graph.exact
    return options.level == Level.AUTO or key not in options.black


def _first_opset(analysis: Analysis, node: Node) -> int:
    """First opset at which all of the node's float32 parameters can be low on the target; 0 if there is none."""
    options, bound = analysis.options, analysis.ports.layouts[node.index].bound
    params = [param for param, kind in bound.items() if kind == FLOAT]
    assert node.signature is not None
    newest = min(newest_loaded(), release(analysis.options.target).opset)
    for signature in newer_versions(node.signature):
        if signature.since > newest:
            break
        low = retyped(FLOAT, options.low)
        if not params or any(low not in signature.params.get(param, ()) for param in params):
            continue
        if not freedom(options.target, node.key, signature, bound, params, options.low, node.proto).high:
            return signature.since
    return 0
