"""The cost of a decision on a device: launches of kernels, Casts, bytes and arithmetic, by the roofline model.

The time of a model is the sum over its nodes of a launch and the node's own time (:mod:`onnxamp._graph.work`), and of a
launch and the traffic of each Cast. Fusions save launches in both precisions; they are not estimated. Nodes without
floats do not count, because they run on the host or compute shapes.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np

from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis, low_nodes
from onnxamp._decide.precision import Decision
from onnxamp._decide.variables.ports import NONE, PortVariables
from onnxamp._facts.devices import DEFAULT_DEVICE, Device, device_called
from onnxamp._facts.dtypes import FLOAT16, FLOAT32_BYTES, FLOAT_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import profile_of
from onnxamp._facts.targets import LAUNCH, target_of
from onnxamp._graph.constants import expected_terms
from onnxamp._graph.determined import loop_trips
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._graph.work import Work, work_with
from onnxamp._options.options import Options

if TYPE_CHECKING:
    from onnxamp._runtime.sessions.values import Feed

UNIT_US: Final = 0.0327
"""Microseconds of one cost unit of the cut: 32,768 bytes at 1 TB/s, see :mod:`onnxamp._decide.precision`."""

LAUNCH_US: Final = LAUNCH * UNIT_US
"""Microseconds for launching a kernel, as in the cut."""


def constant_nodes(graph: Graph) -> frozenset[int]:
    """Return the nodes that depend on constants only: runtimes compute them once, while they load the model."""
    known = {ABSENT, *graph.constants.tensors}
    folded = set[int]()
    for node in graph.order:
        is_settled = node.key not in op_facts().random and not node.bodies
        if is_settled and known.issuperset(node.inputs):
            folded.add(node.index)
            known.update(node.outputs)
    return frozenset(folded)


@dataclass(frozen=True)
class Estimate:
    """A graph on a device, for certain shapes of its values."""

    graph: Graph
    device: Device
    shapes: Sequence[Shape | None]
    low: Format = FLOAT16

    @cached_property
    def times(self) -> Sequence[tuple[int, float, float]]:
        """Nodes that launch kernels, with the microseconds in float32 and in low precision, their launches included."""
        known = dict[tuple[object, ...], tuple[float, float]]()
        """The times of nodes of one form: large models repeat few."""
        times = list[tuple[int, float, float]]()
        size_of = self.sizes.__getitem__
        for node in self.graph.nodes:
            if not (count := self.launches(node)):
                continue
            read = (*map(size_of, node.inputs),)
            written = (*map(size_of, node.outputs),)
            terms = expected_terms(node, self.shapes)
            form = node.key, count, terms, read, written
            costs = known.get(form)
            if costs is None:
                trips = self.trips[node.scope]
                work = work_with(node.key, read, sum(written), terms, trips)
                high, low = (work.time(self.device, low=it) for it in (None, self.low))
                launches = count * LAUNCH_US
                costs = known[form] = launches + high, launches + low
            times.append((node.index, *costs))
        return times

    @cached_property
    def sizes(self) -> Sequence[int]:
        """Elements by value index; none of what is absent."""
        shapes = self.shapes[: len(self.graph.values)]
        return [*map(elements, shapes), 0]

    @cached_property
    def floats(self) -> Sequence[bool]:
        """For each value, whether it is a float tensor. ABSENT (-1) reads the last entry."""
        return [kind in FLOAT_TENSORS for kind in self.graph.types]

    @cached_property
    def trips(self) -> Sequence[int]:
        """Return how often each scope runs."""
        return self.graph.ask(loop_trips)

    @cached_property
    def settled(self) -> AbstractSet[int]:
        """The nodes that runtimes compute once, while they load the model."""
        return self.graph.ask(constant_nodes)

    def work(self, node: Node) -> Work:
        """Return the work of a node in one run of the model."""
        sizes = self.sizes
        read = (*map(sizes.__getitem__, node.inputs),)
        written = sum(map(sizes.__getitem__, node.outputs))
        terms = expected_terms(node, self.shapes)
        return work_with(node.key, read, written, terms, self.trips[node.scope])

    def launches(self, node: Node) -> int:
        """Return how many kernels a node launches in one run of the model."""
        if node.key in op_facts().unlaunched or node.index in self.settled:
            return 0
        is_float = self.floats.__getitem__
        # Nearly all nodes write floats if they read any.
        has_floats = any(map(is_float, node.outputs)) or any(
            map(is_float, node.inputs)
        )
        return self.trips[node.scope] if has_floats else 0

    def cast_time(self, value: int) -> float:
        """Return the microseconds of a Cast of a value: it reads in one precision and writes in the other."""
        size = (FLOAT32_BYTES + self.low.bytes) * elements(self.shapes[value])
        trips = self.trips[self.graph.values[value].scope]
        return (LAUNCH_US + size / self.device.bandwidth) * trips

    def casts(self, ports: PortVariables, decision: Decision) -> list[int]:
        """Return the values that need a Cast, one for all readers.

        Constants need none, because they are stored in the precision in which they are read.
        """
        return [
            value
            for value, produced, needed in self._needs(ports, decision)
            if value not in ports.free and not needed <= {produced}
        ]

    def weight_bytes(self, ports: PortVariables, decision: Decision) -> int:
        """Return the bytes of float constants, each in the precisions in which it is read."""
        sizes = {False: FLOAT32_BYTES, True: self.low.bytes}
        total = 0
        for value, produced, needed in self._needs(ports, decision):
            if value in self.graph.constants.tensors:
                # A constant that nothing reads is stored as it is.
                each = sum(sizes[low] for low in needed or {produced})
                total += each * elements(self.shapes[value])
        return total

    def _needs(
        self, ports: PortVariables, decision: Decision
    ) -> Iterator[tuple[int, bool, set[bool]]]:
        """Yield (value, whether it is low precision, precisions in which it is read)."""
        is_low = decision.of_ports()
        for value, produced in enumerate(ports.produced):
            if produced != NONE:
                needed = set(map(is_low.__getitem__, ports.read[value]))
                yield value, is_low[produced], needed

    def time(self, low: AbstractSet[int] = frozenset()) -> float:
        """Return the microseconds of all nodes in one run with these in low precision, without Casts."""
        time = 0.0
        for node, slow, fast in self.times:
            time += fast if node in low else slow
        return time


def time_of(analysis: Analysis, estimate: Estimate) -> float:
    """Return the microseconds per run of an analysis, as a search space's ``time`` does for its choices.

    Complexity: linear in nodes and uses of values.
    """
    casts = estimate.casts(analysis.ports, analysis.decision)
    return estimate.time(low_nodes(analysis)) + sum(map(estimate.cast_time, casts))


@record
class SpeedUp:
    """The estimated gain of a conversion.

    Attributes:
        device: the device that the estimate is for, by its name in ``_data/devices.toml``.
        before: microseconds of a run in float32.
        after: microseconds of a run of the result.
        shapes: the shapes of the inputs for which these are estimated, by name.
    """

    device: str
    before: float
    after: float
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def factor(self) -> float:
        """The estimated speed-up of the result."""
        return self.before / self.after


def expected_speed_up(
    analysis: Analysis, shapes: Mapping[str, tuple[int, ...]] | None
) -> SpeedUp | None:
    """Return the expected gain of a conversion.

    None if the target computes no faster in low precision, if sizes are unknown, or if nothing is low.

    Args:
        analysis: the analysis.
        shapes: shapes of the inputs, by name; by default, those that the model declares.
    """
    device = _usual_device(analysis.options.target)
    graph = analysis.graph
    declared = declared_shapes(graph) if shapes is None else shapes
    if not device or declared is None or not any(analysis.decision.low):
        return None
    bound = shapes_at(graph, declared)
    estimate = Estimate(graph, device_called(device), bound, analysis.options.low)
    before = estimate.time()
    if not before:
        return None
    return SpeedUp(device, before, time_of(analysis, estimate), declared)


def _usual_device(target: str) -> str:
    """Return the device that a target usually runs on; "" if it computes no faster in low precision."""
    if device := target_of(target).device:
        rates = device_called(device)
        return device if rates.low > rates.products else ""
    profile = profile_of(target)
    honors_types = profile is None or profile.values["honors_types"]
    return DEFAULT_DEVICE if honors_types else ""


def declared_shapes(graph: Graph) -> Mapping[str, tuple[int, ...]] | None:
    """Return the shapes of the model's inputs, by name; None if one has an open dimension."""
    shapes = dict[str, tuple[int, ...]]()
    for value in graph.scopes[0].inputs:
        shape = graph.shapes[value]
        sizes = [size for size in shape or () if size is not None]
        if shape is None or len(sizes) < len(shape):
            return None
        shapes[graph.values[value].name] = tuple(sizes)
    return shapes


def estimate_on_target(graph: Graph, options: Options) -> Estimate:
    """Return the estimate for the device that the target runs on; open dimensions have the same sizes as in the cut."""
    device = device_called(target_of(options.target).device or DEFAULT_DEVICE)
    return Estimate(graph, device, graph.shapes, options.low)


def time_on_target(analysis: Analysis) -> float:
    """Return the same as :func:`time_of` on the device of the target, with the time of nodes left to the CPU.

    Open dimensions have the same sizes as in the cut.
    """
    graph = analysis.graph
    estimate = estimate_on_target(graph, analysis.options)
    moved = 0
    for index in analysis.on_cpu:
        node = graph.nodes[index]
        sizes = (
            elements(graph.shapes[value]) for value in (*node.reads, *node.writes)
        )
        moved += estimate.trips[node.scope] * sum(sizes)
    costs = target_of(analysis.options.target).costs
    return time_of(analysis, estimate) + costs.host_time(FLOAT32_BYTES * moved)


def bound_shapes(graph: Graph, feeds: "Mapping[str, Feed]") -> Sequence[Shape | None]:
    """Return shapes by value index for these inputs: as inferred, or else as declared with the sizes of the inputs."""
    arrays = {name: x for name, x in feeds.items() if isinstance(x, np.ndarray)}
    return shapes_at(graph, {name: array.shape for name, array in arrays.items()})


def shapes_at(
    graph: Graph, given: Mapping[str, tuple[int, ...]]
) -> Sequence[Shape | None]:
    """Return the same as :func:`bound_shapes`, for inputs of these shapes."""
    is_open = any(_is_open(graph.shapes[value.index]) for value in graph.values)
    if given == declared_shapes(graph) and not is_open:
        return graph.shapes
    named = dict[str, int]()
    for entry in graph.model.graph.input:
        dims = entry.type.tensor_type.shape.dim
        for dim, size in zip(dims, given.get(entry.name, ()), strict=False):
            if dim.dim_param:
                named[dim.dim_param] = size
    inferred = graph.shapes_of(given)
    declared = graph.shapes_at(named)
    return [_better(one, other) for one, other in zip(inferred, declared, strict=True)]


def _better(inferred: Shape | None, declared: Shape | None) -> Shape | None:
    """Return the inferred shape, unless only the declared one is known, or known in full."""
    if inferred is None:
        return declared
    is_fuller = _is_open(inferred) and declared and not _is_open(declared)
    return declared if is_fuller else inferred


def _is_open(shape: Shape | None) -> bool:
    """Return whether the shape, or a size in it, is unknown."""
    return shape is None or None in shape
