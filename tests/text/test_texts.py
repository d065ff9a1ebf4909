"""What two decoders make of texts: perplexity, and tokens that are generated from step to step."""

import json
from pathlib import Path

import decoders
import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import run
from onnx import ModelProto, numpy_helper

from onnxamp import Prompts, diff_models

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'onnxamp[text]'")

TEXTS = ["w3 w14 w15", "w9 w26 w5 w35 w8", "w1 w2 w90 w4"]
COUNT = 12


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(TEXTS))
    decoders.folder(Path("llama"), "genai", decoders.grouped())
    return decoders.folder(tmp_path / "plain", "optimum", decoders.plain())


def logits(model: ModelProto, tokens: list[int]) -> np.ndarray:
    """What the decoder says after each of the tokens, which it reads at once."""
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, len(tokens)), np.int64)}
    feeds["position_ids"] = np.arange(len(tokens))[None]
    for entry in model.graph.input[3:]:
        feeds[entry.name] = np.zeros((1, decoders.HEADS, 0, decoders.HEAD), np.float32)
    return session.run(["logits"], feeds)[0][0].astype(np.float64)


def words(text: str) -> list[int]:
    return [int(word[1:]) for word in text.split()]


def likelihoods(model: ModelProto, tokens: list[int]) -> np.ndarray:
    """The probability of each token after those before it."""
    rows = logits(model, tokens)[:-1]
    shares = np.exp(rows - rows.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    return shares[np.arange(len(rows)), tokens[1:]]


@pytest.mark.slow
def test_perplexity_is_that_of_the_texts(home: Path) -> None:
    model = onnx.load(home / "model.onnx")
    other = decoders.disturbed(model)
    report = diff_models(home / "model.onnx", other, Prompts(TEXTS))
    assert report.perplexity is not None
    assert report.perplexity.tokens == sum(len(words(text)) - 1 for text in TEXTS)
    for one, found in ((model, report.perplexity.reference), (other, report.perplexity.result)):
        every = np.concatenate([likelihoods(one, words(text)) for text in TEXTS])
        np.testing.assert_allclose(found, np.exp(-np.log(every).mean()), rtol=1e-5)


def test_tokens_that_masks_hide_do_not_count(home: Path) -> None:
    model = onnx.load(home / "model.onnx")
    tokens = [3, 14, 15, 0]
    sample = {"input_ids": np.array([tokens]), "attention_mask": np.array([[1, 1, 1, 0]])}
    sample["position_ids"] = np.arange(4)[None]
    for entry in model.graph.input[3:]:
        sample[entry.name] = np.zeros((1, decoders.HEADS, 0, decoders.HEAD), np.float32)
    report = diff_models(model, model, sample)
    assert report.perplexity is not None
    assert report.perplexity.tokens == 2
    np.testing.assert_allclose(
        report.perplexity.reference, np.exp(-np.log(likelihoods(model, tokens[:3])).mean()), rtol=1e-5
    )
    assert not report.tokens  # nobody asked to generate
    assert diff_models(model, model).perplexity is None  # random tokens are no text


@pytest.mark.parametrize("vocabulary", [8, 20])
def test_networks_that_predict_no_next_token_have_no_perplexity(vocabulary: int) -> None:
    """They classify tokens, or fill gaps: what they take and give has the names and shapes of a decoder's."""
    text = f"(int64[1,n] input_ids) => (float[1,n,{vocabulary}] logits) {{ logits = Gather (table, input_ids) }}"
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    table = np.random.default_rng(0).standard_normal((20, vocabulary)).astype(np.float32)
    model.graph.initializer.append(numpy_helper.from_array(table, "table"))
    report = diff_models(model, model, {"input_ids": np.array([[3, 19, 2]])})
    assert report.passed
    assert report.perplexity is None


@pytest.mark.slow
def test_generation_ends_where_a_token_differs(home: Path) -> None:
    model = onnx.load(home / "model.onnx")
    other = decoders.disturbed(model)
    (found,) = diff_models(home / "model.onnx", other, Prompts(TEXTS, generates=COUNT)).tokens
    runs = decoders.on_cpu(model), decoders.on_cpu(other)
    ones = [decoders.generate(runs[0], model, words(text), COUNT) for text in TEXTS]
    others = [decoders.generate(runs[1], other, words(text), COUNT)[0] for text in TEXTS]
    same = [
        next((n for n, (a, b) in enumerate(zip(one, two, strict=True)) if a != b), COUNT)
        for (one, _), two in zip(ones, others, strict=True)
    ]
    assert 0 < sum(count < COUNT for count in same) < len(TEXTS)  # or the test shows nothing
    first = next(number for number, count in enumerate(same) if count < COUNT)
    assert (found.output, found.sequences, found.same) == ("", len(TEXTS), sum(same))
    assert (found.parted, found.sample) == (sum(count < COUNT for count in same), 2 * first)
    (one, rows), two = ones[first], others[first]
    assert (found.position, found.reference, found.result) == (same[first], one[same[first]], two[same[first]])
    row = rows[same[first]]
    np.testing.assert_allclose(found.gap, row[found.reference] - row[found.result], rtol=1e-3)


@pytest.mark.usefixtures("home")
def test_a_comparison_with_itself_differs_nowhere() -> None:
    report = diff_models("llama/model.onnx", "llama/model.onnx", Prompts(TEXTS, generates=COUNT))
    (found,) = report.tokens
    assert (found.parted, found.same) == (0, COUNT * len(TEXTS))
    assert report.perplexity is not None
    assert report.perplexity.reference == report.perplexity.result


@pytest.mark.slow
@pytest.mark.usefixtures("home", "forked")
@pytest.mark.parametrize("command", ["diff", "convert", "folder", "tune"])
def test_commands_show_the_figures(command: str) -> None:
    if command == "diff":
        assert run("convert", "llama/model.onnx", "-o", "out.onnx", "--no-validate").exit_code == 0
    texts = ("--prompts", "prompts.txt")
    arguments = {
        "diff": ("diff", "llama/model.onnx", "out.onnx", *texts, "--html", "page.html"),
        "convert": ("convert", "llama/model.onnx", "-o", "out.onnx", *texts, "--html", "page.html"),
        "folder": ("convert", "llama", "-o", "out", *texts, "--jobs", "1", "--html", "pages"),
        "tune": ("tune", "llama/model.onnx", "-o", "out.onnx", *texts, "--html", "page.html", "--metric", "kl"),
    }[command]
    printed = run(*arguments)
    assert printed.exit_code == 0, printed.output
    page = Path("pages/model.onnx.html" if command == "folder" else "page.html").read_text()
    for figure in ("KL divergence", "top-1 agreement", "perplexity", "same tokens"):
        assert figure in printed.output
        assert figure in page
    again = run(*(arguments[:-2] if command == "folder" else arguments), "--format", "json")
    facts = json.loads(again.stdout)
    found = {
        "diff": lambda: facts,
        "convert": lambda: facts["validation"],
        "folder": lambda: facts["report"]["rows"][0],
        "tune": lambda: facts["comparison"],
    }[command]()
    assert found["perplexity"]["tokens"] == sum(len(words(text)) - 1 for text in TEXTS)
    assert found["tokens"][0]["sequences"] == len(TEXTS)


@pytest.mark.slow
@pytest.mark.usefixtures("home", "forked")
def test_a_folder_tells_the_first_token_that_differs() -> None:
    """bfloat16 keeps so few bits that tokens differ."""
    printed = run("convert", "llama", "-o", "out", "--prompts", "prompts.txt", "--jobs", "1", "--dtype", "bfloat16")
    assert printed.exit_code == 0, printed.output
    assert "The first token that differs is number" in " ".join(printed.output.split())


@pytest.mark.usefixtures("home")
def test_the_first_token_that_differs_is_told() -> None:
    onnx.save(decoders.disturbed(onnx.load("plain/model.onnx")), "other.onnx")
    printed = run("diff", "plain/model.onnx", "other.onnx", "--prompts", "prompts.txt", "--tolerance", "1", "-v")
    assert printed.exit_code == 0, printed.output
    assert "The first token that differs is number" in " ".join(printed.output.split())
