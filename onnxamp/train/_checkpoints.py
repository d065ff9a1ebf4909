"""Checkpoints: the state of a network in training, also as a safetensors file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxamp._errors import ArgumentError, MissingModelError, ModelError
from onnxamp._model.storage import write_file
from onnxamp._paths.reading import reason_of


def write_checkpoint(path: Path, state: Mapping[str, NDArray[Any]]) -> None:
    """Write a state; an existing file is replaced once the new one is complete.

    Raises:
        OutputError: it cannot be written.
    """
    import safetensors.numpy  # noqa: PLC0415 - only checkpoints need it

    arrays = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in state.items()}
    write_file(path, safetensors.numpy.save(arrays, metadata={"kind": "onnxamp training state"}))


def read_checkpoint(path: Path) -> dict[str, NDArray[Any]]:
    """What :func:`write_checkpoint` wrote.

    Raises:
        ModelError: the file cannot be read.
    """
    import safetensors.numpy  # noqa: PLC0415 - only checkpoints need it

    try:
        return dict(safetensors.numpy.load(path.read_bytes()))
    except OSError as error:
        kind = MissingModelError if isinstance(error, FileNotFoundError) else ModelError
        raise kind(f"Cannot read {str(path)!r}: {reason_of(error)}.") from None
    except safetensors.SafetensorError as error:
        raise ModelError(f"{str(path)!r} is not a checkpoint, or is truncated: {error}.") from None


def check_state(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a state has the arrays of a network.

    Raises:
        ArgumentError: it is the state of another network.
    """
    for name in sorted(shapes.keys() | state.keys()):
        if name not in shapes or name not in state or np.shape(state[name]) != shapes[name]:
            raise ArgumentError(
                f"The state is that of another network: {name!r} is missing, unknown or of another shape."
            )
