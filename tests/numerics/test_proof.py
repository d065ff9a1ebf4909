"""Upgrades are proven: float32 before and after gives the same numbers, or the upgrade is not taken."""

import onnx
from graphs.case import add_weights, parse

from onnxamp._graph.graph import Graph
from onnxamp._model.model import Model
from onnxamp._numerics.comparison import Comparison
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._rewrite.passes.upgrade import upgraded
from onnxamp._runtime.inputs.samples import random_samples
from onnxamp._runtime.run import Run

TEXT = """(float[1,2,5,7] x) => (float[1,2,M,N] y) {
    s = Constant <value = float[4] {1, 1, 1.7, 2.3}> () u = Upsample <mode = "linear"> (x, s) y = Conv (u, w) }"""


def test_the_numbers_of_an_upgrade_are_compared_once() -> None:
    model = Model(add_weights(parse(TEXT, opset=9, ir=4), {"w": (2, 2, 1, 1)}))
    ran = []
    samples = random_samples(model, 2, seed=1)
    run = Run(inputs=samples, provider="cpu", report=lambda _, done, total: ran.append((done, total)))
    proof = UpgradeProof(Comparison.of(model, run))
    right = upgraded(Graph.of(model.proto), 13)
    assert proof(right) is None
    assert not proof.has_refused
    times = len(ran)
    assert times > 0
    assert proof(right) is None
    assert len(ran) == times


def test_other_coordinates_are_found_out() -> None:
    model = Model(add_weights(parse(TEXT, opset=9, ir=4), {"w": (2, 2, 1, 1)}))
    proof = UpgradeProof(Comparison.of(model, Run(inputs=random_samples(model, 1, seed=1), provider="cpu")))
    wrong = onnx.ModelProto.FromString(upgraded(Graph.of(model.proto), 13).model.SerializeToString())
    resize = next(node for node in wrong.graph.node if node.op_type == "Resize")
    for item in resize.attribute:
        if item.name == "coordinate_transformation_mode":
            item.s = b"half_pixel"
    assert "float32 results would change as well" in str(proof(Graph.of(wrong)))
    assert proof.has_refused


def test_a_model_that_does_not_run_proves_nothing() -> None:
    model = Model(parse("(float[2] x) => (float[2] y) { y = own.Unknown (x) }", opset=9, ir=4, domains={"own": 1}))
    proof = UpgradeProof(Comparison.of(model, Run(inputs=random_samples(model, 1, seed=1), provider="cpu")))
    assert proof(upgraded(Graph.of(model.proto), 13)) is None
