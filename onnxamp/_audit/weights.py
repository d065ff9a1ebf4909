"""What the weights of a model hold: their types, and what is wrong with their numbers."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from onnxamp._audit.findings import Finding
from onnxamp._dtypes import FLOAT16, FORMATS, Format, readable_types, tensor_type
from onnxamp._errors import ModelError
from onnxamp._model.protos import stored_bytes, tensors_of
from onnxamp._model.statistics import blocks_of
from onnxamp._model.weights import read_array

_LOW_ELEMS: Final = {low.elem: low for low in FORMATS.values()}
_MANY_SUBNORMAL: Final = 0.01
"""Share of subnormal elements that is worth a note."""
_MANY: Final = 1000
"""Elements below which shares mean nothing."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Counts of a float tensor's elements; zeros and subnormals are counted in low precision only."""

    elements: int
    nan: int
    infinite: int
    zero: int = 0
    subnormal: int = 0


def weight_types(model: ModelProto) -> dict[str, int]:
    """Element type ("float32", "float16", "int64", ...) -> bytes of weights and Constants, wherever they are stored."""
    sizes: Counter[str] = Counter()
    for tensor in tensors_of(model):
        sizes[readable_types(tensor_type(tensor.data_type))] += stored_bytes(tensor)
    return dict(sizes.most_common())


def weight_findings(model: ModelProto, base_dir: Path | None) -> list[Finding]:
    """NaN and infinities in weights, digits that low-precision weights have lost, and weights that cannot be read.

    Complexity: one pass over the weights, in blocks.
    """
    findings: list[Finding] = []
    lows: dict[Format, dict[str, Contents]] = {low: {} for low in FORMATS.values()}
    unread: list[tuple[str, str]] = []
    for tensor in tensors_of(model):
        low = _LOW_ELEMS.get(tensor.data_type)
        if low is None and tensor.data_type != TensorProto.FLOAT:
            continue
        try:
            array = read_array(tensor, base_dir)
        except ModelError as error:
            unread.append((tensor.name, str(error)))
            continue
        contents = _float_contents(array) if low is None else _low_contents(array, low)
        findings += _not_finite(
            tensor.name, readable_types(tensor_type(tensor.data_type)), contents
        )
        if low is not None:
            lows[low][tensor.name] = contents
    return [*_unread(unread), *findings, *_lost_digits(lows)]


def _float_contents(array: NDArray[np.float32]) -> Contents:
    nan = infinite = 0
    for block in blocks_of(array):
        if not np.isfinite(block).all():
            nan += int(np.isnan(block).sum())
            infinite += int(np.isinf(block).sum())
    return Contents(array.size, nan, infinite)


def _low_contents(array: NDArray[Any], low: Format) -> Contents:
    """Counts from the bits: sign, exponent, mantissa."""
    mantissa = (1 << low.mantissa) - 1
    numbers = low.patterns.type((1 << 8 * low.bytes - 1) - 1)  # all bits but the sign
    exponent = numbers ^ mantissa
    nan = infinite = zero = subnormal = 0
    for block in blocks_of(array):
        magnitude = block.view(low.patterns) & numbers
        infinite += int(np.count_nonzero(magnitude == exponent))
        nan += int(np.count_nonzero(magnitude > exponent))
        zeros = int(np.count_nonzero(magnitude == 0))
        zero += zeros
        subnormal += int(np.count_nonzero(magnitude <= mantissa)) - zeros
    return Contents(array.size, nan, infinite, zero, subnormal)


def _unread(failures: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """One finding for all weights that cannot be read: mostly the whole data file is missing."""
    for name, why in failures[:1]:
        more = f" The same goes for {len(failures) - 1} more weights." if len(failures) > 1 else ""
        action = "Hazards are not looked for, since they depend on the weights."
        yield Finding(
            severity="error", kind="weight", node=name, op="", text=why + more, action=action
        )


def _not_finite(name: str, type_name: str, contents: Contents) -> Iterator[Finding]:
    """NaN is never intended. Infinities may be in masks, which have few numbers."""
    if contents.nan:
        text = f"NaN among {type_name} weights: what reads them becomes NaN"
        yield Finding(
            severity="warning",
            kind="weight",
            node=name,
            op="",
            text=text,
            action="Look at where the weights come from: they are broken.",
        )
    if contents.infinite and contents.infinite < contents.elements and contents.elements >= _MANY:
        text = f"infinities among {type_name} weights"
        action = "Harmless in a mask. Otherwise a conversion overflowed: convert the original again (onnxamp convert)."
        yield Finding(severity="note", kind="weight", node=name, op="", text=text, action=action)


def _lost_digits(lows: Mapping[Format, Mapping[str, Contents]]) -> Iterator[Finding]:
    """How many low-precision weights are subnormal, with the tensor that has most of them."""
    for low, tensors in lows.items():
        total = sum(contents.elements for contents in tensors.values())
        subnormal = sum(contents.subnormal for contents in tensors.values())
        zero = sum(contents.zero for contents in tensors.values())
        if total < _MANY or subnormal < _MANY_SUBNORMAL * total:
            continue
        worst = max(tensors, key=lambda name: tensors[name].subnormal)
        text = (
            f"{100 * subnormal / total:.1f} % of the {low.name} weights are subnormal, with fewer digits, and"
            f" {100 * zero / total:.1f} % are zero; most subnormal ones are in {worst!r}"
        )
        action = "bfloat16 holds such numbers in full (--dtype bfloat16)." if low is FLOAT16 else ""
        yield Finding(severity="note", kind="weight", node="", op="", text=text, action=action)
