"""Where work is done: in processes of this machine, or in those of a cluster."""

from collections.abc import Iterator
from contextlib import closing, contextmanager

from onnxamp._base.errors import ArgumentError
from onnxamp._base.executor import Workers
from onnxamp._base.extensions import extensions
from onnxamp._base.numbers import WHOLE, checked_number
from onnxamp._base.processes import Processes
from onnxamp._base.records import record
from onnxamp._base.threads import core_count


@record
class Place:
    """The worker processes to use.

    Attributes:
        jobs: the number of workers; None for one per processor.
        cluster: the Ray cluster that they belong to: "local" for one that is started on this machine, or an address.
            None for processes of this machine, without Ray.

    Raises:
        ArgumentError: a value is invalid. ArgumentTypeError: it is of another type.
    """

    jobs: int | None = None
    cluster: str | None = None

    def __post_init__(self) -> None:
        if self.jobs is not None:
            what = "a whole number of at least 1"
            checked_number("jobs", self.jobs, what, lambda n: n >= 1, WHOLE)
        if self.cluster is not None and not self.cluster:
            raise ArgumentError(
                "The cluster has no address: write 'local', or that of a Ray cluster."
            )

    @contextmanager
    def workers(
        self, most: int | None = None, gpus: int = 0, *, once: bool = False
    ) -> Iterator[Workers]:
        """Provide the workers within a ``with`` block.

        Args:
            most: the maximum number of workers that can be used.
            gpus: the GPUs of a cluster that each worker uses.
            once: whether each worker ends after one item.

        Raises:
            MissingPackageError: the package for clusters is not installed. RuntimeFailure: there is no cluster.
        """
        workers: Workers
        if self.cluster is not None:
            cluster = extensions("workers")["cluster"].load("--cluster needs")
            workers = cluster.connect(self.cluster, self.jobs, most, gpus, once=once)
        else:
            cores = core_count()
            wanted = self.jobs or cores
            count = max(1, min(wanted, most or wanted))
            # Workers share the cores: more threads in all than cores would slow down each other.
            workers = Processes(count, max(1, cores // count), once)
        with closing(workers):
            yield workers

    @contextmanager
    def sharing(
        self, items: int | None = None, gpus: int = 0
    ) -> Iterator[Workers | None]:
        """Provide the workers for this many items, if known; None if this process does them: one item, or by default.

        Raises:
            As :meth:`workers`.
        """
        is_wanted = self.jobs is not None or self.cluster is not None
        if is_wanted and (items is None or items > 1):
            with self.workers(items, gpus) as workers:
                yield workers
        else:
            yield None
