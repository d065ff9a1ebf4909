"""Estimated time of a node by the roofline model (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009).

Time = max(bytes / bandwidth, flops / throughput), in microseconds, without the launch of the kernel. Views move
nothing, and lookups read only the rows that they return, not their whole table.
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import Final, NamedTuple

from onnxamp._dtypes import FLOAT32_BYTES, Format
from onnxamp._errors import ArgumentError
from onnxamp._graph.constants import expected_terms
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import op_facts
from onnxamp._ops.targets import read_table

DEFAULT_DEVICE: Final = "A100"
"""The device for estimates if none of ``_data/devices.toml`` is installed."""


class Device(NamedTuple):
    """The speed of a device: ``bandwidth`` in bytes, the others in floating-point operations, per microsecond.

    ``products`` is for sums of products in float32, ``float32`` for all other work in float32.
    """

    name: str
    bandwidth: float
    float32: float
    products: float
    low: float


@cache
def devices() -> Mapping[str, Device]:
    """Return the devices of ``_data/devices.toml``, by name."""
    rows = read_table("devices").items()
    rates = ("float32", "products", "low")
    return {
        name: Device(name, row["bandwidth"] * 1e3, *(row[rate] * 1e6 for rate in rates))
        for name, row in rows
    }


def device_called(name: str) -> Device:
    """Return the device with this name.

    Raises:
        ArgumentError: there is no such device.
    """
    device = devices().get(name)
    if device is None:
        raise ArgumentError(
            f"Unknown device {name!r}: choose one of {', '.join(devices())}."
        )
    return device


def device_titled(title: str) -> str:
    """Return the device with this title in drivers, such as "NVIDIA A100-SXM4-80GB"; the default device if unknown."""
    words = title.replace("-", " ").split()
    return next((name for name in devices() if name in words), DEFAULT_DEVICE)


class Work(NamedTuple):
    """The work of a node in one run: elements that it reads and writes, and floating-point operations.

    ``products`` means that the operations are sums of products, which tensor cores compute.
    """

    elements: int
    flops: int
    products: bool = False

    def time(self, device: Device, *, low: Format | None) -> float:
        """Return the microseconds on a device in a format (None for float32), without the launch of the kernel."""
        traffic = (
            (low.bytes if low else FLOAT32_BYTES) * self.elements / device.bandwidth
        )
        rate = (
            device.low if low else device.products if self.products else device.float32
        )
        return max(traffic, self.flops / rate)


def work_of(node: Node, shapes: Sequence[Shape | None], trips: int = 1) -> Work:
    """Return the work of a node that runs ``trips`` times, from the shapes of its values."""
    terms = expected_terms(node, shapes)
    sizes = [0 if value == ABSENT else elements(shapes[value]) for value in node.inputs]
    made = [0 if value == ABSENT else elements(shapes[value]) for value in node.outputs]
    return _work(node.key, tuple(sizes), sum(made), terms, trips)


@lru_cache(maxsize=1 << 12)
def _work(
    key: str, read: tuple[int, ...], written: int, terms: int | None, trips: int
) -> Work:
    """Return the work of a node, given the elements that it reads and writes; cached, because a model repeats these."""
    if key in op_facts().views:
        return Work(0, 0)
    tables = {lookup.table for lookup in op_facts().lookups.get(key, ())}
    touched = sum(size for port, size in enumerate(read) if port not in tables)
    touched += written * (1 + bool(tables))
    flops = written * (1 if terms is None else 2 * terms) * trips
    return Work(touched * trips, flops, terms is not None)


LAUNCH: Final = 64
"""Fixed cost of a Cast, in cost units, for launching a kernel."""
MAX_ELEMENTS: Final = 1 << 32
"""Most elements of a value that count; larger numbers are guesses about open dimensions."""


class Costs(NamedTuple):
    """The costs on one target, from its ``target.toml``.

    Attributes:
        bytes_per_unit: memory traffic in bytes that takes as long as one cost unit.
        memory: the number of times that each byte of a weight counts as if a Cast moved it.
        launch: microseconds to start a Cast.
        bandwidth: bytes per microsecond at which a Cast reads and writes.
        host: bytes per microsecond at which nodes without a kernel on the target transfer their values to the CPU,
            compute there, and transfer them back; 0 if the target is the CPU.
    """

    bytes_per_unit: int
    memory: float
    launch: float
    bandwidth: float
    host: float

    @classmethod
    def of(cls, row: Mapping[str, float]) -> "Costs":
        """Return the costs from a table ``[costs]``."""
        unit = round(row["launch"] * row["bandwidth"] * 1e3 / LAUNCH)
        return cls(
            unit,
            row["memory"],
            row["launch"],
            row["bandwidth"] * 1e3,
            row.get("host", 0) * 1e3,
        )

    def host_time(self, size: int) -> float:
        """Return the microseconds for a node on the CPU with ``size`` bytes of inputs and outputs."""
        return size / self.host if self.host else 0.0

    def cast(self, count: int, trips: int, low: Format) -> int:
        """Return the cost of running a Cast of ``count`` elements between float32 and a format ``trips`` times."""
        return (
            LAUNCH
            + (FLOAT32_BYTES + low.bytes)
            * min(count, MAX_ELEMENTS)
            // self.bytes_per_unit
        ) * trips

    def traffic(self, size: int) -> int:
        """Return the cost of moving ``size`` bytes."""
        return size // self.bytes_per_unit

    def stored(self, size: int) -> int:
        """Return the cost of holding ``size`` bytes of weights."""
        return int(size * self.memory) // self.bytes_per_unit
