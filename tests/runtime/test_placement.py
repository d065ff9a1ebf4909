"""What ONNX Runtime's CUDA provider decides before anything runs: where nodes go, what is fused, what does not load.

On a GPU, or without one with the stand-in for CUDA: ``python scripts/test_placement.py``.
"""

from collections import Counter, defaultdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from assignment import disagreements
from every import every
from fusion_cases import FILES, WISHES, explained, families, fused, options_of, original
from fusion_proxy import count_ops, optimized
from graphs import CASES
from graphs.case import add_weights, parse
from norms import LAYER_NORM, RMS_NORM
from onnx import GraphProto, ModelProto
from repository import ROOT
from strategies import all_ops, random_model
from train_nets import conv_net

from onnxamp import OnnxAmpError, convert_model
from onnxamp._audit.audit import audit_model
from onnxamp._audit.device_placement import memory_table
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import Types, infer_types
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._model.protos import opset_imports
from onnxamp._runtime.sessions.session import assigned_nodes, cuda_available, make_session
from onnxamp._runtime.sessions.values import type_proto
from onnxamp.train import AdamW, build_train_network

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.placement,
    pytest.mark.skipif(not cuda_available(), reason="neither a CUDA device nor the stand-in"),
]

MORE_WISHES: dict[str, dict[str, Any]] = {
    "O1 bfloat16": {"level": "O1", "dtype": "bfloat16"},
    "O2 fast bfloat16": {"level": "O2", "lists": "fast", "dtype": "bfloat16"},
    "O2 fast folded bfloat16": {"level": "O2", "lists": "fast", "fold": True, "dtype": "bfloat16"},
    "O2 low inputs": {"level": "O2", "keep_io_types": False},
    "O2 low inputs bfloat16": {"level": "O2", "keep_io_types": False, "dtype": "bfloat16"},
    "O3 bfloat16": {"level": "O3", "dtype": "bfloat16"},
}
SEEDS = 3
NO_MATTER_OF_PLACE = ("invalid model", "ShapeInferenceError", "TypeInferenceError")
"""ONNX Runtime inlines some function bodies in a wrong order, and refuses some shapes; no kernel is asked by then."""
LOST_ON_CUDA = {
    # ONNX Runtime's fusions of Gelu know no bfloat16 (gelu_fusion.cc, supported_data_types).
    "O2 bfloat16": {"encoder", "gelu_erf"},
    # The factor stays with a function of its own, which is kept.
    "any": {"function_kept"},
}


def converted(name: str, wishes: dict[str, Any]) -> ModelProto | None:
    """The model converted; None where it is refused."""
    try:
        return convert_model(original(name), **options_of(name, wishes))
    except OnnxAmpError:
        return None


def loads(model: ModelProto, *, optimize: bool) -> bool:
    try:
        make_session(model, "cuda", optimize=optimize)
    except OnnxAmpError:
        return False
    return True


@pytest.mark.parametrize("wishes", WISHES | MORE_WISHES)
def test_results_load_with_all_optimisations(wishes: str) -> None:
    """A fusion may make a node that no kernel takes: then the model does not load on the GPU alone."""
    done, failed = 0, []
    for name in [*FILES, *CASES]:
        result = converted(name, (WISHES | MORE_WISHES)[wishes])
        if result is not None:
            done += 1
            if not loads(result, optimize=True) and loads(original(name), optimize=True):
                failed.append(name)
    assert failed == []
    assert done > 200


@every(
    norm=[LAYER_NORM, RMS_NORM],
    first=["h = Identity (x)", "h = MatMul (x, w)", "t = Relu (x) h = Neg (t)"],
    level=["O1", "O2", "O3"],
    dtype=["float16", "bfloat16"],
    given=["", "float[8] gain, "],
    parts=2,
)
def test_casts_in_front_of_norms_let_the_model_load(norm: str, first: str, level: str, dtype: str, given: str) -> None:
    text = f"""({given}float[2,8] x) => (float[2,8] y) <float two = {{2.0}}, float eps = {{1e-5}}> {{
        {first} {norm} }}"""
    for keep in (True, False):
        model = add_weights(parse(text), {"w": (8, 8)} | ({} if given else {"gain": (8,)}))
        assert loads(convert_model(model, level, dtype=dtype, keep_io_types=keep), optimize=True)


@pytest.mark.parametrize("wishes", WISHES)
def test_precision_costs_no_fusion_on_cuda(wishes: str) -> None:
    known = explained(wishes) | LOST_ON_CUDA["any"] | LOST_ON_CUDA.get(wishes, set())
    compared = 0
    for name in fused():
        result = converted(name, WISHES[wishes])
        if result is not None:
            before, after = families(fused_on_cuda(original(name))), families(fused_on_cuda(result))
            compared += bool(before)
            assert not before - after or name in known, f"{name}: {dict(before - after)} lost"
    assert compared > 20


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, ModelProto]:
    """Those of the benchmark for GPUs, tiny."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import shapes

    return {shape.name: shape.model(tmp_path) for shape in shapes.QUICK}


@pytest.mark.parametrize("name", ["bert", "resnet50", "decoder", "unet"])
def test_fast_and_folded_networks_gain_casts_at_their_borders_alone(networks: dict[str, ModelProto], name: str) -> None:
    """The fused graph is that of float32, kernel by kernel, and no data move to the CPU."""
    model = networks[name]
    result = convert_model(model, lists="fast", fold=True)
    before, after = all_on_cuda(model), all_on_cuda(result)
    before["RMSNormalization"] += before.pop("SimplifiedLayerNormalization", 0)
    ports = [*model.graph.input, *model.graph.output]
    floats = sum(port.type.tensor_type.elem_type == onnx.TensorProto.FLOAT for port in ports)
    hot = 2 if name == "decoder" else 0  # a channel of the embedding is about 400: squares of it stay in float32
    assert after["Cast"] - before["Cast"] <= floats + hot
    assert after - before == Counter(Cast=after["Cast"] - before["Cast"])
    assert falls_back(result) == []


def falls_back(model: ModelProto) -> list[str]:
    """Nodes on the CPU whose data move for them, and nodes that are elsewhere than predicted."""
    findings = audit_model(model, "cuda").findings
    copied = [f.text for f in findings if f.kind == "fallback" and f.severity == "warning"]
    return [*copied, *disagreements(model, "cuda")]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("boost", ["O0", "O1", "O2"])
def test_training_steps_run_on_cuda_whole(level: str, dtype: str, boost: str) -> None:
    """Boost O2 wants all nodes there: ONNX Runtime records no CUDA graph of others."""
    net = build_train_network(conv_net(), AdamW(learning_rate=1e-2), "cross-entropy", level, boost, dtype=dtype)
    assert net.runs_on == "CUDA"
    rng = np.random.default_rng(0)
    feeds = {"x": rng.random((4, 1, 8, 8), np.float32), "label": rng.integers(0, 10, 4)}
    for _ in range(3):
        net.step(feeds)
    assert falls_back(net.model) == []


def all_on_cuda(model: ModelProto) -> Counter[str]:
    """Op types after all optimizations."""
    return Counter(node.op_type for node in on_cuda(model).node)


def fused_on_cuda(model: ModelProto) -> Counter[str]:
    return count_ops(on_cuda(model))


def on_cuda(model: ModelProto) -> GraphProto:
    return optimized(model, "CUDAExecutionProvider", ort.GraphOptimizationLevel.ORT_ENABLE_ALL)


@every(op=sorted(all_ops()), parts=8)
def test_predictions_hold_on_random_models(op: str) -> None:
    for seed in range(SEEDS):
        model = random_model(Random(f"placement {op} {seed}"), op).model
        if not any(entry.domain in ("", "ai.onnx") for entry in model.opset_import) or not loads(model, optimize=False):
            continue  # where no opset is named ONNX Runtime takes its newest; onnx and onnxamp, that of the IR version
        for dtype in (None, "float16", "bfloat16"):
            try:
                wanted = dtype and convert_model(model, level="O3", dtype=dtype, hazards=False)
                found = disagreements(wanted or model, "cuda")
            except OnnxAmpError:
                continue
            assert [text for text in found if not any(words in text for words in NO_MATTER_OF_PLACE)] == []


@every(op=sorted(all_ops()), parts=8)
def test_the_memory_of_inputs_and_outputs(op: str) -> None:
    """``memory.toml`` against sessions with one node each."""
    found: dict[str, dict[int, set[str]]] = {"inputs": defaultdict(set), "outputs": defaultdict(set)}
    for seed in range(8):
        model = random_model(Random(f"memory {op} {seed}"), op, 2).model
        view = Graph.of(model)
        types = infer_types(view)
        for node in view.nodes:
            if node.proto.op_type == op and not node.bodies:
                look(alone(view, types, node), found)
    for which, ports in found.items():
        told = memory_table("cuda", which).get(op, frozenset())
        assert {port for port, kinds in ports.items() if kinds == {"Cpu"}} == told & ports.keys()
        assert all(len(kinds) == 1 for kinds in ports.values())


def alone(view: View, types: Types, node: Node) -> ModelProto:
    """The node as a model: it takes and gives all that it reads and makes, named by position."""
    model = ModelProto(ir_version=10)
    for domain, version in opset_imports(view.model).items():
        model.opset_import.add(domain=domain, version=version)
    model.graph.name = "alone"
    added = model.graph.node.add()
    added.CopyFrom(node.proto)
    added.name = "alone"
    for values, entries, names in (
        (node.inputs, model.graph.input, added.input),
        (node.outputs, model.graph.output, added.output),
    ):
        for port, value in enumerate(values):
            if value != ABSENT:
                names[port] = f"{'in' if names is added.input else 'out'}{port}"
                entries.add(name=names[port]).type.CopyFrom(type_proto(types[value] or "tensor(float)"))
    return model


def look(model: ModelProto, found: dict[str, dict[int, set[str]]]) -> None:
    try:
        session = make_session(model, "cuda", optimize=False, record=True)
    except OnnxAmpError:
        return
    if [place for place, _, name in assigned_nodes(session) if name == "alone"] != ["CUDA"]:
        return
    for port, info in zip(session.get_inputs(), session.get_input_memory_infos(), strict=True):
        found["inputs"][int(port.name.removeprefix("in"))].add(info.name)
    for port, info in zip(session.get_outputs(), session.get_output_memory_infos(), strict=True):
        found["outputs"][int(port.name.removeprefix("out"))].add(info.name)
