"""Large weights that stay in float32 are named, with who reads them and why."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnxamp

LOOKUPS = """<ir_version: 10, opset_import: ["" : 18]>
g (int64[N] ids, float[N,32] x) => (float[N,32] y, float[M,32] same) {
  e = Gather (table, ids)
  n = LayerNormalization (e, gain)
  m = MatMul (x, w)
  y = Add (n, m)
  same = Identity (other)
}"""


def model() -> ModelProto:
    result = parser.parse_model(LOOKUPS)
    rng = np.random.default_rng(0)
    shapes = {"table": (400, 32), "gain": (32,), "w": (32, 32), "other": (200, 32), "unread": (100, 32)}
    for name, shape in shapes.items():
        result.graph.initializer.append(numpy_helper.from_array(rng.standard_normal(shape, np.float32), name))
    return result


def kept(folder: Path, **options: Any) -> dict[str, tuple[int, bool, dict[str, str]]]:
    """What a conversion tells of large weights."""
    onnx.save(model(), folder / "model.onnx")
    made = onnxamp.convert_file(folder / "model.onnx", folder / "low.onnx", **options, validate=False)
    return {weight.name: (weight.size, weight.copied, dict(weight.readers)) for weight in made.summary.kept_weights}


def test_large_weights_are_named_with_readers_and_reasons(tmp_path: Path) -> None:
    fewest = "fewest Casts: its Casts would cost more than its bytes"
    found = kept(tmp_path, lists="conservative")
    assert list(found) == ["table", "other", "unread"], "the largest first, without the small gain and the low w"
    assert found["table"] == (400 * 32 * 4, False, {"e": fewest})
    assert found["unread"][2] == {"none": "nothing reads it"}


@pytest.mark.parametrize(("options", "reason"), [
    ({"black_list": ["Gather"]}, "on the black list: Gather"),
    ({"keep_high": ["e"]}, "named in your options: keep_high (--keep-fp32) 'e'"),
])  # fmt: skip
def test_the_users_own_reasons_are_given(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    assert kept(tmp_path, **options)["table"][2] == {"e": reason}


def test_a_repeated_plan_gives_its_own_reasons(tmp_path: Path) -> None:
    onnx.save(model(), tmp_path / "model.onnx")
    plan = onnxamp.plan_model(tmp_path / "model.onnx", black_list=["Gather"])
    assert kept(tmp_path, plan=plan)["table"][2] == {"e": "on the black list: Gather"}


def test_what_is_low_or_asked_to_stay_is_not_named(tmp_path: Path) -> None:
    assert "table" not in kept(tmp_path, level="O3")
    assert kept(tmp_path, level="O0") == {}
