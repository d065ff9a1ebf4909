"""The head of a report tells in which range hard inputs were searched: random inputs may be smaller than yours."""

import numpy as np
import pytest
from commands import run, saved
from graphs.case import add_weights, parse


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "is_random"),
    [((), True), (("--inputs", "given.npz"), False), (("--input-range", "x=-3e38:3e38"), False)],
    ids=["random", "given", "stated"],
)
def test_the_head_names_the_range_of_random_inputs(arguments: tuple[str, ...], is_random: bool) -> None:
    draw = np.random.default_rng(0)
    weights = {"w": (64, 64), "v": (64, 64)}
    model = add_weights(
        parse("(float[N,64] x) => (float[N,64] y) { h = MatMul (x, w) r = Relu (h) y = MatMul (r, v) }"), weights
    )
    np.savez("given.npz", x=draw.standard_normal((4, 64)).astype(np.float32))
    text = " ".join(run("convert", saved(model), "-o", "low.onnx", *arguments).stdout.split())
    assert ("also on random inputs made to be hard." in text) == is_random
