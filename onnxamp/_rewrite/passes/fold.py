"""Folds of decomposed patterns into the one standard op that they are equivalent to, before anything is decided.

The forms are data (``_data/folds.toml``).
"""

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import onnx.defs
from onnx import ModelProto, NodeProto, helper

from onnxamp._base.errors import OpsetError
from onnxamp._base.words import count, enumerated
from onnxamp._decide.overrides import find_overrides
from onnxamp._facts.kernels import float_types, takes_anywhere
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import folded_first
from onnxamp._facts.signature import lookup
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import release, target_of, version_meant
from onnxamp._graph.editor import WEIGHTS_ALONE, GraphEditor, NewNames
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import form_table
from onnxamp._graph.view import ABSENT, Origin, View
from onnxamp._model.protos import copied
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult
from onnxamp._rewrite.passes.fold_search import KIND as BATCH_NORM
from onnxamp._rewrite.passes.fold_search import Fold, find_folds
from onnxamp._rewrite.passes.upgrade import upgraded


def apply_folds(view: View, folds: Sequence[Fold], model: ModelProto) -> None:
    """Apply the folds to ``model``, a copy of the view's model. The view is stale afterwards.

    Complexity: linear in nodes and in the size of the folds.
    """
    nodes, weights = _going(view, folds)
    adds_weights = any(len(fold.reads) < len(fold.inputs) for fold in folds)
    # A new weight may have the name of one that goes.
    lost = {view.values[value].name for value in weights}
    names = NewNames(view.all_names() - lost) if adds_weights else None
    editor = GraphEditor(view, model, names)
    editor.remove(*nodes)
    for value in weights:
        editor.drop_weight(value)
    for fold in folds:
        place = _place(fold)
        editor.insert(view.nodes[place].scope, place, *_new_nodes(view, fold, editor))
    editor.finish()


def _place(fold: Fold) -> int:
    """Return the node that the new one replaces."""
    return fold.last if fold.first == ABSENT else fold.first


def _going(view: View, folds: Sequence[Fold]) -> tuple[set[int], set[int]]:
    """Return the nodes and weights that go: the nodes of the folds, and all that nothing else reads.

    Inputs of removed nodes are followed back to producers without other readers. Linear in what goes.
    """
    nodes = set[int]().union(*(fold.nodes for fold in folds))
    weights = set[int]()
    reads = set[int]().union(*(fold.reads for fold in folds))
    lost: Counter[int] = Counter()
    listed = frozenset(view.scopes[0].inputs)
    """Weights of the old style: without them, callers must give one."""

    def is_unread(value: int) -> bool:
        kept = view.results[value] or value in reads
        return not kept and lost[value] >= len(view.uses[value])

    pending = list[int]()
    for node in nodes:
        pending += view.nodes[node].reads
    while pending:
        value = pending.pop()
        # Most values are those of the folds themselves.
        if view.values[value].producer in nodes:
            continue
        lost[value] += 1
        if not is_unread(value):
            continue
        producer = view.producer(value)
        if producer is not None:
            if producer.bodies:
                continue
            if all(
                output == ABSENT or is_unread(output) for output in producer.outputs
            ):
                nodes.add(producer.index)
                pending += producer.reads
        elif view.values[value].origin is Origin.INITIALIZER and value not in listed:
            weights.add(value)
    return nodes, weights


def _new_nodes(view: View, fold: Fold, editor: GraphEditor) -> list[NodeProto]:
    """Return the new node, with Constants before it if every initializer must be a graph input."""
    last = view.nodes[fold.last]
    place = view.nodes[_place(fold)]
    nodes = []
    inputs = []
    for item in fold.inputs:
        if isinstance(item, int):
            inputs.append(view.values[item].name)
            continue
        tensor = item.make()
        tensor.name = editor.names.fresh(item.base)
        inputs.append(tensor.name)
        if editor.model.ir_version < WEIGHTS_ALONE:
            nodes.append(helper.make_node("Constant", [], [tensor.name], value=tensor))
        else:
            editor.add_weight(place.scope, tensor)
    new = NodeProto()
    if fold.first != ABSENT:
        new.CopyFrom(view.nodes[fold.first].proto)
        # The new bias contains the factor "beta" of a Gemm.
        kept = [item for item in new.attribute if item.name != "beta"]
        del new.input[:], new.output[:], new.attribute[:]
        new.attribute.extend(kept)
    else:
        new.CopyFrom(
            helper.make_node(fold.op, [], [], name=last.proto.name, **fold.attributes)
        )
        new.doc_string = last.proto.doc_string
        new.metadata_props.extend(last.proto.metadata_props)
    new.input.extend(inputs)
    new.output.append(last.proto.output[0])
    return [*nodes, new]


def output_of(graph: Graph, fold: Fold) -> str:
    """Return the name of the output of a fold."""
    return graph.nodes[fold.last].proto.output[0]


def _folded_first(options: Options) -> frozenset[str]:
    """Return kinds of folds to apply by default: those that the target asks for, and those of ops that would be
    separated from their producers because the target has no low-precision kernel for them alone.
    """
    if (
        options.level == Level.O0
        or options.fold is False
        or not options.folds_batch_norm
    ):
        return frozenset()
    facts = op_facts()
    able = partial(takes_anywhere, options.target, type_name=options.low.tensor)
    parts = any(map(able, facts.folds_into)) and not any(map(able, facts.folded))
    return folded_first(options.target) | ({BATCH_NORM} if parts else frozenset())


def apply(
    draft: Draft, options: Options, folds: Sequence[Fold] | None = None
) -> PassResult:
    """Fold decomposed patterns into the equivalent standard ops; return the same draft if there is nothing to fold.

    The model is upgraded if an op needs it, as far as ``options.opset`` allows and the target loads it.

    Args:
        draft: the model.
        options: the options of the conversion, which name the patterns to fold.
        folds: the folds that they name, if these are found already.

    Raises:
        ModelError: the model breaks a rule of ONNX.
    """
    asked = _AskedFolds.of(options)
    if not asked:
        return PassResult(draft)
    # Only decomposed patterns were searched for. A target that folds more, such as batch norms, needs another search.
    known = None if asked.kinds else folds
    possible = known
    if possible is None:
        possible = asked.find(draft.graph, with_weights=False)
    graph, notes, refused = _upgraded_for(draft.graph, possible, options)
    if known is None or graph is not draft.graph:
        with_weights = options.folds or BATCH_NORM in asked.kinds
        known = asked.find(graph, with_weights=with_weights)
    reached = graph.book.opsets[""]
    ready = list[Fold]()
    late = list[Fold]()
    for candidate in known:
        fold = (
            _own(candidate, options.target) if candidate.opset > reached else candidate
        )
        (late if fold.opset > reached else ready).append(fold)
    if late:
        ceiling = options.highest_opset(draft.graph.book.opsets[""])
        refused.append(_why_late(graph, late, options.target, ceiling))
    result = draft if graph is draft.graph else Draft.of(graph)
    if ready:
        result = _folded(graph, ready)
        notes.append(f"Folded {counted_kinds(ready)}.")
    requested = options.folds and result is not draft
    return PassResult(result, tuple(notes), requested, tuple(refused))


class _AskedFolds(NamedTuple):
    """The folds that the options ask for, if any.

    Attributes:
        options: the options.
        kinds: kinds that the target asks for.
        outputs: what the folds that the user names compute.
    """

    options: Options
    kinds: AbstractSet[str]
    outputs: AbstractSet[str]

    @classmethod
    def of(cls, options: Options) -> "_AskedFolds":
        """Return the folds that these options ask for."""
        outputs = frozenset(options.folded if options.may_fold else ())
        return cls(options, _folded_first(options), outputs)

    def __bool__(self) -> bool:
        """Return whether there may be any."""
        return bool(self.options.folds or self.kinds or self.outputs)

    def find(self, graph: Graph, *, with_weights: bool) -> Sequence[Fold]:
        """Return the folds in a graph; those into weights only if they are wanted, since these take memory."""
        options = self.options
        # Folds into weights hold these in memory, so they are not cached.
        folds = (
            find_folds(graph)
            if with_weights
            else graph.ask(find_folds, with_weights=False)
        )
        if options.folds:
            return folds
        decided = find_overrides(graph, options).of_node.keys() if self.kinds else ()
        asked = list[Fold]()
        for fold in folds:
            is_of_kind = fold.kind in self.kinds and fold.nodes.isdisjoint(decided)
            if is_of_kind or output_of(graph, fold) in self.outputs:
                asked.append(fold)
        return asked


def _upgraded_for(
    graph: Graph, possible: Sequence[Fold], options: Options
) -> tuple[Graph, list[str], list[str]]:
    """Return a graph at the opset that the folds need, or the same graph, with sentences.

    These are notes about the upgrade, and reasons why it was refused.
    """
    current = graph.book.opsets[""]
    ceiling = options.highest_opset(current)
    wanted = reachable(graph, possible, options.target, ceiling)
    if wanted <= current:
        return graph, [], []
    needed = counted_kinds(
        [fold for fold in possible if current < fold.opset <= wanted]
    )
    note = f"Upgraded from opset {current} to {wanted} to fold {needed}."
    try:
        return upgraded(graph, wanted), [note], []
    except OpsetError as error:
        return graph, [], [str(error)]


def _folded(graph: Graph, folds: Sequence[Fold]) -> Draft:
    """Return a graph's model with these folds."""
    model = copied(graph.model)
    apply_folds(graph, folds, model)
    # What is left has the types and shapes that it had, if onnx infers those of the new ops.
    opset = graph.book.opsets[""]
    is_inferred = all(onnx.defs.has(fold.op, opset, "") for fold in folds)
    before = graph if is_inferred else None
    build = partial(Graph.of, model, graph.folder, before=before)
    return Draft(model, graph.folder, build)


def _own(fold: Fold, target: str) -> Fold:
    """Return the fold into an op of ONNX Runtime itself, which needs no opset; the same fold if the target has none."""
    kind = form_table().kinds.get(fold.kind)
    own = None if kind is None else kind.own.get(device_of(target))
    return fold if own is None else replace(fold, op=own, opset=1)


def reachable(
    graph: Graph, folds: Sequence[Fold], target: str, ceiling: int | None
) -> int:
    """Return the newest opset that folds want and at which no other node loses a kernel on the target."""
    current = graph.book.opsets[""]
    newest = min(ceiling or _newest(target), _newest(target))
    opsets = sorted(
        {fold.opset for fold in folds if current < fold.opset <= newest}, reverse=True
    )
    return next(
        (opset for opset in opsets if not _losers(graph, folds, target, opset)),
        current,
    )


def within_reach(graph: Graph, folds: Sequence[Fold], options: Options) -> list[Fold]:
    """Return the folds into ops that the model has at its own opset, or at one that it can be upgraded to."""
    ceiling = options.highest_opset(graph.book.opsets[""])
    opset = reachable(graph, folds, options.target, ceiling)
    own = partial(_own, target=options.target)
    return [fold for fold in folds if min(fold.opset, own(fold).opset) <= opset]


def _newest(target: str) -> int:
    """Return the newest opset that the target's version of ONNX Runtime loads."""
    return release(target).opset


def _losers(graph: Graph, folds: Sequence[Fold], target: str, opset: int) -> list[str]:
    """Return the op types outside the folds with fewer kernels on the target at that opset than now."""
    if not target_of(target).limits_types:
        return []
    going = set[int]().union(*(fold.nodes for fold in folds))
    staying = {
        node.key: node.signature for node in graph.nodes if node.index not in going
    }
    losers = []
    for key, signature in staying.items():
        newer = (
            lookup("", key, opset)
            if signature is not None and not signature.domain
            else None
        )
        if signature is not None and newer is not None and newer is not signature:
            lost = float_types(target, key, signature.since) - float_types(
                target, key, newer.since
            )
            losers += [key] if lost else []
    return sorted(losers)


def _why_late(
    graph: Graph, late: Sequence[Fold], target: str, ceiling: int | None
) -> str:
    """Return the reason why folds are left, as a sentence."""
    opset = min(fold.opset for fold in late)
    text = f"{counted_kinds(late)} {'stays' if len(late) == 1 else 'stay'} decomposed: that needs opset {opset}"
    if ceiling is not None and opset > ceiling:
        return f"{text}, which --opset {'keep' if ceiling == graph.book.opsets[''] else ceiling} rules out."
    if opset > _newest(target):
        version = version_meant(target)
        return f"{text}, but ONNX Runtime {version} loads no opset beyond {_newest(target)}."
    losers = _losers(graph, late, target, opset)
    if not losers:
        return f"{text}."
    return f"{text}, where {', '.join(losers)} would lose kernels on {target}."


def counted_kinds(folds: Sequence[Fold]) -> str:
    """Return how many of each kind: "12 LayerNorms and 24 Gelus"."""
    counts = Counter(
        form_table().kinds[fold.kind].called
        if fold.kind in form_table().kinds
        else fold.kind
        for fold in folds
    )
    return enumerated([count(n, kind) for kind, n in counts.items()])
