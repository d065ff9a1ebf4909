"""The reference is the model that was given: what onnxamp does to models before it runs them cannot be wrong twice."""

import numpy as np
import onnx
import pytest
from graphs.case import add_weights, parse
from onnx import ModelProto, parser

import onnxamp
from onnxamp._graph import view
from onnxamp._runtime.piecewise import pieces

X = {"x": np.linspace(-3, 3, 12, dtype=np.float32).reshape(3, 4)}
CALL = """
<ir_version: 10, opset_import: ["" : 18, "d" : 1]>
g (float[3, 4] x) => (float[N, M] y) { u = Relu(x) v = d.F(u) y = Neg(v) }
<domain: "d", opset_import: ["" : 18]>
F <alpha: float = 2.0>(a) => (b) { k = Constant <value_float: float = @alpha>() b = Mul(a, k) }
"""


def lost(model: ModelProto) -> bool:
    """What inlining would be like if it lost defaults."""
    for function in model.functions:
        for node in function.node:
            for item in node.attribute:
                if item.ref_attr_name:
                    item.CopyFrom(onnx.helper.make_attribute(item.name, 1.0))
    return False


@pytest.mark.parametrize("layers", [False, True])
def test_a_fault_of_inlining_is_on_one_side(monkeypatch: pytest.MonkeyPatch, layers: bool) -> None:
    model = parser.parse_model(CALL)
    right = onnxamp.convert_model(model, "O3")
    monkeypatch.setattr(view, "bind_defaults", lost)
    wrong = onnxamp.convert_model(model, "O3")
    report = onnxamp.diff_models(model, wrong, X, provider="cpu", layers=layers)
    assert not report.passed
    assert report.outputs[0].rel_l2 == pytest.approx(0.5, abs=0.01)
    report = onnxamp.diff_models(model, right, X, provider="cpu", layers=layers)
    assert report.passed
    told = [note for note in report.notes if "prepared form of the reference, which computes another 'y'" in note]
    assert bool(told) == layers


def test_a_conversion_that_inlining_spoils_is_not_validated(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    onnx.save(parser.parse_model(CALL), tmp_path / "m.onnx")
    monkeypatch.setattr(view, "bind_defaults", lost)
    with pytest.raises(onnxamp.RuntimeFailure, match="no result can be validated"):
        onnxamp.convert_file(tmp_path / "m.onnx", tmp_path / "o.onnx", validate=True, provider="cpu")


def test_a_model_that_is_repaired_runs_as_it_is() -> None:
    model = parse("(float[3, 4] x) => (float[3, 4] y) { a = Relu(x) y = Neg(a) }")
    first, second = model.graph.node
    model.graph.node.extend([second, first])
    del model.graph.node[:2]
    report = onnxamp.diff_models(model, onnxamp.convert_model(model), X, provider="cpu")
    assert report.passed
    assert not any("prepared form" in note for note in report.notes)


UPSAMPLED = """(float[1, 3, 8, 8] x) => (float[1, 4, 16, 16] y) {{
    {constants}
    e = Identity(none)
    a = Conv <kernel_shape = [1, 1]>(x, w)
    q = QuantizeLinear(a, s, z)
    d = DequantizeLinear(q, s, z)
    r = Relu(d)
    shape = Shape(r)
    kept = Slice(shape, zero, two, zero)
    twice = Slice(shape, two, four, zero)
    size = Mul(twice, double)
    sizes = Concat <axis = 0>(kept, size)
    u = Resize <mode = "nearest", coordinate_transformation_mode = "asymmetric", nearest_mode = "floor">({inputs})
    y = Sigmoid(u)
}}"""
CONSTANTS = """
    none = Constant <value = float[0] {}>()
    factors = Constant <value = float[4] {1, 1, 2, 2}>()
    zero = Constant <value = int64[1] {0}>() two = Constant <value = int64[1] {2}>()
    four = Constant <value = int64[1] {4}>() double = Constant <value = int64[2] {2, 2}>()
    s = Constant <value = float {0.05}>() z = Constant <value = int8 {3}>()
"""


def upsampling(inputs: str) -> ModelProto:
    """What detectors of opset 11 do between quantized layers."""
    model = parse(UPSAMPLED.format(constants=CONSTANTS, inputs=inputs), opset=11, ir=7)
    return add_weights(model, {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3, 1, 1)})


@pytest.mark.mostly_slow(fast=10)
@pytest.mark.parametrize("budget", [0, 3000, 9000, 2**30])
@pytest.mark.parametrize("inputs", ["r, none, none, sizes", "r, e, e, sizes", "r, none, factors", "r, e, factors"])
@pytest.mark.parametrize("layers", [False, True])
def test_empty_operands_stay_empty_in_pieces(inputs: str, budget: int, layers: bool) -> None:
    model = upsampling(inputs)
    feeds = {"x": np.linspace(-1, 1, 192, dtype=np.float32).reshape(1, 3, 8, 8)}
    report = onnxamp.diff_models(
        model, onnxamp.convert_model(model), feeds, provider="cpu", budget=budget, layers=layers
    )
    assert (report.passed, report.skipped, report.failure) == (True, None, None)
    assert not any("fault" in note for note in report.notes)


def before_relu(flow, nodes, *_):
    """Yield the nodes before a Relu, and those from it on."""
    found = [place for place, node in enumerate(nodes) if flow.nodes[node].op_type == "Relu"]
    place = found[0] if found else 0
    yield from filter(None, (nodes[:place], nodes[place:]))


@pytest.mark.parametrize("layers", [False, True])
def test_what_does_not_run_in_pieces_runs_whole(monkeypatch: pytest.MonkeyPatch, layers: bool) -> None:
    monkeypatch.setattr(pieces, "_known", lambda *_: [])
    monkeypatch.setattr(pieces, "_declare_sizes", lambda *_: None)
    monkeypatch.setattr(pieces, "parts_of", before_relu)
    model = upsampling("r, none, none, sizes")
    feeds = {"x": np.linspace(-1, 1, 192, dtype=np.float32).reshape(1, 3, 8, 8)}
    budget = 26000 if layers else 11000  # layers take the values of three runs
    report = onnxamp.diff_models(
        model, onnxamp.convert_model(model), feeds, provider="cpu", budget=budget, layers=layers
    )
    assert (report.passed, report.skipped, report.failure) == (True, None, None)
    told = "The values inside could not be compared" if layers else "The result ran as a whole"
    assert any(told in note and "a fault of onnxamp" in note for note in report.notes)
