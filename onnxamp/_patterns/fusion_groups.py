"""Nodes that ONNX Runtime merges when no Cast stands between them: they take one precision."""

from collections.abc import Callable

from onnxamp._dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.types import bind
from onnxamp._graph.view import ABSENT, Node
from onnxamp._ops.facts import attribute, op_facts
from onnxamp._options.options import Options
from onnxamp._patterns.islands import decomposed_norms
from onnxamp._target.kernels import freedom


def batch_norm_folds(graph: Graph, options: Options) -> list[tuple[int, int]]:
    """(producer, BatchNormalization) pairs that ONNX Runtime folds into one Conv, ConvTranspose or Gemm.

    The conditions are those of its conv_bn_fusion.cc and matmul_bn_fusion.cc: inference mode, constant parameters
    and weights, and a producer that nobody else reads. Where the target has no low kernel for the normalisation,
    there is no pair: folding happens at load time, but the model must also load with optimisations off.
    """
    if not options.folds_batch_norm:
        return []
    pairs = constant_batch_norms(graph, graph.constants.is_constant)
    return [(producer.index, node.index) for producer, node in pairs if _can_be_low(graph, node, options)]


def constant_batch_norms(graph: Graph, is_constant: Callable[[int], bool]) -> list[tuple[Node, Node]]:
    """(producer, BatchNormalization) pairs in inference mode, all but the data constant, and nobody reads between."""
    pairs = []
    for node in graph.nodes:
        producer = graph.producer(node.input(0)) if node.key in op_facts().folded else None
        if producer is None or producer.key not in op_facts().folds_into:
            continue
        result = producer.outputs[0]
        alone = len(graph.uses[result]) == 1 and not graph.results[result] and producer.scope == node.scope
        parameters = (*node.inputs[1:], *(value for value in producer.inputs[1:] if value != ABSENT))
        if alone and all(is_constant(value) for value in parameters) and _is_inference(node):
            pairs.append((producer, node))
    return pairs


def _is_inference(node: Node) -> bool:
    outputs = sum(value != ABSENT for value in node.outputs)
    return outputs == 1 and not attribute(node.proto, "training_mode")


def _can_be_low(graph: Graph, node: Node, options: Options) -> bool:
    if node.signature is None:
        return False
    bound = bind(node.signature, [None if value == ABSENT else graph.types[value] for value in node.inputs])
    params = [param for param, found in bound.items() if found == FLOAT]
    return not freedom(options.target, node.key, node.signature, bound, params, options.low, node.proto).high


def skip_sums(graph: Graph) -> dict[int, int]:
    """Add -> the normalisation of its sum (or a node of one that is written out): ONNX Runtime makes one op of both.

    The conditions are those of its skip_layer_norm_fusion.cc: two activations of one shape, as far as shapes are known.
    """
    heads = {index: index for index, node in enumerate(graph.nodes) if node.key == "LayerNormalization"}
    for root, nodes in graph.ask(decomposed_norms):
        heads |= dict.fromkeys((index for index in nodes if graph.nodes[index].key == "ReduceMean"), root.index)
    found: dict[int, int] = {}
    for index, norm in heads.items():
        total = graph.producer(graph.nodes[index].input(0))
        if total is None or total.key != "Add" or any(graph.constants.is_constant(value) for value in total.inputs):
            continue
        one, other = (graph.shapes[value] for value in total.inputs)
        if one is None or other is None or _may_be_equal(one, other):
            found[total.index] = norm
    return found


def _may_be_equal(one: Shape, other: Shape) -> bool:
    if len(one) != len(other):
        return False
    return all(a == b or None in (a, b) for a, b in zip(one, other, strict=True))
