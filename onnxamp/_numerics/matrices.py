"""The backward pass through products with a large matrix, for all samples and vectors of signs at once.

The gradient of the matrix is as large as the matrix, and is never formed. What a product makes of the matrix's rounding
errors is the error of its result: column by column, its scalar product with the result's gradient is what the errors of
one column of the matrix do. The many columns are independent of each other.
"""

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from onnx import parser

from onnxamp._dtypes import FLOAT, Format
from onnxamp._model.weights import rounded
from onnxamp._ops.facts import attribute, op_key
from onnxamp._runtime.flow import DataflowGraph
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


def matrix_readers(flow: DataflowGraph) -> set[int]:
    """Return the nodes that multiply by a large matrix of many columns, or gather its rows."""
    matrices = {
        name
        for name, tensor in flow.shell.weights.items()
        if len(tensor.dims) == 2 and tensor.dims[1] >= _COLUMNS
    } - flow.defaults
    found = set[int]()
    for number, node in enumerate(flow.nodes):
        is_product = op_key(node) == "MatMul"
        if not is_product and (op_key(node) != "Gather" or attribute(node, "axis")):
            continue
        x, matrix = node.input if is_product else node.input[::-1]
        is_fed = x in flow.maker or (not is_product and x in flow.inputs)
        if matrix in matrices and is_fed and flow.types.get(node.output[0]) == FLOAT:
            found.add(number)
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


class Moved(NamedTuple):
    """By how much rounding moves what is multiplied by a matrix, and the product.

    Attributes:
        x: what is multiplied, where it is rounded itself.
        y: the product, where it is rounded itself.
        rows: the product as rows, where the matrix is rounded.
        defined: which elements of the product are numbers.
    """

    x: Floats
    y: Floats
    rows: Floats
    defined: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, x: Floats, y: Floats, rows: Floats, low: Format) -> "Moved":
        """Return it for a product whose rows the rounded matrix moves."""
        x_error, y_error = (rounded(array, low, inf) - array for array in (x, y))
        return cls(x_error, y_error, rows, np.isfinite(y))

    def along(self, dx: Floats, dy: Floats) -> tuple[Floats, Floats, Floats]:
        """Return the effects of each element of x and of y, and of each column of the matrix, along gradients."""
        effects = dy.reshape(self.rows.shape) * self.rows
        defined = self.defined.reshape(self.rows.shape)
        columns = np.sum(effects, axis=0, where=defined)
        return dx * self.x, dy * self.y, columns
