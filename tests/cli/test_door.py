"""What leaves a command that fails: a sentence or an object of JSON, an exit code, and a traceback on demand."""

import errno
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnxruntime
import pytest
from click.testing import CliRunner, Result
from commands import is_one_sentence, run, saved, small
from google.protobuf.message import DecodeError
from graphs.case import parse
from onnx import TensorProto, helper

import onnxamp
from onnxamp._cli.command import group
from onnxamp._runtime.profile import read_events

ADDED = "(float[1,2] A, float[1,2] B) => (float[1,2] Y) { Y = Add (A, B) }"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def words(result: Result) -> str:
    return " ".join(result.output.split())


def error_of(result: Result) -> dict[str, Any]:
    """The one object on standard output, with nothing beside it."""
    return dict(json.loads(result.stdout))


class TestAnyException:
    """Of a command that stands in for all: the door does not know which one it guards."""

    def raising(self, monkeypatch: pytest.MonkeyPatch, error: BaseException, *options: str) -> Result:
        def run(_: Any) -> None:
            raise error

        monkeypatch.setattr("onnxamp._cli.check.run", run)
        return CliRunner().invoke(group, ["check", "model.onnx", *options])

    @pytest.mark.parametrize("error", [
        TypeError("an integer is required"), ZeroDivisionError("division by zero"), RuntimeError(),
        RecursionError("deep"), DecodeError("truncated"), np.exceptions.AxisError("axis 3"), KeyError("name"),
        AssertionError(), StopIteration(),
    ], ids=lambda error: type(error).__name__)  # fmt: skip
    def test_what_nobody_expected_is_called_a_bug(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        result = self.raising(monkeypatch, error)
        assert result.exit_code == 1
        assert is_one_sentence(result), result.output
        assert f"{type(error).__name__} in onnxamp/_cli/command.py:" in result.output
        assert "may be a bug in onnxamp: run the command again with -v" in result.output

    def test_exceptions_of_onnx_runtime_have_no_base(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(Exception, match="INVALID_PROTOBUF") as caught:
            onnxruntime.InferenceSession(b"\x08")
        assert is_one_sentence(self.raising(monkeypatch, caught.value))

    def test_the_trace_comes_on_demand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.raising(monkeypatch, TypeError("odd"), "-v")
        assert result.exit_code == 1
        assert "Traceback (most recent call last):" in result.stderr
        assert result.stderr.splitlines()[-1].startswith("Error: TypeError in onnxamp/")

    @pytest.mark.parametrize("error", [
        OSError(errno.ENOSPC, "No space left on device", "out.bin"), TimeoutError("timed out"), OSError(),
        PermissionError(errno.EACCES, "Permission denied", "x"),
    ], ids=lambda error: type(error).__name__)  # fmt: skip
    def test_what_the_system_refuses_is_no_bug(self, monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
        result = self.raising(monkeypatch, error)
        assert result.exit_code == 1
        assert is_one_sentence(result), result.output
        assert result.output.startswith(
            f"Error: Cannot read or write {repr(error.filename) if error.filename else 'a file'}"
        )

    def test_memory_that_does_not_suffice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.raising(monkeypatch, MemoryError())
        assert is_one_sentence(result)
        assert "There is not enough memory. Use smaller inputs" in result.output

    @pytest.mark.parametrize(("error", "kind", "code"), [
        (onnxamp.ModelError("It is broken."), "ModelError", 1), (onnxamp.ArgumentError("No."), "ArgumentError", 2),
        (MemoryError(), "SystemError", 1), (OSError(errno.EIO, "Input/output error"), "SystemError", 1),
        (TypeError("odd"), "UnexpectedError", 1), (click.UsageError("Wrong."), "UsageError", 2),
        (click.ClickException("It failed."), "Failure", 1),
    ], ids=lambda item: item if isinstance(item, str) else "")  # fmt: skip
    def test_json(self, monkeypatch: pytest.MonkeyPatch, error: Exception, kind: str, code: int) -> None:
        result = self.raising(monkeypatch, error, "--format", "json")
        told = error_of(result)
        assert result.exit_code == code
        assert result.stderr == ""
        assert told.keys() == {"onnxamp", "format", "kind", "message", "exit_code"}
        assert (told["onnxamp"], told["kind"], told["exit_code"]) == ("error", kind, code)
        assert told["message"].endswith(".")

    def test_json_with_a_trace(self, monkeypatch: pytest.MonkeyPatch) -> None:
        result = self.raising(monkeypatch, TypeError("odd"), "--format=json", "--verbose")
        assert error_of(result)["kind"] == "UnexpectedError"
        assert result.stderr.startswith("Traceback")


class TestJson:
    @pytest.mark.parametrize(("command", "kind", "code"), [
        (("convert", "nothing.onnx"), "MissingModelError", 1),
        (("diff", "nothing.onnx", "x.onnx"), "MissingModelError", 2),
        (("check", "model.onnx", "--inputs", "nothing.npz"), "MissingFileError", 2),
        (("tune", "model.onnx", "--tolerance", "0"), "ArgumentError", 2),
        (("bench", "model.onnx", "--dim", "a"), "UsageError", 2),
        (("inspect", "model.onnx", "--nothing"), "UsageError", 2), (("convrt", "model.onnx"), "UsageError", 2),
        (("convert",), "UsageError", 2), (("diff", "model.onnx"), "ArgumentError", 2),
        (("check", "nothing://a/b.onnx"), "UsageError", 2),
    ])  # fmt: skip
    def test_errors_are_the_only_object(self, command: tuple[str, ...], kind: str, code: int) -> None:
        small()
        result = run(*command, "--format", "json")
        assert (result.exit_code, error_of(result)["kind"], error_of(result)["exit_code"]) == (code, kind, code)

    def test_quiet_commands_tell_it_too(self) -> None:
        assert error_of(run("check", "nothing.onnx", "-q", "--format", "json"))["exit_code"] == 1

    def test_a_report_that_was_printed_stays_the_only_object(self) -> None:
        """What fails its validation has a report, which says so, and a sentence on standard error."""
        path = saved("(float[1,2] X) => (float[1,2] Y) <float k = {1e6}> { Y = Mul (X, k) }")
        result = run("convert", path, "--no-cure", "--level", "O3", "--force-low", "Y", "--format", "json")
        assert result.exit_code == 1
        assert json.loads(result.stdout)["onnxamp"] == "convert"
        assert "Error: The result failed validation" in result.stderr

    def test_without_it_nothing_is_on_standard_output(self) -> None:
        result = run("check", "nothing.onnx")
        assert result.stdout == ""
        assert result.stderr.startswith("Error: ")


class TestMissingFiles:
    def test_a_model(self) -> None:
        for wrong in (onnxamp.convert_model, onnxamp.audit_model, onnxamp.check_run, onnxamp.plan_model):
            with pytest.raises(
                FileNotFoundError, match=r"^Cannot read 'nothing.onnx': No such file or directory\. Check the path\.$"
            ) as caught:
                wrong("nothing.onnx")
            assert isinstance(caught.value, onnxamp.ModelError)

    def test_inputs_and_plans(self) -> None:
        path, nothing = small(), "nothing.file"
        for wrong in (
            lambda: onnxamp.load_samples(nothing), lambda: onnxamp.load_plan(nothing),
            lambda: onnxamp.diff_models(path, path, nothing), lambda: onnxamp.convert_model(path, custom_ops=nothing),
        ):  # fmt: skip
            with pytest.raises(FileNotFoundError, match=nothing) as caught:
                wrong()
            assert isinstance(caught.value, onnxamp.MissingFileError)
            assert isinstance(caught.value, ValueError)

    def test_weights(self) -> None:
        model = parse("(float[1,2] X) => (float[1,2] Y) { Y = Add (X, w) }")
        tensor = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[1, 2], data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value="weights.bin")
        model.graph.initializer.append(tensor)
        with pytest.raises(FileNotFoundError, match=r"'.*weights.bin' of the weight 'w' is missing") as caught:
            onnxamp.convert_file(saved(model), "out.onnx", validate=False)
        assert isinstance(caught.value, onnxamp.MissingDataError)
        assert isinstance(caught.value, onnxamp.ExternalDataError)

    def test_what_is_there_and_cannot_be_read_is_not_missing(self) -> None:
        Path("folder").mkdir()
        with pytest.raises(onnxamp.ModelError, match="it is a folder") as caught:
            onnxamp.convert_model("folder")
        assert not isinstance(caught.value, FileNotFoundError)


class TestFullDisks:
    @pytest.mark.slow
    @pytest.mark.skipif(os.name != "posix", reason="limits of processes are those of POSIX")
    @pytest.mark.parametrize("blocks", [0, 1])
    @pytest.mark.parametrize("command", [
        ("diff", "model.onnx", "model.onnx", "--state", "state"),
        ("diff", "model.onnx", "model.onnx", "--save", "d.json"),
        ("tune", "model.onnx", "-o", "out.onnx", "--state", "state"), ("convert", "model.onnx", "-o", "out.onnx"),
        ("check", "model.onnx", "--html", "page.html"), ("bench", "model.onnx", "--seconds", "0.01"),
    ])  # fmt: skip
    def test_are_told_in_one_sentence(self, command: tuple[str, ...], blocks: int) -> None:
        """Files end at a size that nothing but a little state fits into."""
        saved("(float[1,32] X) => (float[1,32] Y) { a = Relu (X) b = Tanh (a) c = Sigmoid (b) Y = Softmax (c) }")
        limit = "import resource, sys, runpy; resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv.pop(1)),) * 2)"
        code = f"{limit}; sys.argv[0] = 'onnxamp'; runpy.run_module('onnxamp', run_name='__main__')"
        line = [sys.executable, "-c", code, str(blocks * 512), *command]
        environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}  # it would be cut off, and break later imports
        done = subprocess.run(line, capture_output=True, text=True, check=False, env=environment)
        assert "Traceback" not in done.stderr
        assert "bug of onnxamp" not in done.stderr
        if blocks == 0:
            assert done.returncode == (2 if command[0] == "diff" else 1), done.stderr
            assert done.stderr.startswith("Error: ")
            assert done.stderr.count("\n") == 1

    @pytest.mark.slow
    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
    @pytest.mark.parametrize("words", [
        ("check", "nothing.onnx", "--format", "json"), ("check", "nothing.onnx", "--format", "markdown"),
        ("lists", "--format", "json"), ("lists",), ("check", "--help"), ("--help",),
    ])  # fmt: skip
    @pytest.mark.parametrize("unbuffered", ["", "1"])
    def test_what_cannot_be_printed_is_told_in_a_sentence(self, words: tuple[str, ...], unbuffered: str) -> None:
        command = [sys.executable, "-m", "onnxamp", *words]
        # What stays in a buffer is written again at the end.
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        with Path("/dev/full").open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("Error: Cannot ")
        assert "Traceback" not in done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("form", ["table", "json"])
    def test_nobody_reads(self, form: str) -> None:
        path = small()
        command = [sys.executable, "-m", "onnxamp", "inspect", str(path), "--format", form]
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
        assert (done.returncode, done.stderr) == (1, "")

    @pytest.mark.slow
    @pytest.mark.skipif(os.name == "nt", reason="it is closed by a POSIX shell")
    def test_standard_output_that_is_closed(self) -> None:
        command = ["sh", "-c", 'exec "$0" -m onnxamp inspect model.onnx >&-', sys.executable]
        small()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")

    @pytest.mark.slow
    def test_signs_that_the_encoding_lacks(self) -> None:
        path = small().rename("größe.onnx")
        command = [sys.executable, "-m", "onnxamp", "convert", str(path), "-o", "out.onnx", "--no-validate"]
        environment = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run(command, capture_output=True, check=False, env=environment)
        assert b"gr\\xf6\\xdfe.onnx -> out.onnx" in done.stdout
        assert done.returncode == 0

    def test_half_a_profile(self) -> None:
        Path("profile.json").write_text('[{"cat": "Sess')
        with pytest.raises(onnxamp.RuntimeFailure, match="is the disk full"):
            read_events(Path("profile.json"))


class TestFiles:
    """Files that are broken are named, with the place in them."""

    @pytest.mark.parametrize(("shape", "told"), [
        ("(True, 64)", "its shape (True, 64) is not made of whole numbers"), ("(1, 2.0)", "shape is not valid"),
        ("(9, 64)", "its shape [9, 64] needs 2304 bytes"),
    ])  # fmt: skip
    def test_headers_of_arrays(self, shape: str, told: str) -> None:
        path = small()
        header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}".ljust(117) + "\n"
        data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + bytes(256)
        with zipfile.ZipFile("x.npz", "w") as archive:
            archive.writestr("X.npy", data)
        result = run("check", path, "--inputs", "x.npz")
        assert result.exit_code == 2
        assert "Cannot read the array 'X' of x.npz: " in words(result)
        assert told in words(result)
        with pytest.raises(onnxamp.ArgumentError, match="array 'X'"):
            onnxamp.load_samples("x.npz")[0]

    @pytest.mark.parametrize(("name", "value", "told"), [
        ("rows", [[1, 2]], "rows[0] is damaged: [1, 2]"), ("rows", [{"key": "x"}], "rows[0] is damaged"),
        ("rows", {"a": 1}, "rows is {'a': 1}, not a list"), ("casts", float("inf"), "casts is inf, not a whole number"),
        ("cost", None, "cost is None"), ("opset", "17", "opset is '17'"), ("warnings", [1], "warnings[0] is damaged"),
        ("hazards", [None], "hazards[0] is damaged"), ("options", [], "not an onnxamp plan"),
    ])  # fmt: skip
    def test_plans(self, name: str, value: object, told: str) -> None:
        path = small()
        onnxamp.plan_model(path).save("plan.json")
        data = json.loads(Path("plan.json").read_text())
        Path("plan.json").write_text(json.dumps({**data, name: value}))
        result = run("convert", path, "--plan", "plan.json")
        assert result.exit_code == 2
        assert f"'plan.json' is not an onnxamp plan ({told}" in words(result) or name == "options"
        with pytest.raises(onnxamp.ArgumentError, match=r"plan\.json"):
            onnxamp.load_plan("plan.json")

    def test_the_row_of_a_plan_is_named(self) -> None:
        path = small()
        onnxamp.plan_model(path).save("plan.json")
        data = json.loads(Path("plan.json").read_text())
        data["rows"][1]["low"] = [True]
        Path("plan.json").write_text(json.dumps(data))
        with pytest.raises(onnxamp.ArgumentError, match=r"rows\[1\] is damaged"):
            onnxamp.load_plan("plan.json")

    def test_states_that_were_edited(self) -> None:
        path = small()
        for samples in (1, 2):
            assert run("diff", path, path, "--state", "state", "--samples", samples).exit_code == 0
            whole = Path("state").read_text()
            if samples == 1:
                Path("state").unlink()
        lines = whole.splitlines(keepends=True)
        Path("state").write_text("".join([*lines[:2], lines[2].replace("0.0", "9.9"), *lines[3:]]))
        result = run("diff", path, path, "--state", "state", "--samples", 2)
        assert result.exit_code == 2
        assert "'state' is not a state that this version of onnxamp reads (line 3 is damaged)" in words(result)
        with pytest.raises(onnxamp.ArgumentError, match="line 3 is damaged"):
            onnxamp.diff_models(path, path, count=2, state="state")

    @pytest.mark.parametrize(
        "url", ["dir://a/b", "github://a/b", "data://a/b", "reference://a/b", "zip://a", "generic://a"]
    )
    def test_file_systems_that_need_more(self, url: str) -> None:
        path = small()
        for command in (("inspect", url), ("check", path, "--inputs", url), ("convert", path, "--state", url)):
            result = run(*command)
            assert result.exit_code in {1, 2}
            assert isinstance(result.exception, SystemExit)
            assert "bug of onnxamp" not in result.output

    @pytest.mark.parametrize("form", ["folder", "list"])
    def test_the_file_of_a_sample_that_does_not_fit_is_named(self, form: str) -> None:
        path = saved(ADDED)
        good, bad = {"A": [[1.0, 2.0]], "B": [[1.0, 2.0]]}, {"A": [[1.0, 2.0]]}
        Path("folder").mkdir()
        for name, sample in (("1", good), ("2", bad)):
            np.savez(f"folder/{name}.npz", **{key: np.float32(value) for key, value in sample.items()})
        Path("list").write_text(json.dumps([good, bad]))
        where = "folder/2.npz" if form == "folder" else "list, sample 2"
        for command in (("diff", path, path), ("check", path), ("tune", path)):
            told = words(run(*command, "--inputs", form))
            assert told.endswith(f"The model's input 'B' is missing; given: 'A' (in {where}).")
        with pytest.raises(onnxamp.ArgumentError, match=where):
            onnxamp.diff_models(path, path, form)

    def test_functions_of_the_user_that_fail(self) -> None:
        path = small()
        Path("mine.py").write_text("def judge(a, b):\n    return 1 / 0\n")
        told = words(run("diff", path, path, "--accept", "mine.py:judge"))
        assert told.endswith("accept: 'mine.py:judge' failed: ZeroDivisionError: division by zero.")
        told = words(run("tune", path, "--metric", "mine.py:judge"))
        assert told.endswith("metric: 'mine.py:judge' failed: ZeroDivisionError: division by zero.")
        Path("broken.py").write_text("1 / 0\n")
        told = words(run("diff", path, path, "--accept", "broken.py:judge"))
        assert "cannot be imported: ZeroDivisionError: division by zero." in told
        with pytest.raises(ZeroDivisionError):  # it is the caller's own
            onnxamp.diff_models(path, path, accept=lambda *_: bool(1 / 0))


@pytest.mark.parametrize(("limit", "told"), [
    ("--cosine=2", "'2' for the cosine is out of range: it must be between -1 and 1"),
    ("--cosine=Y=-1.5", "'Y=-1.5' for the cosine"), ("--top1=1.5", "between 0 and 1"), ("--top5=-1", "between 0 and 1"),
    ("--differing=50", "between 0 and 1"), ("--tolerance=-1", "must be 0 or more"), ("--snr=nan", "must be a number"),
])  # fmt: skip
def test_limits_that_nothing_can_hold_or_miss(limit: str, told: str) -> None:
    path = small()
    result = run("diff", path, path, limit)
    assert result.exit_code == 2
    assert told in words(result)


@pytest.mark.openvino
def test_steps_in_fixed_buffers_take_no_plugin() -> None:
    """WebGPU would leave the buffers as they are, and OpenVINO end the process."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 2]) for name in "xy"]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [2, 2], [1.0, 2.0, 3.0, 4.0])
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ports[:1], ports[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(onnxamp.ArgumentError, match="use O1, or provider cuda or cpu"):
        onnxamp.train.build_train_network(
            model, onnxamp.train.SGD(), "mse", boost_level="O2", provider="openvino"
        )  # fmt: skip
