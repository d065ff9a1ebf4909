"""Hints about options that would save Casts: a newer opset, or folding.

The savings are computed by solving the same problem again without the pins in question.
"""

from collections.abc import Mapping
from typing import Final

from onnxamp._convert.analysis import Analysis
from onnxamp._decide.pins import find_pins
from onnxamp._decide.precision import CutProblem
from onnxamp._decide.verdicts import Reason
from onnxamp._dtypes import FLOAT, LOW_TYPES, retyped
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.signature import newer_versions
from onnxamp._options.options import Level
from onnxamp._rewrite.fold.fold import reachable, told
from onnxamp._rewrite.fold.folds import Fold
from onnxamp._rewrite.fold.search import find_folds
from onnxamp._rewrite.plan_edits import plan_edits
from onnxamp._target.kernels import freedom


def opset_hint(analysis: Analysis) -> str | None:
    """How many Casts a newer opset saves, if nodes stay float32 only because of the model's opset; None if none do.

    The hint names the first opset at which all those ops that ever get a low-precision kernel have one.
    """
    if analysis.options.level == Level.O0:
        return None
    graph, newer, first = analysis.graph, 0, dict[tuple[str, int], int]()
    held_back = [node for node in graph.nodes if _is_held_back(analysis, node)]
    for node in held_back:
        assert node.signature is not None
        key = (node.key, node.signature.since)
        if key not in first:
            first[key] = _first_opset(analysis, node)
        newer = max(newer, first[key])
    current = graph.book.opsets[""]
    if newer <= current:
        return None
    able = (node for node in held_back if node.signature and first[node.key, node.signature.since])
    freed = {node.index: frozenset({Reason.NO_KERNEL}) for node in able}
    before = len(analysis.edits.casts)
    saved = before - _casts_without(analysis, freed)
    ops = ", ".join(sorted({key for (key, _), version in first.items() if version}))
    if saved > 0:
        return (
            f"{saved} of {before} new Casts vanish with --opset {newer}, which brings low-precision kernels for {ops}."
        )
    return f"--opset {newer} brings low-precision kernels for {ops}; at opset {current} there are none."


def fold_hint(analysis: Analysis) -> str | None:
    """Which patterns of the model are decomposed, and how many Casts folding saves; None if there are none."""
    options, graph = analysis.options, analysis.graph
    if options.folds or options.level == Level.O0:
        return None
    folds = graph.ask(find_folds, with_weights=False)
    opset = reachable(graph, folds, options.target, None)
    folds = [fold for fold in folds if fold.opset <= opset]
    if not folds:
        return None
    text = f"{_told_as_decomposed(folds)}; --fold makes one op of each"
    able = [fold for fold in folds if options.level == Level.O3 or fold.op not in options.black]
    able = [fold for fold in able if not all(_is_low(analysis, node) for node in fold.nodes)]
    inside = {node for fold in able for node in fold.nodes}
    before_them = filter(None, (graph.producer(value) for node in inside for value in graph.nodes[node].inputs))
    freed = {node.index: frozenset({Reason.FUSION}) for node in before_them} | dict.fromkeys(inside, _OF_PATTERNS)
    before = len(analysis.edits.casts)
    saved = before - _casts_without(analysis, freed) if freed else 0
    if saved > 0:
        text = f"{text}, and saves {saved} of {before} Casts"
    if options.level in (Level.O1, Level.O2) and any(fold.op in options.black for fold in folds):
        text = f"{text}. With --lists fast normalisations can then be low precision, too"
    return f"{text}."


def _is_low(analysis: Analysis, node: int) -> bool:
    """Whether all variables of the node are low."""
    return all(analysis.decision.low[variable] for variable in analysis.ports.of_node.get(node, {}).values())


_OF_PATTERNS: Final = frozenset({Reason.DECOMPOSED, Reason.EPSILON, Reason.FUSION, Reason.BLACK})
"""Reasons that keep nodes of a decomposed pattern in float32, but not the single op."""


def _casts_without(analysis: Analysis, freed: Mapping[int, frozenset[Reason]]) -> int:
    """Number of new Casts if these reasons did not keep these nodes in float32."""
    problem = analysis.problem
    pins = find_pins(problem, freed=freed)
    decision = CutProblem(problem, pins).decide()
    return len(plan_edits(problem, decision).casts)


def _is_held_back(analysis: Analysis, node: Node) -> bool:
    """Whether the node is float32 because the model's opset has no kernel, or no schema, for low precision."""
    if node.signature is None or node.signature.domain:
        return False
    layout = analysis.ports.layouts.get(node.index)
    bound = layout.bound if layout is not None else {}
    variables = analysis.ports.of_node.get(node.index, {})
    for variable in variables.values():
        pin = analysis.pins.verdicts.get(analysis.ports.root(variable))
        if pin is not None and pin.reason is Reason.NO_KERNEL and pin.variable == variable:
            return True
    pinned = op_facts().pinned_parameters.get(node.key, frozenset())
    return any(kind == FLOAT and p not in variables and p not in pinned for p, kind in bound.items())


def _first_opset(analysis: Analysis, node: Node) -> int:
    """First opset at which all of the node's float32 parameters can be low on the target; 0 if there is none."""
    options, bound = analysis.options, analysis.ports.layouts[node.index].bound
    params = [param for param, kind in bound.items() if kind == FLOAT]
    assert node.signature is not None
    for signature in newer_versions(node.signature):
        low = retyped(FLOAT, options.low)
        if not params or any(low not in signature.params.get(param, ()) for param in params):
            continue
        if not freedom(options.target, node.key, signature, bound, params, options.low, node.proto).high:
            return signature.since
    return 0


def _told_as_decomposed(folds: list[Fold]) -> str:
    return f"{told(folds)} {'is' if len(folds) == 1 else 'are'} decomposed into single ops"


def decomposed(graph: Graph) -> str | None:
    """Which patterns of a model, converted or not, are decomposed, and how many Casts surround them."""
    folds = graph.ask(find_folds, with_weights=False)
    if not folds:
        return None
    casts = set().union(*(_casts_around(graph, fold) for fold in folds))
    around = f", with {len(casts)} Cast{'' if len(casts) == 1 else 's'} around" if casts else ""
    return f"{_told_as_decomposed(folds)}{around}"


def _casts_around(graph: Graph, fold: Fold) -> set[int]:
    """Casts between floats within the pattern, right before it, and right after it."""
    casts = set[int]()
    read = {graph.passed_on(value) for index in fold.nodes for value in graph.nodes[index].inputs if value != ABSENT}
    before = map(graph.producer, read)
    behind = (node for value in graph.nodes[fold.last].outputs for node, _ in graph.consumers(value))
    for node in (*map(graph.nodes.__getitem__, fold.nodes), *before, *behind):
        if node is not None and node.key == "Cast":
            ends = graph.types[node.inputs[0]], graph.types[node.outputs[0]]
            if ends[0] != ends[1] and _FLOATS.issuperset(ends):
                casts.add(node.index)
    return casts


_FLOATS: Final = frozenset({FLOAT, *(low.tensor for low in LOW_TYPES.values())})
