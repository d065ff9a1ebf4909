"""Random inputs for which float32 itself is NaN are drawn again, so that results are validated."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, parser

import onnxamp

WEIGHTS = ", ".join(str((place * 7 % 11 - 5) / 10) for place in range(64))


def model(body: str, inputs: str = "float[N,8] x", opset: int = 17) -> ModelProto:
    """A model that computes "r" and multiplies it by weights."""
    return parser.parse_model(
        f"""<ir_version: 8, opset_import: ["" : {opset}]>
        domain ({inputs}) => (float[N,8] y) <float[8,8] w = {{{WEIGHTS}}}, float[8] one = {{1,1,1,1,1,1,1,1}}> {{
            {body} y = MatMul (r, w)
        }}"""
    )


def converted(one: ModelProto, folder: Path, level: str = "O2", **options: object) -> onnxamp.DiffReport:
    onnx.save(one, folder / "model.onnx")
    found = onnxamp.convert_file(folder / "model.onnx", folder / "low.onnx", level, **options).validation
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("body", "domain"),
    [
        ("r = Log (x)", "positive"),
        ("r = Sqrt (x)", "positive"),
        ("h = Constant <value = float {0.45}> () r = Pow (x, h)", "positive"),
        ("r = Acos (x)", "between 0 and 1"),
        ("r = Acosh (x)", "above 1"),
        ("k = Sub (one, x) o = Div (x, k) r = Log (o)", "between 0 and 1"),
        ("k = Neg (x) r = Log (k)", "negative"),
        ("k = Log (x) n = RandomNormalLike (x) r = Add (k, n)", "positive"),
        ("f = Floor (x) k = Mul (f, f) o = Sub (k, k) d = Div (o, f) r = Add (d, x)", "above 1"),
    ],
)
def test_inputs_outside_of_a_domain_are_drawn_again(body: str, domain: str, tmp_path: Path) -> None:
    found = converted(model(body), tmp_path)
    assert found.passed
    assert not found.skipped
    assert found.inputs == f"random inputs (seed 0, {domain})"
    assert all(diff.reference_nan == 0 for diff in found.outputs)


def test_runs_that_fail_for_other_sizes_draw_no_numbers_of_the_model(tmp_path: Path) -> None:
    body = """n = RandomNormalLike (x) a = Add (x, n) s = Constant <value_ints = [-1, 16]> () p = Reshape (z, s)
        k = ReduceMean <keepdims = 0> (p) r = Add (a, k)"""
    found = converted(model(body, "float[N,8] x, float[N,length] z"), tmp_path)
    assert found.passed
    assert found.inputs.startswith("random inputs (seed 0, length=")


def test_only_inputs_that_need_a_domain_get_one(tmp_path: Path) -> None:
    found = converted(model("k = Sqrt (x) r = Add (k, z)", "float[N,8] x, float[N,8] z"), tmp_path)
    assert found.inputs == "random inputs (seed 0, x positive)"


def test_level_auto_measures_in_the_domain(tmp_path: Path) -> None:
    found = converted(model("r = Log (x)"), tmp_path, "auto")
    assert found.passed
    assert not found.skipped


def test_diff_draws_the_same_inputs(tmp_path: Path) -> None:
    one = model("r = Log (x)")
    found = onnxamp.diff_models(one, onnxamp.convert_model(one))
    assert found.inputs == "random inputs (seed 0, positive)"
    assert found.passed


def test_stated_ranges_and_finite_models_are_left_alone(tmp_path: Path) -> None:
    assert converted(model("r = Tanh (x)"), tmp_path).inputs == "random inputs (seed 0)"
    stated = converted(model("r = Log (x)"), tmp_path, input_ranges={"x": (-2.0, -1.0)})
    assert "positive" not in stated.inputs
    assert "NaN" in stated.skipped


def test_infinities_that_masks_leave_are_no_fault(tmp_path: Path) -> None:
    low = np.float32(-np.inf)
    one = model("k = Less (x, zero) r = Where (k, low, x)")
    del one.graph.node[-1]
    one.graph.node[-1].output[0] = "y"
    one.graph.initializer.extend(
        onnx.numpy_helper.from_array(np.float32(number), name) for name, number in (("zero", 0.0), ("low", low))
    )
    assert converted(one, tmp_path).inputs == "random inputs (seed 0)"


def test_what_is_nan_everywhere_stays_unvalidated(tmp_path: Path) -> None:
    found = converted(model("k = Abs (x) m = Neg (k) n = Sub (m, one) r = Log (n)"), tmp_path)
    assert found.inputs == "random inputs (seed 0)"
    assert "NaN or infinite throughout" in found.skipped
