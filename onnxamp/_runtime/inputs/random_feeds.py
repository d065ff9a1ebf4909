"""Random numbers for one input, by its role; :mod:`onnxamp._runtime.inputs.random_inputs` has the table."""

from collections.abc import Mapping
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from onnx import TensorProto, TypeProto, helper

from onnxamp._base.errors import ArgumentError
from onnxamp._runtime.inputs.random_masks import MASKS, mask_numbers, random_mask
from onnxamp._runtime.inputs.roles import Role, Use
from onnxamp._runtime.inputs.shapes import shape_at
from onnxamp._runtime.sessions.values import Feed

_MOST_BYTES: Final = 16 << 30
"""Larger inputs are not generated, because such a shape must be a mistake."""

_TIMESTEPS: Final = 1000
"""Steps of a diffusion model, as most are trained."""


def random_feed(
    generator: np.random.Generator,
    name: str,
    kind: TypeProto,
    use: Use,
    sizes: Mapping[str, int],
) -> Feed:
    """Return random numbers for an input that is a tensor, a sequence or an optional.

    Raises:
        ArgumentError: the input is of another type, or too large.
    """
    if kind.HasField("optional_type"):
        kind = kind.optional_type.elem_type
    if kind.HasField("sequence_type"):
        return [
            random_feed(generator, name, kind.sequence_type.elem_type, use, sizes)
            for _ in range(2)
        ]
    elem = kind.tensor_type.elem_type
    if not kind.HasField("tensor_type") or elem == TensorProto.UNDEFINED:
        raise ArgumentError(
            f"Cannot generate input {name!r}: onnxamp runs models whose inputs are tensors, sequences or optionals, and"
            " converts others without running them (--no-validate)."
        )
    shape = shape_at(name, kind, sizes)
    dtype = helper.tensor_dtype_to_np_dtype(elem)
    # Numbers are drawn as float64 or int64, eight bytes each, and cast after that.
    if prod(shape) * max(dtype.itemsize, 8) > _MOST_BYTES:
        raise too_large(name, shape)
    return _tensor(generator, dtype, shape, use)


def _tensor(
    generator: np.random.Generator,
    dtype: "np.dtype[Any]",
    shape: tuple[int, ...],
    use: Use,
) -> npt.NDArray[Any]:
    numbers: npt.NDArray[Any] | int | float
    if dtype.kind == "O":
        return np.full(shape, "a", dtype)
    if use.role is Role.INDEX:
        numbers = _indices(generator, shape, use)
    elif use.row and shape[-1:] == (len(use.row),):
        numbers = np.broadcast_to(use.row, shape)
    elif use.role is Role.POSITION:
        past = use.past or 0
        places = _last_axis(shape) + past
        bound = use.bound or places.size + past + 1
        numbers = np.broadcast_to(places % bound, shape)
    elif use.role is Role.CACHED:
        numbers = np.full(shape, bool(use.past))
    elif use.role in MASKS:
        numbers = mask_numbers(random_mask(generator, shape, use), dtype, use)
    elif use.role is Role.LENGTH:
        numbers = np.full(shape, use.bound or 1)
    elif use.role is Role.FACTOR:
        numbers = generator.uniform(0.5, 1.5, shape)
    elif use.role is Role.TIMESTEP:
        numbers = generator.integers(0, _TIMESTEPS, shape)
    elif use.role is Role.SIZE:
        numbers = generator.integers(1, 5, shape)
    # Integers of less than a byte are ml_dtypes', which are of NumPy's kind V.
    elif dtype.kind in "biu" or "int" in dtype.name:
        numbers = generator.integers(0, 256 if dtype == np.uint8 else 2, shape)
    else:
        numbers = generator.standard_normal(shape)
    return np.asarray(numbers).astype(dtype)


def _indices(
    generator: np.random.Generator, shape: tuple[int, ...], use: Use
) -> npt.NDArray[np.int64]:
    """Return indices, of which the first ``use.marked`` are the marker, if there is one, and no others."""
    bound = max(use.bound or 1, 1)
    numbers = generator.integers(0, bound, shape)
    if use.marker is not None and use.marked:
        numbers[numbers == use.marker] = (use.marker + 1) % bound
        numbers.reshape(-1)[: use.marked] = use.marker
    return numbers


def _last_axis(shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return 0, 1, 2, ... along the last axis; a scalar 0 for scalars."""
    return np.arange(shape[-1]) if shape else np.zeros((), np.int64)


def too_large(name: str, shape: tuple[int, ...]) -> ArgumentError:
    """Return the error about an input that does not fit into memory."""
    return ArgumentError(
        f"Cannot generate input {name!r}: its shape {list(shape)} needs more memory than there is, or more than"
        f" {_MOST_BYTES >> 30} GiB. Give inputs (--inputs), or smaller sizes (--dim)."
    )
