"""Tokens: where sequences part, and how close the decision was there."""

import numpy as np
import pytest
from graphs.case import add_weights, parse

import onnxamp
from onnxamp._report.comparison import comparison_notes

HEAD = "(float[N,S,4] x) => (int64[N,S] tokens) {{ logits = MatMul (x, w) {tail} }}"
TAILS = {
    "argmax": "tokens = ArgMax <axis = -1, keepdims = 0> (logits)",
    "kept axis": "kept = ArgMax <axis = -1> (logits) tokens = Squeeze (kept, last)",
    "cast": "wide = ArgMax <axis = -1, keepdims = 0> (logits) same = Identity (wide) tokens = Cast <to = 7> (same)",
}


def model(tail="argmax", shift=0.0):
    found = parse(HEAD.format(tail=TAILS[tail]))
    weight = np.eye(4, dtype=np.float32)
    weight[0, 1] += shift
    return add_weights(found, {"w": weight, "last": np.array([-1])})


def inputs(*gaps):
    """One sequence per gap: at position 2 the logit of token 0 exceeds the one of token 1 by that much."""
    x = np.tile(np.float32([1, 0, 0, 0]), (len(gaps), 4, 1))
    x[:, 2, 1] = 1 - np.float32(gaps)
    return {"x": x}


@pytest.mark.parametrize("tail", TAILS)
def test_the_first_place_and_its_gap(tail):
    report = onnxamp.diff_models(model(tail), model(tail, shift=0.01), inputs(0.5, 0.001, 0.002), provider="cpu")
    (found,) = report.tokens
    assert (found.sequences, found.parted, found.sequence, found.position) == (3, 2, 1, 2)
    assert (found.reference, found.result) == (0, 1)
    assert found.gap == pytest.approx(0.001, rel=1e-3)


def test_the_same_tokens():
    report = onnxamp.diff_models(model(), model(shift=0.01), inputs(0.5, 0.4), provider="cpu")
    assert (report.tokens[0].sequences, report.tokens[0].parted, report.tokens[0].gap) == (2, 0, None)


def test_samples_add_up():
    samples = [inputs(0.5, 0.4), inputs(0.001), inputs(0.002, 0.003)]
    (found,) = onnxamp.diff_models(model(), model(shift=0.01), samples, provider="cpu").tokens
    assert (found.sequences, found.parted, found.sample, found.sequence) == (5, 3, 1, 0)
    assert found.gap == pytest.approx(0.001, rel=1e-3)


def test_another_order_has_no_gap():
    text = "(float[N,S,4] x) => (int64[S,N] tokens) { t = ArgMax <axis = -1, keepdims = 0> (logits)"
    turned = text + " tokens = Transpose (t) }"
    one, other = (
        add_weights(parse(turned.replace("{ t", "{ logits = MatMul (x, w) t")), {"w": weight})
        for weight in (np.eye(4, dtype=np.float32), np.eye(4, dtype=np.float32)[::-1].copy())
    )
    x = np.zeros((2, 3, 4), np.float32)
    x[0, :, 1], x[1, :, 2] = 1, 1
    (found,) = onnxamp.diff_models(one, other, {"x": x}, provider="cpu").tokens
    assert (found.sequences, found.parted, found.gap) == (3, 3, None)


def test_other_integers_are_no_tokens():
    labels = parse("(float[N,4] x) => (int64[N] y) { y = ArgMax <axis = -1, keepdims = 0> (x) }")
    assert onnxamp.diff_models(labels, labels, provider="cpu").tokens == ()
    shape = parse("(float[N,4] x) => (int64[2] y) { y = Shape (x) }")
    assert onnxamp.diff_models(shape, shape, provider="cpu").tokens == ()


def test_reports_tell():
    report = onnxamp.diff_models(model(), model(shift=0.01), inputs(0.5, 0.001), provider="cpu")
    text = "\n".join(comparison_notes(report))
    assert "1 of 2 sequences of tokens diverges, the first at position 2 of sequence 1: 1 instead of 0" in text
    assert "where the reference's logits are" in text
