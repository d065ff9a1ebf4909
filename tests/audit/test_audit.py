"""The audit: known-bad models are named at the right node, known-good ones are not accused."""

import io
import re
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnx.defs
import onnxruntime as ort
import pytest
from conversions import naive
from counting import calls
from every import every
from graphs import CASES
from graphs.case import add_weights, parse
from onnx import ModelProto, TensorProto, helper, numpy_helper
from real_models import REAL_MODELS
from repository import ROOT
from rich.console import Console
from stored import external

import onnxamp
from onnxamp._audit import Audit, Finding
from onnxamp._audit.audit import audit_model
from onnxamp._base.state import as_data
from onnxamp._model.model import Model
from onnxamp._report.check import check_report
from onnxamp._report.terminal import as_text

MODELS = sorted((ROOT / "models").glob("*.onnx")) + REAL_MODELS


def found(audit: Audit, severity: str | None = None, kind: str | None = None) -> list[Finding]:
    return [f for f in audit.findings if severity in (None, f.severity) and kind in (None, f.kind)]


def sorts(audit: Audit) -> set[tuple[str, str, str]]:
    """What is accused: errors, and warnings of hazards and types. The node's name is left out: conversions rename."""
    return {
        (f.severity, f.kind, f.text)
        for f in audit.findings
        if f.severity == "error" or (f.severity == "warning" and f.kind not in ("fallback", "cast"))
    }


def half(**weights: float | list[float]) -> dict[str, np.ndarray]:
    with np.errstate(over="ignore"):
        return {name: np.asarray(value, np.float32).astype(np.float16) for name, value in weights.items()}


def low_model(text: str, **weights: float | list[float]) -> ModelProto:
    """A graph in text whose weights are float16."""
    return add_weights(parse(text), half(**weights))


def refused(model: ModelProto) -> str | None:
    """What ONNX Runtime's CPU provider says of a model that it does not load."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # noqa: BLE001 - the runtime has many
        return str(error)
    return None


# --- known-good: not accused --------------------------------------------------------------------------------------


def assert_not_accused(model: ModelProto) -> None:
    before, seen, source = sorts(audit_model(model)), {model.SerializeToString()}, Model.of(model)
    for level in ("O1", "O2", "O3"):
        for dtype in ("float16", "bfloat16"):
            try:
                result = onnxamp.convert_model(source, level, dtype=dtype)
            except onnxamp.OnnxAmpError:
                continue
            if result.SerializeToString() not in seen:  # levels often make the same of a model
                seen.add(result.SerializeToString())
                assert sorts(audit_model(result)) <= before, (level, dtype)


@pytest.mark.slow
@every(case=CASES.values(), parts=8)
def test_own_conversions_are_not_accused(case) -> None:
    assert_not_accused(case.build())


@pytest.mark.slow
@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_own_conversions_of_models_are_not_accused(path) -> None:
    model = onnx.load(path)
    assert not found(audit_model(model), "error")
    assert_not_accused(model)


UNKNOWABLE = ("custom_unknown", "custom_unknown_with_body", "external_initializer", "external_constant")
"""Whether these load depends on what is registered, and on files."""


@pytest.mark.slow
@every(name=[name for name in CASES if name not in UNKNOWABLE], parts=2)
def test_errors_on_cpu_are_what_the_runtime_refuses(name: str) -> None:
    """No error without a refusal, and no refusal without an error: of the original and of a naive conversion."""
    for made in (CASES[name].build(), naive(CASES[name])):
        errors = [f for f in found(audit_model(made, "cpu"), "error") if f.kind not in ("hazard", "weight")]
        assert bool(errors) == bool(refused(made)), (errors, refused(made))


# --- known-bad: found, and named ----------------------------------------------------------------------------------

NAIVE = {
    "rms_norm_pow": ("warning", "Pow", "normalization decomposed"),
    "rms_norm_square": ("warning", "Mul", "normalization decomposed"),
    "layer_norm_decomposed": ("warning", "ReduceMean", "normalization decomposed"),
    "l2_norm": ("warning", "ReduceL2", "normalization decomposed"),
    "softmax_by_hand": ("warning", "Exp", "softmax decomposed"),
    "log_sum_exp": ("warning", "Exp", "softmax decomposed"),
    "epsilon_clip": ("warning", "Clip", "its epsilon is 0"),
    "epsilon_log": ("warning", "Add", "its epsilon is 0"),
    "epsilon_log_direct": ("warning", "Add", "its epsilon is 0"),
    "epsilon_max": ("warning", "Max", "its epsilon is 0"),
    "tiny_divisor": ("error", "Div", "divides by a constant that is 0"),
    "large_constant": ("error", "Mul", "infinite constant"),
    "mask_lowest": ("error", "Mul", "infinite constant"),
    "mask_lowest_where_opset17": ("note", "Where", "masks with infinities"),
    "mask_lowest_table": ("note", "Add", "masks with infinities"),
    "mask_that_fits": ("warning", "Mul", "loses its scores (constant -1e+04)"),
    "index_from_cumsum": ("warning", "CumSum", "counts exactly up to 2048"),
    "index_as_float": ("warning", "Mul", "counts exactly up to 2048"),
    "position_to_sin": ("warning", "MatMul", "counts exactly up to 2048"),
    "long_sum": ("warning", "ReduceSum", "sums 70000 elements"),
    "dynamic_quantization": ("warning", "Mul", "scales integer sums"),
    "large_constant_that_fits": ("warning", "Mul", "end of its range (constant 3e+04)"),
}


@every(name=NAIVE)
def test_naive_conversions_are_found_out(name: str) -> None:
    severity, op, text = NAIVE[name]
    made = naive(CASES[name])
    matching = [f for f in found(audit_model(made), severity, "hazard") if text in f.text]
    assert [f.op for f in matching] == [op]
    node = next(node for node in made.graph.node if matching[0].node in (node.name, *node.output))
    assert node.op_type == op
    assert matching[0].action


def test_what_hazards_would_have_kept_is_found_without_them() -> None:
    model = onnx.load(ROOT / "models" / "decoder.onnx")
    audit = audit_model(onnxamp.convert_model(model, "O3", hazards=False))
    assert {f.node for f in found(audit, "warning", "hazard")} >= {
        "decoder/0/attention/norm/square",
        "decoder/0/attention/norm/epsilon",
        "rotary/angle",
    }


def test_what_is_forced_low_is_found() -> None:
    model = onnx.load(ROOT / "models" / "decoder.onnx")
    audit = audit_model(onnxamp.convert_model(model, "O2", force_low=["decoder/1/mlp/norm/.*"]))
    assert {f.node for f in found(audit, "warning", "hazard")} <= {
        node.name for node in model.graph.node if node.name.startswith("decoder/1/mlp/norm/")
    }
    assert "decoder/1/mlp/norm/square" in {f.node for f in found(audit, "warning", "hazard")}


def test_one_island_is_one_finding() -> None:
    """Its epsilon is a second one; what follows from both is none."""
    audit = audit_model(naive(CASES["rms_norm_pow"]))
    assert Counter(f.op for f in found(audit, "warning", "hazard")) == {"Pow": 1, "Add": 1}


ATTENTION = """(float16[2,4] s, float16[2,4] m) => (float16[2,4] y) {
    i = Sub (one, m) b = Mul (i, low) a = Add (s, b) y = Softmax (a) }"""


@pytest.mark.parametrize(
    ("low", "severity", "op"), [(-3.4e38, "error", "Mul"), (-65504, "warning", "Mul"), (-32752, None, None)]
)
def test_masks_at_the_end_of_the_range(low: float, severity: str | None, op: str | None) -> None:
    """Half of the range is what onnxamp takes: mask + score stays finite."""
    hazards = found(audit_model(low_model(ATTENTION, one=1, low=low)), kind="hazard")
    assert [(f.severity, f.op) for f in hazards] == ([(severity, op)] if severity else [])


def test_a_float32_mask_that_a_cast_makes_infinite() -> None:
    text = """(float16[2,4] s, float[2,4] m) => (float16[2,4] y) <float low = {-1e9}> {
        b = Mul (m, low) c = Cast <to = 10> (b) a = Add (s, c) y = Softmax (a) }"""
    hazards = found(audit_model(parse(text)), "warning", "hazard")
    assert [(f.node, f.text) for f in hazards] == [
        ("c", "casts a mask of 1e+09 to float16, where it is infinite: a masked row becomes NaN")
    ]


@pytest.mark.parametrize(
    "text",
    [
        "(float16[2,4] x) => (float16[2,4] y) { a = Add (x, zero) y = Softmax (a) }",
        "(float16[2,4] x) => (float16[2,4] y) { a = Max (x, zero) b = Sqrt (a) y = Div (x, b) }",
        "(float16[2,4] x) => (float16[2,4] y) { a = Add (x, zeros) y = Div (x, a) }",
        "(float16[2,4] x) => (int64[2] y) <int64[1] two = {2}> { a = Add (x, zero) s = Shape (a) y = Div (two, s) }",
    ],
    ids=["nothing guarded", "clamped root", "bias", "shape"],
)
def test_zeros_that_are_no_epsilons(text: str) -> None:
    assert not found(audit_model(low_model(text, zero=0, zeros=[0, 0, 0, 0])), kind="hazard")


def test_an_absorbed_cast_does_not_load() -> None:
    """The fusion's own type error: onnxamp keeps such a Cast apart, others do not."""
    text = """(float16[2,8] h) => (float[2,8] y) <float two = {2.0}, float eps = {1e-5}> {
        x = Cast <to = 1> (h) m = ReduceMean <axes = [-1]> (x) d = Sub (x, m) p = Pow (d, two)
        v = ReduceMean <axes = [-1]> (p) e = Add (v, eps) q = Sqrt (e) n = Div (d, q) s = Mul (n, g) y = Add (s, b) }"""
    model = add_weights(parse(text), {"g": np.ones(8, np.float32), "b": np.ones(8, np.float32)})
    assert [f.node for f in found(audit_model(model), "error", "hazard")] == ["x"]
    assert "LayerNorm" in (refused(model) or "")


def test_a_float32_model_gets_one_note() -> None:
    audit = audit_model(CASES["rms_norm_pow"].build())
    (note,) = found(audit, kind="hazard")
    assert (note.severity, note.node) == ("note", "")
    assert "nodes in float32" in note.text


# --- types and versions -------------------------------------------------------------------------------------------


def test_mixed_inputs() -> None:
    model = low_model("(float[4] x) => (float[4] y) { y = Mul (x, k) }", k=2.0)
    (error,) = found(audit_model(model), "error")
    assert (error.kind, error.node, error.op) == ("type", "y", "Mul")
    assert error.text == "reads float16 as 'B', but its other inputs need float32"
    assert error.action
    assert refused(model)


def test_a_type_that_the_schema_does_not_admit_yet() -> None:
    model = parse("(float[4] x) => (bfloat16[4] y) { y = Cast <to = 16> (x) }", opset=11)
    (error,) = found(audit_model(model), "error")
    assert (error.kind, error.node, error.op) == ("opset", "y", "Cast")
    assert "unsupported type bfloat16" in error.text
    assert "--opset 13" in error.action


def test_an_unpatched_cast_is_the_only_error() -> None:
    """What follows from it downstream is not repeated: this is what other tools leave behind."""
    text = "(int64[4] i) => (float16[4] y) { c = Cast <to = 1> (i) r = Relu (c) y = Mul (r, k) }"
    model = low_model(text, k=2.0)
    model.graph.value_info.extend(helper.make_tensor_value_info(n, TensorProto.FLOAT16, [4]) for n in "cr")
    (error,) = found(audit_model(model), "error")
    assert (error.node, error.op, error.text) == ("c", "Cast", "outputs float32, but the model declares float16")
    assert error.action.startswith("Set its attribute 'to' to float16")
    assert refused(model)


def test_wrong_output_declaration() -> None:
    model = parse("(float[4] x) => (float16[4] y) { y = Relu (x) }")
    (error,) = found(audit_model(model), "error")
    assert (error.node, error.op, error.kind) == ("y", "Relu", "type")


def test_branches_of_two_types() -> None:
    text = """(bool c, float[4] x) => (float[4] y) {
        y = If (c) <then_branch = t () => (float[4] a) { a = Relu (x) },
                    else_branch = e () => (float16[4] b) { b = Cast <to = 10> (x) }> }"""
    errors = found(audit_model(parse(text)), "error")
    assert [(error.node, error.op, error.text) for error in errors] == [
        ("y", "If", "its branches return different types")
    ]


def versions(model: ModelProto, opset: int = 17, ir: int = 8) -> ModelProto:
    model.opset_import[0].version = opset
    model.ir_version = ir
    return model


def test_versions_that_nothing_knows() -> None:
    text = "(float[4] x) => (float[4] y) { y = Relu (x) }"
    for model in (versions(parse(text), opset=99), versions(parse(text), ir=99)):
        audit = audit_model(model)
        assert {error.kind for error in found(audit, "error")} == {"opset"}
        assert refused(model)
    assert audit_model(versions(parse(text), opset=99)).nodes == ()


def test_opsets_that_the_runtime_does_not_know() -> None:
    """The installed onnx may be ahead of the runtime; then the runtime decides."""
    text = "(float[4] x) => (float[4] y) { y = Relu (x) }"
    for opset in range(18, onnx.defs.onnx_opset_version() + 1):
        model = versions(parse(text), opset)
        errors = found(audit_model(model), "error")
        assert bool(errors) == bool(refused(model)), opset
        assert all(f"opset {opset}" in error.text for error in errors)


def test_the_first_opsets_are_known() -> None:
    text = "(float[4] x) => (float[4] y) { y = Identity (x) }"
    for opset in range(1, 7):
        model = versions(parse(text), opset)
        assert not refused(model)
        assert not found(audit_model(model), kind="opset"), opset


def test_missing_imports() -> None:
    text = "(float[4] x) => (float[4] y) { y = com.microsoft.Gelu (x) }"
    model = parse(text)
    (note,) = found(audit_model(model), kind="opset")
    assert note.severity == "note"
    assert "com.microsoft" in note.text
    del model.opset_import[:]
    (error,) = found(audit_model(model), "error")
    assert error.kind == "opset"
    assert refused(model)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("(float[4] x) => (float[4] y) { y = Add (x, z) }", "which nothing defines"),
        ("(float[4] x) => (float[4] y) { a = Relu (b) b = Relu (a) y = Relu (b) }", "cyclic"),
    ],
)
def test_broken_graphs_are_an_error_and_no_exception(text: str, what: str) -> None:
    audit = audit_model(parse(text))
    (error,) = found(audit, "error")
    assert error.kind == "schema"
    assert what in error.text
    assert audit.nodes == ()


def test_shared_names_are_what_the_runtime_refuses() -> None:
    errors = found(audit_model(CASES["same_node_names"].build()), "error", "schema")
    assert {error.node for error in errors} == {"n"}


# --- kernels ------------------------------------------------------------------------------------------------------


def kernel(text: str, target: str = "cuda", opset: int = 17) -> tuple[Audit, list[Finding]]:
    audit = audit_model(parse(text, opset, 10 if opset > 20 else 8), target)
    return audit, [f for f in audit.findings if f.kind in ("kernel", "fallback") and f.node]


def test_a_kernel_on_the_target() -> None:
    audit, findings = kernel("(float16[2,2] x) => (float16[2,2] y) { y = Relu (x) }")
    assert findings == []
    assert [(n.precision, n.provider) for n in audit.nodes] == [("float16", "CUDA")]


def test_a_fallback_in_float32() -> None:
    audit, (finding,) = kernel("(float[8,2,2] x) => (float[8] y) { a = Relu (x) d = Det (a) y = Relu (d) }")
    assert (finding.severity, finding.kind, finding.node, finding.op) == ("warning", "fallback", "d", "Det")
    assert [node.provider for node in audit.nodes] == ["CUDA", "CPU", "CUDA"]
    (cost,) = [f for f in audit.findings if f.kind == "fallback" and not f.node]
    assert cost.text.startswith("1 node falls back to the CPU: less than 0.1 MB (2 tensors)")


def test_copies_are_counted_where_providers_meet() -> None:
    text = "(float[9,2,2] x) => (float[9,4,4] y) { d = Det (x) e = Det (x) y = Relu (x) z = Add (d, e) }"
    (cost,) = [f for f in kernel(text)[0].findings if f.kind == "fallback" and not f.node]
    assert cost.text.startswith("2 nodes fall back to the CPU: less than 0.1 MB (2 tensors)")
    text = "(float[9,2,2] x) => (float[9] y) { y = Det (x) }"
    (cost,) = [f for f in kernel(text)[0].findings if f.kind == "fallback" and not f.node]
    assert cost.text == "1 node falls back to the CPU: its inputs and outputs are on the host anyway"


def test_a_fallback_in_float16_runs_between_casts() -> None:
    audit, (finding,) = kernel("(float16[2,2] x) => (float16 y) { y = Det (x) }")
    assert (finding.severity, finding.kind) == ("warning", "fallback")
    assert "between Casts" in finding.text
    assert audit.nodes[0].provider == "CPU"


def test_bfloat16_without_any_kernel_does_not_load() -> None:
    audit, (finding,) = kernel("(bfloat16[2,2] x) => (bfloat16 y) { y = Det (x) }", opset=22)
    assert (finding.severity, finding.kind, finding.op) == ("error", "kernel", "Det")
    assert "float16" in finding.action
    assert audit.nodes[0].provider == "none"


def test_a_kernel_that_ended_with_an_older_opset() -> None:
    text = "(float16[1,1,4,4] x) => (float16[1,1,3,3] y) { y = MaxPool <kernel_shape = [2, 2]> (x) }"
    assert kernel(text, opset=17)[1] == []
    (finding,) = kernel(text, opset=22)[1]
    assert finding.kind == "fallback"
    assert "opset 21" in finding.action


def test_the_target_decides() -> None:
    text = "(float16[2,2] x) => (float16[2,2] y) { y = Neg (x) }"
    assert kernel(text, "cuda")[1] == kernel(text, "any")[1] == []
    (finding,) = kernel(text, "cpu")[1]
    assert "between Casts" in finding.text
    assert [node.provider for node in kernel(text, "any")[0].nodes] == [""]
    with pytest.raises(onnxamp.ArgumentError, match="target"):
        audit_model(parse(text), "tpu")


def test_shape_arithmetic_is_no_fallback() -> None:
    """CPU is where ONNX Runtime wants it, kernels or not; a note says so."""
    text = """(float16[N,4] x) => (float16[M] y) <int64 one = {1}, int64[1] axis = {0}, int64[1] minus = {-1}> {
        s = Shape (x) n = Gather (s, one) m = Mod (n, one) u = Unsqueeze (m, axis) c = Concat <axis = 0> (minus)
        y = Reshape (x, c) }"""
    audit, findings = kernel(text)
    assert findings == []
    assert {n.provider for n in audit.nodes if n.op in ("Gather", "Mod", "Unsqueeze")} == {"CPU"}
    assert [f.severity for f in found(audit, kind="fallback")] == ["note"]


def test_an_op_without_a_kernel_among_shapes_moves_no_data() -> None:
    text = """(float[N,4] x) => (float[M] y) <int64[1] two = {2}> {
        s = Shape (x) f = Cast <to = 1> (s) a = Acosh (f) i = Cast <to = 7> (a) y = Expand (one, i) }"""
    audit = audit_model(add_weights(parse(text), {"one": np.ones(1, np.float32)}))
    assert [f.severity for f in found(audit, kind="fallback")] == ["note"]
    assert {node.op: node.provider for node in audit.nodes}["Acosh"] == "CPU"


def test_what_is_folded_while_loading_is_no_fallback() -> None:
    text = "(float[2,2] x) => (float[2,2] y) <float[2,2] k = {1., 0., 0., 1.}> { d = Det (k) y = Mul (x, d) }"
    audit, findings = kernel(text)
    assert findings == []
    assert [node.provider for node in audit.nodes] == ["", "CUDA"]


def test_the_head_counts_what_the_findings_count() -> None:
    """Casts among the shape arithmetic run on CPU, too."""
    text = """(float[N,4] x) => (float[M] y) <int64 one = {0}, int64[1] axis = {0}> {
        s = Shape (x) n = Gather (s, one) i = Cast <to = 6> (n) j = Cast <to = 7> (i) u = Unsqueeze (j, axis)
        w = Constant <value = float[1] {1.}> () y = Expand (w, u) }"""
    audit = audit_model(parse(text))
    (note,) = found(audit, kind="fallback")
    assert note.text.startswith("4 nodes compute shapes on the CPU")
    assert "nodes on CUDA 2 4 on CPU, including 2 Casts" in " ".join(printed(audit).split())


def test_float64_is_a_float() -> None:
    audit = audit_model(parse("(double[4] x) => (double[4] y) { y = Relu (x) }"), "cpu")
    assert [node.precision for node in audit.nodes] == ["float64"]
    assert "1 float64" in printed(audit)


def test_loops_that_carry_what_no_kernel_carries() -> None:
    text = """(int64 n, bool c, bfloat16[4] x) => (bfloat16[4] y) {
        y = Loop (n, c, x) <body = b (int64 i, bool k, bfloat16[4] s) => (bool k2, bfloat16[4] t) {
            k2 = Identity (k) t = Neg (s) }> }"""
    audit = audit_model(parse(text))
    bodies = [node.scope for node in audit.nodes if node.op == "Neg"]
    assert bodies == ["y.body"]
    carried = [f for f in audit.findings if f.op == "Loop"]
    assert all(f.severity == "error" for f in carried)
    assert [node.provider for node in audit.nodes if node.op == "Loop"] == [("none" if carried else "CUDA")]


def test_custom_ops_are_unknown() -> None:
    model = CASES["custom_unknown"].build()
    (note,) = found(audit_model(model), kind="schema")
    assert (note.severity, note.op) == ("note", "acme::Custom")
    assert next(n for n in audit_model(model).nodes if n.op == "acme::Custom").provider == ""


# --- Casts --------------------------------------------------------------------------------------------------------


def test_cast_traffic() -> None:
    text = """(float[8,4] x) => (float[8,4] y) {
        a = Cast <to = 10> (x) b = Relu (a) y = Cast <to = 1> (b) i = Cast <to = 7> (x) }"""
    casts = audit_model(parse(text)).casts
    assert (casts.count, casts.bytes, casts.redundant) == (2, 2 * 32 * 6, 0)


def test_casts_in_loops_count_once_per_trip() -> None:
    text = """(float16[4] x) => (float16[4] y) <int64 n = {3}, bool c = {1}> {
        y = Loop (n, c, x) <body = b (int64 i, bool k, float16[4] s) => (bool k2, float16[4] t) {
            k2 = Identity (k) f = Cast <to = 1> (s) e = Exp (f) t = Cast <to = 10> (e) }> }"""
    casts = audit_model(parse(text)).casts
    assert (casts.count, casts.bytes) == (2, 3 * 2 * 4 * 6)


@pytest.mark.parametrize(
    ("body", "severity", "text", "count"),
    [
        ("a = Relu (x) b = Cast <to = 10> (a) y = Relu (b)", "note", "type that its input already has", 1),
        ("a = Cast <to = 1> (x) b = Cast <to = 1> (x) c = Add (a, b) y = Cast <to = 10> (c)", "warning", "another", 1),
        ("a = Relu (x) b = Cast <to = 1> (a) c = Cast <to = 10> (b) y = Relu (c)", "warning", "a chain", 2),
    ],
    ids=["identity", "duplicate", "inverse"],
)
def test_redundant_casts(body: str, severity: str, text: str, count: int) -> None:
    model = parse(f"(float16[4] x) => (float16[4] y) {{ {body} }}")
    audit = audit_model(model)
    casts = [f for f in found(audit, severity, "cast") if text in f.text]
    assert len(casts) == audit.casts.redundant == count
    left = onnxamp.remove_redundant_casts(model)
    assert len(model.graph.node) - len(left.graph.node) == count


def test_lossy_pairs_are_noted_and_not_redundant() -> None:
    model = CASES["lossy_pair_of_the_user"].build()
    audit = audit_model(model)
    (note,) = found(audit, kind="cast")
    assert note.severity == "note"
    assert "rounds" in note.text
    assert audit.casts.redundant == 0


# --- weights ------------------------------------------------------------------------------------------------------


def test_weight_bytes() -> None:
    weights = {"a": np.zeros(8, np.float16), "b": np.zeros(4, np.float32), "c": np.zeros(2, np.int64)}
    model = add_weights(parse("(float[4] x) => (float[4] y) { y = Add (x, b) }"), weights)
    assert audit_model(model).weight_bytes == {"float16": 16, "float32": 16, "int64": 16}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_nan_among_weights(dtype: type) -> None:
    name = "float" if dtype is np.float32 else "float16"
    weights = {"w": np.array([1, np.nan, 3, 4], dtype)}
    audit = audit_model(add_weights(parse(f"({name}[4] x) => ({name}[4] y) {{ y = Mul (x, w) }}"), weights))
    (warning,) = found(audit, kind="weight")
    assert (warning.severity, warning.node) == ("warning", "w")
    assert "NaN" in warning.text


def test_nan_in_bfloat16() -> None:
    model = parse("(bfloat16[2] x) => (bfloat16[2] y) { y = Mul (x, w) }")
    model.graph.initializer.add(name="w", data_type=TensorProto.BFLOAT16, dims=[2], raw_data=b"\x80\x3f\xc1\x7f")
    assert [f.node for f in found(audit_model(model), "warning", "weight")] == ["w"]


def test_lost_digits_of_weights() -> None:
    weights = half(w=[1e-7] * 100 + [0.0] * 300 + [1.0] * 1600)
    audit = audit_model(add_weights(parse("(float16[2000] x) => (float16[2000] y) { y = Mul (x, w) }"), weights))
    (note,) = found(audit, kind="weight")
    assert note.text.startswith("5.0 % of the float16 weights are subnormal, with fewer digits, and 15.0 % are zero")
    assert "'w'" in note.text


def test_external_weights_are_read_where_they_lie(tmp_path) -> None:
    path = external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    assert not found(audit_model(model, base_dir=tmp_path), "error")
    (error,) = found(audit_model(model), "error")
    assert (error.kind, error.node) == ("weight", "first")
    assert "1 more weight." in error.text
    assert audit_model(model).weight_bytes == audit_model(onnx.load(path)).weight_bytes


def test_low_external_weights_are_judged_where_they_lie(tmp_path) -> None:
    """Their hazards are those of the same model in one file, block by block."""
    rows = np.full((1024, 1100), 1.0, np.float16)  # more than one block
    rows[-1, -1] = -np.inf
    text = "(float16[1024,1100] s) => (float16[1024,1100] y) { a = Add (s, mask) y = Softmax (a) }"
    model = add_weights(parse(text), {"mask": rows})
    whole = audit_model(model)
    assert [(f.node, f.severity) for f in found(whole, kind="hazard")] == [("a", "note")]
    onnx.save(model, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin")
    loaded = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    assert loaded.ByteSize() < 2000
    assert audit_model(loaded, base_dir=tmp_path) == whole


# --- any model ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@every(case=CASES.values(), parts=2)
def test_any_model_is_read_and_never_changed(case) -> None:
    has_data = not case.name.startswith("external")  # without it there is nothing to convert
    for model in (case.build(), naive(case) if has_data else case.build()):
        before = model.SerializeToString(deterministic=True)
        audit = audit_model(model)
        assert model.SerializeToString(deterministic=True) == before
        assert [node.position for node in audit.nodes] == list(range(len(audit.nodes)))
        assert {f.severity for f in audit.findings} <= {"error", "warning", "note"}
        assert {f.kind for f in audit.findings} <= {
            "type", "opset", "kernel", "fallback", "cast", "fold", "hazard", "weight", "schema",
        }  # fmt: skip
        assert all(f.text and "LOW" not in f.text for f in audit.findings)
        as_data(audit)


def test_functions_are_looked_into() -> None:
    text = """(float16[4] x) => (float16[4] y) { y = my.Twice (x) }
        <domain: "my", opset_import: ["" : 17]> Twice (a) => (b) { c = Add (a, a) b = Exp (c) }"""
    audit = audit_model(parse(text, domains={"my": 1}))
    assert Counter(node.op for node in audit.nodes) == {"Add": 1, "Exp": 1}
    assert {node.precision for node in audit.nodes} == {"float16"}


def test_precisions() -> None:
    text = """(float16[1,1,4,4] x, float[1,1,8,8] z) => (float[1,1,8,8] y) <float[4] scales = {1., 1., 2., 2.}> {
        r = Resize (x, , scales) c = Cast <to = 1> (r) s = Shape (c) y = Add (c, z) }"""
    audit = audit_model(parse(text))
    assert {node.op: node.precision for node in audit.nodes} == {
        "Resize": "float16", "Cast": "mixed", "Shape": "float32", "Add": "float32",
    }  # fmt: skip


def test_not_a_model() -> None:
    with pytest.raises(onnxamp.ArgumentTypeError):
        audit_model(3)
    with pytest.raises(onnxamp.ModelError, match="Cannot read"):
        audit_model("missing.onnx")


def test_a_path_is_audited_as_its_model(tmp_path: Path) -> None:
    onnx.save(CASES["rms_norm_pow"].build(), tmp_path / "model.onnx")
    assert audit_model(tmp_path / "model.onnx") == audit_model(CASES["rms_norm_pow"].build())


def chain(count: int) -> ModelProto:
    """Masks, epsilons, Casts and norm-like ops, over and over."""
    block = ("Relu", "Mul", "Add", "Cast", "Cast", "ReduceMean", "Sqrt", "Div", "Softmax", "Identity")
    nodes, last = [], "x"
    for index in range(count):
        op, made = block[index % len(block)], f"v{index}"
        inputs = [last, "k"] if op in ("Mul", "Add", "Div") else [last]
        attributes = {"to": (1, 10)[index % len(block) == 4]} if op == "Cast" else {}
        nodes.append(helper.make_node(op, inputs, [made], **attributes))
        last = made
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, [1, 4]) for name in ("x", last)]
    weights = [numpy_helper.from_array(np.float16([-65504]), "k")]
    return helper.make_model(
        helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )


def test_work_grows_with_the_model_and_no_faster() -> None:
    """Ten times the nodes, at most twelve times the calls: what is quadratic would need a hundred times as many."""
    small, large = chain(100), chain(1000)
    audit_model(small)  # tables are read once
    assert calls(lambda: audit_model(large)) < 12 * calls(lambda: audit_model(small))


# --- the report ---------------------------------------------------------------------------------------------------


def printed(audit: Audit, *, verbose: bool = False) -> str:
    console = Console(width=140, file=io.StringIO())
    console.print(as_text(check_report(audit, None), verbose=verbose))
    return console.file.getvalue()


def test_the_report_names_what_to_do() -> None:
    text = printed(audit_model(naive(CASES["rms_norm_pow"])))
    assert text.startswith("? Nothing is known to break, but nothing was run.")
    assert "The check found 2 warnings." in text
    assert text.count("! hazard: ") == 2
    assert "float16" in text
    assert "nodes on CUDA" in text
    assert "Pow: a normalization decomposed" in text
    assert "--keep-fp32 NAME" in text


def test_the_report_groups() -> None:
    """The five normalizations of a model are one entry with the first names; -v names all."""
    model = onnx.load(ROOT / "models" / "decoder.onnx")
    audit = audit_model(onnxamp.convert_model(model, "O3", hazards=False))
    text, full = printed(audit), printed(audit, verbose=True)
    assert "Pow ×5: a normalization" in text
    assert "and 2 more" in text
    assert "head/norm/square" not in text
    assert "head/norm/square" in full


def test_the_report_obeys_no_names() -> None:
    model = low_model("(float[4] x) => (float[4] y) { y = Mul (x, k) }", k=2.0)
    model.graph.node[0].name = "[red]\x1b[2J"
    text = printed(audit_model(model))
    assert "[red]\\x1b[2J" in text
    assert "\x1b" not in text


def test_a_model_without_trouble() -> None:
    text = printed(audit_model(parse("(float16[4] x) => (float16[4] y) { y = Relu (x) }")))
    assert text.startswith("? Nothing is known to break")
    assert "The check found" not in text
    assert "Findings" not in text


def test_a_broken_model_has_a_report_all_the_same() -> None:
    text = printed(audit_model(parse("(float[4] x) => (float[4] y) { y = Add (x, z) }")))
    assert text.startswith("✘ The model fails to load or is known to break.")
    assert "The check found 1 error." in text
    assert "which nothing defines" in text


def test_many_domains_leave_the_figures_beside_their_names() -> None:
    model = parse(
        "(float[4] x) => (float[4] y) { y = Relu (x) }", domains={f"org.pytorch.aten.{n}": 1 for n in range(8)}
    )
    lines = printed(audit_model(model)).splitlines()
    assert any(re.fullmatch(r" +nodes in float16 +0 % +1 float32", line) for line in lines)
    assert max(len(line) - len(line.strip()) for line in lines) < 60
    assert "org.pytorch.aten.7 1" in " ".join(lines)


def test_the_verdict_on_a_broken_model_names_the_node() -> None:
    model = parse("(float[4] x) => (float[4] y) { [same] a = Relu (x) [same] y = Abs (a) }")
    assert "Abs 'same': another node of the same graph has the same name" in printed(audit_model(model))


RISKS = {
    "sound": (0.01, None, None),
    "zero": (1e-9, "a scale of 1e-09 is 0 in float16", "a scale is 0"),
    "out of range": (1e5, "a scale of 100000 is out of the range of float16", "a scale of inf is out of the range"),
    "subnormal": (2e-5, "a scale of 2e-05 is subnormal in float16", "a scale of 2.00272e-05 is subnormal in float16"),
    "moved": (2e-6, "moves the end of its grid by up to 1.91 steps", "moves the end of its grid by up to 1.88 steps"),
}
"""A scale of int8, what is said of it in float32, and what in float16."""


@pytest.mark.parametrize("is_low", [False, True])
@pytest.mark.parametrize("name", RISKS)
def test_scales_at_risk_are_named(name: str, is_low: bool) -> None:
    number, *whys = RISKS[name]
    why, kind = whys[is_low], "float16" if is_low else "float"
    text = f"""({kind}[2,8] x) => ({kind}[2,4] y) <int8 z = {{0}}> {{
        [q] a = QuantizeLinear (x, s, z) [d] b = DequantizeLinear (a, s, z) y = MatMul (b, w) }}"""
    model = parse(text, 21)
    dtype = np.float16 if is_low else np.float32
    with np.errstate(over="ignore"):
        arrays = {"s": np.array(number).astype(dtype), "w": np.ones((8, 4), dtype)}
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in arrays.items())
    audit = audit_model(model, "tensorrt")
    stored = "float16" if is_low else "float32"
    assert [(one.node, one.type, one.stored, one.low) for one in audit.scales] == (
        [(node, "int8", stored, "float16") for node in "qd"] if why else []
    )
    assert all(why in one.why for one in audit.scales)
    assert ("Scales at risk" in str(audit)) is bool(why)
