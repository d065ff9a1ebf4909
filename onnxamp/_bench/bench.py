"""Models timed beside each other on one provider, and what each of them is made of when it runs."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Final, TypeAlias

from onnx import ModelProto

from onnxamp._bench.causes import Evidence, find_causes
from onnxamp._bench.profiled import profile
from onnxamp._bench.records import Bench, BenchReport, Timing
from onnxamp._bench.timing import Clock, interleave, latency, ratio, warm_up
from onnxamp._errors import ArgumentError
from onnxamp._graph.graph import Graph
from onnxamp._graph.stats import lowest_precision
from onnxamp._graph.types import infer_types
from onnxamp._model.storage import folder_of, load_model
from onnxamp._ops.facts import op_key
from onnxamp._runtime.bound import bind
from onnxamp._runtime.device import device_name
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.random_inputs import random_inputs
from onnxamp._runtime.session import Provider, assigned_nodes, choose_provider, make_session
from onnxamp._runtime.shell import take_weights
from onnxamp._runtime.spill import save_spilled
from onnxamp._runtime.values import Feed

if TYPE_CHECKING:
    import onnxruntime as ort

Told: TypeAlias = Callable[[int, int], None]

_WARM_UP: Final = 2.0
"""Seconds that warming up may take, per model and batch."""


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """How models run. ``tf32``, ``nhwc`` and ``cuda_graph`` are options of the CUDA provider, whose defaults are True,
    False, False. ``threads`` of one op on CPU (0: as ONNX Runtime likes). ``seconds`` per model and batch.
    """

    tf32: bool = True
    nhwc: bool = False
    cuda_graph: bool = False
    threads: int = 0
    seconds: float = 2.0
    profile: bool = True

    def of_provider(self) -> dict[str, str]:
        """Options of the CUDA provider, all of them written out."""
        flags = {"use_tf32": self.tf32, "prefer_nhwc": self.nhwc, "enable_cuda_graph": self.cuda_graph}
        return {name: str(int(flag)) for name, flag in flags.items()}


@dataclass(slots=True)
class _Model:
    """A model in the making: its file, its session, and what is known of it."""

    takes: tuple[str, ...]
    how: BenchOptions
    session: "ort.InferenceSession"
    facts: Bench
    timings: list[Timing] = field(default_factory=list)


def bench_models(
    *models: ModelProto | str | PathLike[str],
    provider: Provider | None = None,
    batches: Sequence[int] = (),
    dims: Mapping[str, int] | None = None,
    feeds: Mapping[str, Feed] | None = None,
    seed: int = 0,
    options: BenchOptions | Sequence[BenchOptions] | None = None,
    told: Told | None = None,
    clock: Clock = perf_counter,
) -> BenchReport:
    """Time models in turns on the same inputs, on the device beforehand; the first is what others are held to.

    Args:
        models: at least one; others take the inputs of the first, floats in their own types.
        provider: "cuda" or "cpu"; None for CUDA where there is a device. CUDA never falls back.
        batches: sizes of the dimension that leads the inputs; () for the inputs as they are.
        dims: sizes of named dimensions of made-up inputs.
        feeds: inputs to use instead of made-up ones; then there can be no batches.
        seed: of made-up inputs.
        options: how models run; one for all, or one for each.
        told: called with what is done and what there is to do.
        clock: what tells seconds.

    Raises:
        ArgumentError: inputs or batches do not fit. ModelError: a model cannot be read.
        RuntimeFailure: CUDA cannot be used, or a model does not run there.
    """
    if not models:
        raise ArgumentError("There is no model to time.")
    chosen = choose_provider(provider)
    each = [options or BenchOptions()] * len(models) if isinstance(options, BenchOptions | None) else list(options)
    if len(each) != len(models):
        raise ArgumentError(f"There are options for {len(each)} models, but {len(models)} models.")
    if chosen != "cuda" and any(one.cuda_graph for one in each):
        raise ArgumentError("CUDA graphs need the CUDA provider.")
    given = _Inputs(models[0], batches, dims or {}, feeds, seed)
    with _files(models) as files:
        job = _Job(chosen, given, clock, told or (lambda *_: None), len(files) * (1 + len(given.sizes)))
        loaded = [job.load(path, label, how) for (path, label), how in zip(files, each, strict=True)]
        for batch in given.sizes:
            job.time(loaded, batch)
    return _report(job, loaded)


class _Inputs:
    """The inputs at each batch size."""

    def __init__(
        self,
        model: ModelProto | str | PathLike[str],
        batches: Sequence[int],
        dims: Mapping[str, int],
        feeds: Mapping[str, Feed] | None,
        seed: int,
    ) -> None:
        if isinstance(model, ModelProto):
            self.proto = take_weights(model, None, keep=0).model
        else:
            self.proto = take_weights(load_model(Path(model)), folder_of(Path(model)), keep=0).model
        if any(isinstance(size, bool) or not isinstance(size, int) or size < 1 for size in batches):
            raise ArgumentError(f"Batches must be positive whole numbers, not {list(batches)}.")
        if feeds is not None and batches:
            raise ArgumentError("Batches are for made-up inputs: inputs that are given have the sizes that they have.")
        self.sizes: tuple[int | None, ...] = tuple(dict.fromkeys(batches)) or (None,)
        self.feeds, self.dims, self.seed = feeds, dims, seed
        self.name = _lead(self.proto) if batches else ""
        what = "given inputs" if feeds is not None else f"made-up inputs (seed {seed})"
        self.text = what + "".join(f", {name}={size}" for name, size in dims.items())

    def at(self, batch: int | None) -> dict[str, Feed]:
        """Inputs at that batch size."""
        if self.feeds is not None:
            return check_inputs(self.proto, self.feeds)
        sizes = {**self.dims, self.name: batch} if batch is not None else dict(self.dims)
        return random_inputs(self.proto, seed=self.seed, dims=sizes)


def _lead(proto: ModelProto) -> str:
    """Name of the dimension that leads the inputs; open ones without a name get one, in the copy that is at hand.

    Raises:
        ArgumentError: no input has an open first dimension.
    """
    weights = {tensor.name for tensor in proto.graph.initializer}
    found = Counter[str]()
    for entry in proto.graph.input:
        dims = entry.type.tensor_type.shape.dim if entry.type.HasField("tensor_type") else ()
        if entry.name in weights or not dims or dims[0].HasField("dim_value"):
            continue
        dims[0].dim_param = dims[0].dim_param or "batch"
        found[dims[0].dim_param] += 1
    if not found:
        raise ArgumentError("No input has an open first dimension: the batch is fixed. Leave --batch out.")
    return found.most_common(1)[0][0]


@contextmanager
def _files(models: Sequence[ModelProto | str | PathLike[str]]) -> Iterator[list[tuple[Path, str]]]:
    """Models as files, and how reports name them: by path, or by the name of the graph."""
    with TemporaryDirectory(prefix="onnxamp-", ignore_cleanup_errors=True) as folder:
        found = []
        for number, model in enumerate(models):
            if isinstance(model, ModelProto):
                own = Path(folder, str(number))
                own.mkdir()
                path = save_spilled(model, own, None)
                found.append((path, f"{number}: {model.graph.name or 'model'}"))
            else:
                found.append((Path(model), fspath(model)))
        labels = Counter(label for _, label in found)
        yield [(path, label if labels[label] == 1 else f"{n}: {label}") for n, (path, label) in enumerate(found)]


@dataclass(slots=True)
class _Job:
    provider: Provider
    inputs: _Inputs
    clock: Clock
    told: Told
    steps: int
    done: int = 0

    def step(self) -> None:
        self.done += 1
        self.told(self.done, self.steps)

    def load(self, path: Path, label: str, how: BenchOptions) -> _Model:
        """Profile the model, then load it for timing."""
        options, proto = how.of_provider(), load_model(path)
        given = {tensor.name for tensor in proto.graph.initializer}
        takes = tuple(entry.name for entry in proto.graph.input if entry.name not in given)
        view = Graph.of(proto)
        kinds = Counter(op_key(node.proto) for node in view.nodes)
        told = options if self.provider == "cuda" else {"threads": str(how.threads)}
        facts = Bench(label, told, lowest_precision(infer_types(view)), 0.0, {}, kinds=dict(kinds))
        del proto, view
        feeds = self.inputs.at(max(self.inputs.sizes, key=lambda size: size or 0))
        if missing := [name for name in takes if name not in feeds]:
            raise ArgumentError(f"{label} takes inputs that the first model lacks: {', '.join(map(repr, missing))}.")
        if how.profile:
            plain = options | {"enable_cuda_graph": "0"}  # a graph is replayed as a whole: its nodes are not seen
            seen = profile(path, {name: feeds[name] for name in takes}, self.provider, plain, how.threads)
            facts = replace(facts, memory=seen.memory, ops=seen.ops, odd=seen.odd)
        start = self.clock()
        session = make_session(path, self.provider, threads=how.threads, record=True, cuda_options=options)
        took = self.clock() - start
        assigned = Counter(provider for provider, *_ in assigned_nodes(session))
        self.step()
        return _Model(takes, how, session, replace(facts, load=took, assigned=dict(assigned)))

    def time(self, loaded: Sequence[_Model], batch: int | None) -> None:
        """Time all models at one batch size."""
        feeds = self.inputs.at(batch)
        number = self.inputs.sizes.index(batch)
        runs, firsts, each = [], [], []
        for model in loaded:
            start = self.clock()
            taken = {name: feeds[name] for name in model.takes}
            run = bind(model.session, taken, number if model.how.cuda_graph else None)
            first = self.clock() - start
            each.append(warm_up(run, self.clock, _WARM_UP))
            runs.append(run)
            firsts.append(first)
        blocks = interleave(runs, each, loaded[0].how.seconds, self.clock)
        for model, first, mine in zip(loaded, firsts, blocks, strict=True):
            found = latency(first, mine)
            speedup = None if model is loaded[0] else ratio(blocks[0], mine)
            model.timings.append(Timing(model.facts.model, batch, found, (batch or 1) / found.median, speedup))
            self.step()


def _report(job: _Job, loaded: Sequence[_Model]) -> BenchReport:
    import onnxruntime as ort  # noqa: PLC0415

    on_cuda = job.provider == "cuda"
    slower = tuple(m.facts.model for m in loaded if any(t.speedup and t.speedup.high < 1 for t in m.timings))
    evidence = (Evidence(loaded[0].facts, m.facts, m.timings, on_cuda) for m in loaded[1:])
    notes = []
    if not on_cuda and any(m.facts.lowest != "float32" for m in loaded):
        notes.append(
            "ONNX Runtime's CPU provider computes float16 in float32, between Casts of its own: these times say nothing"
            " of a GPU."
        )
    sizes = job.inputs.sizes
    return BenchReport(
        f"CUDA ({device_name()})" if on_cuda else "CPU", f"onnxruntime {ort.__version__}", job.inputs.text,
        tuple(m.facts for m in loaded), tuple(t for m in loaded for t in m.timings),
        max((size for size in sizes if size is not None), default=None), slower,
        tuple(cause for one in evidence for cause in find_causes(one)), tuple(notes),
    )  # fmt: skip
