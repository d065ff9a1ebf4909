"""The errors of parts of outputs: of values that they join (:mod:`onnxamp._runtime.piecewise.joined`), and of groups
of numbers far below the largest (:mod:`onnxamp._numerics.differences.groups`).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import inf, sqrt
from typing import Any, Final

import numpy as np

from onnxamp._base.records import record
from onnxamp._facts.dtypes import FORMATS
from onnxamp._model.exponents import exponents_between
from onnxamp._numerics.differences.groups import Group, groups_of, hidden_groups
from onnxamp._numerics.differences.measure import measure
from onnxamp._numerics.differences.metrics import RELATIVE_FLOOR, PartError
from onnxamp._numerics.limits import PART_OFF
from onnxamp._runtime.piecewise.flow import DataflowGraph, dtype_of
from onnxamp._runtime.piecewise.joined import holds_shares, joined_parts
from onnxamp._runtime.sessions.values import to_value

_LEAST: Final = 16
"""Elements of a part that is judged: few numbers may be small by chance."""

_STEADY: Final = 0.01
"""Relative L2 error from which on numbers that follow such digits are noise: float32 has two decimals of them left."""


@record
class Grouped:
    """The groups of numbers of an output; errors are of numbers no smaller than ``floor``."""

    output: str
    floor: float
    groups: tuple[Group, ...]

    def __add__(self, other: "Grouped") -> "Grouped":
        """With those of another sample."""
        return Grouped(self.output, self.floor, (*self.groups, *other.groups))

    @property
    def worst(self) -> PartError | None:
        """The group with the largest error; None if the norm of the whole hides none."""
        errors = (
            PartError(group.error(self.floor), self.output, group.told)
            for group in hidden_groups(self.groups)
        )
        return max(errors, default=None)


def grouped(
    flows: tuple[DataflowGraph, DataflowGraph],
    reference: Mapping[str, Any],
    result: Mapping[str, Any],
) -> Iterator[Grouped]:
    """Yield the groups of numbers of each output that has floats of very different magnitude.

    Args:
        flows: both models.
        reference: outputs of the reference.
        result: those of the result.
    """
    for output, one in reference.items():
        other = result[output]
        if output in flows[0].outputs and _are_floats(one, other):
            groups = groups_of(one, other)
            if len({group.axis for group in groups}) < len(groups):
                yield Grouped(output, _floor(flows, output), groups)


def are_off(groups: Iterable[Grouped]) -> bool:
    """Return whether a group of numbers may miss its limit."""
    worst = (group.worst for group in groups)
    return any(part is not None and part.rel_l2 > PART_OFF for part in worst)


def steady(
    groups: Iterable[Grouped],
    reference: Mapping[str, Any],
    moved: Mapping[str, Any],
) -> Iterator[Grouped]:
    """Yield groups without those that are noise.

    Args:
        groups: the groups of a sample.
        reference: outputs of the reference.
        moved: its outputs for inputs with other last digits.
    """
    for one in groups:
        outputs = reference[one.output], moved[one.output]
        if not _are_floats(*outputs):
            yield one
            continue
        noise = groups_of(*outputs)
        sure = (
            group
            for group in one.groups
            if all(
                other.error(one.floor) < _STEADY
                for other in noise
                if other.overlaps(group)
            )
        )
        yield replace(one, groups=tuple(sure))


def worst_parts(
    flows: tuple[DataflowGraph, DataflowGraph],
    reference: Mapping[str, Any],
    result: Mapping[str, Any],
) -> Iterator[tuple[str, PartError]]:
    """Yield the part with the largest relative L2 error of each output that joins several.

    Args:
        flows: both models.
        reference: values of the reference, by name.
        result: those of the result.
    """
    exponents = exponents_between(*(flow.exponents for flow in flows))
    for output, names in flows[0].ask(joined_parts).items():
        known = [name for name in names if name in reference and name in result]
        sizes = sum(np.size(reference[name]) for name in known)
        if output not in reference or sizes > np.size(reference[output]):
            continue  # something of the parts is left out
        errors = []
        for name in known:
            factor = 2.0 ** exponents.get(name, 0)
            floor = _floor(flows, output, name)
            error = _error(reference[name], result[name], factor, floor)
            if error is not None:
                errors.append(PartError(error, name))
        if errors:
            yield output, max(errors)


def _floor(
    flows: tuple[DataflowGraph, DataflowGraph], output: str, part: str = ""
) -> float:
    """Return the magnitude below which numbers of an output, or of a part of it, are not told apart.

    What is a share of 1 has errors on the scale of 1. An output that is stored in low precision cannot do better than
    its type.
    """
    share = RELATIVE_FLOOR if holds_shares(flows[0], part or output) else 0.0
    low = FORMATS.get(dtype_of(flows[1], output))
    return share if low is None else max(share, low.smallest_normal)


def _are_floats(one: Any, other: Any) -> bool:
    """Return whether these are tensors of floats of one shape."""
    if not isinstance(one, np.ndarray) or not isinstance(other, np.ndarray):
        return False
    is_float = one.dtype.kind not in "biuUSO" and other.dtype.kind not in "biuUSO"
    return is_float and one.shape == other.shape


def _error(reference: Any, result: Any, factor: float, floor: float) -> float | None:
    """Return the relative L2 error of a part; None if it has few elements, or is zero."""
    one = np.asarray(reference)
    other = np.asarray(result)
    if not _are_floats(one, other) or one.size < _LEAST:
        return None
    if factor != 1:
        other = np.asarray(other * np.float32(factor))
    measured = measure(to_value(one), to_value(other))
    if not measured.reference_energy:
        return None
    if measured.broken:
        return inf
    least = measured.elements * floor**2
    return sqrt(measured.error_energy / max(measured.reference_energy, least))
