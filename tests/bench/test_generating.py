"""``onnxamp bench`` of folders of language models: what is generated, on which engine, and what is refused."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import decoders
import numpy as np
import onnx
import pytest
import web
from commands import CLASSIFIER, run
from onnx import TensorProto, helper, numpy_helper

from onnxamp import convert_folder
from onnxamp._runtime.browser.server import WEB

TEXTS = [[3, 14, 15], [9, 26, 5, 35, 8], [1, 2, 90, 4]]
COUNT = 12
QUICK = ("--seconds", "0.01", "--provider", "cpu", "--tokens", str(COUNT))
HAS_GENAI = find_spec("onnxruntime_genai") is not None
needs_tokenizers = pytest.mark.skipif(
    find_spec("tokenizers") is None, reason="tokenizers is not installed: pip install 'onnxamp[text]'"
)


JAVASCRIPT_TROUBLE = web.javascript_trouble()
needs_javascript = pytest.mark.skipif(JAVASCRIPT_TROUBLE is not None, reason=JAVASCRIPT_TROUBLE or "")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("\n".join(" ".join(f"w{token}" for token in text) for text in TEXTS))
    decoders.folder(Path("llama"), "genai", decoders.grouped())
    return tmp_path


def benched(*arguments: str, code: int = 0) -> dict[str, Any]:
    printed = run("bench", *QUICK, *arguments, "--format", "json")
    assert printed.exit_code == code, printed.output
    found: dict[str, Any] = json.loads(printed.stdout)["report"]
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("home", "forked")
@needs_tokenizers
def test_a_result_generates_beside_its_original() -> None:
    convert_folder("llama", "out", jobs=1)
    report = benched("llama", "out", "--prompts", "prompts.txt")
    assert report["inputs"] == f"3 of the prompts, 12 tokens; {COUNT} tokens generated after each"
    assert report["ran_on"] == "CPU"
    engines = ["onnxruntime", "onnxruntime-genai"] if HAS_GENAI else ["onnxruntime"]
    assert [(one["model"], one["runtime"].split()[0]) for one in report["runs"]] == [
        (str(Path(folder, "model.onnx")), engine) for folder in ("llama", "out") for engine in engines
    ]
    for one in report["runs"]:
        assert one["same"] == COUNT * len(TEXTS) == report["tokens"]
        assert min(one["load"], one["prefill"], one["decode"], one["first"]["median"], one["step"]["median"]) > 0
        assert (one["step_ratio"] is None) == (one["model"] == str(Path("llama", "model.onnx")))
        assert one["memory"] is None or one["memory"] > 10_000_000
        assert one["device_memory"] is None
    assert any("nothing about a GPU" in note for note in report["notes"])


@pytest.mark.slow
@pytest.mark.usefixtures("home")
@needs_tokenizers
def test_tokens_are_counted_up_to_the_first_that_differs() -> None:
    model = decoders.plain()
    other = decoders.disturbed(model)
    decoders.folder(Path("plain"), "optimum", model)
    onnx.save(other, "other.onnx")
    one, two = benched("plain/model.onnx", "other.onnx", "--prompts", "prompts.txt")["runs"]
    same = 0
    for text in TEXTS:
        pair = (decoders.generate(decoders.on_cpu(each), each, text, COUNT)[0] for each in (model, other))
        same += next((n for n, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), COUNT)
    assert (one["same"], two["same"]) == (COUNT * len(TEXTS), same)
    assert same < COUNT * len(TEXTS)


@pytest.mark.slow
@pytest.mark.usefixtures("home", "forked")
def test_prompts_may_be_made_up(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    monkeypatch.setenv(WEB, str(home))  # without transformers.js
    monkeypatch.delenv("NODE_PATH", raising=False)
    decoders.folder(Path("web"), "transformers.js", decoders.plain())
    convert_folder("web", "out", jobs=1)
    for more, other in (("web/onnx/model.onnx", "model_q4.onnx"), ("out/onnx/model_fp16.onnx", "model_q4f16.onnx")):
        shutil.copy(more, Path(more).with_name(other))  # the more precise one generates
    report = benched("web", "out", "--dim", "sequence_length=9")
    assert report["inputs"] == f"1 random prompt, 9 tokens; {COUNT} tokens generated after each"
    assert [one["model"] for one in report["runs"]] == ["web/onnx/model.onnx", "out/onnx/model_fp16.onnx"]
    left_out = (
        "transformers.js is left out: the npm package @huggingface/transformers is not installed: npm install"
        " @huggingface/transformers installs it in this folder."
    )
    assert report["notes"].count(left_out) == 1
    printed = run("bench", "web", *QUICK, "--format", "table").output
    assert "64 tokens" in printed
    assert "generated per s" in printed


PLACES = [
    pytest.param("cpu", "Node", marks=needs_javascript),
    pytest.param("browser", "Chromium", marks=[needs_javascript, pytest.mark.browser]),
]


@pytest.mark.usefixtures("home", "forked")
@pytest.mark.parametrize(("provider", "place"), PLACES)
def test_transformers_js_generates_in_node_and_in_chromium(provider: str, place: str) -> None:
    model = decoders.plain()
    decoders.folder(Path("web"), "transformers.js", model)
    convert_folder("web", "out", jobs=1)
    report = benched("web", "out", "--provider", provider, "--prompts", "prompts.txt")
    runs = [one for one in report["runs"] if one["runtime"].startswith("transformers.js")]
    assert [one["model"] for one in runs] == ["web/onnx/model.onnx", "out/onnx/model_fp16.onnx"]
    assert len(report["runs"]) == (2 if provider == "browser" else 4)
    for one in runs:
        assert place in one["runtime"]
        assert one["same"] == COUNT * len(TEXTS)
        assert one["nans"] == 0
        assert min(one["load"], one["decode"], one["first"]["median"], one["step"]["median"]) > 0
        assert one["memory"] is None or one["memory"] > 10_000_000


@pytest.mark.usefixtures("home", "forked")
@pytest.mark.parametrize("kind", ["genai", pytest.param("transformers.js", marks=needs_javascript)])
def test_logits_that_are_not_numbers_are_counted_and_fail(kind: str) -> None:
    model = decoders.plain() if kind == "transformers.js" else decoders.grouped()
    (weight,) = (tensor for tensor in model.graph.initializer if tensor.name == "lm_head.weight")
    values = numpy_helper.to_array(weight).copy()
    values[:, 7] = np.nan
    weight.CopyFrom(numpy_helper.from_array(values, weight.name))
    decoders.folder(Path("broken"), kind, model)
    report = benched("broken", code=1)
    assert {one["nans"] for one in report["runs"]} == {COUNT}
    engines = ["onnxruntime", "transformers.js" if kind == "transformers.js" else "onnxruntime-genai"]
    found = [one["runtime"].split()[0] for one in report["runs"]]
    assert found == (engines if kind == "transformers.js" or HAS_GENAI else engines[:1])


@pytest.mark.usefixtures("home")
def test_a_merged_decoder_generates_rather_than_its_branches() -> None:
    home = decoders.folder(Path("both"), "optimum", decoders.plain())
    (home / "model.onnx").rename(home / "decoder_with_past_model.onnx")
    merged = decoders.plain()
    flag = helper.make_tensor_value_info("use_cache_branch", TensorProto.BOOL, [1])
    merged.graph.input.append(flag)
    onnx.save(merged, home / "decoder_model_merged.onnx")
    (generated,) = benched("both", "--dim", "sequence_length=9")["runs"]
    assert generated["model"] == str(home / "decoder_model_merged.onnx")


@pytest.mark.browser
@pytest.mark.usefixtures("home")
def test_other_folders_do_not_generate_in_a_browser() -> None:
    printed = run("bench", "llama", "--provider", "browser")
    assert printed.exit_code != 0
    assert "llama/model.onnx is not in a folder for transformers.js" in " ".join(printed.output.split())


@pytest.mark.slow
@pytest.mark.usefixtures("home")
def test_what_is_wrong_is_said() -> None:
    decoders.folder(Path("many"), "optimum", decoders.plain())
    onnx.save(decoders.plain(), "many/other.onnx")
    Path("empty").mkdir()
    broken = decoders.grouped()
    broken.graph.node[-1].op_type = "Missing"
    decoders.folder(Path("broken"), "genai", broken)
    for arguments, text in [
        (["empty"], "'empty' holds no decoder with caches."),
        (["many"], "'many' holds several decoders; name the file of one: model.onnx, other.onnx."),
        (["llama", "--batch", "2"], "--batch is for models that run once: decoders generate text here."),
        ([CLASSIFIER, "--tokens", "3"], "--tokens is for folders of language models, and for decoders with --prompts."),
        ([CLASSIFIER, "--prompts", "prompts.txt"], "Prompts are for decoders"),
        (["llama", "broken"], "broken/model.onnx: "),
    ]:
        printed = run("bench", *map(str, arguments))
        assert printed.exit_code != 0
        assert text in " ".join(printed.output.split())
