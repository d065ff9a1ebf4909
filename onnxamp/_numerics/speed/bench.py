"""Times models side by side on the same inputs, and finds out what each of them executes."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike, fspath
from pathlib import Path
from time import perf_counter
from typing import Any, Final, NamedTuple, TypeAlias

from onnx import ModelProto

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.paths import as_path, is_remote
from onnxamp._base.temporary import temporary_folder
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import lowest_precision
from onnxamp._model.model import Model, load_model
from onnxamp._model.protos import fed_inputs
from onnxamp._model.sources import unchanged_sources
from onnxamp._numerics.saturation import Saturation, may_saturate, saturation_of
from onnxamp._numerics.speed.bench_results import Bench, BenchReport, Slowdown, Timing
from onnxamp._numerics.speed.timing import (
    Clock,
    Evidence,
    find_slowdowns,
    interleave,
    latency,
    profiled,
    ratio,
    timed,
    warm_up,
)
from onnxamp._runtime.engines import Engine, choose_engine
from onnxamp._runtime.inputs.random_inputs import random_inputs
from onnxamp._runtime.inputs.samples import draw_of
from onnxamp._runtime.inputs.suited import suited
from onnxamp._runtime.loading import OPENED, load_file
from onnxamp._runtime.sessions.session import (
    Provider,
    assigned_nodes,
    bind,
    make_session,
)
from onnxamp._runtime.sessions.shell import take_weights
from onnxamp._runtime.sessions.starting import (
    disabled_sentence,
    optimizers_to_disable,
    save_spilled,
    unfolded,
    without_optimizers,
)
from onnxamp._runtime.sessions.values import Feed, check_inputs
from onnxamp._runtime.sizes import is_open, listed

Told: TypeAlias = Callable[[int, int], None]
Source: TypeAlias = ModelProto | str | PathLike[str]

_CPU: Final = "cpu"
"""The provider that every machine has."""
_CUDA: Final = "cuda"
_REST: Final = 0.02
"""Seconds to wait before a model runs after one of another engine, whose threads still busy-wait for work."""
_WARM_UP: Final = 2.0
"""The maximum seconds of warming up, per model and batch size."""
CPU_NOTE: Final = (
    "ONNX Runtime's CPU provider computes float16 in float32, between Casts of its own: these times say nothing about a"
    " GPU."
)
_UNTOLD_NOTE: Final = (
    "The engine reports no kernel times, so times per op are left out."
)
_SOFTWARE_NOTE: Final = (
    "The device is software on the CPU: these times say nothing about a GPU."
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """Options for running and timing a model.

    Attributes:
        tf32: CUDA: allow TF32 in float32 products.
        nhwc: CUDA: prefer the NHWC layout for convolutions.
        cuda_graph: CUDA: capture a run as a CUDA graph and replay it.
        threads: CPU: threads per operator; 0 leaves the choice to ONNX Runtime.
        provider: where this model runs; None for the common provider.
        seconds: how long to time each model at each batch size.
        profile: also profile each model: time per op, memory, and causes of slowness.

    Example:
        >>> from onnxamp import BenchOptions
        >>> BenchOptions(tf32=False).cuda_options()["use_tf32"]
        '0'
    """

    tf32: bool = True
    nhwc: bool = False
    cuda_graph: bool = False
    threads: int = 0
    seconds: float = 2.0
    profile: bool = True
    provider: Provider | None = None

    def cuda_options(self) -> dict[str, str]:
        """Return all options of the CUDA provider, including defaults."""
        flags = {
            "use_tf32": self.tf32,
            "prefer_nhwc": self.nhwc,
            "enable_cuda_graph": self.cuda_graph,
        }
        return {name: str(int(flag)) for name, flag in flags.items()}


@unchanged_sources()
def bench_models(
    *models: Source,
    provider: Provider | None = None,
    batches: Sequence[int] = (),
    dims: Mapping[str, int] | None = None,
    feeds: Mapping[str, Feed] | None = None,
    seed: int = 0,
    options: BenchOptions | Sequence[BenchOptions] | None = None,
    told: Told | None = None,
    clock: Clock = perf_counter,
) -> BenchReport:
    """Time models in turns on the same inputs, which are copied to the device beforehand.

    Args:
        models: one or more, as ModelProto or path. The first is the reference. The others must accept its inputs,
            with floats in their own types, and are compared with it.
        provider: "cuda", "cpu", "webgpu", or the package of another plugin provider; None for CUDA if there is a
            device. A session never falls back to the CPU as a whole.
        batches: sizes of the first dimension of the inputs; () for the inputs as given.
        dims: sizes of named dimensions of random inputs.
        feeds: arrays by input name, instead of random inputs; excludes ``batches``.
        seed: the seed of random inputs.
        options: how to run: one for all models, or one for each.
        told: progress callback, called with (steps done, steps in total).
        clock: returns the time in seconds.

    Returns:
        A report. Times are in seconds, memory is in bytes, throughput in samples per second.

    Raises:
        ArgumentError: inputs, batch sizes or options do not fit the models.
        ModelError: a model cannot be read.
        RuntimeFailure: the provider cannot be used, or a model does not run there.

    Example:
        >>> from onnxamp import BenchOptions, bench_models, convert_model
        >>> low = convert_model("models/encoder.onnx", "O2")
        >>> quick = BenchOptions(seconds=0.1, profile=False)
        >>> report = bench_models("models/encoder.onnx", low, provider="cpu", options=quick)
        >>> [timing.latency.median > 0 for timing in report.timings]
        [True, True]
    """
    if not models:
        raise ArgumentError("There is no model to time.")
    chosen = choose_engine(provider)
    if isinstance(options, BenchOptions | None):
        options = [options or BenchOptions()] * len(models)
    each = list(options)
    if len(each) != len(models):
        raise ArgumentError(
            f"Options are given for {len(each)} models, but there are {len(models)} models."
        )
    engines = list[Engine]()
    for one in each:
        engine = chosen if one.provider is None else choose_engine(one.provider)
        if one.cuda_graph and engine.provider != _CUDA:
            raise ArgumentError("CUDA graphs need the CUDA provider.")
        engines.append(engine)
    first = Model.of(models[0])
    for other in models[1:]:
        Model.of(other)  # its file is watched from now on, like that of the first
    light = take_weights(first.proto, first.folder, keep=0).model
    told = told or (lambda *_: None)
    with _files(models) as files:
        blamed = list(map(_blamed, (path for path, _ in files), engines))
        if feeds is None:
            run = replace(engines[0], emulates=False).open(first, whole=True)
            with without_optimizers(blamed[0]):
                sizes = suited(draw_of(first, seed, dims), run).sizes
            dims = {**(dims or {}), **sizes}
        inputs = _make_inputs(light, batches, dims or {}, feeds, seed)
        steps = len(files) * (1 + len(inputs.sizes))
        loaded = []
        for (path, label), how, engine, names in zip(
            files, each, engines, blamed, strict=True
        ):
            with _named(label, path), without_optimizers(names):
                model = _load(
                    path=path,
                    label=label,
                    how=how,
                    engine=engine,
                    inputs=inputs,
                    clock=clock,
                )
            loaded.append(model)
            told(len(loaded), steps)
        for number, batch in enumerate(inputs.sizes, 2):
            _time(loaded, inputs, batch, clock)
            told(number * len(files), steps)
    return _report(inputs, loaded)


class _Inputs(NamedTuple):
    """Inputs at every batch size in ``sizes`` (None: as given); ``text`` describes them."""

    proto: ModelProto
    sizes: tuple[int | None, ...]
    lead: str
    """The name of the batch dimension; "" without batches."""
    dims: Mapping[str, int]
    feeds: Mapping[str, Feed] | None
    seed: int
    text: str

    def at(self, batch: int | None) -> dict[str, Feed]:
        """Return the inputs at a batch size."""
        if self.feeds is not None:
            return check_inputs(self.proto, self.feeds)
        sizes = dict(self.dims) if batch is None else {**self.dims, self.lead: batch}
        return random_inputs(self.proto, seed=self.seed, dims=sizes)


def _make_inputs(
    proto: ModelProto,
    batches: Sequence[int],
    dims: Mapping[str, int],
    feeds: Mapping[str, Feed] | None,
    seed: int,
) -> _Inputs:
    for size in batches:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ArgumentError(
                f"Batches must be positive whole numbers, not {list(batches)}."
            )
    if feeds is not None and batches:
        raise ArgumentError(
            "Batch sizes apply only to random inputs: leave --batch or the inputs out."
        )
    lead = _leading_dimension(proto) if batches else ""
    if lead in dims:
        raise ArgumentError(
            f"--batch and --dim {lead} both set the leading dimension: drop one of the two."
        )
    text = "given inputs" if feeds is not None else f"random inputs (seed {seed})"
    text += f", {listed(dims)}" if dims else ""
    return _Inputs(
        proto=proto,
        sizes=tuple(dict.fromkeys(batches)) or (None,),
        lead=lead,
        dims=dims,
        feeds=feeds,
        seed=seed,
        text=text,
    )


def _leading_dimension(proto: ModelProto) -> str:
    """Return the name of the leading dimension of the inputs. Name open leading dimensions without a name, in place.

    Raises:
        ArgumentError: no input has an open first dimension.
    """
    names = Counter[str]()
    for entry in fed_inputs(proto.graph):
        dims = entry.type.tensor_type.shape.dim
        if dims and is_open(dims[0]):
            dims[0].dim_param = dims[0].dim_param or "batch"
            names[dims[0].dim_param] += 1
    if not names:
        raise ArgumentError(
            "No input has a dynamic first dimension, so the batch size is fixed: leave --batch out."
        )
    return names.most_common(1)[0][0]


@contextmanager
def _files(models: Sequence[Source]) -> Iterator[list[tuple[Path, str]]]:
    """Yield each model as a file, with its name in reports: the path, or the name of the graph."""
    with temporary_folder() as folder:
        files = []
        for number, model in enumerate(models):
            if isinstance(model, ModelProto):
                proto = model
                label = f"{number}: {model.graph.name or 'model'}"
            elif is_remote(path := as_path(model)):
                proto = unfolded(path)
                label = fspath(model)
            else:
                files.append((path, fspath(model)))
                continue
            own = Path(folder, str(number))
            own.mkdir()
            files.append((save_spilled(proto, own), label))
        # A model may be timed twice, with other options: its number then tells the two apart.
        labels = Counter(label for _, label in files)
        named = []
        for number, (path, label) in enumerate(files):
            is_unique = labels[label] == 1
            named.append((path, label if is_unique else f"{number}: {label}"))
        yield named


class _Loaded(NamedTuple):
    """A model that is ready to be timed; ``takes`` lists the names of its inputs."""

    takes: tuple[str, ...]
    how: BenchOptions
    engine: Engine
    session: Any
    facts: Bench
    timings: list[Timing]
    saturation: Saturation | None

    @property
    def is_slower(self) -> bool:
        """Whether it is slower than the first model at some batch size."""
        speedups = [timing.speedup for timing in self.timings]
        return any(speedup and speedup.is_slower for speedup in speedups)

    @property
    def is_emulated(self) -> bool:
        """Whether the engine computes its low precision in float32."""
        return self.facts.lowest != "float32" and self.engine.emulates


@contextmanager
def _named(label: str, path: Path | None = None) -> Iterator[None]:
    """Name the model in errors by its name in reports, because its file may be temporary."""
    try:
        yield
    except RuntimeFailure as error:
        text = str(error)
        for spelled in () if path is None else (path.absolute(), path):
            text = text.replace(str(spelled), label)
        if label not in text:
            text = f"{label}: {text}"
        raise RuntimeFailure(text, loaded=error.loaded) from error


def _blamed(path: Path, engine: Engine) -> tuple[str, ...]:
    """Return the graph optimizers that end the process, or keep a session on the CPU from opening, without a row in our
    tables.

    A process of its own tries that. On a device it would take memory from what is timed.
    """
    if engine.provider != _CPU:
        return ()
    model = Model.read(path)
    if model.stock.size > OPENED:
        return ()
    return load_file(model, _CPU, in_text=model.in_text).disabled


def _load(
    path: Path,
    label: str,
    how: BenchOptions,
    engine: Engine,
    inputs: _Inputs,
    clock: Clock,
) -> _Loaded:
    """Profile a model, then load it."""
    cuda_options = how.cuda_options()
    proto = load_model(path)
    if not proto.graph.output:
        raise ArgumentError(
            f"{label} has no outputs, so there is nothing to time: name a model that computes something."
        )
    takes = tuple(entry.name for entry in fed_inputs(proto.graph))
    graph = Graph.of(proto)
    is_on_cuda = engine.provider == _CUDA
    kinds = Counter(node.key for node in graph.nodes)
    facts = Bench(
        model=label,
        options=cuda_options if is_on_cuda else {"threads": str(how.threads)},
        lowest=lowest_precision(graph.types),
        load=0.0,
        assigned={},
        kinds=dict(kinds),
        disabled=optimizers_to_disable(proto, engine.provider),
    )
    feeds = inputs.at(max(inputs.sizes, key=lambda size: size or 0))
    if missing := [name for name in takes if name not in feeds]:
        raise ArgumentError(
            f"{label} needs inputs that the first model lacks: {', '.join(map(repr, missing))}."
        )
    given = {name: feeds[name] for name in takes}
    try:
        check_inputs(proto, given)
    except ArgumentError as error:
        raise ArgumentError(
            f"{label} does not accept the inputs of the first model: {error}"
        ) from None
    is_exact = not may_saturate(engine, proto)
    saturation = None if is_exact else saturation_of(engine, path, given)
    del proto, graph  # weights; the session has its own copy
    if how.profile:
        # The nodes of a replayed graph are not visible.
        plain = cuda_options | {"enable_cuda_graph": "0"}
        facts = profiled(facts, path, given, engine.provider, plain, how.threads)
    start = clock()
    session = make_session(
        path,
        engine.provider,
        threads=how.threads,
        record=True,
        cuda_options=cuda_options,
    )
    assigned = Counter(provider for provider, *_ in assigned_nodes(session))
    took = clock() - start
    facts = replace(facts, load=took, assigned=dict(assigned))
    return _Loaded(takes, how, engine, session, facts, [], saturation)


def _time(
    models: Sequence[_Loaded], inputs: _Inputs, batch: int | None, clock: Clock
) -> None:
    """Time all models at one batch size, and add the timings to the models."""
    feeds = inputs.at(batch)
    number = inputs.sizes.index(batch)
    runs = []
    firsts = []
    costs = []
    for model in models:
        start = clock()
        own = {name: feeds[name] for name in model.takes}
        with _named(model.facts.model):
            # Binding runs the model once. CUDA captures one graph per shape, which ONNX Runtime tells apart by number.
            graph = number if model.how.cuda_graph else None
            run = timed(bind(model.session, own, graph), clock)
        firsts.append(clock() - start)
        costs.append(warm_up(run, clock, _WARM_UP))
        runs.append(run)
    rest = _REST if len({model.engine.provider for model in models}) > 1 else 0.0
    blocks = interleave(runs, costs, models[0].how.seconds, rest)
    for model, first, rounds in zip(models, firsts, blocks, strict=True):
        times = latency(first, rounds)
        speedup = None if model is models[0] else ratio(blocks[0], rounds)
        timing = Timing(
            model=model.facts.model,
            batch=batch,
            latency=times,
            throughput=(batch or 1) / times.median,
            speedup=speedup,
        )
        model.timings.append(timing)


def _report(inputs: _Inputs, models: Sequence[_Loaded]) -> BenchReport:
    ran = {model.engine.title: model.engine.runtime for model in models}
    causes = list[Slowdown]()
    for model in models[1:]:
        evidence = Evidence(
            original=models[0].facts,
            model=model.facts,
            timings=model.timings,
            on_cuda=model.engine.provider == _CUDA,
        )
        causes += find_slowdowns(evidence)
    sizes = [size for size in inputs.sizes if size is not None]
    return BenchReport(
        ran_on="; ".join(ran),
        runtime="; ".join(dict.fromkeys(ran.values())),
        inputs=inputs.text,
        models=tuple(model.facts for model in models),
        timings=tuple(chain.from_iterable(model.timings for model in models)),
        profiled=max(sizes, default=None),
        slower=tuple(model.facts.model for model in models if model.is_slower),
        causes=tuple(causes),
        notes=tuple(dict.fromkeys(_notes(models))),
    )


def _notes(models: Sequence[_Loaded]) -> Iterator[str]:
    """Yield remarks about the numbers: what they do not say, and what differs from an ordinary session."""
    facts = [model.facts for model in models]
    if any(model.is_emulated for model in models):
        yield CPU_NOTE
    if any(", software" in model.engine.title for model in models):
        yield _SOFTWARE_NOTE
    rows = chain.from_iterable(one.ops for one in facts)
    if any(row.seconds is None for row in rows):
        yield _UNTOLD_NOTE
    for one in facts:
        if one.disabled:
            yield disabled_sentence(one.disabled, f"opens {one.model}")
    for model in models:
        if model.saturation is not None:
            yield model.saturation.note(model.facts.model)
