"""What is in the weights: bytes per element type, and elements that are NaN, infinite, zero or subnormal.

Low weights are judged by their bits, float32 ones where they lie: external data is mapped, not loaded.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from onnxamp._audit.findings import Finding
from onnxamp._dtypes import BFLOAT16, FLOAT16, LOW_TYPES, LowType, readable_types, tensor_type
from onnxamp._errors import ExternalDataError, ModelError
from onnxamp._model.storage import tensors_of
from onnxamp._model.weights import External, external_of, read_float32, stored_bytes

BLOCK: Final = 1 << 20
"""Elements that are looked at together: few enough to stay in cache."""
_MANTISSA: Final = {FLOAT16: 10, BFLOAT16: 7}
_TELLING: Final = 0.01
"""Share of subnormal elements from which on they are worth a note."""
_MANY: Final = 1000
"""Elements below which shares tell nothing."""


@dataclass(frozen=True, slots=True)
class Contents:
    """Counts of a float tensor's elements."""

    elements: int = 0
    nan: int = 0
    infinite: int = 0
    zero: int = 0
    subnormal: int = 0


def weight_types(model: ModelProto) -> dict[str, int]:
    """Element type ("float32", "float16", "int64", ...) -> bytes of weights and Constants, wherever they are stored."""
    found: Counter[str] = Counter()
    for tensor in tensors_of(model):
        found[readable_types(tensor_type(tensor.data_type))] += stored_bytes(tensor)
    return dict(found.most_common())


def weight_findings(model: ModelProto, base_dir: Path | None) -> list[Finding]:
    """NaN and infinities in weights, digits that low weights have lost, and weights that cannot be read.

    Complexity: one pass over the weights, in blocks.
    """
    found: list[Finding] = []
    low: dict[LowType, dict[str, Contents]] = {low: {} for low in LOW_TYPES.values()}
    unread: list[tuple[str, str]] = []
    for tensor in tensors_of(model):
        try:
            contents = contents_of(tensor, base_dir)
        except (ExternalDataError, ModelError) as error:
            unread.append((tensor.name, str(error)))
            continue
        if contents is None:
            continue
        name = readable_types(tensor_type(tensor.data_type))
        found += _not_finite(tensor.name, name, contents)
        if name in LOW_TYPES:
            low[LOW_TYPES[name]][tensor.name] = contents
    return [*_unread(unread), *found, *_lost_digits(low)]


def _unread(failures: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """One finding for all weights that cannot be read: mostly the whole data file is missing."""
    for name, why in failures[:1]:
        more = f" So it is with {len(failures) - 1} more weights." if len(failures) > 1 else ""
        yield Finding("error", "weight", name, "", why + more, "Hazards are not looked for: they show in the weights.")


def contents_of(tensor: TensorProto, base_dir: Path | None) -> Contents | None:
    """Counts of a float32, float16 or bfloat16 tensor; None for other types.

    Raises:
        ExternalDataError: see :func:`onnxamp._model.weights.external_of`.
        ModelError: the tensor holds fewer or more bytes than its dimensions say.
    """
    low = _LOW_ELEMS.get(tensor.data_type)
    if low is not None:
        return _low_contents(read_low_bits(tensor, base_dir), low)
    if tensor.data_type != TensorProto.FLOAT:
        return None
    flat = read_float32(tensor, base_dir).reshape(-1)
    nan = infinite = 0
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK]
        if not np.isfinite(block).all():
            nan += int(np.isnan(block).sum())
            infinite += int(np.isinf(block).sum())
    return Contents(flat.size, nan, infinite)


def read_low_bits(tensor: TensorProto, base_dir: Path | None) -> NDArray[np.uint16]:
    """Bits of a float16 or bfloat16 tensor's elements, flat; external data is memory-mapped.

    Raises:
        As :func:`contents_of`.
    """
    external: External | None = external_of(tensor, base_dir)
    count = prod(tensor.dims)
    if external is not None:
        if count == 0:
            return np.zeros(0, np.uint16)
        return np.memmap(external.path, "<u2", "r", external.offset, (count,))
    if tensor.HasField("raw_data") and len(tensor.raw_data) == 2 * count:
        return np.frombuffer(tensor.raw_data, "<u2")
    if not tensor.HasField("raw_data") and len(tensor.int32_data) == count:
        return np.asarray(tensor.int32_data, np.int64).astype(np.uint16)
    raise ModelError(f"The weight {tensor.name!r} does not hold the {count} elements that its shape says.")


def low_as_float32(bits: NDArray[np.uint16], low: LowType) -> NDArray[np.float32]:
    """The numbers that low bits stand for."""
    if low is FLOAT16:
        return bits.view(np.float16).astype(np.float32)
    wide: NDArray[Any] = bits.astype(np.uint32) << np.uint32(16)
    return wide.view(np.float32)


_LOW_ELEMS: Final = {low.elem: low for low in LOW_TYPES.values()}


def _low_contents(bits: NDArray[np.uint16], low: LowType) -> Contents:
    """Counts from the bits alone: sign, exponent, mantissa."""
    mantissa = (1 << _MANTISSA[low]) - 1
    exponent = 0x7FFF ^ mantissa
    nan = infinite = zero = subnormal = 0
    for start in range(0, bits.size, BLOCK):
        magnitude = bits[start : start + BLOCK] & np.uint16(0x7FFF)
        infinite += int(np.count_nonzero(magnitude == exponent))
        nan += int(np.count_nonzero(magnitude > exponent))
        none = int(np.count_nonzero(magnitude == 0))
        zero += none
        subnormal += int(np.count_nonzero(magnitude <= mantissa)) - none
    return Contents(bits.size, nan, infinite, zero, subnormal)


def _not_finite(name: str, type_name: str, contents: Contents) -> Iterator[Finding]:
    """NaN is never meant; infinities are where they mask, which tensors of few numbers do."""
    if contents.nan:
        text = f"NaN among {type_name} weights: what reads them becomes NaN"
        yield Finding("warning", "weight", name, "", text, "Look at where the weights come from: they are broken.")
    if contents.infinite and contents.infinite < contents.elements and contents.elements >= _MANY:
        text = f"infinities among {type_name} weights"
        action = "Harmless in a mask. Otherwise a conversion overflowed: convert the original again (onnxamp convert)."
        yield Finding("note", "weight", name, "", text, action)


def _lost_digits(low: Mapping[LowType, Mapping[str, Contents]]) -> Iterator[Finding]:
    """How many of all low weights are subnormal, with the tensor that has most of them."""
    for kind, tensors in low.items():
        total = sum(contents.elements for contents in tensors.values())
        subnormal = sum(contents.subnormal for contents in tensors.values())
        zero = sum(contents.zero for contents in tensors.values())
        if total < _MANY or subnormal < _TELLING * total:
            continue
        worst = max(tensors, key=lambda name: tensors[name].subnormal)
        text = (
            f"{subnormal / total:.1%} of the {kind.name} weights are subnormal, with fewer digits, and"
            f" {zero / total:.1%} are zero; most subnormal ones are in {worst!r}"
        )
        action = "bfloat16 holds such numbers in full (--dtype bfloat16)." if kind is FLOAT16 else ""
        yield Finding("note", "weight", "", "", text, action)
