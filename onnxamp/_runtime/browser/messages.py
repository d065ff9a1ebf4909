"""Messages to and from the page: a header in JSON, and the bytes of tensors behind it.

Numbers are little-endian. A message is the length of its header (four bytes), the header, and the parts; the header's
``tensors`` tell of each its name, type, shape, and where it starts and ends.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from onnxamp._errors import RuntimeFailure
from onnxamp._runtime.values import Array

TYPES: Final[Mapping[str, Any]] = {
    "float32": np.float32,
    "float16": np.float16,
    "float64": np.float64,
    "bool": np.bool_,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
}
"""NumPy's types by the names that onnxruntime-web gives them."""
_NAMES: Final = {np.dtype(dtype): name for name, dtype in TYPES.items()}


def pack(header: Mapping[str, Any], arrays: Mapping[str, Array]) -> bytes:
    """A message.

    Raises:
        RuntimeFailure: an array is of a type that onnxruntime-web does not take.
    """
    rows: list[dict[str, Any]] = []
    parts, start = [], 0
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray) or (
            array.dtype not in _NAMES and array.dtype.kind not in "USO"
        ):
            what = array.dtype if isinstance(array, np.ndarray) else "no tensor"
            raise RuntimeFailure(
                f"A browser cannot be fed {name!r}: onnxruntime-web takes tensors, but this is {what}."
            )
        row: dict[str, Any] = {"name": name, "shape": list(array.shape)}
        if array.dtype not in _NAMES:
            rows.append(row | {"type": "string", "texts": [str(item) for item in array.ravel()]})
            continue
        own = np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False)
        rows.append(row | {"type": _NAMES[array.dtype], "start": start, "end": start + own.nbytes})
        parts.append(own.tobytes())
        start += own.nbytes
    text = json.dumps({**header, "tensors": rows}).encode()
    return b"".join((len(text).to_bytes(4, "little"), text, *parts))


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, Array]]:
    """Header and arrays of a message; the arrays are copies."""
    behind = 4 + int.from_bytes(message[:4], "little")
    header: dict[str, Any] = json.loads(message[4:behind])
    arrays = {}
    for row in header.pop("tensors", ()):
        if row["type"] == "string":
            array = np.array(row["texts"], object)
        else:
            dtype = np.dtype(TYPES[row["type"]])
            array = np.frombuffer(
                message[behind + row["start"] : behind + row["end"]], dtype.newbyteorder("<")
            )
            array = array.astype(dtype)
        arrays[row["name"]] = array.reshape(row["shape"])
    return header, arrays
