"""The benchmark for GPU machines, run on what is at hand; and what its figures are held to."""

import copy
import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import pytest
from repository import ROOT

from onnxamp._runtime.sessions.session import cuda_available

no_device = pytest.mark.skipif(cuda_available(), reason="there is a CUDA device")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import gpu

    yield gpu
    for name in ("gpu", "gpu_picture", "shapes", "subjects"):
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_runs_anywhere_on_tiny_shapes(gpu: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "found.json"
    only = ["--only", "bert", "unet", "--seconds", "0.001"]
    assert gpu.main(["--provider", "cpu", "--quick", "--check", *only, "--out", str(out)]) == 0
    facts = json.loads(out.read_text())
    assert [subject["name"] for subject in facts["subjects"]] == ["bert", "unet"]
    assert facts["machine"]["ran_on"] == "CPU"
    assert facts["machine"]["packages"]["onnx"] == onnx.__version__
    assert facts["goals"] == []  # they are for GPUs
    for subject in facts["subjects"]:
        rows = {row["model"]: row for row in subject["variants"]}
        assert {gpu.REFERENCE, gpu.TF32, "O1, float16", "O3, float16", "auto at 0.001", gpu.HEADLINE} <= rows.keys()
        assert [timing["batch"] for timing in rows[gpu.HEADLINE]["timings"]] == list(subject["batches"])
        assert rows[gpu.HEADLINE]["ops"]
        assert not rows["O1, float16"]["ops"]
        assert subject["error"]["passed"]
        assert "O3, bfloat16" in subject["missing"]  # the CPU has no such kernels: that is said, and the rest is timed
    ET.parse(out.with_suffix(".svg"))
    assert "bert: done" in capsys.readouterr().err


@pytest.mark.slow
def test_shapes_are_those_of_the_real_networks(gpu: ModuleType, tmp_path: Path) -> None:
    import shapes

    weights = {}
    for shape in shapes.FULL:
        if shape.name in ("resnet50", "unet"):
            model = shape.model(tmp_path)
            weights[shape.name] = sum(int(onnx.numpy_helper.to_array(t).size) for t in model.graph.initializer)
            assert all(e.type.tensor_type.shape.dim[0].dim_param == "batch" for e in model.graph.input)
    assert weights["resnet50"] == 25_610_152  # 25,557,032 that are trained, and the statistics of 53 normalizations
    assert 30e6 < weights["unet"] < 40e6


def timing(milliseconds: float, batch: int) -> dict[str, Any]:
    return {"batch": batch, "latency": {"median": milliseconds / 1e3}}


def subject(gpu: ModuleType) -> dict[str, Any]:
    """BERT as it should come out."""

    def row(name: str, milliseconds: float, *, peer: bool = False) -> dict[str, Any]:
        timings = [timing(milliseconds / 8, 1), timing(milliseconds, 32)]
        return {"model": name, "peer": peer, "timings": timings, "ops": []}

    rows = [row(gpu.REFERENCE, 40), row(gpu.TF32, 20), row("peer", 10.5, peer=True), row(gpu.HEADLINE, 10)]
    rows[-1]["ops"] = [
        {"op": "MatMul", "provider": "CUDA", "dtype": "float16", "nodes": 96},
        {"op": "Shape", "provider": "CPU", "dtype": "no floats", "nodes": 2},
    ]
    return {"name": "bert", "title": "BERT & more", "batches": [1, 32], "variants": rows, "missing": {"x": "no <y>"},
            "error": {"passed": True}, "date": "2030-01-02"}  # fmt: skip


def missed(gpu: ModuleType, found: dict[str, Any]) -> list[str]:
    return [goal["goal"] for goal in gpu.goals([found]) if not goal["holds"]]


def test_goals(gpu: ModuleType) -> None:
    good = subject(gpu)
    assert len(gpu.goals([good])) == 5
    assert missed(gpu, good) == []
    times = good["variants"][-1]["timings"][1]["latency"]

    times["median"] = 0.0135  # 2.96 and 1.48 times
    assert len(missed(gpu, good)) == 3
    times["median"] = 0.011  # 3.6 and 1.8 times, but the peer needs 10.5 ms
    assert missed(gpu, good) == ["... and not behind peer (2 % are noise)"]
    times["median"] = 0.010
    fallen = copy.deepcopy(good)
    fallen["variants"][-1]["ops"][1]["dtype"] = "float32"
    assert missed(gpu, fallen) == ["... and no node with floats on CPU"]
    assert len(missed(gpu, good | {"error": None})) == 1
    assert len(missed(gpu, good | {"name": "unet"})) == 1
    assert len(missed(gpu, good | {"variants": good["variants"][:3]})) == 1


def test_picture(gpu: ModuleType) -> None:
    import gpu_picture

    facts = {"subjects": [subject(gpu)],
             "machine": {"ran_on": "CUDA (Test)", "packages": {"onnxruntime-gpu": "9"}}}  # fmt: skip
    drawn = gpu_picture.draw(facts, gpu.REFERENCE)
    texts = [node.text for node in ET.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    for text in ("BERT & more, batch 32 (2030-01-02)", "4.00×   10.00 ms", "1.00×   40.00 ms", "x: no <y>"):
        assert text in texts
    assert any("CUDA (Test), onnxruntime-gpu 9" in (text or "") for text in texts)


def test_results_of_a_cpu_are_not_kept_as_those_of_a_gpu(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--provider", "cpu"]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.slow
@no_device
def test_without_a_device_it_says_so(gpu: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 1
    assert "CUDA cannot be used here" in capsys.readouterr().err
    done = subprocess.run(["sh", ROOT / "scripts" / "gpu_suite.sh"], capture_output=True, text=True, check=False,
                          env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable})  # fmt: skip
    assert done.returncode == 1
    assert "CUDA cannot be used here: there is no NVIDIA device" in done.stderr
    assert "tests/" not in done.stdout
