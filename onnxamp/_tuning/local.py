"""The instrumented pass: every op of the lowered model replayed on the float32 model's values, sample by sample.

What a sample gives is added to what earlier ones gave, so that a pass can stop after any of them and go on later.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Final, TypeAlias

from onnx import ModelProto

from onnxamp._dtypes import LowType
from onnxamp._errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._numerics.measure import Measurement
from onnxamp._numerics.walk import Pairing, SideBySide, pair
from onnxamp._runtime.engines import Executable, OutputCache, part_of
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.samples import Samples
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.units import Unit

Told: TypeAlias = Callable[[str, int, int], None]
"""Called with what is being done, how far it is, and how far it will go. Behind a colon stands what changes."""

_HEADROOM: Final = 4.0
"""Values of other samples may be that much larger than those that were measured."""

_BROKEN_ABOVE: Final = 0.1
"""Relative L2 error of an op on its own from which on it stays float32."""


@dataclass(frozen=True, slots=True)
class Local:
    """What the pass showed of a unit: its own relative error, the largest magnitude, and why it must stay float32."""

    error: float
    largest: float
    broken: str | None


@dataclass(slots=True)
class Tally:
    """What the pass has given so far: the number of samples, by value what its op does to it, and the worst error of
    the outputs when everything is low, emulated.
    """

    samples: int = 0
    values: dict[str, Measurement] = field(default_factory=dict)
    worst: float = 0.0


def measure_samples(
    tally: Tally,
    model: ModelProto,
    lowered: ModelProto,
    units: Sequence[Unit],
    samples: Samples,
    metric: Metric,
    told: Told,
    saved: Callable[[], None],
    references: OutputCache,
) -> None:
    """Add the samples that a tally lacks to it; ``saved`` is called behind each. ``references`` get their outputs.

    Raises:
        RuntimeFailure: the model does not run.
    """
    names = {name for unit in units for name in unit.names}

    def paired(reference: Flow, result: Flow) -> Pairing:
        found = pair(reference, result)
        shared = {name: replay for name, replay in found.shared.items() if name in names and replay is not None}
        return Pairing(shared, found.replaceable, accumulated=False)

    one, other = (Executable(Model(proto), "cpu", emulated=True, whole=False) for proto in (model, lowered))
    walk = SideBySide(one, other, paired)
    for number in range(tally.samples, len(samples)):
        feeds = check_inputs(model, samples[number])
        progress = partial(told, f"measuring each op: sample {number + 1} of {len(samples)}")
        try:
            walked = walk.run(feeds, part_of(progress, number, len(samples)))
        except RuntimeFailure as error:
            raise RuntimeFailure(samples.failure("The model does not run", error, number)) from error
        for name, row in walked.compared.items():
            if row.local is not None:
                tally.values[name] = tally.values[name] + row.local if name in tally.values else row.local
        found = inf
        if walked.failure is None:
            found = metric.error(walked.reference, walked.result)
            references.keep(number, walked.reference)
        tally.samples, tally.worst = number + 1, max(tally.worst, found)
        saved()


def local_of(unit: Unit, values: Mapping[str, Measurement], low: LowType) -> Local:
    """What the measurements say of a unit."""
    mine = [values[name] for name in unit.names if name in values]
    if not mine:  # in the body of a loop, or made of values that only the lowered model has
        return Local(low.epsilon / 2, 0.0, None)
    error, largest = max(m.rel_l2 for m in mine), max(m.reference_max for m in mine)
    alarm = next((m.alarm for m in mine if m.alarm), None)
    if alarm is not None:
        return Local(error, largest, alarm)
    if error > _BROKEN_ABOVE:
        return Local(error, largest, f"it is off by {error:.0%} on its own")
    if largest * _HEADROOM > low.max_finite:
        return Local(error, largest, f"it reaches {largest:.4g}: {low.name} ends at {low.max_finite:.6g}")
    return Local(max(error, low.epsilon / 64), largest, None)
