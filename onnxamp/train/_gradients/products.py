"""Gradients of MatMul, Gemm and Einsum."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from onnxamp.train._gradients.calls import Call, Grads, Rule, reshape_like, sum_to
from onnxamp.train._gradients.writer import Tensor


def _gemm(call: Call) -> Grads:
    """Y = alpha A' B' + beta C, where A' and B' may be transposed; so are the operands of the gradients."""
    dy, a, b = call.dy, call[0], call[1]
    alpha, beta = float(call.attribute("alpha", 1.0)), float(call.attribute("beta", 1.0))
    flip_a, flip_b = int(call.attribute("transA", 0)), int(call.attribute("transB", 0))
    da = db = dc = None
    if call.wants[0]:
        da = _gemm_of(b, dy, flip_b, 1, alpha) if flip_a else _gemm_of(dy, b, 0, 1 - flip_b, alpha)
    if call.wants[1]:
        db = _gemm_of(dy, a, 1, flip_a, alpha) if flip_b else _gemm_of(a, dy, 1 - flip_a, 0, alpha)
    if call.wants_input(2):
        dc = sum_to(dy if beta == 1 else dy * beta, call.y.dims, call[2])
    return [da, db, dc]


def _gemm_of(a: Tensor, b: Tensor, flip_a: int, flip_b: int, alpha: float = 1.0) -> Tensor:
    """Alpha A' B' of two matrices."""
    return a.op(
        "Gemm", b, alpha=alpha if alpha != 1 else None, transA=flip_a or None, transB=flip_b or None
    )


def _matmul(call: Call) -> Grads:
    """DA = dY B^T and dB = A^T dY, summed over broadcast axes; a vector counts as a matrix of one row or column."""
    dy, a, b = call.dy, call[0], call[1]
    rank_a, rank_b, y = call.rank(0), call.rank(1), call.y.dims
    if rank_b == 1:
        b, dy = (
            replace(b.op("Unsqueeze", [1]), dims=None if b.dims is None else (*b.dims, 1)),
            dy.op("Unsqueeze", [-1]),
        )
        y = None if y is None else (*y, 1)
    if rank_a == 1:
        a, dy = (
            replace(a.op("Unsqueeze", [0]), dims=None if a.dims is None else (1, *a.dims)),
            dy.op("Unsqueeze", [-2]),
        )
        y = None if y is None else (*y[:-1], 1, y[-1])
    da = _left(dy, replace(dy, dims=y), a, b) if call.wants[0] else None
    db = _right(dy, replace(dy, dims=y), a, b) if call.wants[1] else None
    return [
        reshape_like(da, call[0]) if da is not None and rank_a == 1 else da,
        reshape_like(db, call[1]) if db is not None and rank_b == 1 else db,
    ]


def _left(dy: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """DY B^T; operands have rank 2 or more."""
    assert a.dims is not None
    assert b.dims is not None
    if len(a.dims) == len(b.dims) == 2:
        return _gemm_of(dy, b, 0, 1)
    product = dy.op("MatMul", _transposed(b))
    if len(b.dims) == 2:  # a was not broadcast
        return product
    return sum_to(product, None if y.dims is None else (*y.dims[:-2], *a.dims[-2:]), a)


def _right(dy: Tensor, y: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """A^T dY. Where a batch shares the matrix (a weight), the batch becomes rows, so that one Gemm sums over it."""
    assert a.dims is not None
    assert b.dims is not None
    if len(b.dims) == 2:
        rows = (
            (a, dy) if len(a.dims) == 2 else (a.reshape(-1, a.size(-1)), dy.reshape(-1, b.size(-1)))
        )
        return _gemm_of(*rows, 1, 0)
    product = _transposed(a).op("MatMul", dy)
    return sum_to(product, None if y.dims is None else (*y.dims[:-2], *b.dims[-2:]), b)


def _transposed(x: Tensor) -> Tensor:
    rank = len(x.dims or ())
    return x.transpose([*range(rank - 2), rank - 1, rank - 2])


def _einsum(call: Call) -> Grads:
    """The gradient of an operand is the Einsum of the output gradient and the other operands onto its letters."""
    equation = str(call.attribute("equation")).replace(" ", "")
    left, _, result = equation.partition("->")
    terms = left.split(",")
    if "->" not in equation or "." in equation:
        raise call.error(
            f"has the equation {equation!r}; only equations with '->' and without '...' have a gradient rule"
        )
    if any(len(set(term)) != len(term) for term in (*terms, result)):
        raise call.error(f"has the equation {equation!r}, which repeats a letter in one term")
    grads: list[Tensor | None] = []
    for position, term in enumerate(terms):
        others = [i for i in range(len(terms)) if i != position]
        if not set(term) <= set(result).union(*(terms[i] for i in others)):
            raise call.error(
                f"has the equation {equation!r}, which sums over a letter of one operand only"
            )
        reverse = ",".join([result, *(terms[i] for i in others)]) + f"->{term}"
        operands = [call[i] for i in others]
        grads.append(
            call.dy.op("Einsum", *operands, equation=reverse) if call.wants[position] else None
        )
    return grads


RULES: Final[Mapping[str, Rule]] = {"Einsum": _einsum, "Gemm": _gemm, "MatMul": _matmul}
