"""Emulation held against a real engine: what passes by emulation passes on WebGPU, and errors are of one size."""

from pathlib import Path

import onnx
import pytest
from commands import MODELS
from every import every
from graphs import CASES

import onnxamp
from onnxamp._runtime.samples import random_samples

ZOO = {path.stem: lambda path=path: onnx.load(path) for path in MODELS} | {
    name: case.build for name, case in CASES.items()
}


@pytest.mark.webgpu
@every(name=ZOO, parts=6)
def test_what_passes_by_emulation_passes_on_webgpu(name: str) -> None:
    model = ZOO[name]()
    made = {}
    for level in ("O1", "O2", "O3"):
        try:
            low = onnxamp.convert_model(model, level=level, target="webgpu")
        except onnxamp.OnnxAmpError:  # what cannot be converted is other tests' matter
            continue
        made[low.SerializeToString(deterministic=True)] = level, low
    for level, low in made.values():
        emulated = onnxamp.diff_models(model, low, provider="cpu", target="webgpu", layers=False)
        if emulated.passed and emulated.skipped is None:
            seen = onnxamp.diff_models(model, low, provider="webgpu", layers=False)
            assert seen.passed or seen.skipped, f"{level}: {seen.failure or seen.warnings}"


@pytest.mark.webgpu
@pytest.mark.parametrize("path", MODELS, ids=[path.stem for path in MODELS])
def test_the_emulated_error_is_within_a_factor_of_two(path: Path) -> None:
    """Over several samples: that of a single number is a matter of luck."""
    model = onnx.load(path)
    low, samples = onnxamp.convert_model(model, level="O3", target="webgpu"), list(random_samples(model, 4))
    emulated, seen = (
        max(row.rel_l2 for row in found.outputs if row.is_float)
        for found in (
            onnxamp.diff_models(model, low, samples, provider="cpu", target="webgpu", layers=False),
            onnxamp.diff_models(model, low, samples, provider="webgpu", layers=False),
        )
    )
    assert seen / 2 < emulated < seen * 2
