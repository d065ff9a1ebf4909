"""Ranges of a model's values on samples, and the exponents and float32 nodes that follow from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper

from onnxamp._base.executor import Memory
from onnxamp._base.state import fingerprint
from onnxamp._convert.raising import raised
from onnxamp._decide.exponent_rows import value_names
from onnxamp._decide.exponent_windows import Partial
from onnxamp._decide.overrides import find_overrides
from onnxamp._decide.rescaling import Ranges, find_rescaling
from onnxamp._facts.dtypes import FLOAT, FLOAT16
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.providers import Profile, emulated_arithmetic
from onnxamp._graph.constants import summed_terms, terms_of
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import Node, Origin, scope_path
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.measure import measure as measured
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import with_casts
from onnxamp._runtime.engines import Engine, choose_engine
from onnxamp._runtime.fingerprints import SentModel, model_print, sample_print
from onnxamp._runtime.loop import (
    KeptSamples,
    LoadedSample,
    Opened,
    Probe,
    observe_all,
    one_by_one,
)
from onnxamp._runtime.pieces import observed_values
from onnxamp._runtime.run import Run
from onnxamp._runtime.values import check_inputs, shapes_of
from onnxamp._runtime.versions import versions

_CONSTANTS_OPSET: Final = 13
"""The opset from which Constant accepts numbers, and Flatten negative axes."""

_ROOTS: Final = frozenset({"ReduceL2", "ReduceLogSumExp"})
"""Sums that follow from their result."""


_CENTERED: Final = 4.0
"""Squared mean over variance up to which a normalization may subtract the mean in float16: it loses one or two digits.
"""

_LEAST_SPREAD: Final = 1e-12
"""Lower bound for variance over squared mean, so that ratios stay below those of sentinels."""


class WatchedNode(NamedTuple):
    """A node, its value, and the added value: the node on magnitudes, or the squared mean over variance of a norm.

    Names are those of :func:`value_names`.
    """

    node: int
    value: str
    name: str


def with_magnitudes(
    graph: Graph, profile: Profile
) -> tuple[ModelProto, list[WatchedNode]]:
    """Return a copy of the model that computes also sums of magnitudes.

    Complexity: linear in nodes.
    """
    editor = GraphEditor(graph)
    watched = list[WatchedNode]()
    names = value_names(graph)
    magnitudes: dict[tuple[int, int], str] = {}

    def watch(node: Node, name: str) -> None:
        path = scope_path(graph, node.scope)
        added = f"{path}/{name}" if path else name
        watched.append(WatchedNode(node.index, names[node.outputs[0]], added))

    for node in graph.nodes_of(profile.cancelling):
        is_new = graph.book.opsets.get("", 0) >= _CONSTANTS_OPSET
        is_open = not graph.scopes[node.scope].opaque
        if is_open and graph.types[node.inputs[0]] == FLOAT and is_new:
            watch(node, _add_squared_mean(graph, node, editor))
    for node in _summing(graph, profile):
        proto = copied(node.proto)
        if node.key in op_facts().biased:  # a bias is added after the sum
            del proto.input[2:]
        for port in range(len(proto.input)):
            value = node.inputs[port]
            if graph.types[value] != FLOAT:
                continue
            if (value, node.scope) not in magnitudes:
                name = editor.names.fresh(f"{graph.values[value].name}_magnitude")
                made = editor.make("Abs", [proto.input[port]], [name], "")
                editor.insert_after(node.index, made)
                magnitudes[value, node.scope] = name
            proto.input[port] = magnitudes[value, node.scope]
        proto.name = ""
        name = editor.names.fresh(f"{node.proto.output[0]}_magnitude")
        proto.output[:] = [name]
        editor.insert_after(node.index, proto)
        watch(node, name)
    return editor.finish(), watched


def _add_squared_mean(graph: Graph, node: Node, editor: GraphEditor) -> str:
    """Compute the squared mean over the variance of the input that a node normalizes, and return the name of the
    result.
    """
    axis = 2 if node.key == "InstanceNormalization" else attribute(node.proto, "axis")
    source = node.proto.input[0]

    def op(kind: str, *inputs: str, **attributes: Any) -> str:
        name = editor.names.fresh(f"{source}_{kind}")
        editor.insert_after(
            node.index, editor.make(kind, inputs, [name], "", **attributes)
        )
        return name

    def mean(of: str) -> str:
        if graph.book.opsets[""] >= _AXES_INPUT:
            return op("ReduceMean", of, editor.ints([1], "axes"))
        return op("ReduceMean", of, axes=[1])

    flat = op("Flatten", source, axis=-1 if axis is None else axis)
    middle = mean(flat)
    centered = op("Sub", flat, middle)
    square = op("Mul", middle, middle)
    least = op(
        "Mul", square, editor.constant(np.float32(_LEAST_SPREAD), "least_spread")
    )
    return op("Div", square, op("Max", mean(op("Mul", centered, centered)), least))


def centered_norms(
    graph: Graph,
    profile: Profile,
    watched: Sequence[WatchedNode],
    largest: Mapping[str, float],
) -> tuple[str, ...]:
    """Return outputs of normalizations with a mean so small relative to the deviation that it can be subtracted in
    float16.
    """
    norms = (
        item for item in watched if graph.nodes[item.node].key in profile.cancelling
    )
    return tuple(
        item.value for item in norms if largest.get(item.name, inf) <= _CENTERED
    )


def _summing(graph: Graph, profile: Profile) -> Iterator[Node]:
    """Yield nodes whose sums are float16, and do not follow from their results."""
    products = {
        op for op, fact in profile.products.items() if fact.accumulator == "float16"
    }
    sums = {op for op, fact in profile.sums.items() if fact.accumulator == "float16"}
    for node in graph.nodes_of(products | (sums - _ROOTS)):
        value = node.outputs[0]
        is_open = not graph.scopes[node.scope].opaque
        if is_open and graph.types[value] == FLOAT:
            yield node


def partial_sums(
    graph: Graph,
    profile: Profile,
    watched: Sequence[WatchedNode],
    largest: Mapping[str, float],
    shapes: Sequence[Shape | None],
) -> dict[str, Partial]:
    """Return value -> the largest sum on the way to it.

    Args:
        graph: the model.
        profile: how the target accumulates.
        watched: the values that :func:`with_magnitudes` added.
        largest: largest magnitude by name, including these.
        shapes: shapes by value on the samples.
    """
    partial = dict[str, Partial]()
    names = value_names(graph)
    for item in watched:
        node = graph.nodes[item.node]
        if node.key in profile.cancelling:
            continue
        counted = terms_of if node.key in profile.products else summed_terms
        terms = counted(node, shapes)
        reach = largest.get(item.name, 0.0)
        if terms and reach:
            # A mean is divided after its sum.
            times = terms if node.key in op_facts().means else 1
            partial[item.value] = Partial(reach * times, terms)
    overflowing = {op for op, fact in profile.sums.items() if fact.overflows}
    for node in graph.nodes_of(_ROOTS & overflowing):
        name = names[node.outputs[0]]
        if node.key == "ReduceL2" and largest.get(name):
            terms = summed_terms(node, shapes) or 1
            partial[name] = Partial(largest[name] ** 2, terms, power=2)
    return partial


ROUNDS: Final = frozenset({"Loop", "Scan"})
"""Ops that run their body in a loop, and stack its results."""

_LEAST_OPSET: Final = 9
"""The opset that introduced Where, and Scan in its current form."""

_AXES_INPUT: Final = 18
"""Opset from which on reductions take their axes as an input."""


def with_body_ranges(graph: Graph) -> tuple[ModelProto, dict[str, int]]:
    """Return a copy of the model that also computes the ranges in bodies, and new value -> value whose magnitude it is.

    Complexity: linear in nodes.
    """
    if len(graph.scopes) == 1 or graph.book.opsets.get("", 0) < _LEAST_OPSET:
        return graph.model, {}
    writer = _BodyRanges(graph, GraphEditor(graph))
    vectors: dict[int, tuple[str, list[int]]] = {}
    for scope in reversed(graph.scopes):  # a scope comes after the one around it
        for node in graph.at(scope.nodes):
            passed = writer.pass_out(node)
            if passed is not None:
                vectors[node.index] = passed
        if scope.index:
            inner = [vectors[index] for index in scope.nodes if index in vectors]
            writer.measure(scope.index, inner)
    watched: dict[str, int] = {}
    for index in graph.scopes[0].nodes:
        vector, values = vectors.get(index, ("", []))
        for place, value in enumerate(values):
            base = f"{graph.values[value].name}_largest"
            inputs = [vector, writer.integers([place])]
            watched[writer.op(0, "Gather", inputs, base)] = value
    return writer.editor.finish(), watched


@dataclass(slots=True)
class _BodyRanges:
    """Writes nodes that compute the ranges in bodies, and pass them out, into the copy of a model."""

    graph: Graph
    editor: GraphEditor
    made: dict[int, tuple[str, list[int]]] = field(default_factory=dict)
    """Scope -> the vector of its magnitudes, and the values that these are of."""

    def floats(self, *numbers: float) -> str:
        """Return the name of a float32 vector."""
        return self.editor.constant(np.array(numbers, np.float32), "range_constant")

    def integers(self, numbers: Sequence[int]) -> str:
        """Return the name of an int64 vector."""
        return self.editor.ints(numbers, "range_constant")

    def op(
        self,
        scope: int,
        kind: str,
        inputs: Sequence[str],
        base: str = "",
        **attributes: Any,
    ) -> str:
        """Append a node to a scope, and return the name of its output."""
        name = self.editor.names.fresh(base or f"range_{kind}")
        node = self.editor.make(kind, inputs, [name], "", **attributes)
        self.editor.insert(scope, self.graph.scopes[scope].nodes.stop, node)
        return name

    def measure(self, scope: int, inner: Sequence[tuple[str, list[int]]]) -> None:
        """Compute the magnitudes of a body's floats, including those of the bodies in it."""
        graph = self.graph
        parts = list[str]()
        values = list[int]()
        for value in graph.values:
            is_made = value.scope == scope and value.origin is Origin.NODE
            if is_made and graph.types[value.index] == FLOAT:
                parts.append(self.largest(scope, value.name))
                values.append(value.index)
        for vector, listed in inner:
            parts.append(vector)
            values += listed
        if parts:
            self.made[scope] = self.op(scope, "Concat", parts, axis=0), values

    def largest(self, scope: int, name: str) -> str:
        """Return the largest magnitude below that of sentinels, as a vector of one; 0 of nothing."""
        flat = self.op(
            scope, "Reshape", [self.op(scope, "Abs", [name]), self.integers([-1])]
        )
        flat = self.op(scope, "Concat", [flat, self.floats(0.0)], axis=0)
        is_usual = self.op(scope, "Less", [flat, self.floats(SENTINEL)])
        usual = self.op(scope, "Where", [is_usual, flat, self.floats(0.0)])
        return self.op(scope, "ReduceMax", [usual], keepdims=1)

    def pass_out(self, node: Node) -> tuple[str, list[int]] | None:
        """Let a node also return the magnitudes of its bodies, and return the vector of these, and its values."""
        known = node.key == "If" or node.key in ROUNDS
        is_opaque = any(self.graph.scopes[body].opaque for _, body in node.bodies)
        bodies = [
            (body, *self.made[body]) for _, body in node.bodies if body in self.made
        ]
        if not known or is_opaque or not bodies:
            return None
        proto = self.editor.node(node.index)
        values = [*chain.from_iterable(listed for _, _, listed in bodies)]
        output = self.editor.names.fresh("range_output")
        if node.key == "If":
            self.branches(node, len(values))
            proto.output.append(output)
            return output, values
        ((body, vector, _),) = bodies
        results = self.editor.graphs[body].output
        results.append(_vector(vector, len(values)))
        _fill(proto, len(results) - (node.key == "Loop") - 1)
        proto.output.append(output)
        # A row of zeros comes first, as a loop may make no turn and then has no rows to take the maximum of.
        none = self.floats(*[0.0] * len(values))
        row = self.op(node.scope, "Reshape", [none, self.integers([1, len(values)])])
        rows = self.op(node.scope, "Concat", [row, output], axis=0)
        inputs = [rows]
        axes = dict[str, Any](axes=[0])
        if self.graph.book.opsets[""] >= _AXES_INPUT:
            inputs = [rows, self.integers([0])]
            axes = {}
        return self.op(node.scope, "ReduceMax", inputs, keepdims=0, **axes), values

    def branches(self, node: Node, count: int) -> None:
        """Let both branches return all magnitudes: those of the other one are 0."""
        for _, body in node.bodies:
            parts = list[str]()
            for other in (other for _, other in node.bodies if other in self.made):
                vector, values = self.made[other]
                is_own = other == body
                parts.append(vector if is_own else self.floats(*[0.0] * len(values)))
            results = self.editor.graphs[body].output
            results.append(_vector(self.op(body, "Concat", parts, axis=0), count))
        _fill(self.editor.node(node.index), len(results) - 1)


def _fill(proto: NodeProto, count: int) -> None:
    """Name as many outputs as the body had, and extend attributes that have an entry for each."""
    proto.output.extend([""] * (count - len(proto.output)))
    for item in proto.attribute:
        if item.name in ("scan_output_axes", "scan_output_directions"):
            item.ints.append(0)


def _vector(name: str, size: int) -> ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, [size])


def with_ranges(model: Model, options: Options, run: Run) -> Options:
    """Return options with the requested exponents, and with names of nodes in place of ``data_max``, found on samples.

    So decisions follow from the graph and the options alone, and plans repeat them without samples.

    Args:
        model: the model.
        options: the options of the conversion.
        run: where and on which samples they are measured.

    Raises:
        RuntimeFailure: the model does not run, or a sample ends the process of a worker.
        ArgumentError: a sample does not fit it.
    """
    if not options.lacks_ranges:
        return options
    options, limit = replace(options, data_max=None), options.data_max
    graph, ranges = measured_ranges(model, options, run)
    # Nodes that stay in float32 need no exponents, so they are found first.
    if limit is not None:
        beyond = _beyond(graph, options, ranges.largest, limit)
        options = replace(options, keep_nodes=(*options.keep_nodes, *beyond))
    if not options.lacks_ranges:
        return options
    found = find_rescaling(graph, options, ranges)
    return replace(options, rescaling=found._replace(made_up=run.samples.made_up))


def measured_ranges(model: Model, options: Options, run: Run) -> tuple[Graph, Ranges]:
    """Return the float32 model that exponents apply to, folded as the options say, and the ranges of its values.

    If the target accumulates in float16, the sums on the way to values are also measured.

    Arguments and errors as :func:`with_ranges`.
    """
    graph = with_casts(raised(model, options), replace(options, split_k=False)).graph
    profile = None
    if options.rescale and options.low is FLOAT16:
        profile = emulated_arithmetic(options.target)
    wide = graph
    watched = list[WatchedNode]()
    if profile is not None and run.samples.has(0):
        proto, watched = with_magnitudes(graph, profile)
        wide = Graph.of(proto, graph.folder) if watched else graph
    proto, inner = with_body_ranges(wide)
    written = model if proto is model.proto else Model(proto, graph.folder)
    largest = largest_magnitudes(written, run)
    names = value_names(wide)
    largest |= {
        names[value]: largest[name] for name, value in inner.items() if name in largest
    }
    own = set(value_names(graph).values())
    ranges = {name: reach for name, reach in largest.items() if name in own}
    if profile is None or not watched:
        return graph, Ranges(ranges)
    feeds = check_inputs(graph.model, run.samples[0])
    shapes = graph.shapes_of(shapes_of(feeds))
    sums = partial_sums(graph, profile, watched, largest, shapes)
    norms = centered_norms(graph, profile, watched, largest)
    return graph, Ranges(ranges, sums, norms)


def _beyond(
    graph: Graph, options: Options, largest: Mapping[str, float], limit: float
) -> Iterator[str]:
    """Yield nodes that read or write a float beyond the limit, but for those that the user lowers."""
    wishes = find_overrides(graph, options).of_node
    large = {
        value
        for value, name in value_names(graph).items()
        if largest.get(name, 0.0) > limit
    }
    for node in graph.nodes:
        is_forced = node.index in wishes and wishes[node.index].low
        if not is_forced and not large.isdisjoint((*node.inputs, *node.outputs)):
            yield node.proto.name or next(filter(None, node.proto.output))


def largest_magnitudes(model: Model, run: Run) -> dict[str, float]:
    """Return the largest magnitude of each float32 tensor of the main graph below 1e30, where masks begin, by name.

    Arguments and errors as :func:`with_ranges`.
    """
    engine = choose_engine(run.provider).reference
    kept = None
    if run.state is not None:
        # Several models of a job have their ranges in one part of its state.
        first = sample_print(run.samples, 0)
        prints = fingerprint(model_print(model), first, engine.name(), versions())
        part = run.state.part("ranges", {})
        kept = KeptSamples(part, run.samples, Magnitudes, f"ranges {prints}")
    magnitudes = observe_all(
        run,
        RangeProbe(SentModel.of(model), engine),
        "measuring ranges",
        kept=kept,
        crashed="The ranges of sample {sample} cannot be measured. {crash} Leave it out.",
        failed="The ranges of values cannot be measured",
        model=model,
    )
    largest: dict[str, float] = {}
    for one in magnitudes:
        for name, magnitude in one.largest.items():
            largest[name] = max(magnitude, largest.get(name, 0.0))
    return largest


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The largest magnitude of each tensor on a sample."""

    largest: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class RangeProbe(Probe[Magnitudes]):
    """Measuring how large the values of a float32 model become."""

    has_steps = False

    model: SentModel
    engine: Engine

    def open(self, _: Memory) -> Opened[Magnitudes]:
        """As :meth:`Probe.open`."""
        session = self.engine.open(self.model.opened())

        def measure(item: LoadedSample) -> Magnitudes:
            feeds = check_inputs(session.model.proto, item.sample)
            executor = session.prepare(feeds)
            flow = executor.flow
            floats = (FLOAT, None)  # a value of unknown type may be one
            computed = [name for name in flow.maker if flow.types.get(name) in floats]
            largest = dict[str, float]()
            names = [*flow.inputs, *computed]
            for name, value in observed_values(executor, feeds, names):
                if value.is_tensor() and value.data_type() == FLOAT:
                    largest[name] = measured(value, value).reference_max
            return Magnitudes(largest)

        return Opened(session.prepare_sample, one_by_one(measure))
