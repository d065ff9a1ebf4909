"""Estimated time of a node by the roofline model (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009).

Time = max(bytes / bandwidth, flops / throughput), in microseconds, without the launch of the kernel. Views move
nothing, and look-ups read the rows that they return, not their table.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Final

from onnxamp._errors import ArgumentError
from onnxamp._graph.shapes import DEFAULT_DIMENSION, Shape, elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import attribute, op_facts
from onnxamp._ops.tables import read_table

DEFAULT_DEVICE: Final = "A100"


@dataclass(frozen=True, slots=True)
class Device:
    """``bandwidth`` in bytes per microsecond; ``float32`` and ``low`` in floating-point operations per microsecond."""

    name: str
    bandwidth: float
    float32: float
    low: float


@cache
def devices() -> Mapping[str, Device]:
    """The devices of ``_data/devices.toml``, by name."""
    rows = read_table("devices").items()
    return {name: Device(name, row["bandwidth"] * 1e3, row["float32"] * 1e6, row["low"] * 1e6) for name, row in rows}


def device_called(name: str) -> Device:
    """The device of that name.

    Raises:
        ArgumentError: there is none.
    """
    device = devices().get(name)
    if device is None:
        raise ArgumentError(f"Unknown device {name!r}: choose one of {', '.join(devices())}.")
    return device


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a node in one run: elements that it reads and writes, and floating-point operations."""

    elements: int
    flops: int

    def time(self, device: Device, *, low: bool) -> float:
        """Microseconds on a device, without the launch of the kernel."""
        traffic = (2 if low else 4) * self.elements / device.bandwidth
        return max(traffic, self.flops / (device.low if low else device.float32))


def work_of(node: Node, shapes: Sequence[Shape | None], trips: int = 1) -> Work:
    """The work of a node that runs ``trips`` times, from the shapes of its values."""
    if node.key in op_facts().views:
        return Work(0, 0)
    tables = {lookup.table for lookup in op_facts().lookups.get(node.key, ())}
    read = [value for port, value in enumerate(node.inputs) if value != ABSENT and port not in tables]
    touched = sum(elements(shapes[value]) for value in (*read, *node.outputs) if value != ABSENT)
    written = sum(elements(shapes[value]) for value in node.outputs if value != ABSENT)
    flops = _FLOPS.get(node.key)
    return Work(
        (touched + written * bool(tables)) * trips, written * (flops(node, shapes) if flops is not None else 1) * trips
    )


def terms_of(node: Node, shapes: Sequence[Shape | None]) -> int | None:
    """How many products each element of the output sums up; None for ops that do not, and where sizes are unknown."""
    flops = _FLOPS.get(node.key)
    sizes = shapes[node.input(1)] if flops is not None and node.input(1) != ABSENT else None
    return None if flops is None or sizes is None or None in sizes else flops(node, shapes) // 2


def _inner(node: Node, shapes: Sequence[Shape | None]) -> int:
    """A multiplication and an addition per element of the first factor's last axis."""
    return 2 * _axis(shapes[node.input(0)], -1)


def _gemm(node: Node, shapes: Sequence[Shape | None]) -> int:
    return 2 * _axis(shapes[node.input(0)], 0 if attribute(node.proto, "transA") else -1)


def _conv(node: Node, shapes: Sequence[Shape | None]) -> int:
    """A multiplication and an addition per element of a filter."""
    weight = shapes[node.input(1)]
    return 2 * prod(_axis(weight, axis) for axis in range(1, len(weight))) if weight else 2


def _axis(shape: Shape | None, axis: int) -> int:
    size = shape[axis] if shape and len(shape) > max(axis, 0) else None
    return DEFAULT_DIMENSION if size is None else size


_FLOPS: Final[Mapping[str, Callable[[Node, Sequence[Shape | None]], int]]] = {
    "MatMul": _inner,
    "com.microsoft::FusedMatMul": _inner,
    "Gemm": _gemm,
    "Conv": _conv,
    "ConvTranspose": _conv,
}
"""Op -> floating-point operations per element of its output; 1 for all others."""
