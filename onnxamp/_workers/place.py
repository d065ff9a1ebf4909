"""Where work goes: the one meaning of ``--jobs`` and ``--cluster``."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass

from onnxamp._errors import ArgumentError
from onnxamp._workers.cluster import Cluster, connect
from onnxamp._workers.executor import Workers
from onnxamp._workers.processes import Processes
from onnxamp._workers.threads import core_count


@dataclass(frozen=True, slots=True)
class Place:
    """Worker processes to use.

    Attributes:
        jobs: how many; None for one per processor.
        cluster: the Ray cluster that they are of: "local" for one that is started on this machine, or an address. None
            for processes of this machine, without Ray.

    Raises:
        ArgumentError: a value is wrong.
    """

    jobs: int | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise ArgumentError(f"jobs must be at least 1, but is {self.jobs}.")
        if self.cluster is not None and not self.cluster:
            raise ArgumentError(
                "The cluster has no address: write 'local', or that of a Ray cluster."
            )

    @contextmanager
    def workers(
        self, most: int | None = None, gpus: int = 0, *, once: bool = False
    ) -> Iterator[Processes | Cluster]:
        """The workers, for the length of a ``with`` block.

        Args:
            most: how many can be used.
            gpus: GPUs that each of them takes from a cluster.
            once: whether each does one item, and ends.

        Raises:
            As :func:`onnxamp._workers.cluster.connect`.
        """
        with closing(self._opened(most, gpus, once)) as workers:
            yield workers

    @contextmanager
    def sharing(self, items: int | None = None, gpus: int = 0) -> Iterator[Workers | None]:
        """The workers for so many items, if that is known; None where this process does them: for one, and by default.

        Raises:
            As :meth:`workers`.
        """
        if (self.jobs is None and self.cluster is None) or (items is not None and items < 2):
            yield None
            return
        with self.workers(items, gpus) as workers:
            yield workers

    def _opened(self, most: int | None, gpus: int, once: bool) -> Processes | Cluster:
        if self.cluster is not None:
            return connect(self.cluster, self.jobs, most, gpus, once=once)
        cores = core_count()
        count = max(
            1, min(self.jobs or cores, most or cores if self.jobs is None else most or self.jobs)
        )
        return Processes(count, max(1, cores // count), once)
