"""What reports say of reasons: words that need no knowledge of the project, and each node counted once."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from commands import CLASSIFIER, run, saved
from graphs.case import add_weights, parse

import onnxamp
from onnxamp._decide.kinds import kinds
from onnxamp._decide.verdicts import Reason, reason_text, title_of
from onnxamp._facts.tables import read_table

ENCODER = CLASSIFIER.parent / "encoder.onnx"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    shutil.copy(ENCODER, "model.onnx")


def test_each_reason_has_a_title() -> None:
    reasons = {reason.value for reason in Reason}
    assert read_table("reasons").keys() == reasons
    for reason in (*reasons, *(kind.value for kind in kinds())):
        assert len(title_of(reason).split()) > 2
    assert title_of("cut") != title_of("cut", low=True)


def test_details_follow_titles_or_replace_them() -> None:
    assert reason_text("black list", "Softmax") == "on the black list: Softmax"
    assert reason_text("tie", "shares its type with a float32 value") == "shares its type with a float32 value"
    assert reason_text("cut", "fewest Casts", low=True) == "low precision gains more than its Casts cost"
    assert reason_text("one of another version") == "one of another version"


KEYS = "tie|cut|exact op|index path|white list|black list|level|constant|no kernel"
INTERNAL = re.compile(rf"(?:  |: )({KEYS})(?::| +\d+$|$)", re.MULTILINE)


@pytest.mark.mostly_slow(fast=1)
@pytest.mark.parametrize("command", [
    ("inspect", "model.onnx", "-v"), ("convert", "model.onnx", "--no-validate", "-v"), ("view", "model.onnx", "-v"),
])  # fmt: skip
def test_no_key_of_a_reason_is_printed(command: tuple[str, ...]) -> None:
    text = run(*command).output
    assert not INTERNAL.findall(text)


def test_plans_are_in_plain_words() -> None:
    plan = onnxamp.plan_model("model.onnx")
    assert {row.reason for row in plan.rows} >= {"cut", "constant"}
    for row, line in zip(sorted(plan.rows, key=lambda row: row.op in ("initializer", "Constant")),
                         str(plan).splitlines()[1:], strict=True):  # fmt: skip
        assert line.endswith(reason_text(row.reason, row.detail, low=row.low))


def test_a_node_with_two_hazards_is_counted_once() -> None:
    text = run("convert", "model.onnx", "--no-validate", "--no-fold", "-v").output
    title = re.search(r"Hazards: (\d+) nodes kept in float32(?: \((\d+) of them for more than one reason\))?", text)
    assert title is not None
    hazards = onnxamp.plan_model("model.onnx", fold=False).hazards
    nodes = [row.node for row in hazards]
    assert int(title[1]) == len(set(nodes))
    assert int(title[2] or 0) == sum(nodes.count(node) > 1 for node in set(nodes))


def test_a_node_that_shares_a_type_is_counted_for_its_own_hazard() -> None:
    """All nodes of a decomposed normalization share a type, but each one is a part of it."""
    plan = onnxamp.plan_model("model.onnx", fold=False)
    assert {row.node for row in plan.rows if row.reason == "tie" and not row.low} & {row.node for row in plan.hazards}
    run("view", "model.onnx", "--no-fold", "-o", "page.html")
    for text in (repr(plan), Path("page.html").read_text(encoding="utf-8")):
        assert "part of a decomposed op" in text
        assert "shares its type with other nodes" not in text


def test_options_in_pages_are_not_broken_at_their_hyphens() -> None:
    run("view", "model.onnx", "-o", "page.html")
    page = Path("page.html").read_text(encoding="utf-8")
    assert 'inputs and outputs stay in float32. <span class="option">--io-types</span> low' in page


def test_the_limit_of_a_part_names_it() -> None:
    """Otherwise the table would have two rows for one metric of one output."""
    text = """(float[4,8] X) => (float[4,16] Y) <float[8,8] w, float k = {1000}> {
        x = MatMul (X, w) h = MatMul (x, w) p = Mul (x, k) Y = Concat <axis = 1> (p, h)
    }"""
    saved(add_weights(parse(text), {"w": np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)}))
    limits = run("convert", "model.onnx", "-v").output.partition("Limits")[2]
    assert "relative L2 error of its part 'h'" in limits


@pytest.mark.parametrize("layers", [1, 9])
def test_the_hazard_that_keeps_most_nodes_is_named(layers: int) -> None:
    """A reader sees at once why little is low, and nothing of hazards of a few nodes."""
    spectrum = "c = Conv (x, w) p = Mul (c, c) b = Clip (p, floor) h0 = Log (b)"
    network = " ".join(f"h{number + 1} = MatMul (v, h{number})" for number in range(layers))
    model = parse(
        f"""(float[1,1,64] x) => (float[1,8,49] h{layers}) <float floor = {{1e-6}}> {{ {spectrum} {network} }}"""
    )
    saved(add_weights(model, {"w": (8, 1, 16), "v": (8, 8)}), "model.onnx")
    told = run("convert", "model.onnx").output
    is_told = "Most nodes stay in float32: low precision loses the quiet parts of a spectrum." in told
    assert is_told == (layers == 1), told
