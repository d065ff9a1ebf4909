"""Timing decoders that generate text greedily, each in a process of its own, in turns after the same prompts.

A process loads one model, and then generates after all prompts as often as requested. Its peak memory is that of the
model, with Python and the engine.
"""

import pickle
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from onnxamp._bench import Generation, GenerationReport
from onnxamp._bench.bench import CPU_NOTE
from onnxamp._bench.timing import Blocks, latency, ratio
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._graph.graph import graph_of
from onnxamp._graph.types import lowest_precision
from onnxamp._model.model import Model
from onnxamp._model.sources import unchanged_sources
from onnxamp._optional import optional
from onnxamp._runtime.building import Child
from onnxamp._runtime.decoder import LOGITS, Decoder, Prompts, PromptWriter
from onnxamp._runtime.engines import Engine, choose_engine, engine_on, on_cpu
from onnxamp._runtime.plugins import device_memory_used
from onnxamp._runtime.servers import answer_with
from onnxamp._runtime.session import BROWSER, Provider, make_session, run_values
from onnxamp._runtime.starting import Surroundings
from onnxamp._runtime.values import Array, Feeds, as_typed, from_value, to_value
from onnxamp._workers.executor import temporary_folder

RUNTIME: Final = "onnxruntime"
"""ONNX Runtime, for which onnxamp feeds caches from step to step."""
GENAI: Final = "genai"
"""ONNX Runtime GenAI, which generates with folders that have its config."""
GENAI_CONFIG: Final = "genai_config.json"
"""The file that identifies a folder for ONNX Runtime GenAI."""
JAVASCRIPT: Final = "javascript"
"""transformers.js, which generates with folders of its layout, in Node and in a browser."""
_LENGTH: Final = 64
"""The number of tokens of a random prompt."""
_ROUNDS: Final = (3, 20)
"""The smallest and the largest number of rounds that count, after one warm-up round."""
_LONG: Final = 30.0
"""The duration of a round, in seconds, from which a single round is enough."""
_TITLES: Final = {GENAI: "ONNX Runtime GenAI", JAVASCRIPT: "transformers.js"}
_ENDING: Final = 10.0
"""Seconds that a process may take to end, including the processes that its engine started."""


class Text(NamedTuple):
    """The text that a model generated after one prompt.

    Attributes:
        tokens: the tokens.
        first: seconds to the first token.
        steps: seconds of each following token.
        nans: how many tokens were chosen from logits with NaN; 0 if logits were not watched.
    """

    tokens: list[int]
    first: float
    steps: list[float]
    nans: int


class Generator(Protocol):
    """A model on an engine. It generates one sequence at a time, greedily, and never ends the text."""

    runtime: str
    """The engine and its version."""

    def generate(
        self, prompt: Feeds, tokens: list[int], count: int, *, watched: bool
    ) -> Text:
        """Generate after a prompt; if ``watched``, look for NaN in the logits."""

    def memory(self) -> int | None:
        """Return the peak memory of the engine, in bytes; None if the system does not report it."""


class Stepwise(ABC):
    """A generator that makes one step after another in this process."""

    watched = False

    @abstractmethod
    def begin(self, prompt: Feeds, tokens: list[int], count: int) -> int:
        """Read a prompt, and return the token after it; ``count`` tokens will be generated."""

    @abstractmethod
    def step(self) -> int:
        """Return the next token."""

    @abstractmethod
    def logits(self) -> Array:
        """Return the logits that the last token was chosen from; called only if ``watched``."""

    def generate(
        self, prompt: Feeds, tokens: list[int], count: int, *, watched: bool
    ) -> Text:
        """As :meth:`Generator.generate`."""
        self.watched = watched
        found = list[int]()
        seconds = list[float]()
        nans = 0
        while len(found) < count:
            start = perf_counter()
            found.append(self.step() if found else self.begin(prompt, tokens, count))
            seconds.append(perf_counter() - start)
            nans += watched and bool(np.isnan(self.logits()).any())
        return Text(found, seconds[0], seconds[1:], nans)

    def memory(self) -> int | None:
        """As :meth:`Generator.memory`."""
        return _peak_memory()


class RuntimeGenerator(Stepwise):
    """A model in ONNX Runtime. Caches stay where a run leaves them, on the device if there is one."""

    def __init__(
        self, path: Path, decoder: Decoder, provider: Provider, threads: int
    ) -> None:
        self._session = make_session(path, provider, threads=threads, cuda_options={})
        self._decoder = decoder
        self._kinds = {item.name: item.type for item in self._session.get_inputs()}
        self._outputs = [item.name for item in self._session.get_outputs()]
        self._feeds: Feeds = {}
        self._caches: dict[str, Any] = {}
        self._logits: Array = np.empty(0)
        self._token = 0
        self.runtime = engine_on(provider).runtime

    def begin(self, prompt: Feeds, tokens: list[int], count: int) -> int:
        """As :meth:`Stepwise.begin`."""
        del tokens, count
        self._feeds = prompt
        self._caches = {}
        return self._run()

    def step(self) -> int:
        """As :meth:`Stepwise.step`."""
        self._feeds = self._decoder.advanced(self._feeds, self._token)
        return self._run()

    def logits(self) -> Array:
        """As :meth:`Stepwise.logits`."""
        return self._logits

    def _run(self) -> int:
        values = dict(self._caches)
        for name in self._kinds.keys() - values.keys():
            feed = as_typed(self._feeds[name], self._kinds[name])
            values[name] = to_value(feed, self._kinds[name])
        found = run_values(self._session, values, self._outputs)
        for name, present in self._decoder.caches.items():
            if all(found[present].shape()):
                self._caches[name] = found[present]
        self._logits = from_value(found[LOGITS])[0, -1]
        self._token = int(self._logits.argmax())
        return self._token


def serve() -> None:
    """Answer questions with a :class:`_Timer`."""
    answer_with(_Timer)


class _Timer:
    """Loads one model, and times its generation."""

    def __init__(self) -> None:
        self._generator: Generator | None = None
        self._prompts: list[tuple[Feeds, list[int]]] = []
        self._before: int | None = None

    def __call__(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Return the answer to a question."""
        asked: Mapping[str, Callable[..., dict[str, Any]]]
        asked = {"load": self.load, "generate": self.generate, "end": self.end}
        return asked[do](**arguments)

    def load(self, engine: str, task: str) -> dict[str, Any]:
        """Load a model with an engine; a file contains everything that it needs."""
        given: Mapping[str, Any] = pickle.loads(Path(task).read_bytes())  # noqa: S301 - the file is our own
        given["surroundings"].enter()
        self._prompts = given["prompts"]
        provider = given["provider"]
        self._before = device_memory_used() if provider == "cuda" else None
        arguments = given["path"], given["decoder"], provider, given["threads"]
        start = perf_counter()
        self._generator = generator = _generator_on(engine, *arguments)
        return {"seconds": perf_counter() - start, "runtime": generator.runtime}

    def generate(self, count: int, *, watched: bool) -> dict[str, Any]:
        """Generate after all prompts, and return the seconds of first tokens and steps, the tokens, and the memory."""
        generator = self._generator
        assert generator is not None
        texts = [
            generator.generate(prompt, read, count, watched=watched)
            for prompt, read in self._prompts
        ]
        now = None if self._before is None else device_memory_used()
        taken = None if now is None or self._before is None else now - self._before
        return {
            "firsts": [text.first for text in texts],
            "steps": [seconds for text in texts for seconds in text.steps],
            "tokens": [text.tokens for text in texts],
            "nans": sum(text.nans for text in texts),
            "memory": generator.memory(),
            "device": taken,
        }

    def end(self) -> dict[str, Any]:
        """End this process, including what the engine started."""
        raise SystemExit


def _generator_on(engine: str, *arguments: Any) -> Generator:
    """Return a model on the engine of this name."""
    if engine == GENAI:
        kind = optional(GENAI, "It is").GenaiGenerator
    elif engine == JAVASCRIPT:
        kind = optional(JAVASCRIPT).JavascriptGenerator
    else:
        kind = RuntimeGenerator
    generator: Generator = kind(*arguments)
    return generator


def _peak_memory() -> int | None:
    """Return the peak memory of this process, in bytes; None if the system does not report it."""
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    with suppress(ImportError):
        import resource  # noqa: PLC0415 - Windows has none

        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
    return None


@unchanged_sources()
def bench_decoders(
    models: Sequence[Path],
    *,
    prompts: Prompts | None = None,
    count: int = 64,
    provider: str | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    seconds: float = 2.0,
    threads: int = 0,
    told: Callable[[int, int], None],
) -> GenerationReport:
    """Time decoders that generate greedily on ONNX Runtime, and on the software that their folders are for.

    That software is ONNX Runtime GenAI, or transformers.js: in Node on the CPU, and in a browser, where nothing else
    generates.

    Args:
        models: the files. The others are compared with the first one, and read its tokens.
        prompts: texts; None for one prompt of random tokens.
        count: the number of tokens to generate after each prompt, at least 2.
        provider: "cpu", "cuda", a plugin provider, or "browser"; None for CUDA if there is a device.
        dims: sizes of named dimensions of random inputs.
        seed: seed of random inputs.
        seconds: how long to time each model on each engine.
        threads: threads per operator on the CPU; 0 leaves the choice to the engine.
        told: progress callback, called with (steps done, steps in total).

    Raises:
        ArgumentError: a model is not a decoder with caches, or no engine there generates with it.
        RuntimeFailure: the provider cannot be used, or a model does not run.
    """
    engine = choose_engine(provider, whole=True)
    first = Model.of(models[0])
    writer = PromptWriter(on_cpu(first), seed, dims)
    texts = [] if prompts is None else prompts.tokens_of(first)
    read = [writer.prompt(text) for text in texts] or [writer.made_up(_LENGTH)]
    runs = list[_Run]()
    notes = list[str]()
    with temporary_folder() as folder, ExitStack() as stack:

        def started() -> Child:
            process = Child("onnxamp._bench.generating")
            stack.callback(process.finish, {"do": "end"}, seconds=_ENDING)
            return process

        for path in models:
            task = Path(folder, f"{len(runs)}.pickle")
            runs += _loaded(
                model=first if path == models[0] else Model.of(path),
                path=path,
                task=task,
                read=read,
                engine=engine,
                threads=threads,
                started=started,
                note=notes.append,
            )
        told(1, 2)
        _generate(runs, count, seconds)
        told(2, 2)
    tokens = sum(np.asarray(one[writer.decoder.tokens]).shape[-1] for one in read)
    source = "1 random prompt" if prompts is None else f"{len(read)} of the prompts"
    if engine.emulates and any(run.lowest != "float32" for run in runs):
        notes.append(CPU_NOTE)
    return GenerationReport(
        ran_on=engine.place,
        inputs=f"{source}, {tokens} tokens; {count} tokens generated after each",
        tokens=count * len(read),
        runs=tuple(_outcome(run, runs, tokens) for run in runs),
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass(slots=True)
class _Run:
    """A model on an engine: its description, its process, and its results per round; the first round does not count."""

    label: str
    kind: str
    lowest: str
    process: Child
    runtime: str
    load: float
    rounds: list[dict[str, Any]] = field(default_factory=list)

    def generate(self, count: int) -> float:
        """Generate after all prompts, and return the seconds that it took.

        Raises:
            RuntimeFailure: the model does not run.
        """
        question = {"do": "generate", "count": count, "watched": not self.rounds}
        found = _answer(self.process, self.label, question)
        self.rounds.append(found)
        return float(sum(found["firsts"]) + sum(found["steps"]))

    def blocks(self, what: str) -> Blocks:
        """Return the seconds of all rounds that count."""
        return [found[what] for found in self.rounds[1:]]


def _loaded(
    model: Model,
    path: Path,
    task: Path,
    read: Sequence[Feeds],
    engine: Engine,
    threads: int,
    started: Callable[[], Child],
    note: Callable[[str], None],
) -> Iterator[_Run]:
    """Load a model in a process for each engine that accepts it, and note which engines fail to load it.

    Raises:
        ArgumentError: it has no caches, or no engine accepts it. RuntimeFailure: the first engine does not load it.
    """
    decoder = Decoder.of(model)
    if not decoder.caches:
        raise ArgumentError(
            f"{model.label} has no caches, but onnxamp times generation only for decoders that have them."
        )
    lowest = lowest_precision(model.ask(graph_of).types)
    prompts = [
        (feeds, np.asarray(feeds[decoder.tokens])[0].tolist()) for feeds in read
    ]
    facts = {
        "path": path.absolute(),
        "decoder": decoder,
        "prompts": prompts,
        "provider": engine.provider,
        "threads": threads,
        "surroundings": Surroundings.here(),
    }
    task.write_bytes(pickle.dumps(facts))
    engines = _engines(path, decoder, read, engine.provider)
    if not engines:
        raise ArgumentError(
            f"{model.label} is not in a folder for transformers.js, and nothing else generates text in a browser."
        )
    for kind in engines:
        process = started()
        question = {"do": "load", "engine": kind, "task": str(task)}
        try:
            loaded = _answer(process, model.label, question)
        except RuntimeFailure as failure:
            if kind == engines[0]:
                raise
            reason = str(failure).removeprefix(f"{model.label}: ")
            note(f"{_TITLES[kind]} is left out: {reason}")
            continue
        yield _Run(
            label=model.label,
            kind=kind,
            lowest=lowest,
            process=process,
            runtime=loaded["runtime"],
            load=loaded["seconds"],
        )


def _engines(
    path: Path, decoder: Decoder, read: Sequence[Feeds], provider: str
) -> list[str]:
    """Return the engines that accept a model: ONNX Runtime, and the software that its folder is for."""
    engines = []
    home = path.absolute().parent
    if provider != BROWSER:
        engines.append(RUNTIME)
        config = home / GENAI_CONFIG
        known = {decoder.tokens, *decoder.caches, *decoder.positions, *decoder.masks}
        if config.is_file() and (
            all(known.issuperset(feeds) for feeds in read)
            or '"encoder"' in config.read_text(encoding="utf-8")
        ):
            engines.append(GENAI)
    is_for_javascript = home.name == "onnx" and (home.parent / "config.json").is_file()
    if is_for_javascript and provider in ("cpu", BROWSER):
        engines.append(JAVASCRIPT)
    return engines


def _answer(process: Child, label: str, question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a process.

    Raises:
        RuntimeFailure: the process ended, or reports an error.
    """
    found = process.ask(question)
    if found is None:
        raise RuntimeFailure(f"{label}: its process {process.ended}.")
    if "fault" in found:
        raise RuntimeFailure(f"{label}: {found['fault']}")
    return found


def _generate(runs: Sequence[_Run], count: int, seconds: float) -> None:
    """Let all models generate in turns, in reverse order every other round, after a round that does not count."""
    cost = sum(run.generate(count) for run in runs)
    least, most = _ROUNDS if cost < _LONG else (1, 1)
    for number in range(max(least, min(most, int(seconds * len(runs) / cost)))):
        for run in runs if number % 2 == 0 else reversed(runs):
            run.generate(count)


def _outcome(run: _Run, runs: Sequence[_Run], read: int) -> Generation:
    """Return the measurements of a run, next to the first one on its engine."""
    reference = next(one for one in runs if one.kind == run.kind)
    firsts = run.blocks("firsts")
    steps = run.blocks("steps")
    ratios = (
        None if reference is run else ratio(reference.blocks(what), run.blocks(what))
        for what in ("firsts", "steps")
    )
    first_ratio, step_ratio = ratios
    step = latency(run.rounds[0]["steps"][0], steps)
    same = (
        sum(takewhile(bool, map(eq, one, other)))
        for one, other in zip(
            reference.rounds[-1]["tokens"], run.rounds[-1]["tokens"], strict=True
        )
    )
    return Generation(
        model=run.label,
        runtime=run.runtime,
        load=run.load,
        first=latency(run.rounds[0]["firsts"][0], firsts),
        step=step,
        prefill=read / median(map(sum, firsts)),
        decode=1 / step.median,
        first_ratio=first_ratio,
        step_ratio=step_ratio,
        same=sum(same),
        nans=run.rounds[0]["nans"],
        memory=run.rounds[-1]["memory"],
        device_memory=run.rounds[-1]["device"],
    )
