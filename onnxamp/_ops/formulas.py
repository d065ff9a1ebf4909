"""How an engine computes an op, as a formula whose every step is rounded: ``1 / (1 + exp(-x))``.

Formulas are those of :mod:`onnxamp._ops.profiles`. They hold ``x``, numbers, ``+ - * /``, and calls of functions.
"""

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
    """What a formula makes of x. Equal steps are made once.

    Args:
        formula: as the module says.
        x: what it is about: an array, or a name of a value.
        step: makes one step, from an operator's op type in ONNX ("Add", ...) or a function's name, and its operands.
    """
    made: dict[str, T | float] = {"x": x}
    for node in _inner_first(ast.parse(formula, mode="eval").body):
        text = ast.unparse(node)
        if text in made:
            continue
        if isinstance(node, ast.Constant):
            made[text] = float(ast.unparse(node))
            continue
        made[text] = step(_kind(node), [made[ast.unparse(part)] for part in _operands(node)])
    found = made[text]
    assert not isinstance(found, float)
    return found


def _inner_first(whole: ast.expr) -> list[ast.expr]:
    found, waiting = [], [whole]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting += _operands(node)
    return found[::-1]


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
