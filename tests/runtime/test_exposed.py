"""Sessions that show values inside a model compute the same bits as those that do not."""

import numpy as np
import onnx
import pytest
from repository import ROOT

import onnxamp
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.piecewise.flow import expose
from onnxamp._runtime.sessions.session import make_session, run


@pytest.mark.mostly_slow(fast=3)
@pytest.mark.parametrize("name", ["classifier", "encoder", "decoder"])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_values_are_shown_and_no_bit_changes(name: str, level: str) -> None:
    model = emulate(onnxamp.convert_model(onnx.load(ROOT / "models" / f"{name}.onnx"), level))
    feeds = onnxamp.random_samples(model)[0]
    made = [output for node in model.graph.node for output in node.output]
    session, shown = expose(model, "cpu", set(made))
    expected, found = run(make_session(model), feeds), run(session, feeds)
    assert shown
    assert found.keys() == {*expected, *shown}
    assert {name: array.tobytes() for name, array in expected.items()} == {
        name: found[name].tobytes() for name in expected
    }
    assert all(isinstance(found[name], np.ndarray) for name in shown)


def test_nothing_is_shown_unasked() -> None:
    model = onnx.load(ROOT / "models" / "classifier.onnx")
    session, shown = expose(model, "cpu", {"image", "there is no such value"})
    assert shown == ()
    assert len(session.get_outputs()) == len(model.graph.output)
