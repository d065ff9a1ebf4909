"""Benchmarks: how fast models run side by side, and why one is slower than it should be.

Their results are here: frozen records, which reports print and save. Times are in seconds, memory is in bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from onnxamp._base.public import Shown
from onnxamp._base.records import record

SAME: Final = 0.02
"""The share by which two sessions of the same model may differ permanently, because their weights are at different
addresses. Of 18 pairs on one CPU thread, two differed by 2 %, and four by more than their interval.
"""


@record
class Latency:
    """Seconds per run: the first run at this shape, and quantiles of ``runs`` runs after warming up."""

    first: float
    median: float
    p90: float
    p99: float
    runs: int


@record
class TimeRatio:
    """How many times as fast as the first model a model is: the median over rounds, and its 95 % interval (bootstrap).

    ``spread`` is how far single rounds are from the median: half the distance between the 10th and the 90th percentile.
    """

    value: float
    low: float
    high: float
    spread: float = 0.0

    @property
    def is_slower(self) -> bool:
        """Whether the model is slower than the first one by more than the spread and the noise between sessions."""
        return self.high < 1 and self.value + max(self.spread, SAME) < 1

    @property
    def is_faster(self) -> bool:
        """Whether the model is faster than the first one by more than the same limits."""
        return self.low > 1 and self.value - max(self.spread, SAME) > 1


@record
class Timing:
    """One model at one batch size.

    Attributes:
        model: the label of the model.
        batch: the batch size; None for the inputs as given.
        latency: seconds per run.
        throughput: samples per second (batch over median latency); runs per second without a batch size.
        speedup: the speedup over the first model; None for the first model itself.
    """

    model: str
    batch: int | None
    latency: Latency
    throughput: float
    speedup: TimeRatio | None


@record
class OpTime:
    """The time that the nodes of one op type, provider and float type took in a profiled run.

    Attributes:
        op: the op type that ONNX Runtime executes: fused ops have the name of the fusion.
        provider: "CUDA" or "CPU".
        dtype: the lowest float type the nodes read or write; "no floats" if there is none.
        nodes: the number of nodes.
        seconds: the total time in one run; None if the engine does not report it.
    """

    op: str
    provider: str
    dtype: str
    nodes: int
    seconds: float | None


@record
class Bench:
    """The measurements of one model that do not depend on the batch size.

    Attributes:
        model: the label: the path, or the number and the name of the graph.
        options: the options of the CUDA provider; on CPU, the number of threads.
        lowest: the model's lowest float type.
        load: seconds to create the session.
        assigned: the number of nodes by provider, before fusions that depend on the provider.
        memory: bytes of device memory beyond the CUDA context; None on CPU and without a profile.
        ops: the ops that ran, slowest first; empty without a profile.
        kinds: op type -> number of nodes of the model itself.
        odd: op type -> number of low-precision convolutions and products whose channels are not a multiple of 8.
        disabled: graph optimizers of ONNX Runtime that did not run because they break the model.
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
    disabled: tuple[str, ...] = ()


@record
class Slowdown:
    """Something that slows a model down. :mod:`onnxamp._numerics.speed.timing` lists the kinds."""

    model: str
    kind: str
    text: str
    action: str


@dataclass(frozen=True, slots=True, repr=False)
class BenchReport(Shown):
    """The times of models on the same inputs, side by side.

    Attributes:
        ran_on: "CUDA (name of the device)", "CPU", or the name of another engine and its device.
        runtime: ONNX Runtime and its version.
        inputs: description of the inputs.
        models: one entry per model, the reference first.
        timings: one entry per model and batch size.
        profiled: batch size of the profiles; None for the inputs as they are.
        slower: labels of models that are slower than the first at some batch size, by more than the measured spread.
        causes: the causes that slow the models down.
        notes: remarks for interpreting the numbers.

    Example:
        >>> from onnxamp import BenchOptions, bench_models
        >>> quick = BenchOptions(seconds=0.1, profile=False)
        >>> report = bench_models("models/encoder.onnx", provider="cpu", options=quick)
        >>> report.ran_on, len(report.models), report.slower
        ('CPU', 1, ())
    """

    ran_on: str
    runtime: str
    inputs: str
    models: tuple[Bench, ...]
    timings: tuple[Timing, ...]
    profiled: int | None
    slower: tuple[str, ...]
    causes: tuple[Slowdown, ...]
    notes: tuple[str, ...]
