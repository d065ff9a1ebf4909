"""From a model and the name of a node to the region around it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import ModelProto

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._extract.cutout import Cut, choose, cut_out, find_nodes, wire
from onnxamp._extract.record import Run, differences, is_finite, values_of
from onnxamp._extract.region import Recorded, Region, assembled
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import infer_types
from onnxamp._graph.view import Node, View
from onnxamp._model.model import ModelSource
from onnxamp._numerics.beside import Opened, Progress, open_model, ran_on
from onnxamp._runtime.branches import resolve_branches
from onnxamp._runtime.emulate import inlined
from onnxamp._runtime.flow import Flow, make_flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.protos import copy_fields
from onnxamp._runtime.samples import Samples, random_samples
from onnxamp._runtime.session import Provider, choose_provider
from onnxamp._runtime.shell import WEIGHTS_IN_GRAPH
from onnxamp._runtime.side import BUDGET
from onnxamp._runtime.values import Feed


def extract_region(
    model: ModelSource,
    around: str | Sequence[str],
    *,
    before: int = 2,
    after: int = 1,
    samples: Samples | None = None,
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
    provider: Provider | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> Region:
    """Cut the region around a node, and record what enters it.

    The nodes are those of the model as written, in its precision. To record, the model runs as far as the region, on
    CPU with low values emulated. Where the node is in a branch of an If, the branches that were taken stand in the main
    graph first; where it is in a body of a Loop or Scan, the region is cut around the Loop or Scan.

    Args:
        model: a proto with its weights loaded, or the path of a file; it is not changed.
        around: name of a node, or of one of its outputs, or a regular expression that matches whole names; or several.
        before, after: how many nodes to take with it along each path; Casts and constants do not count.
        samples: inputs; made up (seeded, ``count`` of them, sizes from ``dims``) where None. Of several, the first that
            makes an output of the region infinite or NaN counts, or else the first (always where branches are taken).
        provider: "cuda" or "cpu"; None for CUDA where there is one.
        budget: bytes of values and weights that may be held at a time besides the model itself.
        progress: told how far a run is, in nodes.

    Raises:
        ArgumentError: nothing is called ``around``, the samples do not fit the model, or the region would have to take
            in a sequence. ModelError: the model cannot be read. RuntimeFailure: it does not run as far as the region.
    """
    names = [around] if isinstance(around, str) else list(around)
    if not names or min(before, after) < 0:
        raise ArgumentError("around must name at least one node, and before and after must not be negative.")
    opened = open_model(model)
    samples = samples or random_samples(opened.proto, count, seed=seed, dims=dims)
    run = Run(choose_provider(provider), budget, progress)
    feeds = check_inputs(opened.proto, samples[0])
    meant = _meant(_without_overridden(opened, feeds), names, run, feeds)
    view, wiring = meant.view, wire(meant.view)
    middle = {wiring.outermost[node.index]: None for node in meant.nodes}
    cut = cut_out(view, wiring, choose(view, infer_types(view), wiring, middle, before, after), middle)
    recorded, where, keep = _recorded(meant, cut, feeds, samples, run)
    region, entered = assembled(meant.opened, view, cut, recorded), recorded.entered
    flow = make_flow(region, emulated=run.provider == "cpu", keep=keep)
    lost = [name for name in recorded.outputs if name not in recorded.expected]
    return Region(
        model=region,
        inputs=entered,
        expected=recorded.expected,
        around=tuple(view.nodes[index].label for index in middle),
        nodes=tuple(view.nodes[index].label for index in cut.nodes),
        source=opened.label,
        total=len(view.scopes[0].nodes),
        ran_on=ran_on(run.provider, flow.lowest),
        sample=where,
        differing=differences(flow, entered, recorded.expected, Run(run.provider, budget)),
        notes=(*meant.notes, *(f"The output {name!r} is no tensor: what it was is not saved." for name in lost)),
    )


def _without_overridden(opened: Opened, feeds: Mapping[str, Feed]) -> Opened:
    """A model whose inputs with defaults have none where the sample gives them a value."""
    overridden = {tensor.name for tensor in opened.proto.graph.initializer} & feeds.keys()
    if not overridden:
        return opened
    result = ModelProto()
    copy_fields(opened.proto, result, but={"graph"})
    copy_fields(opened.proto.graph, result.graph, but={"initializer"})
    result.graph.initializer.extend(t for t in opened.proto.graph.initializer if t.name not in overridden)
    return Opened(result, opened.folder, opened.label)


@dataclass(frozen=True, slots=True)
class _Meant:
    """The nodes that are meant, and the model in whose main graph they are, or at least those that contain them.

    ``branched``: its branches are those that one sample takes.
    """

    opened: Opened
    view: View
    nodes: Sequence[Node]
    notes: Sequence[str] = ()
    branched: bool = False


def _meant(opened: Opened, names: Sequence[str], run: Run, feeds: Mapping[str, Feed]) -> _Meant:
    view = Graph.of(opened.proto)
    try:
        nodes = find_nodes(view, names)
    except ArgumentError:
        if not opened.proto.functions:
            raise
        opened = Opened(inlined(opened.proto), opened.folder, opened.label)  # reports name what is in functions, too
        view = Graph.of(opened.proto)
        nodes = find_nodes(view, names)
    hidden = [node for node in nodes if node.scope != 0]
    if not any(_outermost(view, node).key == "If" for node in hidden):
        return _Meant(opened, view, nodes, _containers(view, hidden))
    flat = _with_branches_taken(opened, run, feeds)
    flat_view = Graph.of(flat.proto)
    try:
        found = find_nodes(flat_view, names)
    except ArgumentError:
        notes = ["On this input the branch that it is in is not taken."]
        return _Meant(opened, view, nodes, notes + _containers(view, hidden))
    notes = ["The Ifs of the main graph are replaced by the branches that were taken."]
    return _Meant(flat, flat_view, found, notes + _containers(flat_view, found), branched=True)


def _outermost(view: View, node: Node) -> Node:
    while node.scope != 0:
        node = view.nodes[view.scopes[node.scope].owner]
    return node


def _containers(view: View, nodes: Iterable[Node]) -> list[str]:
    """What to say of nodes that are in a body."""
    pairs = ((node, _outermost(view, node)) for node in nodes if node.scope != 0)
    return [f"{n.label!r} is inside of {o.label!r} ({o.key}), which is taken as a whole." for n, o in pairs]


def _with_branches_taken(opened: Opened, run: Run, feeds: Mapping[str, Feed]) -> Opened:
    def conditions(model: ModelProto, wanted: Sequence[str]) -> dict[str, bool]:
        found = values_of(_flow(Opened(model, opened.folder, opened.label), feeds, run), feeds, wanted, run)
        return {name: bool(value.reshape(-1)[0]) for name, value in found.items() if value is not None}

    return Opened(resolve_branches(opened.proto, conditions), opened.folder, opened.label)


def _flow(opened: Opened, feeds: Mapping[str, Feed], run: Run) -> Flow:
    shapes = {name: feed.shape for name, feed in feeds.items() if isinstance(feed, np.ndarray)}
    return make_flow(opened.proto, opened.folder, emulated=run.provider == "cpu", shapes=shapes)


def _recorded(
    meant: _Meant, cut: Cut, feeds: Mapping[str, Feed], samples: Samples, run: Run
) -> tuple[Recorded, str, int]:
    """What goes into the region and comes out of it, from which sample, and how many bytes of weights stay in graphs.

    Args:
        feeds: the first sample, which is the only one where branches were taken for it.
    """
    names = meant.view.values
    inputs, outputs = ([names[value].name for value in values] for values in (cut.inputs, cut.outputs))
    flow = _flow(meant.opened, feeds, run)
    keep = 0 if flow.large else WEIGHTS_IN_GRAPH  # kernels may round otherwise where weights are constants
    first: Recorded | None = None
    for number in range(1 if meant.branched else len(samples)):
        feeds = check_inputs(meant.opened.proto, samples[number]) if number else feeds
        try:
            found = values_of(flow, feeds, list(dict.fromkeys([*inputs, *outputs])), run)
        except RuntimeFailure as error:
            raise RuntimeFailure(
                f"The model does not run as far as the region: {error}{samples.hint(error)}"
            ) from error
        recorded = Recorded({name: found[name] for name in inputs}, {name: found[name] for name in outputs})
        if not all(map(is_finite, recorded.expected.values())):
            return recorded, _place(samples, number), keep
        first = first or recorded
    assert first is not None, "no source of samples is empty"
    return first, _place(samples, 0), keep


def _place(samples: Samples, number: int) -> str:
    return samples.description + (f", number {number + 1} of them" if len(samples) > 1 else "")
