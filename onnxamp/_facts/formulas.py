"""Formulas that compute an op from its only input x, such as "x * sigmoid(x)" in a target's ``arithmetic.toml``."""

import ast
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

T = TypeVar("T")

_OPERATORS: Final = {
    ast.Add: "Add",
    ast.Sub: "Sub",
    ast.Mult: "Mul",
    ast.Div: "Div",
    ast.USub: "Neg",
}


def compute(formula: str, x: T, step: Callable[[str, Sequence[T | float]], T]) -> T:
    """Apply a formula to x. Equal steps are computed once.

    Args:
        formula: the formula.
        x: its argument: an array, or the name of a value.
        step: computes one step from an operator's op type in ONNX ("Add", ...) or a function's name, and its operands.
    """
    results: dict[str, T | float] = {"x": x}
    for node in _inner_first(ast.parse(formula, mode="eval").body):
        # Parsed and written again, equal steps have the same text, however the formula spaces them.
        text = ast.unparse(node)
        if text in results:
            continue
        if isinstance(node, ast.Constant):
            results[text] = float(text)
            continue
        operands = [results[ast.unparse(part)] for part in _operands(node)]
        results[text] = step(_kind(node), operands)
    result = results[text]
    assert not isinstance(result, float)
    return result


def _inner_first(whole: ast.expr) -> list[ast.expr]:
    """Return the parts of a formula, operands before the steps that take them."""
    nodes = []
    waiting = [whole]
    while waiting:
        node = waiting.pop()
        nodes.append(node)
        waiting += _operands(node)
    return nodes[::-1]


def _kind(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return ast.unparse(node.func)
    assert isinstance(node, ast.BinOp | ast.UnaryOp)
    return _OPERATORS[type(node.op)]


def _operands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    return node.args if isinstance(node, ast.Call) else []
