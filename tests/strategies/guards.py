"""Small chains of arithmetic that end in a division, a root or a logarithm of what they guard, or do not guard."""

from random import Random

import numpy as np
from graphs.case import parse
from onnx import ModelProto, numpy_helper

WIDTH = 8
STEPS = {
    "add": "v{n} = Add ({x}, c{n})",
    "subtract": "v{n} = Sub ({x}, c{n})",
    "rest": "v{n} = Sub (c{n}, {x})",
    "scale": "v{n} = Mul ({x}, c{n})",
    "at least": "v{n} = Max ({x}, c{n})",
    "clip": "v{n} = Clip ({x}, c{n})",
    "magnitude": "v{n} = Abs ({x})",
    "square": "v{n} = Mul ({x}, {x})",
    "root": "a{n} = Relu ({x}) v{n} = Sqrt (a{n})",
    "exponential": "v{n} = Exp ({x})",
    "probability": "v{n} = Sigmoid ({x})",
    "softplus": "v{n} = Softplus ({x})",
    "product": "v{n} = MatMul ({x}, w{n})",
    "centered": "m{n} = ReduceMean <axes = [-1]> ({x}) v{n} = Sub ({x}, m{n})",
    "sum": "m{n} = ReduceSum ({x}, last) v{n} = Add ({x}, m{n})",
    "normalized": "m{n} = ReduceL2 <axes = [-1]> ({x}) q{n} = Max (m{n}, c{n}) v{n} = Div ({x}, q{n})",
}
ENDS = (
    "y = Div (one, {x})",
    "y = Reciprocal ({x})",
    "y = Div (x, {x})",
    "b = Abs ({x}) y = Log (b)",
    "y = Mul ({x}, big)",
    "i = Reciprocal ({x}) y = Mul (x, i)",
)
CONSTANTS = (1e-9, 2.0**-25, 3e-8, 1e-5, 1e-3, 0.1, 0.5, 1.0, 1.0004, 3.0, 100.0, 2047.6, -1.0, -2000.2, 40000.0)
LEAST = (0.0, 1e-8, 1e-4, 0.01, 1.0, -1.0, -8.0, 100.0, 2040.0)
SPANS = (0.0, 1e-6, 1e-3, 0.5, 1.0, 8.0, 1000.0)


def random_guard(rng: Random) -> tuple[ModelProto, tuple[float, float]]:
    """A model of one input, and the range of that input."""
    x, steps = "x", list[str]()
    constants = {"one": 1.0, "big": 60000.0, "last": np.array([-1])}
    for n in range(rng.randint(1, 5)):
        steps.append(rng.choice(tuple(STEPS.values())).format(n=n, x=x))
        x = f"v{n}"
        constants[f"c{n}"] = rng.choice(CONSTANTS)
        weight = [rng.choice((1.0004, -1.0, 0.5, 0.0)) for _ in range(WIDTH * WIDTH)]
        constants[f"w{n}"] = np.array(weight, np.float32).reshape(WIDTH, WIDTH)
    text = " ".join((*steps, rng.choice(ENDS).format(x=x)))
    model = parse(f"(float[4,{WIDTH}] x) => (float[4,{WIDTH}] y) {{ {text} }}", 17)
    read = {name for node in model.graph.node for name in node.input}
    for name, held in constants.items():
        array = np.asarray(held, np.float32) if isinstance(held, float) else np.asarray(held)
        if name in read:
            model.graph.initializer.append(numpy_helper.from_array(array, name))
    low = float(np.float32(rng.choice(LEAST)))
    return model, (low, float(np.float32(low + rng.choice(SPANS))))
