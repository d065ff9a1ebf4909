"""The gradient rules of all ops, and the ops whose gradient is zero."""

from collections.abc import Mapping
from typing import Final

from onnxamp.train._gradients import (
    movement,
    normalisations,
    pointwise,
    products,
    reductions,
    selection,
    windows,
)
from onnxamp.train._gradients.calls import Forward, Rule

RULES: Final[Mapping[str, Rule]] = {
    op: rule
    for family in (movement, normalisations, pointwise, products, reductions, selection, windows)
    for op, rule in family.RULES.items()
}
"""Rules by op type of ai.onnx."""

FORWARD: Final[Mapping[str, Forward]] = {
    **normalisations.FORWARD,
    **pointwise.FORWARD,
    **windows.FORWARD,
}
"""Ops whose forward pass keeps values for the rule, or is decomposed."""

ALWAYS: Final = frozenset({"BatchNormalization"})
"""Those of them that may have no kernel: they are decomposed off the path to the loss, too."""

FLAT: Final = frozenset(
    {
        "Bernoulli",
        "Ceil",
        "ConstantOfShape",
        "EyeLike",
        "Floor",
        "Hardmax",
        "Multinomial",
        "OneHot",
        "RandomNormalLike",
        "RandomUniformLike",
        "Round",
        "Sign",
    }
)
"""Ops whose derivative is zero or undefined everywhere: no gradient flows through them.

Outputs that are not floats end the path, too, and need no entry.
"""
