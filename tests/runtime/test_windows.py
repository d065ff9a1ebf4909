"""Caches that slide: prompts that are shorter than the window, and rows that engines leave undefined."""

from pathlib import Path

import decoders
import numpy as np
import pytest

from onnxamp import Prompts, check_run, convert_model, diff_models, tune_model
from onnxamp._model.model import Model
from onnxamp._runtime.engines import on_cpu

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'onnxamp[text]'")

WINDOW = 24
SHORT, LONG = [3, 14, 15, 9, 26], list(range(1, 31))


def text(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return decoders.folder(tmp_path / "gemma", "genai", decoders.grouped(window=WINDOW)) / "model.onnx"


def test_a_short_prompt_begins_with_empty_caches(path: Path) -> None:
    prompt, step, longer, _ = Prompts([text(SHORT), text(LONG)]).samples_of(path)
    for sample, seen in ((prompt, 5), (step, 6), (longer, 30)):
        np.testing.assert_array_equal(sample["attention_mask"], np.ones((1, seen)))
        assert sample["past_key_values.0.key"].shape == (1, 2, WINDOW, 16)
    assert prompt["past_key_values.1.key"].shape == (1, 2, 0, 16)
    assert step["past_key_values.1.key"].shape == (1, 2, 5, 16)
    assert not np.any(prompt["past_key_values.0.key"])


def test_a_short_prompt_is_read_as_without_a_window(path: Path) -> None:
    """A window that all tokens are in hides none of them."""
    plain = decoders.grouped()
    tokens, rows = decoders.generate(decoders.on_cpu(plain), plain, SHORT, 2)
    prompt, step = Prompts([text(SHORT)]).samples_of(path)
    model = on_cpu(Model.of(path))
    assert step["input_ids"].tolist() == [tokens[:1]]
    for sample, row in zip((prompt, step), rows, strict=True):
        np.testing.assert_allclose(model.run(sample)["logits"][0, -1], row, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rows_that_no_token_has_reached_are_zero(path: Path, dtype: str) -> None:
    low = convert_model(path, dtype=dtype, keep_io_types=["logits"])
    for number, sample in enumerate(Prompts([text(SHORT), text(LONG)]).samples_of(path)):
        for model in (Model.of(path), Model.of(low)):
            outputs = on_cpu(model).run(sample)
            cache = outputs["present.0.value"]
            seen = (5, 6, WINDOW, WINDOW)[number]
            assert np.all(np.any(cache[..., :seen, :], axis=(0, 1, 3)))
            assert not np.any(cache[..., seen:, :])


@pytest.mark.parametrize("whole", [None, True])
def test_undefined_rows_make_no_difference(path: Path, whole: bool | None) -> None:
    report = diff_models(path, path, Prompts([text(SHORT), text(LONG)]), whole=whole)
    assert report.passed
    assert max(output.max_abs for output in report.outputs) == 0
    assert report.tokens[0].same == 64


@pytest.mark.slow
def test_a_short_prompt_shows_no_fault(path: Path) -> None:
    low = convert_model(path)
    assert check_run(low, Prompts([text(SHORT)], path.with_name("tokenizer.json"))).first_bad is None
    report = diff_models(path, low, Prompts([text(SHORT)]), layers=True)
    assert report.passed
    assert {row.value for row in report.layers} >= {"present.0.key", "present.1.key"}


@pytest.mark.slow
def test_level_auto_measures_a_short_prompt(path: Path) -> None:
    _, tuned = tune_model(path, tolerance=0.01, samples=Prompts([text(SHORT)]), allow_slower=True)
    errors = [candidate.error for candidate in tuned.candidates if candidate.low]
    assert errors
    assert 0 < max(errors) < 0.01


def test_all_layers_may_slide(tmp_path: Path) -> None:
    model = decoders.grouped(window=WINDOW)
    (first, second) = (node for node in model.graph.node if node.op_type == "GroupQueryAttention")
    del second.attribute[:]
    second.attribute.extend(first.attribute)
    for entry in model.graph.input:
        if entry.name.startswith("past"):
            entry.type.tensor_type.shape.dim[2].dim_param = "past_sliding_length"
    path = decoders.folder(tmp_path / "mistral", "genai", model) / "model.onnx"
    prompt, step = Prompts([text(SHORT)]).samples_of(path)
    assert prompt["attention_mask"].shape == prompt["input_ids"].shape == (1, 5)
    assert step["attention_mask"].shape == (1, 6)
    assert diff_models(path, path, Prompts([text(SHORT)])).tokens[0].same == 32
