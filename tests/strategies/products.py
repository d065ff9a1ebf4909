"""Products of transposed and of dequantized factors, which ONNX Runtime's graph optimizers take up."""

import numpy as np

from .builder import FLOAT, Builder
from .values import Value, numbers

PERMS = {
    3: ((1, 0, 2), (1, 2, 0), (0, 2, 1), (2, 0, 1)),
    4: ((1, 2, 0, 3), (1, 2, 3, 0), (0, 2, 1, 3), (0, 1, 3, 2)),
    5: ((1, 2, 3, 0, 4), (1, 2, 3, 4, 0), (0, 1, 3, 2, 4)),
}
"""Rank -> permutations, the first two of which move the first axis behind the batch axes."""
WIDTH = 5


def transposed_product(builder: Builder) -> Value:
    """A product with a transposed factor on either side, whose ranks are equal or not."""
    rng, main = builder.rng, builder.main
    rank = rng.choice((3, 3, 4, 5))
    perm = rng.choice(PERMS[rank])
    kind = rng.choice((FLOAT, FLOAT, "tensor(float16)"))
    value = builder.shaped(main, kind, [rng.randint(1, 3) for _ in range(rank)])
    turned = builder.apply(main, "Transpose", [value], perm=list(perm))[0]
    if builder.chance(0.3):
        turned = builder.apply(main, rng.choice(("Identity", "Relu")), [turned])[0]
    if kind != FLOAT or builder.chance(0.2):
        turned = builder.cast(main, turned, FLOAT)
    assert turned.shape is not None
    *batch, rows, columns = (int(size or 1) for size in turned.shape)
    is_left = builder.chance(0.7)
    own = [columns, WIDTH] if is_left else [WIDTH, rows]
    if builder.chance(0.3):
        own = [*batch, *own]
    weight = builder.store(main, FLOAT, numbers(rng, FLOAT, own, -2, 2))
    factors = [turned, weight] if is_left else [weight, turned]
    return builder.apply(main, "MatMul", factors)[0]


def dequantized_product(builder: Builder) -> Value:
    """A product with a factor whose scale has a type of its own; from opset 23 on."""
    rng, main = builder.rng, builder.main
    kind = rng.choice((FLOAT, "tensor(float16)"))
    other = rng.choice((FLOAT, "tensor(float16)"))
    stored = builder.store(main, "tensor(int8)", np.arange(-20, 20, dtype=np.int8).reshape(8, WIDTH))
    scale = builder.store(main, other, np.float32(0.0625))
    elem = {FLOAT: 1, "tensor(float16)": 10}[kind]
    weight = builder.apply(main, "DequantizeLinear", [stored, scale], output_dtype=elem)[0]
    value = builder.shaped(main, kind, (3, 8))
    return builder.apply(main, "MatMul", [value, weight])[0]
