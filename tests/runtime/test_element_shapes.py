"""Elements of sequences and optionals, and inputs of unknown rank, have the sizes that their readers need."""

import numpy as np
import pytest
from graphs.case import parse
from onnx import AttributeProto, ModelProto, TensorProto, TypeProto, numpy_helper

import onnxamp

GO = "bool go = {1}, int64 zero = {0}, int64 one = {1}"
MODELS = {
    "SequenceAt": "(seq(float[N,K]) s) => (float[N,3] y) { e = SequenceAt (s, zero) y = MatMul (e, w) }",
    "no names": "(seq(float[?,?]) s) => (float[N,3] y) { e = SequenceAt (s, zero) y = MatMul (e, w) }",
    "far away": "(seq(float[N,K]) s) => (float[N,3] y) { e = SequenceAt (s, zero) r = Relu (e) y = MatMul (r, w) }",
    "Gemm": "(seq(float[K,N]) s) => (float[N,3] y) { e = SequenceAt (s, one) y = Gemm <transA = 1> (e, w) }",
    "another input": """(seq(float[N,K]) s, float[K,L] q) => (float[N,L] y, float[N,3] v) {
        e = SequenceAt (s, one) y = MatMul (e, q) v = MatMul (e, w) }""",
    "ConcatFromSequence": """(seq(float[N,K]) s) => (float[M,3] y) {
        e = ConcatFromSequence <axis = 0> (s) y = MatMul (e, w) }""",
    "a stack": """(seq(float[N,K]) s) => (float[B,N,3] y) {
        e = ConcatFromSequence <axis = 0, new_axis = 1> (s) y = MatMul (e, w) }""",
    "another sequence": """(seq(float[N,K]) s) => (float[N,3] y) {
        f = SequenceAt (s, zero) t = SequenceInsert (s, f) e = SequenceAt (t, one) y = MatMul (e, w) }""",
    "SequenceMap": """(seq(float[N,K]) s) => (seq(float[N,3]) y) {
        y = SequenceMap (s) <body = b (float[A,B] i) => (float[A,C] q) { q = MatMul (i, w) }> }""",
    "Loop": """(seq(float[N,K]) s) => (float[T,N,3] y) { n = SequenceLength (s) y = Loop (n, go) <body = b
        (int64 i, bool on) => (bool next, float[A,B] q) {
        next = Identity (on) e = SequenceAt (s, i) q = MatMul (e, w) }> }""",
    "If": """(seq(float[N,K]) s, bool c) => (float[N,3] y) {
        y = If (c) <then_branch = a () => (float[N,3] p) { e = SequenceAt (s, zero) p = MatMul (e, w) },
        else_branch = b () => (float[N,3] q) { f = SequenceAt (s, one) q = MatMul (f, w) }> }""",
    "an optional": "(optional(float[N,K]) s) => (float[N,3] y) { e = OptionalGetElement (s) y = MatMul (e, w) }",
    "a tensor": "(float[N,K] s) => (float[N,3] y) { y = MatMul (s, w) }",
}  # fmt: skip


def model_of(name: str) -> ModelProto:
    """A model whose elements are multiplied with a matrix of five rows."""
    head, brace, body = MODELS[name].partition("{")
    model = parse(f"{head}<{GO}>{brace}{body}")
    matrix = np.arange(15, dtype=np.float32).reshape(5, 3)
    model.graph.initializer.append(numpy_helper.from_array(matrix, "w"))
    return model


def tensor_in(kind: TypeProto) -> TypeProto.Tensor:
    """The type of the tensors in a sequence or optional."""
    while (held := kind.WhichOneof("value")) != "tensor_type":
        kind = getattr(kind, held).elem_type
    return kind.tensor_type


@pytest.mark.parametrize("ranked", [True, False], ids=["declared", "no rank"])
@pytest.mark.parametrize("name", MODELS)
def test_made_up_elements_fit_what_reads_them(name: str, ranked: bool) -> None:
    model = model_of(name)
    if not ranked:
        tensor_in(model.graph.input[0].type).ClearField("shape")
        for node in model.graph.node:
            for body in (one.g for one in node.attribute if one.type == AttributeProto.GRAPH):
                for entry in (*body.input, *body.output):
                    if entry.type.tensor_type.elem_type == TensorProto.FLOAT:
                        entry.type.tensor_type.ClearField("shape")
    report = onnxamp.diff_models(model, onnxamp.convert_model(model))
    assert (report.skipped, report.passed) == (None, True)
