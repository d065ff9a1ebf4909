"""Worker processes, of this machine and of a Ray cluster: how work scales with them, what a task costs, and a plan.

python benchmarks/cluster.py [--models 500] [--samples 200] [--workers 1 2] [--no-validate] [--ray] [--out FILE]
                             [--check]
python benchmarks/cluster.py --plan [--measured FILE]

Each number of workers gets as many processors, by affinity, with one thread each. Efficiency is the time of one worker
over n times that of n; where others use the machine, too, processor seconds say what sharing the work costs. With
--ray, workers are those of a Ray cluster on this machine. Writes benchmarks/results/cluster.json; --check fails if two
workers are less than 0.8 efficient. --plan simulates 10,000 models, and a checkpoint of 700 GB in 150 files on 100
machines, with the service times that were measured; docs/how-to/cluster.md has the formula.
"""

import argparse
import heapq
import json
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import onnxamp
from onnxamp._workers.executor import Memory, run
from onnxamp._workers.place import Place

RESULTS: Final = Path(__file__).parent / "results" / "cluster.json"
say: Final = partial(print, flush=True)
LEAST: Final = 0.8
"""Promised efficiency of two workers."""


def chain(layers: int, width: int, rows: int, seed: int) -> onnx.ModelProto:
    """Products with biases, each normalised by a Softmax: of any size, and with something to decide in each layer."""
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
    """What some work took with so many workers; memory is the largest resident set of any process, in MB."""

    workers: int
    seconds: float
    processor_seconds: float
    items: int
    efficiency: float
    processor_efficiency: float
    main_mb: float
    worker_mb: float


def timed(work: Callable[[int], Any], items: int, numbers: Sequence[int]) -> list[Run]:
    """The work with each number of workers, on as many processors."""
    everywhere, runs = os.sched_getaffinity(0), list[Run]()
    for workers in numbers:
        os.sched_setaffinity(0, set(sorted(everywhere)[:workers]))
        try:
            spent, start = _processor_seconds(), time.perf_counter()
            work(workers)
            seconds, spent = time.perf_counter() - start, _processor_seconds() - spent
        finally:
            os.sched_setaffinity(0, everywhere)
        first = runs[0] if runs else None
        alone = first.seconds * first.workers if first else seconds * workers
        worked = first.processor_seconds if first else spent
        most = [resource.getrusage(who).ru_maxrss / 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        runs.append(Run(workers, seconds, spent, items, alone / (workers * seconds), worked / spent, *most))
        say(
            f"  {workers} workers: {seconds:.1f} s, {items / seconds:.1f}/s, efficiency {runs[-1].efficiency:.2f};"
            f" {spent:.1f} processor seconds, {worked / spent:.2f}"
        )
    return runs


def _processor_seconds() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(row.ru_utime + row.ru_stime for row in usage)


def nothing(_: Memory) -> Callable[[Any], Any]:
    """The work that takes no time."""
    return lambda item: item


def overhead(place: Place, tasks: int = 500) -> float:
    """Seconds that a task takes which does nothing, once its worker is there."""
    with place.workers() as workers:
        for count in (workers.count, tasks):  # the first starts the workers
            start = time.perf_counter()
            for _ in run(workers, nothing, range(count)):
                pass
        return (time.perf_counter() - start) / tasks


def measure(models: int, samples: int, numbers: Sequence[int], *, ray: bool, validate: bool) -> dict[str, Any]:
    """All figures."""
    place = partial(Place, cluster="local" if ray else None)
    cluster = "local" if ray else None
    with tempfile.TemporaryDirectory() as root:
        source = Path(root, "models")
        source.mkdir()
        size, rows = make_models(source, models), list[Any]()
        say(f"{models} models, {size / 1e6:.0f} MB")

        def folder(workers: int) -> None:
            report = onnxamp.convert_folder(
                source, Path(root, f"out{workers}"), jobs=workers, cluster=cluster, provider="cpu", validate=validate
            )
            assert report.count("converted") == models
            rows[:] = [[row.seconds, row.bytes_before] for row in report.rows]

        folders = timed(folder, models, numbers)
        original = Path(root, "judged.onnx")
        onnx.save(chain(24, 512, 128, 0), original)
        low = Path(root, "low.onnx")
        onnxamp.convert_file(original, low)
        say(f"diff on {samples} samples")
        diff = timed(
            lambda n: onnxamp.diff_models(original, low, count=samples, provider="cpu", jobs=n, cluster=cluster),
            samples, numbers,
        )  # fmt: skip
        say(f"tune on {samples} samples")
        tune = timed(
            lambda n: onnxamp.tune_model(original, 1e-2, count=samples, provider="cpu", jobs=n, cluster=cluster),
            samples, numbers,
        )  # fmt: skip
        return {
            "machine": {"processor": _processor(), "processors": os.cpu_count(), "load": os.getloadavg()[0]},
            "workers": "Ray" if ray else "processes",
            "bytes": size,
            "validated": validate,
            "folder": [asdict(row) for row in folders],
            "diff": [asdict(row) for row in diff],
            "tune": [asdict(row) for row in tune],
            "overhead": overhead(place(max(numbers))),
            "services": rows,
            "shard": shard_rates(),
        }


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
            from onnxamp._model.weights import constant_stats  # noqa: PLC0415

            start = time.perf_counter()
            constant_stats(np.memmap(Path(root, "big.data"), np.float32, "r"))
            measuring = time.perf_counter() - start
            start = time.perf_counter()
            onnxamp.convert_file(path, Path(root, "low.onnx"))
            whole = time.perf_counter() - start
        finally:
            os.sched_setaffinity(0, everywhere)
        size = Path(root, "big.data").stat().st_size
        return {"measure": size / measuring, "convert": size / max(whole - measuring, 1e-9)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


# --- simulated ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Farm:
    """Machines that are not there.

    Attributes:
        machines: how many.
        workers: of each.
        network: bytes per second of each machine.
        storage: bytes per second of what all of them read from and write to.
        latency: seconds until a worker that is free has its next task, at best.
        dispatch: seconds of the main process per task; it does one after another.
        start: seconds until a worker is ready.
    """

    machines: int = 100
    workers: int = 8
    network: float = 10e9 / 8
    storage: float = 20e9
    latency: float = 2e-3
    dispatch: float = 1e-3
    start: float = 10.0

    @property
    def rate(self) -> float:
        """Bytes per second that a worker has if all read and write at once."""
        return min(self.network / self.workers, self.storage / (self.machines * self.workers))


@dataclass(frozen=True)
class Task:
    """Seconds of a processor, and bytes that are read and written."""

    seconds: float
    bytes: float


def simulate(tasks: Sequence[Task], farm: Farm) -> float:
    """Seconds until all tasks are done, which are handed out in this order as workers get free.

    Complexity: tasks times the logarithm of workers.
    """
    free = [farm.start] * (farm.machines * farm.workers)
    told, end = farm.start, 0.0
    for task in tasks:
        told = max(heapq.heappop(free), told) + farm.dispatch
        done = told + farm.latency + task.seconds + task.bytes / farm.rate
        heapq.heappush(free, done)
        end = max(end, done)
    return end


def bound(tasks: Sequence[Task], farm: Farm) -> float:
    """The formula: the largest of what all workers, the longest task and the main process need at least."""
    each = [farm.latency + task.seconds + task.bytes / farm.rate for task in tasks]
    workers = farm.machines * farm.workers
    return farm.start + max(sum(each) / workers, *each, len(tasks) * farm.dispatch)


def many_models(services: Sequence[tuple[float, float]], count: int = 10_000) -> list[Task]:
    """Models like those that were measured, the largest first, as folders are converted."""
    random = np.random.default_rng(0)
    chosen = [services[number] for number in random.integers(len(services), size=count)]
    return [Task(seconds, 1.5 * size) for seconds, size in sorted(chosen, key=lambda row: -row[1])]


def checkpoint(rates: dict[str, float], size: float = 700e9, files: int = 150) -> Iterator[list[Task]]:
    """Two rounds: shares of a gigabyte that are measured, then files that are converted."""
    shares = round(size / 2**30)
    yield [Task(size / shares / rates["measure"], size / shares)] * shares
    yield [Task(size / files / rates["convert"], 1.5 * size / files)] * files


def plan(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Simulated times on farms of several sizes and networks."""
    rows, services = [], [(seconds, size) for seconds, size in facts["services"]]
    for machines in (1, 10, 100):
        for gigabits in (1, 10):
            farm = Farm(machines, network=gigabits * 1e9 / 8)
            models = many_models(services)
            lone = replace(farm, workers=2)  # 150 files are two for each of 100 machines, or less
            rounds = list(checkpoint(facts["shard"]))
            rows.append(
                {
                    "machines": machines, "gigabits": gigabits, "models": simulate(models, farm),
                    "models_bound": bound(models, farm),
                    "checkpoint": sum(simulate(tasks, lone) for tasks in rounds) - lone.start,
                    "checkpoint_bound": sum(bound(tasks, lone) for tasks in rounds) - lone.start,
                }
            )  # fmt: skip
    return rows


def shown(rows: Sequence[dict[str, Any]]) -> str:
    """The plan as a table."""
    head = "machines  Gbit/s  10,000 models (bound)  700 GB (bound), seconds"
    lines = (
        f"{row['machines']:8}{row['gigabits']:8}{row['models']:12.0f} ({row['models_bound']:.0f})"
        f"{row['checkpoint']:16.0f} ({row['checkpoint_bound']:.0f})"
        for row in rows
    )
    return "\n".join([head, *lines])


def main() -> int:
    """Measure or plan; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--no-validate", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--measured", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if given.plan:
        say(shown(plan(json.loads(given.measured.read_text(encoding="utf-8")))))
        return 0
    facts = measure(given.models, given.samples, given.workers, ray=given.ray, validate=not given.no_validate)
    facts["plan"] = plan(facts)
    say(f"a task costs {facts['overhead'] * 1e3:.2f} ms; seconds of a model: median"
          f" {statistics.median(row[0] for row in facts['services']):.2f}")  # fmt: skip
    say(shown(facts["plan"]))
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    worst = min(row["efficiency"] for name in ("folder", "diff", "tune") for row in facts[name] if row["workers"] == 2)
    return int(given.check and worst < LEAST)


if __name__ == "__main__":
    sys.exit(main())
