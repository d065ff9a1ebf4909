"""What commands say where something is wrong: what, where, and what to do; never a class or a file of their own."""

import gzip
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from commands import CLASSIFIER, is_one_sentence, report_of, run, saved, small
from graphs.case import add_weights, parse
from repository import MODELS

import onnxamp
from onnxamp._cli.command import group

UNET = next(path for path in MODELS if path.stem == "unet")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def custom() -> Path:
    """A model with an op that ONNX Runtime does not know."""
    text = "(float[1,2] X) => (float[1,2] Y) { [first] a = acme.Swish (X) [last] Y = Softsign (a) }"
    return saved(parse(text, domains={"acme": 1}))


def message(*arguments: object, code: int = 2) -> str:
    """What a command that fails says, without its usage, in one line."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.partition("Error: ")[2].split())


class TestInPlace:
    def test_the_model_is_replaced_without_a_name_for_the_result(self) -> None:
        path = small()
        wanted = onnxamp.convert_model(str(path), "O3")
        assert run("convert", path, "--in-place", "--level", "O3").exit_code == 0
        assert onnx.load(path) == wanted
        assert [file.name for file in Path().glob("*.onnx")] == [path.name]

    def test_tune_replaces_it_too(self) -> None:
        path = saved(onnx.load(CLASSIFIER))
        before = path.read_bytes()
        assert run("tune", path, "--in-place", "--samples", 1, "--allow-slower").exit_code == 0
        assert path.read_bytes() != before

    @pytest.mark.parametrize("command", ["convert", "tune"])
    def test_another_name_contradicts_it(self, command: str) -> None:
        told = message(command, small(), "--in-place", "-o", "other.onnx")
        assert told == "--in-place replaces 'model.onnx', but -o names 'other.onnx': drop one of the two."
        assert not Path("other.onnx").exists()

    def test_folders_are_not_replaced(self) -> None:
        Path("models").mkdir()
        assert "--in-place is for a single model" in message("convert", "models", "-o", "out", "--in-place")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("Matmul", "MatMul"), ("matMul", "MatMul"), ("SOFTMAX", "Softmax"), ("Sofmax", "Softmax"), ("Xyzzy", None)],
)
def test_misspelled_op_types_are_named_as_onnx_spells_them(given: str, meant: str | None) -> None:
    result = run("convert", small(), "--white", given, "-q")
    assert result.exit_code == 2
    assert result.output.count("Did you mean") == (meant is not None)
    assert meant is None or f"Did you mean '{meant}'?" in result.output


def test_misspelled_outputs_are_named_with_the_option() -> None:
    result = run("convert", CLASSIFIER, "-o", "x.onnx", "--io-types", "keep:logit", "-q")
    assert "--io-types" in result.output
    assert "Did you mean 'logits'?" in result.output


@pytest.mark.parametrize("option", [("--data-max", 4), ("--rescale",)])
def test_what_needs_ranges_names_the_commands_that_measure_them(option: tuple[object, ...]) -> None:
    assert "'onnxamp convert' and 'onnxamp tune' measure" in message("inspect", small(), *option)


@pytest.mark.parametrize(("arguments", "told"), [
    (("out.onnx",), "Unexpected argument 'out.onnx'. To write the result there, pass '-o out.onnx'."),
    (("b.onnx", "-o", "out"), "Unexpected argument 'b.onnx'."),
    (("-level", "O3"), "No such option '-level'. Did you mean '--level'?"),
    (("--tolerance", "1%"), "'1%' is not a valid number (write it like 0.01 or 1e-3)."),
    (("--samples", "inputs.npz"), "'inputs.npz' is not a valid integer."),
    (("--keep-node", "nothing"), "is called 'nothing'. onnxamp inspect -v lists the names."),
])  # fmt: skip
def test_habits_of_other_command_lines(arguments: tuple[str, ...], told: str) -> None:
    assert message("convert", small(), *arguments).endswith(told)


class TestFiles:
    def test_archives_of_models_are_to_be_unpacked(self) -> None:
        path = small()
        with zipfile.ZipFile("archive.onnx", "w") as archive:
            archive.write(path, "folder/model.onnx")
        Path("small.onnx").write_bytes(gzip.compress(path.read_bytes()))
        told = message("convert", "archive.onnx", code=1)
        assert told == "'archive.onnx' is a ZIP archive with an ONNX model in it: unpack it."
        assert message("convert", "small.onnx", code=1) == "'small.onnx' is a compressed file: unpack it."

    def test_parts_of_files_are_to_be_fetched_again(self) -> None:
        path = small()
        path.write_bytes(path.read_bytes()[:-20])
        assert message("convert", path, code=1).endswith("Download or export it again.")
        path.write_bytes(b"")
        assert message("convert", path, code=1) == "'model.onnx' is empty: download or export it again."

    def test_data_files_are_to_be_copied(self) -> None:
        onnx.save(onnx.load(CLASSIFIER), "model.onnx", save_as_external_data=True, location="w", size_threshold=0)
        with Path("w").open("r+b") as file:
            file.truncate(1000)
        assert "which holds 1000 bytes: copy or export both files again." in message("convert", "model.onnx", code=1)
        Path("w").unlink()
        assert "is missing: copy it there under that name." in message("convert", "model.onnx", code=1)

    def test_missing_arrays_are_not_called_incomplete(self) -> None:
        told = message("train", CLASSIFIER, "--data", "nowhere.npz", "-o", "out.onnx")
        assert told == "Cannot read nowhere.npz: No such file or directory. Check the path."

    @pytest.mark.parametrize(("path", "told"), [
        ("modle.onnx", "Did you mean 'model.onnx'?"), ("models/model.onnx", "There is no folder 'models'."),
        ("else", "Check the path."),
    ])  # fmt: skip
    @pytest.mark.parametrize("command", [("inspect",), ("diff", "model.onnx"), ("convert", "model.onnx", "--plan")])
    def test_a_missing_file_is_looked_for(self, command: tuple[str, ...], path: str, told: str) -> None:
        small()
        assert message(*command, path, code=1 if command == ("inspect",) else 2).endswith(told)

    @pytest.mark.parametrize("arguments", [
        ("inspect", "-"), ("diff", "model.onnx", "-"), ("view", "model.onnx", "-o", "-"), ("bench", "-"), ("tune", "-"),
        ("convert", "model.onnx", "-o", "-"), ("convert", ".", "-o", "-"), ("check", "model.onnx", "--inputs", "-"),
    ])  # fmt: skip
    def test_a_dash_is_no_file(self, arguments: tuple[str, ...]) -> None:
        small()
        assert message(*arguments).endswith("name a file ('./-' for this name).")
        assert not Path("-").exists()

    def test_folders_and_pipes_are_no_models(self) -> None:
        assert message("inspect", ".", code=1) == "Cannot read '.': it is a folder: name a model in it."
        reader, writer = os.pipe()
        try:
            told = message("inspect", f"/dev/fd/{reader}", code=1)
        finally:
            os.close(reader)
            os.close(writer)
        assert told.endswith("it is not a regular file: save the model to one.") or not Path("/dev/fd").exists()

    @pytest.mark.slow
    @pytest.mark.parametrize("stream", [1, 2])
    @pytest.mark.parametrize("option", ["-o", "--html", "--save-plan"])
    def test_a_standard_stream_is_no_place_for_results(self, option: str, stream: int) -> None:
        path, names = small(), ["out", "err"]
        with Path("out").open("wb") as out, Path("err").open("wb") as err:
            command = [
                sys.executable,
                "-m",
                "onnxamp",
                "convert",
                str(path),
                "--no-validate",
                option,
                names[stream - 1],
            ]
            code = subprocess.run(command, stdout=out, stderr=err, check=False).returncode
        assert code == 2
        assert f"'{names[stream - 1]}' receives reports and warnings" in " ".join(Path("err").read_text().split())
        assert Path("out").read_bytes() == b""

    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="the system has no /dev/stdout")
    def test_neither_is_a_pipe(self) -> None:
        command = [sys.executable, "-m", "onnxamp", "convert", str(small()), "-o", "/dev/stdout"]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (ran.returncode, ran.stdout) == (2, "")
        assert "'/dev/stdout' receives reports and warnings" in ran.stderr

    def test_a_folder_that_cannot_be_written_has_one_code(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = small()
        Path("file").touch()
        outputs = [
            ("-o", "file/sub/"),
            ("-o", "file/x.onnx"),
            ("--html", "file/x.html"),
            ("--save-plan", "file/x.json"),
        ]
        for option in outputs:
            assert message("convert", path, *option, code=1).startswith("Cannot ")
        monkeypatch.setattr("os.access", lambda *_: False)
        assert message("convert", path, "-o", "x.onnx", code=1).endswith("is read-only.")
        assert message("check", path, "--html", "x.html", code=1).endswith("is read-only.")

    def test_a_folder_that_cannot_be_made(self) -> None:
        Path("file").touch()
        Path("models").mkdir()
        small().rename("models/model.onnx")
        for source in ("models", "models/model.onnx"):
            result = run("convert", source, "-o", "file/sub/")
            assert result.exit_code == 1
            assert is_one_sentence(result), result.output
            assert "Cannot make the folder 'file/sub'" in result.output


class TestRuns:
    @pytest.mark.parametrize("command", ["bench", "tune"])
    def test_an_op_without_kernels_names_the_option_that_brings_them(self, command: str) -> None:
        told = message(command, custom(), code=1)
        assert "acme:Swish" in told
        assert "--custom-ops-library" in told
        assert "RuntimeFailure" not in told

    def test_convert_says_so_too(self) -> None:
        result = run("convert", custom())
        assert result.exit_code == 0
        assert "--custom-ops-library" in " ".join(result.output.split())

    @pytest.mark.slow
    def test_what_is_timed_must_take_the_inputs_of_the_first(self) -> None:
        told = message("bench", CLASSIFIER, UNET, "--seconds", 0.01)
        assert f"{UNET} does not accept the inputs of the first model: Input 'image' must have the shape" in told

    @pytest.mark.slow
    def test_the_model_that_does_not_run_is_named(self) -> None:
        """By the name that the user gave, and once."""
        told = message("bench", custom(), "--seconds", 0.01, "--no-profile", code=1)
        assert told.startswith("ONNX Runtime could not load model.onnx on cpu: Fatal error: acme:Swish")
        with pytest.raises(onnxamp.RuntimeFailure, match=r"^ONNX Runtime could not load 0: g on cpu: Fatal error"):
            onnxamp.bench_models(onnx.load("model.onnx"), provider="cpu")

    @pytest.mark.slow
    def test_a_model_that_is_timed_alone_is_named_once(self) -> None:
        result = run("bench", small(), "--seconds", 0.01, "--format", "line")
        assert result.output.count("model.onnx") == 1

    def test_inputs_that_are_missing_are_counted(self) -> None:
        path = saved("(float[1,2] A, float[1,2] B) => (float[1,2] Y) { Y = Add (A, B) }")
        np.savez("x.npz", C=np.zeros((1, 2), np.float32))
        assert message("diff", path, path, "--inputs", "x.npz").startswith("The model's inputs 'A', 'B' are missing")

    @pytest.mark.mostly_slow(fast=2)
    @pytest.mark.parametrize(
        "command", [("convert",), ("convert", "--level", "auto"), ("check",), ("bench", "--seconds", 0.01)]
    )
    def test_sizes_that_sound_takes_are_found(self, command: tuple[object, ...]) -> None:
        """A window of 400 samples, as melspectrograms have."""
        text = "(float[1,1,samples] X) => (float[1,1,frames] Y) { Y = Conv (X, w) }"
        model = add_weights(parse(text), {"w": np.ones((1, 1, 400), np.float32)})
        result = run(command[0], saved(model), *command[1:])
        assert result.exit_code == 0, result.output
        assert re.search(r"random inputs \((\d samples, )?seed 0(\), |, )samples=1024", result.output)

    def test_what_was_not_compared_has_no_error(self) -> None:
        np.savez("x.npz", X=np.full((1, 2), np.nan, np.float32))
        result = run("convert", small(), "--inputs", "x.npz", "--format", "line")
        assert "not validated" in result.output
        assert "error" not in result.output

    @pytest.mark.slow
    def test_models_of_a_folder_that_were_not_validated_are_not_ticked(self) -> None:
        Path("models").mkdir()
        custom().rename("models/custom.onnx")
        small().rename("models/small.onnx")
        result = run("convert", "models", "-o", "out", "--jobs", 1)
        assert result.exit_code == 0
        rows = {line.split()[1]: line.split()[0] for line in result.output.splitlines() if line.startswith("  ")}
        assert (rows["custom.onnx"], rows["small.onnx"]) == ("?", "!"), "the small one is slower by the estimate"
        assert "2 models: 1 converted, 1 nothing lowered; 1 not validated." in result.output
        assert "custom.onnx  nothing lowered: 0 of 2 float nodes low, +0 Casts, not validated" in result.output


class TestReports:
    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
    @pytest.mark.parametrize("form", ["line", "table", "json"])
    def test_a_report_that_cannot_be_printed(self, form: str) -> None:
        """What is to be written is written before."""
        command = [sys.executable, "-m", "onnxamp", "convert", str(small()), "--no-validate", "--format", form]
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
        assert (done.returncode, done.stderr) == (1, "Error: Cannot print the report: No space left on device.\n")
        assert Path("model_fp16.onnx").exists()

    @pytest.mark.parametrize(
        ("batches", "told"), [((), r", [\d.]+ [µm]s$"), (("--batch", "1,2"), "at batch 1, .* at batch 2$")]
    )
    def test_a_model_that_is_timed_alone_has_its_time_in_one_line(self, batches: tuple[str, ...], told: str) -> None:
        path = saved("(float[N,2] X) => (float[N,2] Y) { Y = Relu (X) }")
        result = run("bench", path, "--seconds", 0.01, "--no-profile", "--format", "line", *batches)
        assert re.search(told, result.output.strip())

    def test_types_of_outputs_are_those_of_the_models(self) -> None:
        path = small()
        assert run("convert", path, "-o", "low.onnx", "--io-types", "low", "--level", "O3").exit_code == 0
        (output,) = report_of(run("diff", path, "low.onnx", "--format", "json"))["outputs"]
        assert (output["reference_dtype"], output["result_dtype"]) == ("float32", "float16")

    def test_outputs_without_a_number_are_not_said_to_match(self) -> None:
        path = saved("(float[1,2] X) => (float[1,2] Y, float[1,2] Z) { z = Sub (X, X) Y = Div (z, z) Z = Relu (X) }")
        result = run("diff", path, path, "-v")
        assert result.exit_code == 0
        assert "the one of 2 outputs that contains numbers matches the reference." in result.output
        told = result.output.partition("More metrics")[0]
        rows = {line.split()[1]: line.split()[0] for line in told.splitlines() if line.startswith("  ")}
        assert (rows["Y"], rows["Z"]) == ("?", "✔")

    def test_an_error_just_beyond_its_limit_is_told_apart_from_it(self) -> None:
        path = saved("(float[1,2] X) => (float[1,2] Y) { Y = Relu (X) }")
        other = saved(
            "(float[1,2] X) => (float[1,2] Y) <float k = {1.01004}> { a = Relu (X) Y = Mul (a, k) }", "other.onnx"
        )
        np.savez("x.npz", X=np.ones((1, 2), np.float32))
        result = run("diff", path, other, "--inputs", "x.npz", "--tolerance", "1e-2", "--no-cure")
        assert result.exit_code == 1
        assert "relative L2 error is 0.01004; the limit is 0.01." in " ".join(result.output.split())

    def test_numbers_stay_whole_in_forty_columns(self) -> None:
        """Each figure stands beside its unit, however many lines its remark takes."""
        result = CliRunner(env={"COLUMNS": "40"}).invoke(group, ["check", str(CLASSIFIER), "--static"])
        assert all(len(line) <= 40 for line in result.output.splitlines())
        assert "117.2 kB" in result.output
        assert "float32" in result.output

    def test_what_stays_float32_says_why(self) -> None:
        path = saved("(float[1,2] X) => (float[1,2] Y) { Y = Tanh (X) }")
        told = " ".join(run("convert", path).output.split())
        assert "because the Casts around them would cost more than they gain" in told

    def test_quantized_parts_are_not_said_to_break(self) -> None:
        path = saved("""(float[1,4] X) => (float[1,4] Y) <float s = {0.1}, int8 z = {0}> {
            q = QuantizeLinear (X, s, z) d = DequantizeLinear (q, s, z) r = Relu (d)
            p = QuantizeLinear (r, s, z) Y = DequantizeLinear (p, s, z) }""")
        told = " ".join(run("check", path, "--static", "--target", "cpu").output.split())
        assert "they are quantized, or are between quantized nodes" in told
        assert "would break" not in told
