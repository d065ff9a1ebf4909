"""What a benchmark returns: frozen records, which the reports print and save."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of one run: the first at this shape, and quantiles of ``runs`` runs after warming up."""

    first: float
    median: float
    p90: float
    p99: float
    runs: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as fast as the first model: the median over rounds, and its 95 % interval (bootstrap)."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One model at one batch size (None: the inputs as they were given)."""

    model: str
    batch: int | None
    latency: Latency
    throughput: float
    """Samples per second: batch over the median; runs per second without a batch."""
    speedup: Ratio | None
    """None for the first model."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """What nodes of one op type, provider and type took in one profiled run; fused ops go by what they became.

    ``dtype`` is the lowest float type that they read or make, "no floats" where there is none.
    """

    op: str
    provider: str
    dtype: str
    nodes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Bench:
    """One model: what loading it took, and, where it was profiled, its memory and the ops that ran.

    ``options`` are those of the CUDA provider, or the number of threads. ``lowest`` is the model's lowest float type.
    ``assigned`` counts nodes per provider, before those fusions that depend on the provider. ``memory`` is what it took
    of the device's memory, beyond the CUDA context; None on CPU. ``kinds`` counts its own nodes per op type; ``odd``
    low convolutions and products with channels that are no multiple of 8.
    """

    model: str
    options: Mapping[str, str]
    lowest: str
    load: float
    assigned: Mapping[str, int]
    memory: int | None = None
    ops: tuple[OpTime, ...] = ()
    kinds: Mapping[str, int] | None = None
    odd: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class Cause:
    """Something that costs a model time: ``kind`` is one of those that :mod:`onnxamp._bench.causes` lists."""

    model: str
    kind: str
    text: str
    action: str


@dataclass(frozen=True, slots=True)
class BenchReport:
    """Models beside each other, all on the same inputs.

    ``ran_on`` is "CUDA (device)" or "CPU"; ``profiled`` is the batch that the
    op times are of. ``slower`` names models that are slower than the first at some batch.
    """

    ran_on: str
    runtime: str
    inputs: str
    models: tuple[Bench, ...]
    timings: tuple[Timing, ...]
    profiled: int | None
    slower: tuple[str, ...]
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
