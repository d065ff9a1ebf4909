"""Ranges of a model's values on samples, and the exponents and float32 nodes that follow from them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from onnxamp._base.executor import Memory
from onnxamp._base.records import record
from onnxamp._base.state import fingerprint
from onnxamp._convert.raising import raised
from onnxamp._decide.exponents.rescaling import Ranges, find_rescaling
from onnxamp._decide.exponents.rows import value_names
from onnxamp._decide.overrides import find_overrides
from onnxamp._facts.dtypes import FLOAT, FLOAT16
from onnxamp._facts.providers import Profile, emulated_arithmetic
from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._numerics.differences.measure import measure as measured
from onnxamp._numerics.unseen.body_ranges import with_body_ranges
from onnxamp._numerics.unseen.stress import Stress
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
from onnxamp._runtime.piecewise.pieces import observed_values
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.values import check_inputs, shapes_of
from onnxamp._runtime.sessions.versions import versions
from onnxamp._tuning.inner_sums import (
    WatchedNode,
    centered_norms,
    partial_sums,
    with_magnitudes,
)


def with_ranges(model: Model, options: Options, run: Run, steps: int = 0) -> Options:
    """Return options with the requested exponents, and with names of nodes in place of ``data_max``, found on samples.

    So decisions follow from the graph and the options alone, and plans repeat them without samples.

    Args:
        model: the model.
        options: the options of the conversion.
        run: where and on which samples they are measured.
        steps: steps toward inputs that are hard, on which exponents have to suit as well; 0 to leave them out.

    Raises:
        RuntimeFailure: the model does not run, or a sample ends the process of a worker.
        ArgumentError: a sample does not fit it.
    """
    if not options.lacks_ranges:
        return options
    limit = options.data_max
    options = replace(options, data_max=None)
    observed = _Observed.of(model, options, run)
    graph, ranges = observed.graph, observed.ranges(run)
    # Nodes that stay in float32 need no exponents, so they are found first.
    if limit is not None:
        beyond = _beyond(graph, options, ranges.largest, limit)
        options = replace(options, keep_nodes=(*options.keep_nodes, *beyond))
    if not options.lacks_ranges:
        return options
    hard = None
    if options.low.is_narrow:
        stress = Stress(options.low, steps, options.input_ranges)
        hard = stress.hard(Model(graph.model, graph.folder), run.samples)
    if hard is not None:
        ranges |= observed.ranges(replace(run.bare, inputs=hard))
    rescaling = find_rescaling(graph, options, ranges)
    return replace(options, rescaling=rescaling._replace(made_up=run.samples.made_up))


def measured_ranges(model: Model, options: Options, run: Run) -> tuple[Graph, Ranges]:
    """Return the float32 model that exponents apply to, folded as the options say, and the ranges of its values.

    If the target accumulates in float16, the sums on the way to values are also measured.

    Arguments and errors as :func:`with_ranges`.
    """
    observed = _Observed.of(model, options, run)
    return observed.graph, observed.ranges(run)


class _Observed(NamedTuple):
    """A float32 model whose ranges are measured.

    Attributes:
        graph: the model, folded as the options say.
        written: the same with outputs for what its values become in bodies, and for sums of magnitudes.
        names: output of it -> the name of a value.
        watched: the nodes whose sums are measured.
        profile: the target that accumulates in float16; None if none does.
    """

    graph: Graph
    written: Model
    names: Mapping[str, str]
    watched: Sequence[WatchedNode]
    profile: Profile | None

    @classmethod
    def of(cls, model: Model, options: Options, run: Run) -> "_Observed":
        """Prepare a model; arguments and errors as :func:`with_ranges`."""
        options = replace(options, split_k=False)
        graph = with_casts(raised(model, options), options).graph
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
        names = value_names(wide)
        renamed = {name: names[value] for name, value in inner.items()}
        return cls(graph, written, renamed, watched, profile)

    def ranges(self, run: Run) -> Ranges:
        """Return the ranges on samples; errors as :func:`with_ranges`."""
        graph = self.graph
        largest = largest_magnitudes(self.written, run)
        largest |= {
            value: largest[name]
            for name, value in self.names.items()
            if name in largest
        }
        own = set(value_names(graph).values())
        ranges = {name: reach for name, reach in largest.items() if name in own}
        if self.profile is None or not self.watched:
            return Ranges(ranges)
        feeds = check_inputs(graph.model, run.samples[0])
        shapes = graph.shapes_of(shapes_of(feeds))
        sums = partial_sums(graph, self.profile, self.watched, largest, shapes)
        norms = centered_norms(graph, self.profile, self.watched, largest)
        return Ranges(ranges, sums, norms)


def _beyond(
    graph: Graph, options: Options, largest: Mapping[str, float], limit: float
) -> Iterator[str]:
    """Yield nodes that read or write a float beyond the limit, except those that the user lowers."""
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


@record
class Magnitudes:
    """The largest magnitude of each tensor on a sample."""

    largest: Mapping[str, float]


@record
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
