"""Machines that are not there: how long many models, and one large checkpoint, take on a cluster.

A simulation of how tasks are handed out, with service times that ``cluster.py`` measured and the network as a
parameter; docs/how-to/cluster.md has the formula and its limits.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np


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
