"""Networks that are right on a thousand random inputs and wrong on some other one, although nothing overflows.

Each measures a spread or a distance and divides by it, behind layers whose errors this amplifies where the spread is
small: the contrast of an image, the loudness of a signal, the distance of two learned points. The worst input of the
first kinds is a faint ramp around some level, as real data may be; that of the others makes their divisor as small as
many steps of gradient descent can. A network that is wrong on none of them is left out, and the next seed is tried.

The script converts each with one command, and writes ``results/planted_errors.json`` and a table of
``docs/explain/verdict.md``.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
import onnx
from measure import engine_commit
from numpy.typing import NDArray
from onnx import ModelProto
from planted import Feeds, drawn, ended
from subjects import Graph
from verdict import STEPS, converted, say
from verdict_page import PAGE

import onnxamp
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.climb import Climb
from onnxamp._numerics.unseen.errors_sought import Pair
from onnxamp._runtime.engines import choose_engine, on_cpu

RESULTS = Path(__file__).parent / "results" / "planted_errors.json"
START, END = "<!-- written by benchmarks/planted_errors.py -->", "<!-- end of planted errors -->"
INPUTS = 1000
RIGHT, WRONG = 0.01, 0.1
"""Limits of a validation: on samples, and on inputs that are made to be hard."""
LEVELS = (-2.0, -1.0, -0.5, 0.0, 0.5, 1.0, 2.0)
FAINT = (0.02, 0.06)
"""Where the ramps of the worst inputs lie, and how high they are, of a range of about 6."""
TRIES, STEPS_DOWN = 12, 40
WIDTH = 130

Facts = dict[str, Any]


class Wrong(NamedTuple):
    """A network.

    Attributes:
        model: the network.
        divisor: the value that the worst input makes small; "" if that is a faint ramp.
    """

    model: ModelProto
    divisor: str


def _linear(g: Graph, x: str, inner: int, outer: int, bias: float) -> str:
    y = g.op("MatMul", x, drawn(g, inner, outer, fan_in=inner))
    return g.op("Add", y, drawn(g, outer, fan_in=1, gain=bias))


def _mean(g: Graph, x: str, *axes: int) -> str:
    return g.op("ReduceMean", x, g.constant(axes, np.int64), keepdims=1)


def _square_root(g: Graph, x: str, epsilon: float) -> str:
    return g.op("Sqrt", g.op("Add", x, g.constant(epsilon)))


def _features(g: Graph, channels: int, bias: float) -> str:
    weight = drawn(g, channels, 3, 3, 3, fan_in=27)
    return g.op("Conv", "x", weight, drawn(g, channels, fan_in=1, gain=bias))


def contrast(seed: int) -> Wrong:
    """Return two convolutions, a normalization of each channel over the image, and a head."""
    g, width, side = Graph(seed), 16, 16
    x = g.op("Relu", _features(g, width, 0.3))
    x = g.op("Conv", x, drawn(g, width, width, 3, 3, fan_in=width * 9 // 2), drawn(g, width, fan_in=1, gain=0.3))
    x = g.op("Relu", g.op("InstanceNormalization", x, g.scale(width), g.bias(width)))
    tail = g.op("Conv", x, drawn(g, 4, width, 1, 1, fan_in=width))
    return Wrong(ended(g, tail, [1, 3, side, side], [1, 4, side - 4, side - 4]), "")


def edges(seed: int) -> Wrong:
    """Return differences of neighboring features of an image, as shares of the largest one."""
    g, width, side = Graph(seed), 8, 16
    x = g.op("Tanh", _features(g, width, 1.0))
    ends = (g.constant([side - 3], np.int64), g.constant([side - 2], np.int64))
    begins = (g.constant([0], np.int64), g.constant([1], np.int64))
    left, right = (
        g.op("Slice", x, begin, end, g.constant([3], np.int64)) for begin, end in zip(begins, ends, strict=True)
    )
    step = g.op("Sub", right, left)
    largest = g.op("ReduceMax", g.op("Abs", step), g.constant([1, 2, 3], np.int64), keepdims=1)
    share = g.op("Div", step, g.op("Add", largest, g.constant(1e-3)))
    tail = g.op("Conv", share, drawn(g, 4, width, 1, 1, fan_in=width))
    return Wrong(ended(g, tail, [1, 3, side, side], [1, 4, side - 2, side - 3]), "")


def tokens(seed: int) -> Wrong:
    """Return features without their mean over the tokens of a sequence, divided by their deviation."""
    g, width, length = Graph(seed), 32, 8
    x = "x"
    for _ in range(2):
        x = g.op("Tanh", _linear(g, x, width, width, 0.2))
    x = _linear(g, x, width, width, 1.0)
    rest = g.op("Sub", x, _mean(g, x, 1))
    deviation = _square_root(g, _mean(g, g.op("Mul", rest, rest), 1), 1e-5)
    tail = g.op("MatMul", g.op("Div", rest, deviation), drawn(g, width, 8, fan_in=width))
    return Wrong(ended(g, tail, [1, length, width], [1, length, 8]), "")


def loudness(seed: int) -> Wrong:
    """Return changes of a signal's features, divided by its loudness."""
    g, width, length = Graph(seed), 16, 32
    x = g.op("MatMul", "x", drawn(g, width, width, fan_in=width))
    loud = _square_root(g, _mean(g, g.op("Mul", x, x), 1, 2), 1e-6)
    x = g.op("Relu", _linear(g, x, width, width, 0.0))
    x = g.op("Add", x, drawn(g, width, fan_in=1))
    change = g.op("Sub", x, _mean(g, x, 1))
    tail = g.op("MatMul", g.op("Div", change, loud), drawn(g, width, 8, fan_in=width))
    return Wrong(ended(g, tail, [1, length, width], [1, length, 8]), "")


def _points(g: Graph, width: int, size: int) -> tuple[str, str]:
    x = g.op("Tanh", _linear(g, "x", width, width, 0.2))
    left, right = (g.op("MatMul", x, drawn(g, width, size, fan_in=width)) for _ in range(2))
    return left, right


def direction(seed: int) -> Wrong:
    """Return the direction from one learned point to another."""
    g, width = Graph(seed), (32, 64, 128)[seed % 3]
    step = g.op("Sub", *_points(g, width, 4))
    length = _square_root(g, g.op("ReduceSum", g.op("Mul", step, step), g.constant([-1], np.int64)), 1e-6)
    tail = g.op("MatMul", g.op("Div", step, length), drawn(g, 4, 8, fan_in=4))
    return Wrong(ended(g, tail, [1, width], [1, 8]), length)


def quotient(seed: int) -> Wrong:
    """Return a difference as a share of the mean distance of two learned points."""
    g, width = Graph(seed), (32, 64, 128)[seed % 3]
    step = g.op("Sub", *_points(g, width, 16))
    distance = _mean(g, g.op("Abs", g.op("Sub", *_points(g, width, 4))), -1)
    share = g.op("Div", step, g.op("Add", distance, g.constant(1e-3)))
    return Wrong(ended(g, g.op("MatMul", share, drawn(g, 16, 8, fan_in=16)), [1, width], [1, 8]), distance)


KINDS: Mapping[str, tuple[Callable[[int], Wrong], int]] = {
    "contrast": (contrast, 3),
    "edges": (edges, 3),
    "tokens": (tokens, 3),
    "loudness": (loudness, 3),
    "direction": (direction, 3),
    "quotient": (quotient, 3),
}
"""What makes a kind, and how many there are of it."""


def _errors(path: Path, low: ModelProto, samples: Sequence[Feeds]) -> list[float]:
    """Return the error of a conversion on each sample, beside the outputs there or those of the first one."""
    sizes, found = [], []
    pair = Pair(on_cpu(Model.of(path)), choose_engine("cpu").open(low), frozenset({"y"}))
    for sample in samples:
        one, other = (outputs["y"] for outputs in pair.floats(sample))
        sizes.append(float(np.linalg.norm(one)))
        found.append(float(np.linalg.norm(other - one)) / max(sizes[-1], sizes[0]))
    return found


def _faint(sample: Feeds) -> Iterator[Feeds]:
    """Yield ramps of little contrast at several levels, along each axis."""
    shape = sample["x"].shape
    for axis in (axis for axis, size in enumerate(shape) if size > 1):
        ramp = np.linspace(-0.5, 0.5, shape[axis], dtype=np.float32)
        ramp = np.broadcast_to(ramp.reshape([-1 if axis == one else 1 for one in range(len(shape))]), shape)
        for level in LEVELS:
            for height in FAINT:
                yield {"x": np.asarray(level + height * ramp, np.float32)}


def _smallest(path: Path, divisor: str, samples: Sequence[Feeds]) -> Iterator[Feeds]:
    """Yield inputs on which a value is as small as many steps make it, within the range of the first sample."""
    array: NDArray[np.float32] = samples[0]["x"]
    climb = Climb.toward(Model.of(path), {"x": (float(array.min()), float(array.max()))}, divisor)
    for sample in samples[:TRIES]:
        yield climb.climbed(sample, -1.0, STEPS_DOWN)[0]


class Planted(NamedTuple):
    """A network in a file, with an input on which its conversion is wrong, and the errors on others and on this one."""

    path: Path
    first: Feeds
    worst: Feeds
    random: float
    hardest: float


def planted(make: Callable[[int], Wrong], seed: int, path: Path) -> Planted | None:
    """Return the network of a seed; ``None`` if it is wrong on random inputs, or on no other."""
    made = make(seed)
    onnx.save(made.model, path)
    low = onnxamp.convert_model(path)
    samples = [dict(sample) for sample in onnxamp.random_samples(path, INPUTS, seed=1)]
    random = max(_errors(path, low, samples))
    if random > RIGHT:
        return None
    hard = list(_smallest(path, made.divisor, samples) if made.divisor else _faint(samples[0]))
    errors = _errors(path, low, [samples[0], *hard])[1:]
    place = int(np.argmax(errors))
    return Planted(path, samples[0], hard[place], random, errors[place]) if errors[place] > WRONG else None


def row(kind: str, one: Planted, folder: Path) -> Facts:
    """Return what conversions without and with a search say of a network."""
    facts: Facts = {"kind": kind, "random": one.random, "hardest": one.hardest, "commit": engine_commit()}
    for steps in (0, STEPS):
        low = folder / f"low-{steps}.onnx"
        found, _ = converted(one.path, steps, low)
        right = _errors(one.path, onnx.load(low), [one.first, one.worst])[1] <= WRONG
        why = found["cure"]["failure"] if found["cure"] else ""
        facts |= {f"found, {steps} steps": "for precision" in why, f"right, {steps} steps": right, "why": why}
    return facts


def table(rows: Sequence[Facts]) -> str:
    """Return what the page shows."""
    found, right, before = (
        sum(one[key] for one in rows) for key in (f"found, {STEPS} steps", f"right, {STEPS} steps", "right, 0 steps")
    )
    text = (
        f"{len(rows)} networks are off by at most {RIGHT} on {INPUTS:,} random inputs, and by more than {WRONG} on"
        f" another within the same range. The default finds such an input for {found} of them, and the result is"
        f" repaired. {right} results are right on the worst input, and {before} with `--stress 0`."
    )
    titles = "planted", "networks", "error, random inputs", "error, worst input", "found", "right on the worst input"
    lines = [fill(text, WIDTH), "", f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for kind in dict.fromkeys(one["kind"] for one in rows):
        own = [one for one in rows if one["kind"] == kind]
        worst = [one["hardest"] for one in own]
        counts = [str(sum(one[f"{key}, {STEPS} steps"] for one in own)) for key in ("found", "right")]
        ends = f"{min(worst):.2g} to {max(worst):.2g}"
        lines.append(
            f"| {kind} | {len(own)} | {max(one['random'] for one in own):.2g} | {ends} | {' | '.join(counts)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure all networks, and write the results and the table."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for kind, (make, count) in KINDS.items():
            every = (planted(make, seed, folder / f"{kind}.onnx") for seed in range(40))
            chosen = (one for one in every if one is not None)
            for _, one in zip(range(count), chosen, strict=False):
                rows.append(row(kind, one, folder))
                say(json.dumps(rows[-1]))
    RESULTS.write_text(f"{json.dumps({'commit': engine_commit(), 'rows': rows}, indent=1)}\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    PAGE.write_text(f"{before}{START}\n\n{table(rows)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
