"""ONNX Runtime opens results with its default options, whose optimizers break some models, and may end the process."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from commands import run
from judge_numbers import session
from onnx import ModelProto, NodeProto, helper, numpy_helper
from opening import outcomes, runtime_version

import onnxamp
from onnxamp._facts.tables import target_names, target_table
from onnxamp._graph.targets import optimizers
from onnxamp._graph.targets.optimizers import faulty_optimizers, known_optimizers, may_break
from onnxamp._runtime.loading import _blamed as blamed

FUSION = "MatmulTransposeFusion"
FLOAT, FLOAT16 = onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16
DIMS = (2, 3, 4, 5)


def model_of(nodes: Sequence[NodeProto], elem: int, rank: int, weight: np.ndarray, opset: int = 20) -> ModelProto:
    """A model from x to y with a weight w."""
    ends = [helper.make_tensor_value_info("x", elem, [*DIMS[: rank - 1], 16][:rank])]
    out = FLOAT if weight.dtype == np.float32 else FLOAT16
    results = [helper.make_tensor_value_info("y", out, None)]
    graph = helper.make_graph(nodes, "products", ends, results, [numpy_helper.from_array(weight, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def turned(
    perm: Sequence[int] = (1, 0, 2),
    *,
    elem: int = FLOAT,
    cast: int = 0,
    before: str = "",
    rank: int = 2,
    is_right: bool = False,
    opset: int = 20,
) -> ModelProto:
    """A product of a transposed factor and a weight of a rank, perhaps with an op and a Cast between."""
    nodes = [helper.make_node("Transpose", ["x"], ["t"], perm=perm)]
    name = "t"
    if before:
        nodes.append(helper.make_node(before, [name], ["b"]))
        name = "b"
    if cast:
        nodes.append(helper.make_node("Cast", [name], ["c"], to=cast))
        name = "c"
    sizes = [*DIMS[: len(perm) - 1], 16]
    *batch, rows, columns = (sizes[axis] for axis in perm)
    own = [8, rows] if is_right else [columns, 8]
    own = [*batch, *own][-rank:] if rank > 1 else [rows if is_right else columns]
    weight = np.random.default_rng(0).standard_normal(own)
    low = FLOAT16 in ((cast,) if cast else (elem,))
    factors = ["w", name] if is_right else [name, "w"]
    nodes.append(helper.make_node("MatMul", factors, ["y"], name="product"))
    return model_of(nodes, elem, len(perm), weight.astype(np.float16 if low else np.float32), opset)


def in_branches() -> ModelProto:
    """Products of transposed factors in both branches of an If."""
    bodies = []
    for n in "ab":
        nodes = [
            helper.make_node("Transpose", ["x"], [f"t{n}"], perm=[1, 0, 2]),
            helper.make_node("Cast", [f"t{n}"], [f"c{n}"], to=FLOAT),
            helper.make_node("MatMul", [f"c{n}", "w"], [f"z{n}"]),
        ]
        results = [helper.make_tensor_value_info(f"z{n}", FLOAT, None)]
        bodies.append(helper.make_graph(nodes, n, [], results))
    choose = helper.make_node("If", ["which"], ["y"], then_branch=bodies[0], else_branch=bodies[1])
    model = model_of([choose], FLOAT16, 3, np.ones((16, 8), np.float32))
    model.graph.input.append(helper.make_tensor_value_info("which", onnx.TensorProto.BOOL, []))
    return model


def reshaped() -> ModelProto:
    """A product of a transposed factor that is reshaped to the shape that it has."""
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        helper.make_node("Reshape", ["t", "shape"], ["r"]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    model = model_of(nodes, FLOAT, 3, np.ones((16, 8), np.float32))
    model.graph.initializer.append(numpy_helper.from_array(np.array([3, 2, 16]), "shape"))
    return model


def dequantized(scale: type, elem: int, op: str = "MatMul") -> ModelProto:
    """A product with a dequantized factor whose scale has a type of its own."""
    weight = np.arange(-64, 64, dtype=np.int8).reshape(16, 8)
    nodes = [
        helper.make_node("Transpose", ["x"], ["t"], perm=[0, 1]),
        helper.make_node("DequantizeLinear", ["w", "scale"], ["d"], output_dtype=elem),
        helper.make_node(op, ["t", "d"], ["y"]),
    ]
    model = model_of(nodes, elem, 2, weight, opset=23)
    model.graph.output[0].type.tensor_type.elem_type = elem
    model.graph.initializer.append(numpy_helper.from_array(np.array(0.01, scale), "scale"))
    return model


FLOATS: Mapping[str, ModelProto] = {
    "behind the batch": turned(),
    "and turned": turned((1, 2, 0)),
    "of rank 4": turned((1, 2, 0, 3)),
    "turned of rank 4": turned((1, 2, 3, 0)),
    "of rank 5": turned((1, 2, 3, 0, 4)),
    "second factor": turned(is_right=True),
    "vector": turned(rank=1),
    "behind an Identity": turned(before="Identity"),
    "opset 11": turned(opset=11),
    "cast up": turned(elem=FLOAT16, cast=FLOAT),
    "cast up behind an Identity": turned(elem=FLOAT16, cast=FLOAT, before="Identity"),
    "cast down": turned(cast=FLOAT16),
    "in branches": in_branches(),
    "behind a Reshape": reshaped(),
    "batches of weights": turned(rank=3),
    "rows and columns": turned((0, 2, 1)),
}
"""Models to convert; in all but the last two, what becomes of the first ones would end the process."""


@pytest.mark.slow
def test_results_open() -> None:
    ways = [{"level": level, "target": target} for level in ("O2", "O3") for target in ("cuda", "any")]
    results = {
        f"{name}, {way}": onnxamp.convert_model(model, **way)  # type: ignore[arg-type]
        for name, model in FLOATS.items()
        for way in ways
    }
    found = dict(zip(results, outcomes(results.values()), strict=True))
    assert {name: said for name, said in found.items() if said != "opens"} == {}


def test_views_change_no_number_and_stay() -> None:
    model = turned()
    result = onnxamp.convert_model(model)
    assert [node.op_type for node in result.graph.node] == [
        "Cast", "Transpose", "Unsqueeze", "Squeeze", "MatMul", "Cast"
    ]  # fmt: skip
    feeds = {"x": np.random.default_rng(1).standard_normal((2, 3, 16)).astype(np.float32)}
    (mine,) = session(result).run(None, feeds)
    (theirs,) = session(model).run(None, feeds)
    assert np.allclose(mine, theirs, atol=0.05)
    assert onnxamp.convert_model(result) == result
    two = onnxamp.convert_model(turned(before="Identity"))
    assert sum(node.op_type == "Unsqueeze" for node in two.graph.node) == 1


def test_models_that_no_optimizer_breaks_get_no_views() -> None:
    for name in ("batches of weights", "rows and columns"):
        result = onnxamp.convert_model(FLOATS[name])
        assert "Unsqueeze" not in [node.op_type for node in result.graph.node], name
    older = onnxamp.convert_model(turned(), target="cuda@1.22")
    assert "Unsqueeze" not in [node.op_type for node in older.graph.node], "the version that is meant is older"


LOW = {
    "direct": turned(elem=FLOAT16),
    "cast": turned(elem=FLOAT16, cast=FLOAT),
    "second factor": turned(elem=FLOAT16, is_right=True),
    "dequantized": dequantized(np.float32, FLOAT16),
    "dequantized Gemm": dequantized(np.float16, FLOAT, "Gemm"),
}
HARMLESS = {
    "equal ranks": turned(elem=FLOAT16, rank=3),
    "rows and columns": turned((0, 2, 1), elem=FLOAT16),
    "one type": dequantized(np.float16, FLOAT16),
}


@pytest.mark.slow
def test_what_the_table_says_of_the_installed_version_holds() -> None:
    """Whatever does not open is in the table; what is harmless is not."""
    opened = dict(zip(LOW, outcomes(LOW.values()), strict=True))
    for name, model in LOW.items():
        faulty = faulty_optimizers(model, "cpu", ort.__version__)
        assert opened[name] == "opens" or faulty, name
    assert outcomes(HARMLESS.values()) == ["opens"] * len(HARMLESS)
    for name, model in HARMLESS.items():
        assert faulty_optimizers(model, "cpu", ort.__version__) == (), name


def test_versions_count() -> None:
    assert faulty_optimizers(LOW["direct"], "cpu", "1.22.1") == ()
    assert faulty_optimizers(LOW["direct"], "cpu", "1.23.0") == (FUSION,)
    assert faulty_optimizers(LOW["cast"], "cpu", "1.20.1") == (FUSION,)
    assert faulty_optimizers(LOW["direct"], "cuda", "1.31.1") == ()
    assert faulty_optimizers(turned(cast=FLOAT16), "cuda", "1.31.1") == (FUSION,)
    assert not may_break(turned((0, 2, 1)))


def test_every_row_says_what_it_must() -> None:
    rows = [row for name in target_names() for row in target_table(name, "optimizers").get("rows", ())]
    assert len(rows) > 3
    for row in rows:
        assert {"optimizer", "ops", "types", "producer", "attribute", "because", "source"} <= row.keys()
        assert row["optimizer"] in known_optimizers()


@pytest.mark.parametrize("name", LOW)
def test_sessions_do_not_run_what_breaks_the_model(name: str, tmp_path: Path) -> None:
    """In this process, which would die."""
    if name.startswith("dequantized") and runtime_version() < (1, 31):
        pytest.skip("ONNX Runtime before 1.31 runs no DequantizeLinear whose output has another type than its scale")
    model = LOW[name]
    onnx.save(model, tmp_path / "low.onnx")
    sizes = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    kind = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    feeds = {"x": np.ones(sizes, kind)}
    for given in (model, str(tmp_path / "low.onnx")):
        assert np.isfinite(onnxamp.InferenceSession(given).run(None, feeds)[0]).all()
        own = onnxamp.InferenceSession(given, providers=["CPUExecutionProvider"])
        assert np.isfinite(own.run(None, feeds)[0]).all()


@pytest.mark.slow
def test_commands_name_the_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(LOW["cast"], "low.onnx")
    named = f"disabled_optimizers=['{FUSION}']"
    timed = run("bench", "low.onnx", "--provider", "cpu", "--seconds", "0.01", "--no-profile")
    assert (timed.exit_code, named in " ".join(timed.output.split())) == (0, True), timed.output
    checked = run("check", "low.onnx", "--provider", "cpu")
    assert (checked.exit_code, named in " ".join(checked.output.split())) == (1, True), checked.output
    kept = run("convert", "low.onnx", "-o", "same.onnx", "--level", "O0", "--provider", "cpu")
    text = " ".join(kept.output.split())
    assert (kept.exit_code, named in text) == (0, True), kept.output
    assert "✔" not in text.partition("Notes")[0].partition("Outputs")[0]
    assert f"without {FUSION}" in text


@pytest.fixture
def _no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which optimizers break models."""
    monkeypatch.setattr(optimizers, "_rows", lambda _: ())
    monkeypatch.setattr(optimizers, "_makers", dict)


@pytest.mark.usefixtures("_no_rows")
def test_an_optimizer_without_a_row_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if runtime_version() < (1, 31):
        pytest.skip("ONNX Runtime before 1.31 runs no DequantizeLinear whose output has another type than its scale")
    monkeypatch.chdir(tmp_path)
    onnx.save(LOW["dequantized"], "low.onnx")
    named = "disabled_optimizers=['QDQSelectorActionTransformer']"
    checked = run("check", "low.onnx", "--provider", "cpu")
    assert (checked.exit_code, named in " ".join(checked.output.split())) == (1, True), checked.output
    timed = run("bench", "low.onnx", "--provider", "cpu", "--seconds", "0.01", "--no-profile")
    assert (timed.exit_code, named in " ".join(timed.output.split())) == (0, True), timed.output


@pytest.mark.slow
@pytest.mark.usefixtures("_no_rows")
@pytest.mark.skipif(runtime_version() < (1, 23), reason="ONNX Runtime before 1.23 opens the result")
def test_an_optimizer_without_a_row_that_ends_processes_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(turned(), "model.onnx")
    named = f"disabled_optimizers=['{FUSION}']"
    healed = run("convert", "model.onnx", "-o", "low.onnx", "--provider", "cpu", "--format", "json")
    assert healed.exit_code == 0, healed.output
    validation = json.loads(healed.stdout)["validation"]
    assert named in validation["cure"]["failure"]
    assert validation["disabled"] == []
    assert outcomes([onnx.load("low.onnx")]) == ["opens"]
    options = ("--provider", "cpu", "--no-cure", "--format", "json")
    failed = json.loads(run("convert", "model.onnx", "-o", "other.onnx", *options).stdout)["validation"]
    assert failed["disabled"] == [FUSION]
    timed = run("bench", "other.failed.onnx", "--provider", "cpu", "--seconds", "0.01", "--no-profile")
    assert (timed.exit_code, named in " ".join(timed.output.split())) == (0, True), timed.output


def test_the_search_for_optimizers() -> None:
    """Each that is to blame takes a few attempts, and what no optimizer explains takes one."""
    names = known_optimizers()
    assert len(names) == len(set(names))
    for guilty in ({names[0]}, {names[-1]}, {names[7], names[40]}, {names[0], names[1], names[2]}):
        asked = []

        def opens(disabled: Sequence[str], guilty: set[str] = guilty, asked: list[object] = asked) -> bool:
            asked.append(disabled)
            return guilty <= set(disabled)

        assert set(blamed(opens)) == guilty
        assert len(asked) <= 1 + 9 * len(guilty)
    assert blamed(lambda _: False) == ()
    assert blamed(lambda disabled: set(names[:4]) <= set(disabled)) == (), "too many"


def test_types_alone_are_said_to_be_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's CPU provider has no kernel for a product in bfloat16."""
    monkeypatch.chdir(tmp_path)
    onnx.save(turned((0, 2, 1)), "model.onnx")
    done = run("convert", "model.onnx", "-o", "low.onnx", "--dtype", "bfloat16", "--provider", "cpu", "-v")
    text = " ".join(done.output.split())
    assert done.exit_code == 0, done.output
    assert f"types checked by ONNX Runtime {ort.__version__}" in text
    assert "loads in ONNX Runtime" not in text.replace("loads from", "")
    assert "did not open it here: Could not find an implementation for" in text
