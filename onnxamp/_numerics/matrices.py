"""The backward pass through nodes that read a large matrix, for all samples and vectors of signs at once.

The gradient of the matrix is as large as the matrix, and is never formed. What a product makes of the matrix's rounding
errors is the error of its result: column by column, its scalar product with the result's gradient is what the errors of
one column of the matrix do. The many columns are independent of each other. Rows that are gathered count once.
"""

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import parser

from onnxamp._dtypes import FLOAT, Format
from onnxamp._model.lowering import rounded
from onnxamp._ops.facts import attribute, op_key
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.session import Provider, make_session, run

Floats: TypeAlias = npt.NDArray[np.float32]

_COLUMNS: Final = 256
"""Columns from which on the sum over them hardly depends on the signs."""

_BLOCK: Final = 1 << 24
"""Elements of a matrix that are rounded at a time."""

_PRODUCT: Final = """<ir_version: 8, opset_import: ["": 18]>
product (float[n,k] x, float[k,m] w, float[r,m] dy) => (float[n,m] moved, float[r,k] dx) {{
    low = Cast <to = {elem}> (w) high = Cast <to = 1> (low) error = Sub (high, w)
    moved = MatMul (x, error) dx = Gemm <transB = 1> (dy, w)
}}"""


class Reader(NamedTuple):
    """A node that multiplies by a large matrix, or gathers rows of it.

    Attributes:
        matrix: the name of the matrix.
        x: what is multiplied, or the numbers of rows.
        y: what the node makes.
    """

    matrix: str
    x: str
    y: str
    is_product: bool


def matrix_readers(flow: Flow) -> Mapping[int, Reader]:
    """Return such nodes, by number, where the matrix has many columns."""
    found = dict[int, Reader]()
    for number, node in enumerate(flow.nodes):
        is_product = op_key(node) == "MatMul"
        if not is_product and (op_key(node) != "Gather" or attribute(node, "axis")):
            continue
        x, matrix = node.input if is_product else node.input[::-1]
        tensor = flow.shell.weights.get(matrix)
        if tensor is None or matrix in flow.defaults or flow.types[matrix] != FLOAT:
            continue
        is_wide = len(tensor.dims) == 2 and tensor.dims[1] >= _COLUMNS
        if is_wide and (x in flow.maker or not is_product):
            found[number] = Reader(matrix, x, node.output[0], is_product)
    return found


def stepped_back(
    matrix: Floats,
    xs: Sequence[Floats],
    dys: Sequence[Floats],
    low: Format,
    provider: Provider,
) -> tuple[list[Floats], list[Floats]]:
    """Go back through products with a matrix.

    Args:
        matrix: the matrix.
        xs: what it is multiplied by.
        dys: gradients of results.

    Returns:
        By how much rounding the matrix moves each result, and the gradients of what is multiplied, all as rows.
    """
    model = parser.parse_model(_PRODUCT.format(elem=low.elem))
    session = make_session(model, provider, optimize=False, lean=True)
    x, dy = (
        [array.reshape(-1, width) for array in arrays]
        for arrays, width in zip((xs, dys), matrix.shape, strict=True)
    )
    rows = {"x": np.concatenate(x), "dy": np.concatenate(dy)}
    moved, dx = np.zeros((len(rows["x"]), matrix.shape[1]), np.float32), list[Floats]()
    height = max(1, _BLOCK // matrix.shape[1])
    for start in range(0, len(matrix), height):
        block = slice(start, start + height)
        made = run(session, rows | {"x": rows["x"][:, block], "w": matrix[block]})
        moved += made["moved"]
        dx.append(made["dx"])
    return _parted(moved, x), _parted(np.hstack(dx), dy)


def _parted(rows: Floats, like: Sequence[Floats]) -> list[Floats]:
    """Rows of several arrays, apart."""
    return np.split(rows, np.cumsum([*map(len, like)])[:-1])


def rounding_error(array: Floats, low: Format) -> Floats:
    """Return by how much rounding moves each element."""
    return rounded(array, low, inf) - array


def squared(gradient: Floats, error: Floats, rows: Any = None) -> float:
    """Return the squared error of what moves a result along its gradient.

    Args:
        gradient: of the result.
        error: by how much each of its elements is moved.
        rows: what moves each row of the result, so that the same counts once; None where each element is on its own.
    """
    moved = gradient * error.reshape(gradient.shape)
    if rows is not None:
        moved = moved.reshape(-1, moved.shape[-1])
        _, places = np.unique(rows, return_inverse=True)
        sums = np.zeros_like(moved)
        np.add.at(sums, places.reshape(-1), moved)
        moved = sums
    return float(np.sum(np.square(moved), dtype=np.float64))
