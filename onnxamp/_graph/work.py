"""The work of a node, and the time that a device takes for it.

Times are estimated by the roofline model (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009): time =
max(bytes / bandwidth, flops / throughput), in microseconds, without the launch of the kernel. Views move nothing, and
lookups read only the rows that they return, not their whole table.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from onnxamp._facts.devices import Device
from onnxamp._facts.dtypes import FLOAT32_BYTES, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.constants import expected_terms
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.view import ABSENT, Node


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
    sizes = [
        0 if value == ABSENT else elements(shapes[value]) for value in node.inputs
    ]
    written = [
        0 if value == ABSENT else elements(shapes[value]) for value in node.outputs
    ]
    return work_with(node.key, tuple(sizes), sum(written), terms, trips)


@lru_cache(maxsize=1 << 12)
def work_with(
    key: str, read: tuple[int, ...], written: int, terms: int | None, trips: int
) -> Work:
    """Return the work of a node, given the elements that it reads and writes; cached, because a model repeats these."""
    if key in op_facts().views:
        return Work(0, 0)
    tables = {lookup.table for lookup in op_facts().lookups.get(key, ())}
    touched = sum(size for port, size in enumerate(read) if port not in tables)
    # A look-up reads a row for each row that it writes.
    touched += written * (1 + bool(tables))
    # Each term of a sum of products takes a multiplication and an addition.
    flops = written * (1 if terms is None else 2 * terms) * trips
    return Work(touched * trips, flops, terms is not None)
