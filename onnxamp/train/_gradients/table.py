"""The rules of all families, and the ops that pass no gradient on."""

from collections.abc import Mapping
from typing import Final

from onnxamp.train._gradients import movement, normalisations, pointwise, products, reductions, selection, windows
from onnxamp.train._gradients.calls import Forward, Rule

RULES: Final[Mapping[str, Rule]] = {
    op: rule
    for family in (movement, normalisations, pointwise, products, reductions, selection, windows)
    for op, rule in family.RULES.items()
}
"""Op type of ai.onnx -> its rule."""

FORWARD: Final[Mapping[str, Forward]] = {**normalisations.FORWARD, **pointwise.FORWARD, **windows.FORWARD}
"""Ops whose forward pass keeps something for their rule, or is written in other ops."""

ALWAYS: Final = frozenset({"BatchNormalization"})
"""Those of them whose own node may have no kernel: they are written out off the way to the loss, too."""

FLAT: Final = frozenset(
    {
        "Bernoulli", "Ceil", "ConstantOfShape", "EyeLike", "Floor", "Hardmax", "Multinomial", "OneHot",
        "RandomNormalLike", "RandomUniformLike", "Round", "Sign",
    }
)  # fmt: skip
"""Ops whose outputs do not move, or only jump, when their inputs move a little: nothing flows back through them.

Outputs that are no floats need no entry: they end the way, too.
"""
