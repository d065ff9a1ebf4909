"""Worker processes, of this machine and of a Ray cluster: how work scales with them, what a task costs, and a plan.

python benchmarks/cluster.py [--models 500] [--samples 200] [--workers 1 2 4 8 16] [--places processes ray]
                             [--limit SECONDS] [--no-validate] [--out FILE] [--check]
python benchmarks/cluster.py --plan [--measured FILE]

Each number of workers gets as many processors, by affinity, with one thread each: different cores first. Efficiency is
the time of one worker over n times that of n; where others use the machine, too, processor seconds say what sharing the
work costs, and those of the main process what no worker can take over. A Ray cluster is started before the clock, its
workers behind it, as processes are. benchmarks/results/cluster.json is written after each run; a run that would not
end within the limit is left out, by name. --check fails if two processes are less than 0.8 efficient. --plan simulates
10,000 models, and a checkpoint of 700 GB in 150 files on 100 machines, with the service times that were measured.
"""

import argparse
import json
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from farm import plan, shown
from measure import machine
from onnx import TensorProto, helper, numpy_helper

import onnxamp
from onnxamp._base.executor import Memory, run
from onnxamp._base.place import Place

RESULTS: Final = Path(__file__).parent / "results" / "cluster.json"
say: Final = partial(print, flush=True)
LEAST: Final = 0.8
"""Promised efficiency of two workers."""
PLACES: Final = ("processes", "ray")
SEARCHED: Final = 1e-3
"""A tolerance that not all ops hold together in float16, so that tuning searches; that of ``tune`` is one."""
MARGIN: Final = 1.2
"""What a run may take over the share of workers in the time of the last one."""


def chain(layers: int, width: int, rows: int, seed: int) -> onnx.ModelProto:
    """Products with biases, each normalized by a Softmax: of any size, and with something to decide in each layer."""
    random, nodes, weights = np.random.default_rng(seed), [], []
    value = "x"
    for layer in range(layers):
        names = [f"l{layer}/{name}" for name in ("w", "b", "h", "s", "p", "y")]
        weight, bias, product, total, share, result = names
        numbers = random.standard_normal((width, width)).astype(np.float32) / np.float32(width**0.5)
        weights += [numpy_helper.from_array(numbers, weight), numpy_helper.from_array(numbers[0], bias)]
        nodes += [
            helper.make_node("MatMul", [value, weight], [product], f"l{layer}/matmul"),
            helper.make_node("Add", [product, bias], [total], f"l{layer}/add"),
            helper.make_node("Softmax", [total], [share], f"l{layer}/softmax"),
            helper.make_node("Add", [share, value], [result], f"l{layer}/residual"),
        ]
        value = result
    tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, width]) for name in ("x", value)]
    graph = helper.make_graph(nodes, "chain", tensors[:1], tensors[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def make_models(folder: Path, count: int) -> int:
    """Models of mixed sizes, most of them small; returns the bytes of all. The same count makes the same models."""
    random, size = np.random.default_rng(count), 0
    for number in range(count):
        layers, width = int(2 ** random.uniform(1, 5)), int(2 ** random.uniform(4, 8.5))
        path = folder / f"{number:04}.onnx"
        onnx.save(chain(layers, width, 8, number), path)
        size += path.stat().st_size
    return size


# --- measured -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What some work took with so many workers; memory is the largest resident set of any process, in MB.

    What workers of Ray take is not known: they are no children of this process.
    """

    workers: int
    seconds: float
    main_seconds: float
    processor_seconds: float | None
    items: int
    efficiency: float
    processor_efficiency: float | None
    main_mb: float
    worker_mb: float | None


@dataclass
class Clock:
    """Until when runs may take."""

    limit: float
    begun: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.limit - (time.monotonic() - self.begun)


def processors(count: int) -> list[int]:
    """As many processors of those of this process; one of each core comes before the second of any."""
    seen: dict[str, int] = {}
    ranks = []
    for processor in sorted(os.sched_getaffinity(0)):
        core = core_of(processor)
        seen[core] = seen.get(core, 0) + 1
        ranks.append((seen[core], processor))
    return [processor for _, processor in sorted(ranks)][:count]


def core_of(processor: int) -> str:
    """What names the core of a processor: the processors that share it."""
    try:
        siblings = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        return siblings.read_text(encoding="ascii").strip()
    except OSError:
        return str(processor)


@contextmanager
def place_of(place: str, workers: int) -> Iterator[Place]:
    """The workers, on as many processors; a Ray cluster is started for them."""
    everywhere = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(processors(workers)))
    try:
        if place == "processes":
            yield Place(workers)
            return
        import ray  # noqa: PLC0415 - it is an extra

        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        ray.init(num_cpus=workers, object_store_memory=512 << 20, include_dashboard=False, log_to_driver=False,
                 logging_level=logging.ERROR)  # fmt: skip
        try:
            yield Place(workers, "local")
        finally:
            ray.shutdown()
    finally:
        os.sched_setaffinity(0, everywhere)


def timed(
    work: Callable[[Place], Any], items: int, numbers: Sequence[int], place: str, clock: Clock
) -> Iterator[Run | str]:
    """The work with each number of workers, on as many processors; a sentence where there is no time for it."""
    first = last = None
    for workers in numbers:
        guess = 0.0 if last is None else MARGIN * last.seconds * last.workers / workers
        if clock.left < guess or clock.left <= 0:
            yield f"{workers} workers: left out, {clock.left:.0f} s are left"
            continue
        with place_of(place, workers) as where:
            spent, start = _processor_seconds(), time.perf_counter()
            work(where)
            seconds = time.perf_counter() - start
            main, all_ = (after - before for after, before in zip(_processor_seconds(), spent, strict=True))
        alone = first.seconds * first.workers if first else seconds * workers
        most = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own = place == "processes"
        worked = (first.processor_seconds or all_) / all_ if own and first else 1.0
        last = Run(
            workers, seconds, main, all_ if own else None, items, alone / (workers * seconds), worked if own else None,
            most[0], most[1] if own else None,
        )  # fmt: skip
        first = first or last
        yield last


def _processor_seconds() -> tuple[float, float]:
    """Those of this process, and of it and all children that have ended."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    main, others = (row.ru_utime + row.ru_stime for row in usage)
    return main, main + others


def nothing(_: Memory) -> Callable[[Any], Any]:
    """The work that takes no time."""
    return lambda item: item


def overhead(place: Place, tasks: int = 500) -> tuple[float, float]:
    """Seconds until all workers are there, and those that a task takes which does nothing."""
    with place.workers() as workers:
        times = []
        for count in (workers.count, tasks):  # the first starts the workers
            start = time.perf_counter()
            for _ in run(workers, nothing, range(count)):
                pass
            times.append(time.perf_counter() - start)
        return times[0], times[1] / tasks


def subjects(root: Path, models: int, samples: int, *, validate: bool) -> dict[str, tuple[Callable[[Place], Any], int]]:
    """By name: what is done at a place, and with how many items."""
    original, low = root / "judged.onnx", root / "low.onnx"
    onnx.save(chain(24, 512, 128, 0), original)
    onnxamp.convert_file(original, low, validate=False)

    def folder(place: Place) -> None:
        with tempfile.TemporaryDirectory(dir=root) as target:
            report = onnxamp.convert_folder(
                root / "models", target, jobs=place.jobs, cluster=place.cluster, provider="cpu", validate=validate
            )
        assert report.count("converted") == models
        services = root / "services.json"
        if not services.exists():  # the fewest workers come first: more than there are processors wait for each other
            rows = [[row.seconds, row.bytes_before] for row in report.rows]
            services.write_text(json.dumps(rows), encoding="utf-8")

    def diff(place: Place) -> None:
        report = onnxamp.diff_models(
            original, low, count=samples, provider="cpu", jobs=place.jobs, cluster=place.cluster
        )
        assert report.samples == samples

    def tune(tolerance: float, count: int, place: Place) -> None:
        _, tuned = onnxamp.tune_model(
            original, tolerance, count=count, provider="cpu", jobs=place.jobs, cluster=place.cluster, seconds=1e6
        )
        assert bool(tuned.runs) == (tolerance == SEARCHED)

    return {
        "folder": (folder, models),
        "diff": (diff, samples),
        "tune": (partial(tune, 1e-2, samples), samples),
        "search": (partial(tune, SEARCHED, max(4, samples // 4)), max(4, samples // 4)),
    }


def measure(given: argparse.Namespace, save: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """All figures; they are saved after each run."""
    clock, numbers = Clock(given.limit), sorted(set(given.workers))
    with tempfile.TemporaryDirectory() as root:
        source = Path(root, "models")
        source.mkdir()
        size = make_models(source, given.models)
        say(f"{given.models} models, {size / 1e6:.0f} MB")
        able = os.sched_getaffinity(0)
        here = machine() | {"usable": len(able), "physical": len(set(map(core_of, able))), "load": os.getloadavg()[0]}
        facts: dict[str, Any] = {"machine": here, "bytes": size, "validated": not given.no_validate}
        todo = subjects(Path(root), given.models, given.samples, validate=not given.no_validate)
        for place in given.places:
            facts[place] = {name: [] for name in todo}
            with place_of(place, max(numbers)) as where:
                facts[place]["start"], facts[place]["overhead"] = overhead(where)
            say(f"{place}: {max(numbers)} workers start in {facts[place]['start']:.1f} s, a task costs"
                f" {facts[place]['overhead'] * 1e3:.2f} ms")  # fmt: skip
            for name, (work, items) in todo.items():
                say(f"{name}, {items} items")
                for row in timed(work, items, numbers, place, clock):
                    say(f"  {row if isinstance(row, str) else told(row)}")
                    facts[place][name].append(row if isinstance(row, str) else asdict(row))
                    save(facts)
            if (services := Path(root, "services.json")).exists():
                facts.setdefault("services", json.loads(services.read_text(encoding="utf-8")))
        return facts | {"shard": shard_rates()}


def shard_rates(megabytes: int = 256) -> dict[str, float]:
    """Bytes per second at which one thread measures float32 weights, and converts and writes them."""
    with tempfile.TemporaryDirectory() as root:
        model = chain(1, 64, 1, 0)
        numbers = np.random.default_rng(0).standard_normal((megabytes << 18) // 1024 * 1024).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(numbers.reshape(1024, -1), "large"))
        model.graph.node.append(helper.make_node("MatMul", ["wide", "large"], ["product"]))
        model.graph.input.append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, [1, 1024]))
        model.graph.output.append(helper.make_tensor_value_info("product", TensorProto.FLOAT, None))
        path = Path(root, "big.onnx")
        onnx.save(model, path, save_as_external_data=True, location="big.data")
        everywhere = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(everywhere)})
        try:
            from onnxamp._model.constant_stats import constant_stats  # noqa: PLC0415

            start = time.perf_counter()
            constant_stats(np.memmap(Path(root, "big.data"), np.float32, "r"))
            measuring = time.perf_counter() - start
            start = time.perf_counter()
            onnxamp.convert_file(path, Path(root, "low.onnx"), validate=False)
            whole = time.perf_counter() - start
        finally:
            os.sched_setaffinity(0, everywhere)
        size = Path(root, "big.data").stat().st_size
        return {"measure": size / measuring, "convert": size / max(whole - measuring, 1e-9)}


def told(row: Run) -> str:
    """A run in a line."""
    spent = "" if row.processor_seconds is None else (
        f"; {row.processor_seconds:.1f} processor seconds, {row.processor_efficiency:.2f}"
    )  # fmt: skip
    return (
        f"{row.workers} workers: {row.seconds:.1f} s, {row.items / row.seconds:.1f}/s, efficiency {row.efficiency:.2f}"
        f"{spent}; the main process {row.main_seconds:.1f}"
    )


def main() -> int:
    """Measure or plan; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--places", choices=PLACES, nargs="+", default=PLACES[:1])
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds for all of it")
    parser.add_argument("--no-validate", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--measured", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.plan:
        say(shown(plan(json.loads(given.measured.read_text(encoding="utf-8")))))
        return 0

    def save(facts: dict[str, Any]) -> None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    facts = measure(given, save)
    if "services" in facts:
        say(f"seconds of a model: median {statistics.median(row[0] for row in facts['services']):.2f}")
        facts["plan"] = plan(facts)
        say(shown(facts["plan"]))
    save(facts)
    rows = (row for name in ("folder", "diff", "tune", "search") for row in facts.get("processes", {}).get(name, ()))
    pairs = [row["efficiency"] for row in rows if isinstance(row, dict) and row["workers"] == 2]
    return int(given.check and min(pairs, default=0.0) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
