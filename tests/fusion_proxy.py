"""What a converted model's precision costs ONNX Runtime's fusions, seen on CPU.

Float16 graphs cannot be compared there: other fusions apply to them. So a *proxy* stands for the result: float32
throughout, each Cast between floats replaced by an op that changes nothing and that no optimization looks through, a
``Max`` of one input.
"""

from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx
import onnxruntime as ort
from engine import analysis_of
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, numpy_helper

from onnxamp._graph.graph import Graph
from onnxamp._graph.types import infer_types
from onnxamp._graph.view import scope_graphs
from onnxamp._model.blobs import WeightConverter
from onnxamp._rewrite.edits.apply import apply_edits

LOW = (TensorProto.FLOAT16, TensorProto.BFLOAT16)
FLOATS = frozenset(("tensor(float)", "tensor(float16)", "tensor(bfloat16)"))
NOT_COUNTED = frozenset({"FusedConv", "FusedGemm", "NhwcMaxPool"})
"""Kernels that ONNX Runtime has for float32 on CPU alone."""


def proxy(model: ModelProto, level: str = "O2", **wishes: Any) -> ModelProto:
    """What a conversion makes of the model, all in float32, with opaque ops where precision changes.

    Constants keep all their digits: ONNX Runtime compares those of a pattern with the numbers it expects, rounded to
    the type that is there.
    """
    analysis = analysis_of(model, level, **wishes)
    prepared = analysis.graph.model
    result, rounded = ModelProto(), ModelProto()
    result.CopyFrom(prepared)
    apply_edits(analysis.graph, analysis.edits, result, lambda weights: [weight.tensor for weight in weights])
    rounded.CopyFrom(prepared)
    apply_edits(analysis.graph, analysis.edits, rounded, WeightConverter(analysis.options.low, None))
    view = Graph.of(rounded)
    types = infer_types(view)
    between = {
        (node.scope, node.proto.output[0])
        for node in view.nodes
        if node.key == "Cast"
        and types[node.inputs[0]] != types[node.outputs[0]]
        and {types[node.inputs[0]], types[node.outputs[0]]} <= FLOATS
    }
    for index, graph in enumerate(scope_graphs(view, result)):
        _raise_graph(graph, {name for scope, name in between if scope == index})
    return result


def _raise_graph(graph: GraphProto, between: set[str]) -> None:
    for tensor in graph.initializer:
        _raise_tensor(tensor)
    for entry in (*graph.input, *graph.output, *graph.value_info):
        _raise_type(entry.type)
    for node in graph.node:
        if node.op_type == "Cast" and node.output[0] in between:
            node.op_type = "Max"
            del node.attribute[:]
        else:
            _raise_attributes(node)


def _raise_attributes(node: NodeProto) -> None:
    for item in node.attribute:
        if item.name in ("to", "dtype", "output_datatype", "output_dtype") and item.i in LOW:
            item.i = TensorProto.FLOAT
        elif item.HasField("t"):
            _raise_tensor(item.t)
        elif item.HasField("tp"):
            _raise_type(item.tp)


def _raise_tensor(tensor: TensorProto) -> None:
    if tensor.data_type in LOW:
        raised = numpy_helper.from_array(numpy_helper.to_array(tensor).astype("float32"), tensor.name)
        tensor.CopyFrom(raised)


def _raise_type(proto: TypeProto) -> None:
    while proto.WhichOneof("value") in ("sequence_type", "optional_type"):
        proto = getattr(proto, proto.WhichOneof("value")).elem_type
    if proto.tensor_type.elem_type in LOW:
        proto.tensor_type.elem_type = TensorProto.FLOAT


def fused_ops(model: ModelProto) -> Counter[str]:
    """Op types that ONNX Runtime's extended optimizations make of the model, those it had already apart."""
    return count_ops(optimized(model, "CPUExecutionProvider", ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED))


def optimized(model: ModelProto, provider: str, level: ort.GraphOptimizationLevel) -> GraphProto:
    """The graph that ONNX Runtime makes of the model."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "optimized.onnx"
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = level
        options.optimized_model_filepath = str(path)
        options.intra_op_num_threads = 1
        ort.InferenceSession(model.SerializeToString(), options, providers=[provider])
        return onnx.load(path).graph


def count_ops(graph: GraphProto) -> Counter[str]:
    """Fused ops of an optimized graph and its bodies."""
    found: Counter[str] = Counter()
    pending = [graph]
    while pending:
        for node in pending.pop().node:
            name = node.op_type.replace("SimplifiedLayer", "RMS")
            if node.domain not in ("", "ai.onnx") or name in ("LayerNormalization", "Gelu", "RMSNormalization"):
                found[name] += name not in NOT_COUNTED
            pending += [item.g for item in node.attribute if item.HasField("g")]
    return +found
