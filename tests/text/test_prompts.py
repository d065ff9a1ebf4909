"""Texts as inputs of decoders."""

import json
from pathlib import Path
from types import SimpleNamespace

import decoders
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import run

import onnxamp
from onnxamp import ArgumentError, Prompts
from onnxamp._model.model import Model
from onnxamp._runtime.engines import on_cpu
from onnxamp._runtime.inputs.samples import as_samples
from onnxamp._text.decoder import built_in_prompts

tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'onnxamp[text]'")

TEXTS = ["w3 w14 w15", "w9 w26 w5 w35 w8"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n\n".join(TEXTS) + "\n")
    return decoders.folder(tmp_path / "llama", "genai", decoders.grouped())


@pytest.mark.parametrize("name", ["grouped", "plain"])
def test_a_prompt_is_followed_by_the_step_that_the_model_takes(home: Path, name: str) -> None:
    model = {"grouped": decoders.grouped, "plain": decoders.plain}[name]()
    onnx.save(model, home / "model.onnx")
    session = ort.InferenceSession(home / "model.onnx", providers=["CPUExecutionProvider"])
    samples = [*Prompts(TEXTS).samples_of(home / "model.onnx")]
    assert len(samples) == 4
    for (prompt, step), text in zip((samples[:2], samples[2:]), TEXTS, strict=True):
        ids = [int(word[1:]) for word in text.split()]
        assert prompt["input_ids"].tolist() == [ids]
        logits, *presents = session.run(None, prompt)
        assert step["input_ids"].tolist() == [[logits[0, -1].argmax()]]
        assert step["attention_mask"].tolist() == [[1] * (len(ids) + 1)]
        caches = [key for key in prompt if key.startswith("past")]
        for key, present in zip(caches, presents, strict=True):
            np.testing.assert_allclose(step[key], present, rtol=1e-4, atol=1e-5)
        if name == "plain":
            assert step["position_ids"].tolist() == [[len(ids)]]


def test_a_tokenizer_is_read_once_for_the_built_in_prompts(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "tokenizer.json").write_text(json.dumps(decoders.LETTERS))
    read, from_str = list[str](), tokenizers.Tokenizer.from_str
    counting = SimpleNamespace(from_str=lambda text: read.append(text) or from_str(text))
    monkeypatch.setattr(tokenizers, "Tokenizer", counting)
    model = Model.of(home / "model.onnx")
    prompts = built_in_prompts(model)
    assert prompts is not None
    samples = prompts.samples_of(model)
    assert samples.description == "samples of 2 built-in prompts and the steps after"
    assert samples[0]["input_ids"][0, :4].tolist() == [ord(letter) - 32 for letter in "The "]
    assert len(read) == 1


@pytest.mark.parametrize("name", ["grouped", "plain"])
def test_the_original_runs_once_on_each_prompt(home: Path, name: str) -> None:
    """What it gives for a step is what is compared: not what it gave for random inputs that show its sizes."""
    onnx.save({"grouped": decoders.grouped, "plain": decoders.plain}[name](), home / "model.onnx")
    model = Model.of(home / "model.onnx")
    reference = on_cpu(model)
    samples = as_samples(Prompts(TEXTS), model, reference=reference)
    assert len(samples) == 4
    assert list(reference.outputs.kept) == [0, 2]
    session = ort.InferenceSession(home / "model.onnx", providers=["CPUExecutionProvider"])
    for number, outputs in reference.outputs.kept.items():
        exact = dict(zip(outputs, session.run(list(outputs), samples[number]), strict=True))
        for output, found in outputs.items():
            np.testing.assert_allclose(found, exact[output], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("forked", "home")
def test_a_folder_is_calibrated_and_validated_on_prompts() -> None:
    report = onnxamp.convert_folder("llama", "out", jobs=1, prompts="prompts.txt")
    (row,) = report.rows
    assert (row.outcome, row.inputs) == ("converted", "samples of 2 prompts and the steps after")
    again = onnxamp.convert_folder("llama", "out", jobs=1, prompts="prompts.txt")
    assert again.rows[0].outcome == "up to date"
    Path("prompts.txt").write_text("w1 w2\n")
    assert onnxamp.convert_folder("llama", "out", jobs=1, prompts="prompts.txt").rows[0].outcome == "converted"
    printed = run("diff", "llama/model.onnx", "out/model.onnx", "--prompts", "prompts.txt", "--kl", "1e-3")
    assert printed.exit_code == 0
    assert "2 samples of 1 prompt and the steps after" in printed.output
    assert "KL divergence" in printed.output
    failed = run("diff", "llama/model.onnx", "out/model.onnx", "--prompts", "prompts.txt", "--kl", "1e-12")
    assert failed.exit_code == 1
    assert "KL divergence" in failed.output


@pytest.mark.usefixtures("home")
def test_what_is_wrong_is_said() -> None:
    assert "--inputs and --prompts" in run("convert", "llama/model.onnx", "-o", "x.onnx", *PAIR).output
    with pytest.raises(ArgumentError, match="There is no text"):
        Prompts(["", "  "]).samples_of("llama/model.onnx")
    with pytest.raises(ArgumentError, match=r"Cannot read the prompts missing\.txt"):
        Prompts("missing.txt").samples_of("llama/model.onnx")
    Path("llama/tokenizer.json").write_text(json.dumps({"version": "0"}))
    with pytest.raises(ArgumentError, match="Cannot read the tokenizer"):
        Prompts(TEXTS).samples_of("llama/model.onnx")
    Path("llama/tokenizer.json").unlink()
    with pytest.raises(ArgumentError, match=r"looked for .*llama/tokenizer.json and .*tokenizer.json"):
        Prompts(TEXTS).samples_of("llama/model.onnx")


PAIR = ("--inputs", "x.npz", "--prompts", "prompts.txt")


def test_models_that_take_no_tokens_are_refused(home: Path) -> None:
    with pytest.raises(ArgumentError, match="Prompts are for decoders, which take input_ids"):
        Prompts(TEXTS, home / "tokenizer.json").samples_of(Path(__file__).parents[2] / "models" / "classifier.onnx")
