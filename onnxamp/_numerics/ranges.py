"""Ranges of a model's values on samples, and what follows from them: exponents, and nodes that stay float32."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxamp._convert.misspelt import raised
from onnxamp._decide.overrides import find_overrides
from onnxamp._decide.rescaling import Ranges, find_rescaling, value_names
from onnxamp._dtypes import FLOAT, FLOAT16
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._numerics.bodies import of_bodies, with_body_ranges
from onnxamp._numerics.measure import measure
from onnxamp._numerics.sums import Watch, centred_norms, partial_sums, with_magnitudes
from onnxamp._ops.profiles import emulated_arithmetic
from onnxamp._options.options import Options
from onnxamp._rewrite.prepare import with_casts
from onnxamp._runtime.defaults import BUDGET
from onnxamp._runtime.engines import Engine, Executable
from onnxamp._runtime.fingerprints import SentModel, model_print, sample_print, versions
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.loop import Item, KeptSamples, Opened, Probe, observe_all, one_by_one
from onnxamp._runtime.pieces import Runner
from onnxamp._runtime.run import Run
from onnxamp._runtime.side import parts_of, start
from onnxamp._runtime.values import Feed
from onnxamp._state.state import fingerprint
from onnxamp._workers.executor import Memory


def with_ranges(model: Model, options: Options, run: Run) -> Options:
    """Options with the exponents that they ask for, and names of nodes in place of ``data_max``, found on samples.

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
    if limit is not None:
        options = replace(
            options,
            keep_nodes=(*options.keep_nodes, *_beyond(graph, options, ranges.largest, limit)),
        )
    if not options.lacks_ranges:
        return options
    found = find_rescaling(graph, options, ranges)
    return replace(options, rescaling=found._replace(made_up=run.samples.made_up))


def measured_ranges(model: Model, options: Options, run: Run) -> tuple[Graph, Ranges]:
    """The float32 model that exponents apply to, folded as the options say, and the ranges of its values.

    Where the target keeps sums in float16, those on the way to values are measured, too.

    Arguments and errors as :func:`with_ranges`.
    """
    graph = with_casts(raised(model, options), replace(options, split_k=False)).graph
    profile = (
        emulated_arithmetic(options.target) if options.rescale and options.low is FLOAT16 else None
    )
    proto, inner = with_body_ranges(graph)
    wide, watched = Graph.of(proto, graph.folder) if inner else graph, list[Watch]()
    if profile is not None and run.samples.has(0):
        proto, watched = with_magnitudes(wide, profile)
    written = model if proto is model.proto else Model(proto, graph.folder)
    largest = largest_magnitudes(written, run)
    found = of_bodies(largest, inner, value_names(graph))
    if profile is None or not watched:
        return graph, Ranges(found)
    feeds = check_inputs(graph.model, run.samples[0])
    shapes = wide.shapes_of(
        {name: feed.shape for name, feed in feeds.items() if isinstance(feed, np.ndarray)}
    )
    sums = partial_sums(wide, profile, watched, largest, shapes)
    return graph, Ranges(found, sums, centred_norms(wide, profile, watched, largest))


def _beyond(
    graph: Graph, options: Options, largest: Mapping[str, float], limit: float
) -> Iterator[str]:
    """Nodes that read or write a float beyond the limit, but for those that the user lowers."""
    wishes = find_overrides(graph, options).of_node
    large = {value for value, name in value_names(graph).items() if largest.get(name, 0.0) > limit}
    for node in graph.nodes:
        is_forced = node.index in wishes and wishes[node.index].low
        if not is_forced and not large.isdisjoint((*node.inputs, *node.outputs)):
            yield node.proto.name or next(filter(None, node.proto.output))


def largest_magnitudes(model: Model, run: Run) -> dict[str, float]:
    """Return the largest magnitude of each float32 tensor of the main graph below 1e30, where masks begin, by name.

    Arguments and errors as :func:`with_ranges`.
    """
    engine = run.engine.reference
    kept = None
    if run.state is not None:
        # Several models of a job have their ranges in one part of its state.
        prints = model_print(model), sample_print(run.samples, 0), engine.name(), versions()
        kept = KeptSamples(
            run.state.part("ranges", {}), run.samples, Magnitudes, f"ranges {fingerprint(*prints)}"
        )
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
        executable = Executable(self.model.opened(), self.engine)

        def measure(item: Item) -> Magnitudes:
            feeds = check_inputs(executable.model.proto, item.sample)
            return Magnitudes(_magnitudes(executable.prepare(feeds), feeds))

        return Opened(executable.prepare_sample, one_by_one(measure))


def _magnitudes(runner: Runner, feeds: dict[str, Feed]) -> dict[str, float]:
    flow, found = runner.flow, dict[str, float]()
    names = [
        name
        for node in flow.nodes
        for name in node.output
        if flow.types.get(name) in (FLOAT, None) and name
    ]
    side = start(runner, feeds, Counter([*names, *flow.inputs]))

    def note(made: list[str]) -> None:
        for name in made:
            value = side.values.get(name)
            if value is not None and value.is_tensor() and value.data_type() == FLOAT:
                found[name] = measure(value, value, runner.provider).reference_max
        side.used(made)

    note(list(flow.inputs))
    watched = set(names)
    for part in parts_of(flow, range(len(flow.nodes)), BUDGET):
        side.run(part)
        note([name for node in part for name in flow.nodes[node].output if name in watched])
        runner.forget()
    return found
