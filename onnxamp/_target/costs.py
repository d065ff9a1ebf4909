"""What Casts and the bytes of weights cost on each target, in units of the minimum cut: 64ths of a Cast's launch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from onnxamp._dtypes import FLOAT32_BYTES, Format

LAUNCH: Final = 64
"""Fixed cost of a Cast in cost units: launching a kernel."""
MAX_ELEMENTS: Final = 1 << 32
"""Elements of a value that count; more are guesses about open dimensions."""


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs on one target, as its ``target.toml`` has them.

    Attributes:
        bytes_per_unit: memory traffic in bytes that takes as long as one cost unit.
        memory: how often a byte that a weight occupies counts as if a Cast moved it.
        launch: microseconds to start a Cast.
        bandwidth: bytes per microsecond at which a Cast reads and writes.
        host: bytes per microsecond at which nodes without a kernel on the target take their values over to the CPU,
            compute there, and give them back; 0 if the target is the CPU.
    """

    bytes_per_unit: int
    memory: float
    launch: float
    bandwidth: float
    host: float

    @classmethod
    def of(cls, row: Mapping[str, float]) -> "Costs":
        """The costs in a table ``[costs]``."""
        unit = round(row["launch"] * row["bandwidth"] * 1e3 / LAUNCH)
        return cls(
            unit, row["memory"], row["launch"], row["bandwidth"] * 1e3, row.get("host", 0) * 1e3
        )

    def host_time(self, size: int) -> float:
        """Microseconds for a node on the CPU with ``size`` bytes of inputs and outputs."""
        return size / self.host if self.host else 0.0

    def cast(self, count: int, trips: int, low: Format) -> int:
        """Cost of running a Cast of ``count`` elements between float32 and a format ``trips`` times."""
        return (
            LAUNCH + (FLOAT32_BYTES + low.bytes) * min(count, MAX_ELEMENTS) // self.bytes_per_unit
        ) * trips

    def traffic(self, size: int) -> int:
        """Cost of moving ``size`` bytes."""
        return size // self.bytes_per_unit

    def stored(self, size: int) -> int:
        """Cost of holding ``size`` bytes of weights."""
        return int(size * self.memory) // self.bytes_per_unit
