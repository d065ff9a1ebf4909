"""Folders as software loads them: the types, names, configs and tokenizers that it expects."""

import json
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import decoders
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import towers
from commands import run
from onnx import ModelProto, TensorProto, numpy_helper

import onnxamp
from onnxamp import FolderReport
from onnxamp._base.extensions import extensions
from onnxamp._facts.tables import read_table
from onnxamp._fleet.kinds import kinds
from onnxamp._options.options import Options

pytestmark = pytest.mark.usefixtures("forked")

COPIED = ("LICENSE", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def files(root: str) -> set[str]:
    found = (path.relative_to(root).as_posix() for path in Path(root).rglob("*") if path.is_file())
    return {name for name in found if not name.startswith(".onnxamp")}


def convert(**options: object) -> FolderReport:
    return onnxamp.convert_folder("in", "out", jobs=1, **options)  # type: ignore[arg-type] # of every option


def types(model: ModelProto) -> dict[str, int]:
    entries = (*model.graph.input, *model.graph.output)
    return {entry.name: entry.type.tensor_type.elem_type for entry in entries}


def runner(path: str) -> Callable[[dict[str, np.ndarray]], list[np.ndarray]]:
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda feeds: session.run(None, feeds)


def test_the_core_looks_for_a_mark_of_each_kind() -> None:
    beside = set(extensions("folders")["packages"].beside)
    assert [kind.name for kind in kinds() if not beside.intersection(kind.marks)] == []


def test_rows_name_options_and_presets_that_exist() -> None:
    styles = read_table("presets")
    for kind in kinds():
        assert Options.of("O2", kind.options)
        assert kind.data_names in styles
        assert kind.names[-1].pattern == "*"  # every model has a name


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["genai", "transformers.js", "optimum"])
def test_a_model_of_a_folder_gets_the_types_of_the_folder(kind: str) -> None:
    home = decoders.folder(Path("in"), kind, decoders.plain())
    path = next(home.rglob("model.onnx"))
    (row,) = convert().rows
    result = next(Path("out").rglob("*.onnx"))
    printed = run("convert", path, "-o", "alone.onnx")
    assert printed.exit_code == 0, printed.output
    assert "'onnxamp convert in -o OUTDIR' also copies configs and tokenizers." in " ".join(printed.stderr.split())
    assert types(onnx.load("alone.onnx")) == types(onnx.load(result, load_external_data=False))
    assert row.casts == sum(node.op_type == "Cast" for node in onnx.load("alone.onnx").graph.node) - 1  # of the mask
    quiet = run("convert", path, "-o", "kept.onnx", "-q", "--io-types", "keep", "--no-validate")
    assert not quiet.output
    assert types(onnx.load("kept.onnx")) == types(onnx.load(path, load_external_data=False))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_model_whose_folder_asks_for_nothing_is_like_any_other(dtype: str) -> None:
    """There is no config, or the software does not take the type."""
    if dtype == "float16":
        onnx.save(decoders.plain(), "model.onnx")
    else:
        decoders.folder(Path("in"), "transformers.js", decoders.plain())
        Path("in/onnx/model.onnx").rename("in/onnx/other.onnx")
    path = "model.onnx" if dtype == "float16" else "in/onnx/other.onnx"
    printed = run("convert", path, "-o", "alone.onnx", "--no-validate", "--dtype", dtype)
    assert "copies configs" not in printed.stderr
    assert set(types(onnx.load("alone.onnx")).values()) == {TensorProto.FLOAT, TensorProto.INT64}


@pytest.mark.slow
@pytest.mark.parametrize("int4", [False, True])
def test_a_folder_of_genai_is_whole_and_generates_the_same_tokens(int4: bool) -> None:
    decoders.folder(Path("in"), "genai", decoders.grouped(int4=int4))
    (row,) = (report := convert()).rows
    assert (row.outcome, row.casts, row.message, row.healed) == ("converted", 1, "", "")
    assert row.error is not None
    assert row.error < 2e-3
    assert row.inputs == "random inputs (2 samples, seed 0)"
    assert files("out") == {"genai_config.json", "model.onnx", "model.onnx.data", *COPIED}
    for name in ("genai_config.json", *COPIED):
        assert Path("out", name).read_bytes() == Path("in", name).read_bytes()
    (shipped,) = report.shipped
    assert (shipped.name, shipped.kind, shipped.kept) == (".", "ONNX Runtime GenAI", ())
    source, result = onnx.load("in/model.onnx"), onnx.load("out/model.onnx")
    low = {name for name, elem in types(result).items() if elem == TensorProto.FLOAT16}
    assert low == {name for name in types(source) if name.startswith(("past", "present"))}
    low_tokens, tokens = (
        decoders.next_tokens(runner(f"{home}/model.onnx"), model, 20)
        for home, model in (("out", result), ("in", source))
    )
    assert low_tokens == tokens


@pytest.mark.slow
@pytest.mark.skipif(find_spec("tokenizers") is None, reason="tokenizers is not installed")
def test_a_tokenizer_that_knows_the_built_in_prompts_lets_both_generate() -> None:
    home = decoders.folder(Path("in"), "genai", decoders.grouped())
    assert "random" in convert().rows[0].inputs  # the tokenizer of the tests knows no such words
    shutil.rmtree("out")
    (home / "tokenizer.json").write_text(json.dumps(decoders.LETTERS))
    (row,) = convert().rows
    assert (row.outcome, row.inputs) == ("converted", "samples of 2 built-in prompts and the steps after")
    assert sum(one.sequences for one in row.tokens) == 2
    assert row.perplexity is not None
    text = "The river rises in the hills, and runs for ninety miles before it meets the sea."
    tokens = [ord(letter) - 32 for letter in text]
    result = onnx.load("out/model.onnx")
    models = (decoders.grouped(), result)  # saving takes the weights out of a model
    pair = [decoders.generate(decoders.on_cpu(each), each, tokens, 8)[0] for each in models]
    assert pair[0] == pair[1]
    assert sum(one.same for one in row.tokens) == 16
    shutil.rmtree("out")
    assert "random" in convert(samples=3).rows[0].inputs
    for entry in (model := decoders.grouped()).graph.output:
        if entry.name == "logits":
            entry.type.tensor_type.ClearField("shape")
    onnx.save(model, home / "model.onnx")
    shutil.rmtree("out")
    (row,) = convert().rows
    assert (row.outcome, row.message) == ("converted", "")


@pytest.mark.slow
def test_what_overflows_gets_exponents_and_no_float32_island() -> None:
    decoders.folder(Path("in"), "genai", decoders.grouped(scale=300.0))
    (row,) = convert().rows
    assert (row.outcome, row.healed, row.casts) == ("converted", "", 1)
    assert any(text.startswith("Exponents were chosen for random inputs") for text in row.warnings)
    island = convert(rescale=False, retry=True).rows[0]
    assert island.healed or island.casts > 1


@pytest.mark.slow
def test_transformers_js_takes_names_caches_and_data_files_by_its_config() -> None:
    home = decoders.folder(Path("in"), "transformers.js", decoders.plain())
    onnx.save(decoders.grouped(int4=True), home / "onnx/model_q4.onnx")
    (home / "onnx/model_quantized.onnx").write_bytes(b"some other types")
    report = convert(external_data="always")
    assert [row.outcome for row in report.rows] == ["converted", "converted"]
    assert files("out") == {
        "config.json",
        *COPIED,
        *(f"onnx/model_{types}.onnx{end}" for types in ("fp16", "q4f16") for end in ("", "_data")),
    }
    assert json.loads(Path("out/config.json").read_text()) == {
        **json.loads(Path("in/config.json").read_text()),
        "transformers.js_config": {
            "kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"},
            "use_external_data_format": {"model_fp16.onnx": 1, "model_q4f16.onnx": 1},
        },
    }
    found = types(onnx.load("out/onnx/model_fp16.onnx"))
    assert found["logits"] == TensorProto.FLOAT
    assert found["past_key_values.0.key"] == found["present.1.value"] == TensorProto.FLOAT16
    (shipped,) = report.shipped
    assert shipped.left == ("onnx/model_quantized.onnx",)
    printed = run("convert", "in", "-o", "again", "--jobs", "1", "--no-validate").output
    assert "A folder for transformers.js" in printed
    assert "onnx/model_quantized.onnx" in printed


@pytest.mark.slow
def test_optimum_keeps_names() -> None:
    decoders.folder(Path("in"), "optimum", decoders.plain())
    (shipped,) = convert().shipped
    assert shipped.kind == "Optimum"
    assert files("out") == {"config.json", "model.onnx", *COPIED}
    found = types(onnx.load("out/model.onnx"))
    assert found["logits"] == TensorProto.FLOAT
    assert found["present.0.key"] == TensorProto.FLOAT16


@pytest.mark.slow
def test_towers_and_embeddings_run_on_made_up_inputs_and_fit_each_other() -> None:
    towers.folder(Path("in"))
    rows = convert().rows
    assert [(row.name, row.outcome, row.message, row.healed) for row in rows] == [
        (f"{name}.onnx", "converted", "", "") for name in ("embedding", "model", "speech", "vision")
    ]
    assert all(row.error is not None and 0 < row.error < 2e-3 for row in rows)
    assert files("out") - {"model.onnx.data"} == files("in") - {"model.onnx.data"}
    ends = {row.name: types(onnx.load(f"out/{row.name}")) for row in rows}
    features = ends["vision.onnx"]["image_features"], ends["embedding.onnx"]["image_features"]
    embeds = ends["embedding.onnx"]["inputs_embeds"], ends["model.onnx"]["inputs_embeds"]
    assert {*features, *embeds, ends["speech.onnx"]["input_features"]} == {TensorProto.FLOAT16}
    assert ends["model.onnx"]["logits"] == TensorProto.FLOAT


def two_decoders(*, share: bool) -> None:
    """A decoder, and one with a head of its own, whose weights are in one data file or in two."""
    home = decoders.folder(Path("in"), "optimum", decoders.plain())
    (home / "model.onnx").unlink()
    first, second = decoders.plain(), decoders.plain()
    head = next(weight for weight in second.graph.initializer if weight.name == "lm_head.weight")
    head.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(head), "other_head"))
    second.graph.node[-1].input[1] = "other_head"
    if not share:
        for name, model in {"a": first, "b": second}.items():
            onnx.save(model, home / f"{name}.onnx", save_as_external_data=True, location=f"{name}.data")
        return
    both = decoders.plain()
    both.graph.initializer.append(head)
    onnx.save(both, home / "both.onnx", save_as_external_data=True, location="weights.data")
    places = {
        weight.name: weight for weight in onnx.load(home / "both.onnx", load_external_data=False).graph.initializer
    }
    (home / "both.onnx").unlink()
    for name, model in {"a": first, "b": second}.items():
        for weight in model.graph.initializer:
            weight.CopyFrom(places[weight.name])
        onnx.save(model, home / f"{name}.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, False])
def test_results_share_the_weights_that_their_models_share(share: bool) -> None:
    two_decoders(share=share)
    report = convert()
    first, second = report.rows
    head = decoders.HIDDEN * decoders.TOKENS * 2
    assert first.bytes_after > 5 * head
    names = {"a.onnx", "b.onnx", "a.onnx.data", "b.onnx.data", "config.json", *COPIED}
    assert files("out") == names
    if not share:
        assert second.bytes_after == first.bytes_after
        assert report.read_again == 0
        return

    assert second.bytes_before == first.bytes_before
    assert 2 * head <= first.bytes_before - report.read_again < 4 * head, "all but the head is read twice"

    def are_right() -> bool:
        reports = (onnxamp.diff_models(f"in/{name}.onnx", f"out/{name}.onnx", provider="cpu") for name in "ab")
        return all(report.passed for report in reports)

    assert head <= second.bytes_after < 2 * head
    assert Path("out/b.onnx.data").stat().st_size < 2 * head
    assert are_right()
    Path("out/a.onnx").unlink()
    again = convert()
    assert [row.outcome for row in again.rows] == ["converted", "up to date"]
    assert again.read_again == report.read_again
    assert len(files("out")) == len(names)
    assert min(path.stat().st_size for path in Path("out").glob("*.data")) < 2 * head
    assert are_right()
    assert [row.outcome for row in convert().rows] == ["up to date", "up to date"]


@pytest.mark.slow
def test_results_share_what_their_models_no_longer_share() -> None:
    """The one that is exported again has its own data file, and the other's result refers to the one it replaces."""
    two_decoders(share=True)
    convert()
    onnx.save(onnx.load("in/a.onnx"), "in/a.onnx", save_as_external_data=True, location="a.data")
    assert [row.outcome for row in convert().rows] == ["converted", "up to date"]
    reports = (onnxamp.diff_models(f"in/{name}.onnx", f"out/{name}.onnx", provider="cpu") for name in "ab")
    assert all(report.passed for report in reports)
    assert [row.outcome for row in convert().rows] == ["up to date", "up to date"]


@pytest.mark.slow
def test_software_that_looks_for_data_by_the_name_of_the_model_gets_them() -> None:
    """transformers.js fetches ``NAME_data`` for a model and no other file."""
    two_decoders(share=True)
    Path("in/onnx").mkdir()
    for path in [*Path("in").glob("*.onnx"), Path("in/weights.data")]:
        path.rename(Path("in/onnx", path.name))
    config = json.loads(Path("in/config.json").read_text())
    config["transformers.js_config"] = {"use_external_data_format": True}
    Path("in/config.json").write_text(json.dumps(config))
    assert {row.outcome for row in convert(external_data="always").rows} == {"converted"}
    data = {path.name: path.stat().st_size for path in Path("out/onnx").glob("*_data")}
    assert set(data) == {"a_fp16.onnx_data", "b_fp16.onnx_data"}
    assert len({*data.values()}) == 1


@pytest.mark.parametrize(
    ("mark", "model", "kind"),
    [
        ("model_index.json", "unet/model.onnx", "Diffusers"),
        ("modules.json", "onnx/model.onnx", "sentence-transformers"),
    ],
)
def test_other_kinds_keep_names_and_the_types_of_ends(mark: str, model: str, kind: str) -> None:
    Path("in", model).parent.mkdir(parents=True)
    for name in (mark, "config.json", "tokenizer/vocab.txt"):
        Path("in", name).parent.mkdir(exist_ok=True)
        Path("in", name).write_text("{}")
    onnx.save(decoders.plain(), Path("in", model))
    (shipped,) = convert(validate=False).shipped
    assert (shipped.kind, shipped.copied) == (kind, ("config.json", mark, "tokenizer/vocab.txt"))
    assert TensorProto.FLOAT16 not in types(onnx.load(Path("out", model))).values()


@pytest.mark.slow
def test_options_that_are_given_stay() -> None:
    decoders.folder(Path("in"), "transformers.js", decoders.plain())
    run("convert", "in", "-o", "out", "--jobs", "1", "--no-validate", "--io-types", "keep", "--target", "cuda")
    assert TensorProto.FLOAT16 not in types(onnx.load("out/onnx/model_fp16.onnx")).values()
    assert json.loads(Path("out/config.json").read_text()) == json.loads(Path("in/config.json").read_text())


def test_a_type_that_software_lacks_is_refused() -> None:
    decoders.folder(Path("in"), "transformers.js", decoders.plain())
    refused = run("convert", "in", "-o", "out", "--dtype", "bfloat16")
    assert refused.exit_code == 2
    assert "'in' is a folder for transformers.js, which does not support bfloat16: use float16" in refused.output
    assert not Path("out").exists()


@pytest.mark.parametrize(("text", "reason"), [("{no", "Cannot read the config"), ("[]", "is not a JSON object")])
def test_a_config_that_cannot_be_changed_is_refused_before_anything_is_converted(text: str, reason: str) -> None:
    decoders.folder(Path("in"), "transformers.js", decoders.plain())
    Path("in/config.json").write_text(text)
    refused = run("convert", "in", "-o", "out")
    assert refused.exit_code == 2
    assert reason in refused.output
    assert str(Path("in/config.json")) in refused.output
    assert not Path("out").exists()


@pytest.mark.slow
def test_nobody_loads_half_a_folder() -> None:
    home = decoders.folder(Path("in"), "transformers.js", decoders.plain())
    (home / "onnx/decoder.onnx").write_bytes(b"no model")
    assert run("convert", "in", "-o", "out", "--no-validate").exit_code == 1
    assert files("out") == set()


@pytest.mark.slow
def test_files_of_others_stay() -> None:
    decoders.folder(Path("in"), "genai", decoders.grouped())
    Path("out").mkdir()
    Path("out/genai_config.json").write_text("mine")
    (shipped,) = convert(validate=False).shipped
    assert shipped.kept == ("genai_config.json",)
    assert Path("out/genai_config.json").read_text() == "mine"
    Path("in/tokenizer.json").write_text('{"version": "2.0"}')
    convert(validate=False)
    assert Path("out/tokenizer.json").read_text() == '{"version": "2.0"}'
    Path("out/tokenizer.json").write_text("edited")
    assert convert(validate=False).shipped[0].kept == ("genai_config.json", "tokenizer.json")


def test_a_folder_with_low_models_alone_says_so() -> None:
    home = decoders.folder(Path("in"), "transformers.js", decoders.plain())
    (home / "onnx/model.onnx").rename(home / "onnx/model_fp16.onnx")
    result = run("convert", "in", "-o", "out")
    assert result.exit_code == 2
    assert "onnx/model_fp16.onnx" in result.output


@pytest.mark.slow
def test_a_folder_of_folders_knows_each() -> None:
    decoders.folder(Path("in/first"), "genai", decoders.grouped())
    decoders.folder(Path("in/second"), "optimum", decoders.plain())
    onnx.save(decoders.plain(), "in/alone.onnx")
    report = convert(validate=False)
    assert {(one.name, one.kind) for one in report.shipped} == {("first", "ONNX Runtime GenAI"), ("second", "Optimum")}
    assert TensorProto.FLOAT16 not in types(onnx.load("out/alone.onnx")).values()
    assert {"first/genai_config.json", "second/config.json"} <= files("out")


def test_grouped_attention_that_is_low_is_not_said_to_run_on_the_cpu() -> None:
    decoders.folder(Path("in"), "genai", decoders.grouped())
    low = run("convert", "in/model.onnx", "-o", "low.onnx", "--no-validate", "-v").output
    assert "no kernel on cuda" not in low
    kept = run(
        "convert",
        "in/model.onnx",
        "-o",
        "kept.onnx",
        "--no-validate",
        "-v",
        "--black",
        "com.microsoft::GroupQueryAttention",
    ).output
    assert "2 nodes have no kernel on cuda in any precision" in kept


def product() -> ModelProto:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,8] x) => (float[N,8] y) { y = MatMul (x, w) }'
    )
    weight = np.eye(8, dtype=np.float32)
    model.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return model


def test_components_with_configs_belong_to_their_pipeline() -> None:
    """As optimum-cli exports them."""
    for component in ("unet", "text_encoder"):
        Path("in", component).mkdir(parents=True)
        onnx.save(product(), f"in/{component}/model.onnx")
        Path("in", component, "config.json").write_text("{}")
    Path("in/model_index.json").write_text("{}")
    Path("in/tokenizer").mkdir()
    Path("in/tokenizer/vocab.json").write_text("{}")
    result = run("convert", "in", "-o", "out", "--no-validate")
    assert "A folder for Diffusers" in result.output
    assert {"model_index.json", "tokenizer/vocab.json"} <= files("out")
    assert result.output.count("✔") == 0, "nothing was validated"


def test_previews_show_the_types_of_the_folder() -> None:
    Path("in").mkdir()
    onnx.save(product(), "in/model.onnx")
    Path("in/genai_config.json").write_text("{}")
    assert run("view", "in/model.onnx", "-o", "page.html").exit_code == 0
    shown = run("inspect", "in/model.onnx", "--level", "O2", "--format", "json")
    assert not json.loads(shown.output)["levels"]["O2"]["options"]["keep_io_types"]


def test_what_was_read_from_a_folder_or_a_library_is_remembered(tmp_path: Path) -> None:
    Path("in").mkdir()
    onnx.save(product(), "in/model.onnx")
    Path("given/model").mkdir(parents=True)
    for number in range(2):
        np.savez(f"given/model/{number}.npz", x=np.full((1, 8), number, np.float32))
    outcomes = [convert(inputs="given").rows[0].outcome for _ in range(2)]
    np.savez("given/model/2.npz", x=np.ones((1, 8), np.float32))
    outcomes.append(convert(inputs="given").rows[0].outcome)
    assert outcomes == ["converted", "up to date", "converted"]


def test_prompts_that_are_missing_end_a_folder_before_it_begins() -> None:
    Path("in").mkdir()
    onnx.save(product(), "in/model.onnx")
    result = run("convert", "in", "-o", "out", "--prompts", "nothing.txt")
    assert result.exit_code == 2
    assert "Cannot read the prompts" in result.output
    assert not Path("out/model.onnx").exists()
