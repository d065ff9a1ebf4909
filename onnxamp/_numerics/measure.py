"""Reducing a pair of tensors to a few numbers where the tensors are, without a copy in Python.

Each pair runs through a small ONNX model, so that the reductions happen on the device on CUDA, and use all cores on
CPU. Sums are in float64, and measurements of several samples add up.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from math import inf, isfinite, prod, sqrt
from operator import add, attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from onnxamp._model.statistics import SENTINEL
from onnxamp._numerics.metrics import (
    COUNTS,
    FIELDS,
    FLOATS,
    NO_LEAST,
    VANISHED_ABOVE,
    Kind,
    Sums,
    decibels,
    meter,
)
from onnxamp._runtime.session import Provider, memory_of

if TYPE_CHECKING:
    import onnxruntime as ort


@dataclass(frozen=True, slots=True)
class Measurement:
    """How a tensor *f* differs from its reference *r*, over one or more samples of the same value.

    Energies are sums of squares over elements where f is finite and |r| < 1e30: larger numbers are sentinels, as in
    attention masks, and may saturate. Counts are numbers of elements.
    """

    elements: int
    error_sum: float
    """sum of |f - r|"""
    error_energy: float
    """sum of (f - r)^2"""
    error_max: float
    """max |f - r|"""
    reference_energy: float
    """sum of r^2"""
    found_energy: float
    """sum of f^2"""
    reference_max: float
    """max |r| below 1e30"""
    found_max: float
    """max |f| over finite f"""
    reference_least: float
    """min |r| below 1e30 that is not zero; inf where there is none"""
    reference_nan: int
    found_nan: int
    reference_inf: int
    found_inf: int
    reference_zero: int
    found_zero: int
    broken: int
    """f is NaN where r is none, or infinite where |r| < 1e30"""
    flushed: int
    """f is zero where r is not"""
    vanished: int
    """f is zero where |r| is more than 5 % of ``reference_max``"""

    @property
    def sums(self) -> Sums:
        """What metrics derive from."""
        return Sums(
            elements=self.elements,
            error_sum=self.error_sum,
            error_norm=sqrt(self.error_energy),
            reference_norm=sqrt(self.reference_energy),
            dot=(self.reference_energy + self.found_energy - self.error_energy) / 2,
            dot_energies=(self.reference_energy, self.found_energy),
            is_comparable=self.elements > 0 and isfinite(self.error_energy),
        )

    @property
    def rel_l2(self) -> float:
        """Relative L2 error as :attr:`Sums.rel_l2`; infinite if f breaks."""
        return inf if self.broken else self.sums.rel_l2

    @property
    def snr_db(self) -> float:
        """Signal-to-noise ratio, -20 log10 of :attr:`rel_l2`, in decibels; inf if equal."""
        return decibels(self.rel_l2)

    @property
    def cosine(self) -> float:
        """Cosine as :attr:`Sums.cosine`, over finite elements."""
        return self.sums.cosine

    @property
    def mean_abs(self) -> float:
        """Mean |f - r|."""
        return self.sums.mean_abs

    @property
    def alarm(self) -> str | None:
        """How f fails whatever the tolerance, in a few words: NaN, Inf, or vanished values."""
        new = self.found_nan - self.reference_nan
        if new > 0:
            return f"NaN in {new} of {self.elements} elements"
        if self.broken and self.found_inf <= self.reference_inf:
            return f"NaN in {self.broken} of {self.elements} elements, where the reference has none"
        if self.broken:
            return f"Inf in {self.broken} of {self.elements} elements, where the largest is {self.reference_max:.4g}"
        if self.vanished:
            return f"{self.vanished} of {self.elements} elements vanished: zero, where the reference is not small"
        return None

    def __add__(self, other: "Measurement") -> "Measurement":
        """Both together: sums add, maxima and minima are the outer ones."""
        pairs = zip(_JOINS, _numbers(self), _numbers(other), strict=True)
        return Measurement(*[join(one, more) for join, one, more in pairs])

    def __reduce__(self) -> tuple[type["Measurement"], tuple[Any, ...]]:
        """Pickled as its numbers alone: workers send one for each value of each sample."""
        return Measurement, _numbers(self)

    def times(self, factor: float) -> "Measurement":
        """What multiples of both tensors would show, by a positive factor."""
        if factor == 1:
            return self
        sizes = {name: getattr(self, name) * factor for name in ("error_sum", *_JOIN)}
        energies = ("error_energy", "reference_energy", "found_energy")
        return replace(
            self,
            **sizes,
            **{name: getattr(self, name) * factor**2 for name in energies},
        )


_JOIN = {
    "error_max": max,
    "reference_max": max,
    "found_max": max,
    "reference_least": min,
}
"""How a field of two samples becomes one; all others add up."""

_NAMES: Final = tuple(field.name for field in fields(Measurement))
_JOINS: Final = tuple(_JOIN.get(name, add) for name in _NAMES)
_numbers: Final[Callable[[Measurement], tuple[Any, ...]]] = attrgetter(*_NAMES)


_BLOCK: Final = 1 << 17
"""Elements that are measured at a time: the temporaries, up to 100 bytes for each, stay in the cache."""


def measure(
    reference: "ort.OrtValue", found: "ort.OrtValue", provider: Provider = "cpu"
) -> Measurement:
    """Measure one pair of tensors.

    Args:
        reference: floats of any width, integers or booleans, on the provider's device or on the host.
        found: the same shape, of any such type.
        provider: where the values come from; the reductions run where it leaves them.

    Raises:
        RuntimeFailure: the tensors are of kinds that cannot be compared (strings).

    Complexity: linear in elements, with temporaries for a fixed number of them.
    """
    elements, types = (
        prod(reference.shape()),
        (reference.data_type(), found.data_type()),
    )
    pair = {"reference": reference, "found": found}
    if not elements:
        return _NOTHING
    total = reduce(
        add, (_block(pair | bounds, types, provider) for bounds in _blocks(elements))
    )
    vanished = 0
    if total.flushed:  # rare: the threshold takes a second pass
        pair["threshold"] = _value(np.array(VANISHED_ABOVE * total.reference_max))
        vanished = int(
            sum(
                _run("vanished", pair | bounds, types, provider)[0]
                for bounds in _blocks(elements)
            )
        )
    return replace(total, elements=elements, vanished=vanished)


def _block(
    feeds: "dict[str, ort.OrtValue]", types: tuple[str, str], provider: Provider
) -> Measurement:
    """Measure one block: in float32 if all is ordinary, else in float64 and with masks for what is not finite."""
    if FLOATS.issuperset(types):
        numbers = _run("quick", feeds, types, provider)
        found = Measurement(
            elements=0, vanished=0, **_facts("quick", numbers) | _ORDINARY
        )
        largest = (found.error_max, found.reference_max, found.found_max)
        if all(
            number == 0 or _LEAST_QUICK < number < _MOST_QUICK
            for number in (*numbers, *(x * x for x in largest))
        ):
            return found
    return Measurement(
        elements=0,
        vanished=0,
        **_facts("measure", _run("measure", feeds, types, provider)),
    )


_LEAST_QUICK: Final = 1e-30
_MOST_QUICK: Final = SENTINEL
"""Where all sums and squares are between these, or zero, float32 is enough. NaN and infinities are beyond."""

_ORDINARY: Final = dict.fromkeys(
    ("reference_nan", "found_nan", "reference_inf", "found_inf", "broken"), 0
)
"""What a block counts where all is finite."""

_ZEROS: Final[dict[str, Any]] = {
    name: 0 if name in ("elements", *COUNTS) else 0.0 for name in _NAMES
}
_NOTHING: Final = Measurement(**_ZEROS | {"reference_least": inf})
"""The measurement of an empty tensor."""


def _facts(kind: Kind, numbers: Sequence[float]) -> dict[str, Any]:
    """Fields of a measurement, in their types."""
    pairs = zip(FIELDS[kind], numbers, strict=True)
    facts: dict[str, Any] = {name: int(x) if name in COUNTS else x for name, x in pairs}
    if facts["reference_least"] >= NO_LEAST:
        facts["reference_least"] = inf
    return facts


def _blocks(elements: int) -> "Iterator[dict[str, ort.OrtValue]]":
    """Bounds that cut a flat tensor into pieces."""
    for start in range(0, elements, _BLOCK):
        yield {
            "start": _value(np.array([start])),
            "end": _value(np.array([min(start + _BLOCK, elements)])),
        }


def _run(
    kind: Kind,
    feeds: "dict[str, ort.OrtValue]",
    types: tuple[str, str],
    provider: Provider,
) -> list[float]:
    session = meter(kind, memory_of(provider), *types)
    numbers: list[float] = (
        session.run_with_ort_values(["measured"], feeds)[0]
        .numpy()
        .astype(np.float64)
        .tolist()
    )
    return numbers


def _value(array: "npt.NDArray[Any]") -> "ort.OrtValue":
    import onnxruntime as ort  # noqa: PLC0415

    return ort.OrtValue.ortvalue_from_numpy(array)
