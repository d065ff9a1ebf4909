"""Worker processes of a Ray cluster: each is one actor, so that the state that it creates serves all its items.

Ray starts processes, moves data, and notices crashes. :mod:`onnxamp._base.executor` and this module decide which
worker gets an item: an item whose worker died goes to another machine if one is free.
"""

import logging
import os
import pickle
import sys
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from secrets import token_hex
from typing import Any, Final

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.executor import Crash, Station, Work
from onnxamp._base.threads import THREADS, core_count

LOCAL: Final = "local"
"""The address that starts a cluster on this machine for as long as it is needed."""

_ATTEMPTS: Final = 3
"""The number of workers that one item may kill."""
_GRACE: Final = 10.0
"""Seconds within which killed workers are expected to be gone."""
_PATIENCE: Final = 300.0
"""Seconds within which a cluster must find room for a worker."""
_STILLBORN: Final = 20
"""The number of workers that may be lost, with their machines, before they have started."""
_STORE: Final = 512 << 20
"""Bytes of shared memory for a cluster that is started here."""


@dataclass(slots=True)
class _Member:
    """An actor, its location ("" until it has started), and the item that it works on."""

    actor: Any
    node: str = ""
    address: str = ""
    position: int = -1


@dataclass(slots=True)
class Cluster:
    """Workers of a cluster. There may be fewer than ``count`` at times, because machines come and go.

    Attributes:
        count: the desired number of workers.
        threads: the processors that each worker uses, and its value of ONNXAMP_THREADS.
        gpus: the GPUs that each worker uses.
        once: whether each worker ends after one item.
    """

    ray: Any
    count: int
    threads: int
    gpus: int = 0
    once: bool = False
    is_own: bool = False
    """Whether this object made the connection, and therefore closes it."""
    is_cluster: bool = True
    attempts: int = _ATTEMPTS
    _work: Any = None
    """The number of the work, and a reference to it."""
    _begun: Work | None = None
    _number: int = 0
    _starting: dict[Any, _Member] = field(default_factory=dict)
    _idle: list[_Member] = field(default_factory=list)
    _busy: dict[Any, _Member] = field(default_factory=dict)
    _stillborn: int = 0
    _left: defaultdict[int, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The machines where the item at each position killed a worker."""

    def begin(self, work: Work) -> None:
        """As :meth:`Workers.begin`; the work is stored once, and each machine fetches it once."""
        self._left.clear()
        if work is not self._begun:
            try:
                pickled = self.ray.cloudpickle.dumps(work)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise ArgumentError(
                    f"Workers of the cluster cannot be sent what they need ({error})."
                ) from None
            self._number += 1
            self._work = (self._number, [self.ray.put(pickled)])
            self._begun = work
        self._fill()

    def free(self) -> int:
        """As :meth:`Workers.free`."""
        return len(self._idle)

    def give(self, position: int, item: Any) -> None:
        """As :meth:`Workers.give`."""
        # An item that killed a worker may need more memory, so another machine tries it if one is free.
        left = self._left.get(position, set())
        others = [member for member in self._idle if member.node not in left]
        member = others[0] if others else self._idle[-1]
        self._idle.remove(member)
        member.position = position
        self._busy[member.actor.do.remote(*self._work, item)] = member

    def wait(self) -> list[tuple[int, Any]]:
        """As :meth:`Workers.wait`.

        Raises:
            RuntimeFailure: the cluster has no room for a single worker.
        """
        patience = None if self._busy or self._idle else _PATIENCE
        ready, _ = self.ray.wait([*self._busy, *self._starting], timeout=patience)
        if not ready:
            raise RuntimeFailure(
                f"The cluster had no room for a worker of {self.threads} processors within {_PATIENCE:.0f} seconds."
            )
        return list(chain.from_iterable(map(self._taken, ready)))

    def _taken(self, reference: Any) -> list[tuple[int, Any]]:
        """Return the result of an item; an empty list if a worker has merely started."""
        if reference in self._starting:
            member = self._starting.pop(reference)
            try:
                member.node, member.address = self.ray.get(reference)
                self._idle.append(member)
            except self.ray.exceptions.RayError as error:
                self._stillborn += 1
                is_fault = getattr(error, "actor_init_failed", False)
                if is_fault or self._stillborn > _STILLBORN:
                    raise RuntimeFailure(
                        f"Workers of the cluster do not start: {_line(error)}."
                    ) from error
                self._fill()
            return []
        member = self._busy.pop(reference)
        try:
            result = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as error:
            # Such as a result that cannot be sent.
            raise RuntimeFailure(
                f"A worker of the cluster failed: {_line(error.cause or error)}."
            ) from error
        except self.ray.exceptions.RayError as error:
            logging.getLogger("onnxamp").info(
                "a worker on %s died: %s", member.address, error
            )
            self._left[member.position].add(member.node)
            self.ray.kill(member.actor)
            result = Crash(None, member.address)
            self._fill()
        else:
            if self.once:
                self.ray.kill(member.actor)
                self._fill()
            else:
                self._idle.append(member)
        return [(member.position, result)]

    def _fill(self) -> None:
        """Request the workers that are missing."""
        # Ray restarts no actor by itself: an item must not run twice without a record of the crash.
        needs = {"num_cpus": self.threads, "num_gpus": self.gpus, "max_restarts": 0}
        kind = self.ray.remote(**needs)(_Actor)
        present = len(self._starting) + len(self._idle) + len(self._busy)
        for _ in range(self.count - present):
            actor = kind.remote(self.threads, str(Path.cwd()))
            self._starting[actor.home.remote()] = _Member(actor)

    def stop(self) -> None:
        """As :meth:`Workers.stop`."""
        busy = self._busy
        self._busy = {}
        for member in busy.values():
            self.ray.kill(member.actor)
        if busy:
            self.ray.wait(list(busy), num_returns=len(busy), timeout=_GRACE)

    def close(self) -> None:
        """End all workers, and close the connection if it was made for them."""
        self.stop()
        for member in (*self._idle, *self._starting.values()):
            self.ray.kill(member.actor)
        self._idle.clear()
        self._starting.clear()
        self._work = None
        if self.is_own:
            self.ray.shutdown()


class _Actor:
    """A worker process."""

    def __init__(self, threads: int, folder: str) -> None:
        os.environ[THREADS] = str(threads)
        # Relative paths are relative to the folder of the main process.
        with suppress(OSError):
            os.chdir(folder)
        self._station = Station()
        self._number = 0

    def home(self) -> tuple[str, str]:
        """Return the id and the address of the machine."""
        import ray  # noqa: PLC0415 - see connect

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()

    def do(self, number: int, work: list[Any], item: Any) -> Any:
        """Return the result of an item of a work; the work is fetched when its first item arrives."""
        if number != self._number:
            import ray  # noqa: PLC0415

            self._station.turn_to(ray.get(work[0]))
            self._number = number
        return self._station.do(item)


def connect(
    address: str,
    jobs: int | None,
    most: int | None = None,
    gpus: int = 0,
    *,
    once: bool = False,
) -> Cluster:
    """Connect to a cluster, or start one on this machine; use an existing connection if there is one.

    Args:
        address: "local", or an address that ``ray.init`` accepts: "auto", HOST:PORT, ray://HOST:PORT.
        jobs: the number of workers; None for one per processor.
        most: the maximum number of workers that can be used.
        gpus: the GPUs that each worker uses.
        once: whether each worker ends after one item.

    Raises:
        RuntimeFailure: there is no cluster, or it has no processors.
    """
    if address == LOCAL:
        _ask_for_a_token()
    import ray  # noqa: PLC0415 - it reads the token on import

    is_own = not ray.is_initialized()
    if is_own:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        own = {}
        if address == LOCAL:
            own = {"num_cpus": jobs or core_count(), "object_store_memory": _STORE}
        try:
            ray.init(
                address,
                log_to_driver=False,
                include_dashboard=False,
                logging_level=logging.ERROR,
                **own,
            )
        except (OSError, RuntimeError, ValueError) as error:
            raise RuntimeFailure(
                f"Cannot connect to the Ray cluster {address!r}: {_line(error)}."
            ) from error
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    processors = [int(resources.get("CPU", 0)) for resources in alive]
    total = sum(processors)
    largest = max(processors, default=0)
    if not largest:
        raise RuntimeFailure(f"The Ray cluster {address!r} has no processors.")
    count = max(1, min(jobs or total, most or total))
    # A worker runs on one machine, so it can use no more threads than the largest machine has.
    threads = max(1, min(total // (jobs or total), largest))
    return Cluster(
        ray=ray, count=count, threads=threads, gpus=gpus, once=once, is_own=is_own
    )


def _ask_for_a_token() -> None:
    """Restrict a cluster on this machine to this process and its workers.

    A cluster runs code for anyone who reaches its ports, which are open on all networks. Ray reads the token when it is
    imported; versions before 2.52 have no tokens.
    """
    if "ray" not in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token_hex(32)}


def _line(error: BaseException) -> str:
    """Return the first line of an error, because Ray appends the traceback of the worker."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
