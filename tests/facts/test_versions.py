"""Targets of a version of ONNX Runtime: their tables, their names, and what is said of models for them."""

import importlib.util
import json
import re
import sys

import onnx
import onnxruntime
import pytest
from commands import run
from graphs.case import parse
from repository import ROOT

import onnxamp
from onnxamp import ArgumentError, Options, OptionWarning, audit_model, convert_model
from onnxamp._facts.kernels import kernel_table
from onnxamp._facts.tables import target_json
from onnxamp._facts.targets import (
    check_target,
    cpu_of,
    installed_target,
    known_versions,
    older_installed,
    release,
    with_versions,
)


def load(name):
    """A module of the folder of scripts, which import each other."""
    folder = ROOT / "scripts"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


@pytest.fixture(scope="module")
def script():
    return load("make_kernel_history")


@pytest.fixture(scope="module")
def refresh():
    return load("refresh_runtime")


def names(kernels):
    """A table as the script holds it."""
    return {
        op: [(row.since, row.until, {param: sorted(types) for param, types in row.types.items()}) for row in rows]
        for op, rows in kernels.items()
    }


# The tables


@pytest.mark.parametrize(
    ("device", "version"), [(device, version) for device in with_versions() for version in known_versions(device)]
)
def test_tables_are_reconstructed_exactly(script, device, version):
    wanted = target_json(device, "history")["versions"][version]["sha256"]
    assert script.fingerprint(names(kernel_table(f"{device}@{version}"))) == wanted


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_the_newest_version_is_the_table_of_the_target_itself(device):
    assert kernel_table(device) == kernel_table(f"{device}@{known_versions(device)[-1]}")
    newest = target_json(device, "kernels")["onnxruntime"]
    assert newest == target_json(device, "history")["versions"][known_versions(device)[-1]]["release"]


def test_versions_are_all_releases_in_order():
    assert known_versions("cpu") == tuple(f"1.{minor}" for minor in range(20, 33))
    assert known_versions("cuda") == known_versions("webgpu") == known_versions("cpu")[:-1]
    loaded = [release(f"cpu@{version}") for version in known_versions("cpu")]
    assert [item.opset for item in loaded] == sorted(item.opset for item in loaded)
    assert [item.ir_version for item in loaded] == sorted(item.ir_version for item in loaded)


def test_the_history_of_small_dumps(script):
    def dump(release, *kernels):
        made = {"onnxruntime": release, "ir": 10, "opset": 21}
        rows = [{"domain": "", "op": op, "since": 1, "until": None, "types": {"T": types}} for op, types in kernels]
        return {**made, "provider": "CPUExecutionProvider", "kernels": rows}

    old = dump("1.9.1", ("A", ["a"]), ("B", ["a"]), ("D", ["b"]))
    new = dump("1.10.0", ("A", ["a", "c"]), ("B", ["a"]), ("C", ["a"]))
    newest = dump("1.11.0", ("B", ["a"]))
    made = json.loads(script.history({"1.9.1": old, "1.10.0": new, "1.11.0": newest}))
    assert list(made["versions"]) == ["1.11", "1.10", "1.9"]
    assert len({facts["sha256"] for facts in made["versions"].values()}) == 3
    types = made["types"]
    assert list(made["changes"]) == ["1.10", "1.9"]
    assert made["changes"]["1.10"].keys() == {"A", "C"}
    assert made["changes"]["1.9"] == {"A": [[1, None, {"T": [types.index("a")]}]], "C": None,
                                      "D": [[1, None, {"T": [types.index("b")]}]]}  # fmt: skip


@pytest.mark.slow
def test_the_history_is_rewritten_byte_by_byte_from_the_registries(script, tmp_path):
    assert script.main(["--to", str(tmp_path)]) == 0
    for name in with_versions():
        known = ROOT / "onnxamp" / "_data" / "targets" / name / "history.json"
        assert (tmp_path / name / "history.json").read_bytes() == known.read_bytes()


@pytest.mark.slow
def test_a_refresh_says_what_a_release_changed(refresh):
    text = refresh.entry("1.32.0")
    assert text.startswith("* The facts about ONNX Runtime 1.32.0:\n  * cuda: no wheel of this release;")
    assert "  * cpu: the kernels of 19 ops differ from 1.31.1.\n" in text
    assert "    * Pad: + 21 T: bfloat16; 23 T: bfloat16; 24 T: bfloat16; 25 T: bfloat16\n" in text
    lost = refresh.changes({"A": [(1, None, {"T": ["tensor(float)", "tensor(double)"]}), (3, 4, {})]},
                           {"A": [(1, None, {"T": ["tensor(float)"]})]})  # fmt: skip
    assert list(lost) == [("A", "", "1 T: double; 3")]


def test_a_new_patch_takes_the_place_of_the_older_one(refresh, tmp_path, monkeypatch):
    for version in ("1.9.0", "1.10.0", "1.10.1"):
        (tmp_path / version).mkdir()
    monkeypatch.setattr(refresh, "REGISTRIES", tmp_path)
    refresh.forget_older_patches("1.10.1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.10.1", "1.9.0"]


# Their names


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("cuda", "cuda"),
        ("any", "any"),
        ("cuda@1.24", "cuda@1.24"),
        ("cpu@1.24.3", "cpu@1.24"),
        ("cuda@1.31", "cuda@1.31"),
        ("cpu@1.32", "cpu@1.32"),
    ],
)
def test_a_target_may_name_a_version(given, meant):
    assert check_target(given) == Options(target=given).target == meant
    assert Options.from_json(Options(target=given).as_json()).target == meant


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cuda@1.19", "'1.19' are not known for the target 'cuda': choose a version from 1.20 to 1.31"),
        ("cuda@", "choose a version"),
        ("cuda@newest", "choose a version"),
        ("cpu@1.19", "'1.19' are not known for the target 'cpu': choose a version from 1.20 to 1.32, as in 'cpu@1.32'"),
        ("any@1.24", "'any' has no versions: only cuda and cpu have"),
        ("tpu@1.24", "Unknown target 'tpu@1.24': choose one of"),
    ],
)
def test_unknown_versions_are_refused(target, message):
    with pytest.raises(ArgumentError, match=message):
        Options(target=target)


@pytest.mark.parametrize(
    ("target", "newest"), [("cuda@1.99.1", "cuda@1.31"), ("cuda@1.32", "cuda@1.31"), ("cpu@1.33", "cpu@1.32")]
)
def test_a_newer_version_gets_the_kernels_of_the_newest_that_is_known_for_the_device(target, newest):
    (device, version), taken = target.split("@"), newest.partition("@")[2]
    told = f"ONNX Runtime {version} are not known yet for {device}: those of {taken} are used"
    with pytest.warns(OptionWarning, match=re.escape(told)):
        options = Options(target=target)
    assert options.target == newest


@pytest.mark.parametrize(
    ("installed", "providers", "target"),
    [
        ("1.32.0", ["CPUExecutionProvider"], "cpu@1.32"),
        ("1.31.1", ["CUDAExecutionProvider", "CPUExecutionProvider"], "cuda@1.31"),
        ("1.24.4", ["CPUExecutionProvider"], "cpu@1.24"),
    ],
)
def test_auto_is_what_is_installed(monkeypatch, installed, providers, target):
    monkeypatch.setattr(onnxruntime, "__version__", installed)
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: providers)
    assert check_target("auto") == installed_target() == target


def test_an_installed_version_that_is_not_known_for_cuda_gets_the_newest_of_cuda(monkeypatch):
    monkeypatch.setattr(onnxruntime, "__version__", "1.32.0")
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    with pytest.warns(OptionWarning, match="1.32.0 are not known yet for cuda: those of 1.31 are used"):
        assert check_target("auto") == "cuda@1.31"


@pytest.mark.parametrize(
    ("target", "beside"),
    [("cuda", "cpu@1.31"), ("cuda@1.24", "cpu@1.24"), ("cpu", "cpu"), ("cpu@1.32", "cpu@1.32"), ("webgpu", "cpu@1.31"),
     ("tensorrt", "tensorrt")],
)  # fmt: skip
def test_the_cpu_beside_a_device_is_of_the_same_version(target, beside):
    assert cpu_of(target) == beside
    assert kernel_table(beside)


# What they decide


def test_a_conversion_keeps_to_the_kernels_of_its_version():
    """CUDA has had bfloat16 kernels of Pow since 1.24."""
    model = parse("(float[2,8] x, float[2,8] w) => (float[2,8] y) { h = Mul (x, w)\n y = Pow (h, w) }", 13)
    for version, stays in (("1.23", True), ("1.24", False), ("1.31", False)):
        made = convert_model(model, level="O3", dtype="bfloat16", target=f"cuda@{version}", hazards=False)
        audit = audit_model(made, f"cuda@{version}")
        assert ({node.op: node.precision for node in audit.nodes}["Pow"] == "float32") is stays
        assert not [item for item in audit.findings if item.severity == "error"]
    plan = onnxamp.plan_model(model, level="O3", dtype="bfloat16", target="cuda@1.23")
    assert plan.target == onnxamp.Options.from_json(plan.options.as_json()).target == "cuda@1.23"


PAD = """(float[2,8] x, float[8,8] w) => (float[4,8] y) <int64[4] p = {1, 0, 1, 0}> {
    h = MatMul (x, w) g = Pad (h, p) y = MatMul (g, w)
}"""


@pytest.mark.parametrize(
    ("target", "padded", "first", "because"),
    [
        (
            "cpu",
            "bfloat16",
            "1.32",
            "1.31: Pad: no kernel (op version 21, bfloat16 with int64, ONNX Runtime 1.31) on CPU",
        ),
        ("cpu@1.32", "bfloat16", "1.32", None),
        ("cpu@1.31", "float32", "1.20", ""),
    ],
)
def test_the_cpu_has_had_bfloat16_kernels_of_pad_since_1_32(target, padded, first, because):
    low = convert_model(parse(PAD, 21), "O3", dtype="bfloat16", target=target)
    assert {node.op: node.precision for node in audit_model(low, target).nodes}["Pad"] == padded
    found = audit_model(low, "cpu").loads_from
    assert found.version == first
    assert because is None or found.because == because


@pytest.mark.skipif(not older_installed("cpu"), reason="the newest version whose kernels are known is installed")
def test_a_result_that_is_too_new_for_the_installed_version_says_for_which_it_was_converted(tmp_path):
    onnx.save(parse(PAD, 21), tmp_path / "m.onnx")
    done = run("convert", tmp_path / "m.onnx", "-o", tmp_path / "low.onnx", "--target", "cpu", "--dtype", "bfloat16",
               "--level", "O3", "--no-cure")  # fmt: skip
    assert done.exit_code == 1
    told = " ".join(done.output.split())
    assert f"It was converted for ONNX Runtime 1.32 (--target {older_installed('cpu')} is this one)." in told


def test_check_says_from_which_version_on_a_model_loads(tmp_path):
    model = parse("(float[2,8] x) => (float[2,8] y) { y = Relu (x) }", 13)
    found = audit_model(model, "cuda").loads_from
    assert (found.version, found.because) == ("1.20", "")
    model = parse("(float[2,8] x) => (float[2,8] y) { y = Relu (x) }", 23)
    model.ir_version = 10
    found = audit_model(model, "cuda@1.31").loads_from
    assert found.version == "1.23"
    assert found.because == "1.22: its opset is 23, and 22 is the newest that it knows"
    path = tmp_path / "m.onnx"
    onnx.save(model, path)
    assert "not on 1.22: its opset is 23" in run("check", path, "--static").output
    told = json.loads(run("check", path, "--static", "--target", "cpu@1.30", "--format", "json").output)
    assert told["static"]["loads_from"]["version"] == "1.23"
    assert audit_model(model, "any").loads_from is None


def test_check_refuses_what_a_version_does_not_load(tmp_path):
    model = parse("(float[2,8] x) => (float[2,8] y) { y = Relu (x) }", 21)
    model.ir_version = 11
    errors = [item.text for item in audit_model(model, "cuda@1.20.2").findings if item.severity == "error"]
    assert errors == ["ONNX Runtime 1.20 does not load it: its IR version is 11, and 10 is the newest that it reads"]
    assert not [item for item in audit_model(model, "cuda").findings if item.severity == "error"]


def test_kernels_decide_from_which_version_on_a_model_loads():
    """bfloat16 kernels of Cos came with 1.27."""
    model = parse("(bfloat16[2,8] x) => (bfloat16[2,8] y) { y = Cos (x) }", 22)
    model.ir_version = 10
    found = audit_model(model, "cuda").loads_from
    assert (found.version, found.because) == (
        "1.27",
        "1.26: Cos: no kernel (op version 22, bfloat16, ONNX Runtime 1.26) on CUDA or CPU",
    )
    assert [item.kind for item in audit_model(model, "cuda@1.26").findings if item.severity == "error"] == ["kernel"]
    assert not [item for item in audit_model(model, "cuda@1.27").findings if item.severity == "error"]
    assert audit_model(model, "cpu").loads_from is None


def test_the_command_line_takes_versions(tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(parse("(float[2,8] x) => (float[2,8] y) { y = Relu (x) }", 17), path)
    done = run("convert", path, "-o", tmp_path / "low.onnx", "--target", "cpu@1.24.2", "--level", "O3")
    assert "for cpu@1.24" in done.output
    done = run("check", path, "--static", "--target", "cuda@1.77")
    assert "Warning: The kernels of ONNX Runtime 1.77 are not known yet" in done.output
    done = run("inspect", path, "--target", "cuda@1.2")
    assert done.exit_code == 2
    assert "choose a version from 1.20 to 1.31" in done.output
