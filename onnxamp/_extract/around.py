"""Extracts the region around a node, given a model and the node's name."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf, isfinite
from typing import Any, NamedTuple

import numpy as np
from onnx import ModelProto, helper

from onnxamp._errors import ArgumentError, ArgumentTypeError, RuntimeFailure
from onnxamp._extract import (
    Cut,
    MainGraph,
    Recorded,
    Region,
    assembled,
    choose,
    cut_out,
    find_nodes,
)
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node, inline_functions
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import copy_without
from onnxamp._model.sources import unchanged_sources
from onnxamp._runtime import BUDGET
from onnxamp._runtime.branches import resolve_branches
from onnxamp._runtime.engines import Progress, choose_engine
from onnxamp._runtime.flow import WEIGHTS_IN_GRAPH, DataflowGraph, make_flow
from onnxamp._runtime.loop import input_failure
from onnxamp._runtime.pieces import Execution, Executor, run_alone
from onnxamp._runtime.run import Run, reported_to
from onnxamp._runtime.samples import Samples, SamplesLike, as_samples
from onnxamp._runtime.session import Provider
from onnxamp._runtime.values import Array, Feed, check_inputs, shapes_of


def values_of(
    flow: DataflowGraph, feeds: Mapping[str, Feed], wanted: Sequence[str], run: Run
) -> dict[str, Array | None]:
    """Run the nodes that some values need, and no others.

    Args:
        feeds: the inputs of the model.
        wanted: names of values of the main graph.

    Returns:
        Arrays by name, with the dtypes of the model as written; None for values that are not tensors.

    Raises:
        RuntimeFailure: one of these nodes does not load or run.
    """
    execution = run_alone(
        Executor(flow, run.engine.provider),
        feeds,
        wanted,
        run.budget,
        run.progress("running"),
    )
    return {name: _as_written(execution, name) for name in wanted}


def _as_written(execution: Execution, name: str) -> Array | None:
    value = execution.values.get(name)
    low = execution.flow.low.get(name)
    if value is not None and not (value.has_value() and value.is_tensor()):
        return None
    array: Array = execution.output(name)
    # The copy is needed, because the memory is freed with the run.
    if low is None:
        return array.copy()
    return array.astype(helper.tensor_dtype_to_np_dtype(low))


def is_finite(array: Array) -> bool:
    """Return whether an array is free of NaN and infinities; only floats can have them."""
    return "float" not in array.dtype.name or bool(
        np.isfinite(_as_double(array)).all()
    )


def _as_double(array: Array) -> Array:
    """Return an array as float64, because NumPy's functions do not know its element type."""
    return array.astype(np.float64)


def differences(
    flow: DataflowGraph,
    feeds: Mapping[str, Array],
    expected: Mapping[str, Array],
    run: Run,
) -> dict[str, float]:
    """Compare the outputs of a model with the expected ones bit for bit.

    Returns:
        For each output that differs, by name: the largest difference relative to the largest element; infinite if
        shapes, NaN or infinities differ.
    """
    results = values_of(flow, feeds, list(expected), run)
    pairs = ((name, value, results[name]) for name, value in expected.items())
    return {
        name: inf if b is None else _distance(a, b)
        for name, a, b in pairs
        if b is None or not same(a, b)
    }


def same(one: Array, other: Array) -> bool:
    """Return whether two arrays are equal bit for bit, ignoring the bits of NaN."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if "float" not in one.dtype.name:
        return bool(np.array_equal(one, other))
    a = _as_double(one)
    b = _as_double(other)
    zero = a == 0
    return bool(
        np.array_equal(a, b, equal_nan=True)
        and np.array_equal(np.signbit(a[zero]), np.signbit(b[zero]))
    )


def _distance(one: Array, other: Array) -> float:
    if one.shape != other.shape or one.dtype.kind in "OUS":
        return inf
    a = _as_double(one)
    b = _as_double(other)
    with np.errstate(invalid="ignore"):
        error = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest = np.max(np.abs(a[np.isfinite(a)]), initial=0.0)
    worst = np.max(error, initial=0.0)
    return float(worst / largest) if isfinite(worst) and largest else inf


@unchanged_sources()
def extract_region(
    model: ModelSource,
    around: str | Sequence[str],
    *,
    before: int = 2,
    after: int = 1,
    samples: SamplesLike | None = None,
    seed: int = 0,
    count: int = 1,
    dims: Mapping[str, int] | None = None,
    provider: Provider | None = None,
    budget: int = BUDGET,
    progress: Progress | None = None,
) -> Region:
    """Extract the region around a node from a model, and record its inputs.

    The nodes are those of the model as written, in its precision. To record values, the model runs up to the
    region; on the CPU, low precision is emulated. For a node in a branch of an If, the branches that the sample
    takes first replace their Ifs. For a node in the body of a Loop or Scan, the region contains the whole Loop or Scan.

    Args:
        model: a ModelProto with its weights loaded, a path, or an onnx-graphsurgeon Graph. It is not changed.
        around: name of a node or of one of its outputs, a regular expression for full names, or several of these.
        before, after: the number of nodes to include along each path; Casts and constants do not count.
        samples: Samples, a path, a dict of arrays by input, or an iterable of such dicts. None for ``count`` random
            samples (with ``seed``, and sizes of named dimensions from ``dims``). The first sample that makes an output
            of the region infinite or NaN is recorded; if there is none, or if branches are taken, it is the first
            sample.
        provider: "cuda", "cpu" or a plugin provider; None for CUDA if there is a device.
        budget: bytes of values and weights to hold at a time, in addition to the model.
        progress: called with (nodes done, nodes in all) during a run.

    Returns:
        The region as a model, with its inputs and expected outputs.

    Raises:
        ArgumentTypeError: the model, the samples or ``around`` are of another type.
        ArgumentError: no node has the name, the samples do not fit the model, or the region would need a sequence as
            input.
        ModelError: the model cannot be read. RuntimeFailure: it does not run as far as the region.

    Example:
        >>> import onnxamp
        >>> region = onnxamp.extract_region("models/encoder.onnx", "pooled", provider="cpu")
        >>> region.around, sorted(region.expected)
        (('pooler/tanh',), ['pooled'])
    """
    names: list[Any] = [around]
    if isinstance(around, Sequence) and not isinstance(around, str):
        names = list(around)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"around must be the name of a node, or several, not {around!r}."
        )
    if not names or min(before, after) < 0:
        raise ArgumentError(
            "around must name at least one node, and before and after must not be negative."
        )
    opened = Model.of(model)
    samples = as_samples(samples, opened, count=count, seed=seed, dims=dims)
    engine = choose_engine(provider)
    run = Run(provider=engine.provider, report=reported_to(progress), budget=budget)
    feeds = check_inputs(opened.proto, samples[0])
    center = _find_center(_without_overridden(opened, feeds), names, run, feeds)
    graph = center.graph
    view = center.graph.view
    nodes = {graph.wiring.outermost[node.index]: None for node in center.nodes}
    cut = cut_out(graph, choose(graph, nodes, before, after), nodes)
    recorded, sample, keep = _record(center, cut, feeds, samples, run)
    region = assembled(center.opened, graph, cut, recorded)
    entered = recorded.entered
    flow = make_flow(region, emulated=engine.emulates, keep=keep)
    lost = [name for name in recorded.outputs if name not in recorded.expected]
    return Region(
        model=region,
        inputs=entered,
        expected=recorded.expected,
        around=tuple(view.nodes[index].label for index in nodes),
        nodes=tuple(view.nodes[index].label for index in cut.nodes),
        source=opened.label,
        total=len(view.scopes[0].nodes),
        ran_on=engine.name(flow.lowest),
        sample=sample,
        differing=differences(flow, entered, recorded.expected, run.bare),
        notes=(
            *center.notes,
            *(
                f"The output {name!r} is not a tensor: its value is not saved."
                for name in lost
            ),
        ),
    )


def _without_overridden(opened: Model, feeds: Mapping[str, Feed]) -> Model:
    """Return a model without the defaults of inputs that the sample contains."""
    overridden = {
        tensor.name for tensor in opened.proto.graph.initializer
    } & feeds.keys()
    if not overridden:
        return opened
    result = copy_without(opened.proto, "initializer")
    result.graph.initializer.extend(
        t for t in opened.proto.graph.initializer if t.name not in overridden
    )
    return Model(result, opened.folder)


class _Center(NamedTuple):
    """The requested nodes, and the model whose main graph holds them or nodes that contain them."""

    opened: Model
    graph: MainGraph
    nodes: Sequence[Node]
    notes: Sequence[str]
    branched: bool = False
    """Whether the branches that one sample takes have replaced their Ifs."""


def _find_center(
    opened: Model, names: Sequence[str], run: Run, feeds: Mapping[str, Feed]
) -> _Center:
    view = Graph.of(opened.proto)
    try:
        nodes = find_nodes(view, names)
    except ArgumentError:  # reports also name nodes in functions
        if not opened.proto.functions:
            raise
        opened = Model(inline_functions(opened.proto), opened.folder)
        view = Graph.of(opened.proto)
        nodes = find_nodes(view, names)
    graph = MainGraph.of(view)
    told = list[str]()
    branched = False
    outside = [
        view.nodes[graph.wiring.outermost[n.index]].key for n in nodes if n.scope != 0
    ]
    if "If" in outside:
        flat = _with_branches_taken(opened, run, feeds)
        flat_view = Graph.of(flat.proto)
        try:
            nodes = find_nodes(flat_view, names)
        except ArgumentError:
            told = ["The branch that contains it is not taken on this input."]
        else:
            told = [
                "The Ifs of the main graph are replaced by the branches that were taken."
            ]
            opened = flat
            graph = MainGraph.of(flat_view)
            branched = True
    return _Center(opened, graph, nodes, [*told, *_containers(graph, nodes)], branched)


def _containers(graph: MainGraph, nodes: Iterable[Node]) -> list[str]:
    """Return notes on nodes that are in a body."""
    pairs = (
        (node, graph.view.nodes[graph.wiring.outermost[node.index]])
        for node in nodes
        if node.scope != 0
    )
    return [
        f"{n.label!r} is inside {o.label!r} ({o.key}), which can only be cut out as a whole."
        for n, o in pairs
    ]


def _with_branches_taken(opened: Model, run: Run, feeds: Mapping[str, Feed]) -> Model:
    def conditions(model: ModelProto, wanted: Sequence[str]) -> dict[str, bool]:
        values = values_of(
            _flow(Model(model, opened.folder), feeds, run), feeds, wanted, run
        )
        return {
            name: bool(value.reshape(-1)[0])
            for name, value in values.items()
            if value is not None
        }

    return Model(resolve_branches(opened.proto, conditions), opened.folder)


def _flow(opened: Model, feeds: Mapping[str, Feed], run: Run) -> DataflowGraph:
    return make_flow(
        opened.proto,
        opened.folder,
        emulated=run.engine.emulates,
        shapes=shapes_of(feeds),
    )


def _record(
    center: _Center, cut: Cut, feeds: Mapping[str, Feed], samples: Samples, run: Run
) -> tuple[Recorded, str, int]:
    """Return the inputs and outputs of the region, their sample, and the bytes of weights that stay in graphs.

    Args:
        feeds: the first sample, which is the only one if its branches were taken.
    """
    values = center.graph.view.values
    inputs, outputs = (
        [values[value].name for value in border]
        for border in (cut.inputs, cut.outputs)
    )
    flow = _flow(center.opened, feeds, run)
    # Kernels may round differently if weights are constants.
    keep = 0 if flow.large else WEIGHTS_IN_GRAPH
    first: Recorded | None = None
    for number in range(1 if center.branched else len(samples)):
        feeds = check_inputs(center.opened.proto, samples[number]) if number else feeds
        try:
            arrays = values_of(
                flow, feeds, list(dict.fromkeys([*inputs, *outputs])), run
            )
        except RuntimeFailure as error:
            text = input_failure(
                "The model fails before it reaches the region",
                error,
                samples,
                number,
                center.opened,
            )
            raise RuntimeFailure(text) from error
        recorded = Recorded(
            {name: arrays[name] for name in inputs},
            {name: arrays[name] for name in outputs},
        )
        if not all(map(is_finite, recorded.expected.values())):
            return recorded, _origin(samples, number), keep
        first = first or recorded
    assert first is not None, "there is at least one sample"
    return first, _origin(samples, 0), keep


def _origin(samples: Samples, number: int) -> str:
    return samples.description + (
        f", number {number + 1} of them" if len(samples) > 1 else ""
    )
