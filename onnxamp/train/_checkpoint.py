"""Checkpoints: named arrays in one safetensors file, written whole or not at all."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxamp._errors import ModelError
from onnxamp._model.storage import write_file

_KIND = "onnxamp training state"


def write_checkpoint(path: Path, state: Mapping[str, NDArray[Any]]) -> None:
    """Write the arrays; until they are complete, a file that was there stays as it was.

    Raises:
        OutputError: the file cannot be written.
    """
    import safetensors.numpy  # noqa: PLC0415 - only training needs it

    whole = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in state.items()}
    write_file(path, safetensors.numpy.save(whole, metadata={"kind": _KIND}))


def read_checkpoint(path: Path) -> dict[str, NDArray[Any]]:
    """Read what :func:`write_checkpoint` wrote.

    Raises:
        ModelError: there is no such file, or it is no checkpoint.
    """
    import safetensors.numpy  # noqa: PLC0415

    try:
        return dict(safetensors.numpy.load(path.read_bytes()))
    except OSError as error:
        raise ModelError(f"Cannot read {str(path)!r}: {error.strerror}.") from None
    except safetensors.SafetensorError as error:
        raise ModelError(f"{str(path)!r} is no checkpoint, or is truncated: {error}.") from None
