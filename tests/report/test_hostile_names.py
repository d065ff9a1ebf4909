"""Names in a hostile model are shown on terminals, never obeyed: node names, op types, domains and value names."""

import io
import logging
import pickle
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from commands import run
from onnx import ModelProto, TensorProto, helper, numpy_helper, save
from rich.console import Console

import onnxamp
from onnxamp._base.errors import warn
from onnxamp._cli.command import group
from onnxamp._report.inspect import plan_report
from onnxamp._report.terminal import as_text

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egnp\nfake: line\r\x00\x7f[bold]"
"""Sets the title of a terminal, clears it, turns the text around, and adds a line."""
OBEYED = frozenset("\x1b\x07\x9b\u202e\r\x00\x7f")


def evil(name: str) -> str:
    return f"{name}{EVIL}"


def hostile(*, custom: bool = True) -> ModelProto:
    """A model all names of which are hostile, with hazards and, if asked, an op that nobody knows."""
    x, w, eps, h, a, n, y = (evil(name) for name in ("x", "w", "eps", "h", "a", "n", "y"))
    weights = [
        numpy_helper.from_array(np.full((4, 4), 0.5, np.float32), w),
        numpy_helper.from_array(np.array([1e-9], np.float32), eps),
    ]
    nodes = [
        helper.make_node("MatMul", [x, w], [h], evil("product")),
        helper.make_node("Add", [h, eps], [a], evil("guard")),
        helper.make_node("Div", [h, a], [n], evil("quotient")),
        helper.make_node("Relu", [n], [y], evil("end")),
    ]
    if custom:
        nodes[-1] = helper.make_node(evil("Op"), [n], [y], evil("end"), domain=evil("domain"))
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [evil("N"), 4]) for name in (x, y)]
    graph = helper.make_graph(nodes, evil("graph"), info[:1], info[1:], weights)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(evil("domain"), 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8, producer_name=evil("producer"))
    helper.set_model_props(model, {evil("key"): evil("value")})
    return model


def is_safe(text: str) -> bool:
    return OBEYED.isdisjoint(text) and "\nfake: line" not in text


@pytest.mark.mostly_slow(fast=12)
@pytest.mark.parametrize("custom", [True, False])
@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect"],
        ["inspect", "-v"],
        ["convert", "--no-validate"],
        ["convert", "--no-validate", "-v"],
        ["convert"],
        ["convert", "-q"],
        ["convert", "--format", "line"],
        ["convert", "--no-validate", "--white", "Div"],
        ["convert", "--no-validate", "--force-low", "(?s).*"],
        ["convert", "--no-validate", "--keep-node", evil("quotient")],
        ["convert", "--no-validate", "--keep-fp32", "nothing"],
        ["convert", "--io-types", "low"],
        ["check"],
        ["check", "-v"],
        ["check", "--no-run"],
        ["tune"],
        ["bench", "--runs", "2"],
        ["view"],
    ],
    ids=lambda arguments: " ".join(arguments).partition("\x1b")[0],
)
def test_commands_show_names(
    arguments: list[str], custom: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save(hostile(custom=custom), "model.onnx")
    result = run(arguments[0], "model.onnx", *arguments[1:])
    assert is_safe(result.output)
    assert result.exception is None or isinstance(result.exception, SystemExit)


@pytest.mark.parametrize("command", ["inspect", "check", "convert"])
def test_json_escapes_names(command: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(hostile(), "model.onnx")
    more = ["--no-validate"] if command == "convert" else []
    result = CliRunner().invoke(group, [command, "model.onnx", "--format", "json", *more])
    assert is_safe(result.output)
    assert "\\u001b" in result.output


def test_colours_of_a_terminal_are_the_only_escapes(tmp_path: Any) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system="standard")
    with console.capture() as capture:
        console.print(as_text(plan_report(onnxamp.plan_model(hostile())), verbose=True))
    text = capture.get()
    assert "\\x1b]0;owned\\x07" in text
    assert is_safe("".join(piece.partition("m")[2] for piece in f"\x1b[m{text}".split("\x1b[")))


VIEWS: dict[str, Callable[[], Any]] = {
    "a plan": lambda: onnxamp.plan_model(hostile()),
    "a plan with warnings": lambda: onnxamp.plan_model(hostile(), keep_nodes=[evil("quotient")]),
    "an audit": lambda: onnxamp.audit_model(hostile()),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("how", [str, repr])
def test_results_show_names(name: str, how: Callable[[Any], str]) -> None:
    text = how(VIEWS[name]())
    assert is_safe(text)


def test_rows_of_a_plan_stay_lines() -> None:
    plan = onnxamp.plan_model(hostile())
    assert len(str(plan).splitlines()) == 1 + len(plan.rows)
    assert any("\\x1b" in line for line in str(plan).splitlines())
    assert any("\x1b" in row.key for row in plan.rows), "data are as they are"


def test_warnings_and_errors_show_names() -> None:
    with pytest.warns(onnxamp.OptionWarning) as caught:
        onnxamp.convert_model(hostile(), force_low=["(?s).*"], white_list=["Div"])
    assert all(is_safe(str(item.message)) for item in caught)
    with pytest.warns(onnxamp.OptionWarning) as caught:
        warn([EVIL])
    assert all(is_safe(str(item.message)) for item in caught)
    error = onnxamp.ModelError(EVIL)
    assert is_safe(str(error))
    assert is_safe(repr(error))
    assert is_safe("".join(traceback.format_exception_only(error)))
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_errors_of_hostile_models_show_names() -> None:
    model = hostile(custom=False)
    model.graph.node[1].input[0] = evil("missing")
    with pytest.raises(onnxamp.ModelError) as caught:
        onnxamp.convert_model(model)
    assert is_safe(str(caught.value))
    with pytest.raises(onnxamp.ArgumentError) as wrong:
        onnxamp.convert_model(hostile(), rule=lambda node: EVIL)
    assert is_safe(str(wrong.value))


def test_logs_show_names(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "onnxamp"), warnings.catch_warnings(action="ignore"):
        onnxamp.convert_model(hostile(custom=False), "auto")
    assert all(is_safe(record.getMessage()) for record in caplog.records)
