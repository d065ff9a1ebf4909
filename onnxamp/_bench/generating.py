"""Timing decoders that generate text, each in its own process, in turns after the same prompts."""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from onnxamp._bench.bench import CPU_NOTE
from onnxamp._bench.generators import GENAI, GENAI_CONFIG, JAVASCRIPT, RUNTIME
from onnxamp._bench.records import Generation, GenerationReport
from onnxamp._bench.timing import Blocks, latency, ratio
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._graph.graph import graph_of
from onnxamp._graph.types import lowest_precision
from onnxamp._model.model import Model
from onnxamp._model.sources import unchanged_sources
from onnxamp._runtime.building import Child
from onnxamp._runtime.decoder import Decoder
from onnxamp._runtime.engines import Engine, choose_engine, on_cpu
from onnxamp._runtime.prompts import Prompts, PromptWriter
from onnxamp._runtime.session import BROWSER
from onnxamp._runtime.starting import active_libraries
from onnxamp._runtime.values import Feeds
from onnxamp._workers.executor import temporary_folder

_LENGTH: Final = 64
"""The number of tokens of a random prompt."""
_ROUNDS: Final = (3, 20)
"""The smallest and the largest number of rounds that count, after one warm-up round."""
_LONG: Final = 30.0
"""The duration of a round, in seconds, from which a single round is enough."""
_TITLES: Final = {GENAI: "ONNX Runtime GenAI", JAVASCRIPT: "transformers.js"}
_ENDING: Final = 10.0
"""Seconds that a process may take to end, including the processes that its engine started."""


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
    engine, first = choose_engine(provider, whole=True), Model.of(models[0])
    writer = PromptWriter(on_cpu(first), seed, dims)
    texts = [] if prompts is None else prompts.tokens_of(first)
    read = [writer.prompt(text) for text in texts] or [writer.made_up(_LENGTH)]
    runs, notes = list[_Run](), list[str]()
    with temporary_folder() as folder, ExitStack() as stack:

        def started() -> Child:
            process = Child("onnxamp._bench.generators")
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
    prompts = [(feeds, np.asarray(feeds[decoder.tokens])[0].tolist()) for feeds in read]
    facts = {
        "path": path.absolute(),
        "decoder": decoder,
        "prompts": prompts,
        "provider": engine.provider,
        "threads": threads,
        "libraries": active_libraries(),
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
    engines, home = [], path.absolute().parent
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
    firsts, steps = run.blocks("firsts"), run.blocks("steps")
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
