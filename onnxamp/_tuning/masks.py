"""Mask runs by worker processes: each runs one choice on one sample, with sessions that serve all choices."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from secrets import token_hex
from typing import Final, NamedTuple

import numpy as np

from onnxamp._dtypes import low_type
from onnxamp._errors import RuntimeFailure
from onnxamp._model.blobs import Bits
from onnxamp._ops.profiles import Profile
from onnxamp._runtime.custom_ops import Surroundings
from onnxamp._runtime.loop import SentSample, remembered, sent_samples
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.sent import SentModel
from onnxamp._runtime.switch import Ports
from onnxamp._tuning.metric import Metric
from onnxamp._tuning.runs import MaskedModel
from onnxamp._workers.executor import Crash, Memory, Workers, run_in_order

_MASKED: Final = "tuning switches"
"""Where a worker remembers the switched model while it does something else."""


class MaskItem(NamedTuple):
    """A choice on a sample: its position among those of the work, and a bit for each node that has a switch."""

    position: int
    low: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskWork:
    """:meth:`MaskedModel.error` on one sample, in worker processes."""

    model: SentModel
    ports: Mapping[str, Ports]
    low: str
    metric: Metric
    samples: Sequence[SentSample]
    budget: int
    threads: int
    arithmetic: Profile | None
    rounded: Mapping[str, Bits]
    key: str = field(default_factory=token_hex)
    """Stands for all of it in the memory of workers."""
    surroundings: Surroundings = field(default_factory=Surroundings.here)

    def __call__(self, memory: Memory) -> Callable[[MaskItem], float]:
        """Read the model, and prepare its switches for the first sample."""
        self.surroundings.enter()
        masked = remembered(memory, _MASKED, self.key, self._prepared)
        keys = list(self.ports)

        def error(item: MaskItem) -> float:
            bits = np.unpackbits(np.frombuffer(item.low, np.uint8), count=len(keys))
            low = frozenset(key for key, bit in zip(keys, bits.tolist(), strict=True) if bit)
            return masked.error(low, [item.position])

        return error

    def _prepared(self) -> MaskedModel:
        masked = MaskedModel(
            model=self.model.opened(),
            ports=self.ports,
            low=low_type(self.low),
            samples=Samples("", [item.read for item in self.samples]),
            metric=self.metric,
            budget=self.budget,
            threads=self.threads,
            arithmetic=self.arithmetic,
            rounded=self.rounded,
        )
        masked.prepare(range(len(self.samples)))
        return masked


@dataclass(slots=True)
class SharedMasks:
    """What :class:`MaskedModel` does, shared by workers: the samples of a choice, and choices that are independent."""

    workers: Workers
    work: MaskWork
    runs: int = 0

    @classmethod
    def of(cls, masked: MaskedModel, subset: Sequence[int], workers: Workers) -> "SharedMasks":
        """Share a model.

        Args:
            masked: what is shared.
            subset: the samples of all runs.
            workers: who runs them.
        """
        work = MaskWork(
            model=SentModel.of(masked.model),
            ports=masked.ports,
            low=masked.low.name,
            metric=masked.metric,
            samples=tuple(sent_samples(masked.samples, subset, workers)),
            budget=masked.budget,
            threads=masked.threads,
            arithmetic=masked.arithmetic,
            rounded=masked.rounded,
        )
        return cls(workers, work)

    def errors(
        self, choices: Sequence[AbstractSet[str]], samples: Sequence[int]
    ) -> Iterator[float]:
        """As :meth:`MaskedModel.errors`, for the samples of the work.

        Raises:
            RuntimeFailure: the model does not run in float32, or a sample ends the processes that run it.
        """
        positions = {item.number: position for position, item in enumerate(self.work.samples)}
        keys = list(self.work.ports)
        items = (
            MaskItem(positions[number], bits)
            for low in choices
            for bits in (np.packbits([key in low for key in keys]).tobytes(),)
            for number in samples
        )
        self.runs += not self.runs  # that of the float32 model
        with closing(run_in_order(self.workers, self.work, items)) as results:
            for _ in choices:
                self.runs += 1
                found = list(islice(results, len(samples)))
                for number, one in zip(samples, found, strict=True):
                    if isinstance(one, Crash):
                        which = f"Sample {number + 1} cannot be run with switches."
                        raise RuntimeFailure(f"{which} {one} Leave it out of the inputs.")
                yield max(found)
