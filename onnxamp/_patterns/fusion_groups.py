"""Nodes that ONNX Runtime merges when no Cast stands between them: they take one precision."""

from collections.abc import Callable, Sequence

from onnxamp._decide.policy import Policy
from onnxamp._dtypes import FLOAT
from onnxamp._graph.constants import Constants
from onnxamp._graph.shapes import Shape
from onnxamp._graph.types import Types, bind
from onnxamp._graph.view import ABSENT, Node, View
from onnxamp._ops.facts import attribute, op_facts
from onnxamp._target.kernels import freedom


def batch_norm_folds(view: View, types: Types, constants: Constants, policy: Policy) -> list[tuple[int, int]]:
    """(producer, BatchNormalization) pairs that ONNX Runtime folds into one Conv, ConvTranspose or Gemm.

    The conditions are those of its conv_bn_fusion.cc and matmul_bn_fusion.cc: inference mode, constant parameters
    and weights, and a producer that nobody else reads. Where the target has no low kernel for the normalisation,
    there is no pair: folding happens at load time, but the model must also load with optimisations off.
    """
    if not policy.folds_batch_norm:
        return []
    pairs = constant_batch_norms(view, constants.is_constant)
    return [(producer.index, node.index) for producer, node in pairs if _can_be_low(node, types, policy)]


def constant_batch_norms(view: View, is_constant: Callable[[int], bool]) -> list[tuple[Node, Node]]:
    """(producer, BatchNormalization) pairs in inference mode, all but the data constant, and nobody reads between."""
    pairs = []
    for node in view.nodes:
        producer = view.producer(node.input(0)) if node.key in op_facts().folded else None
        if producer is None or producer.key not in op_facts().folds_into:
            continue
        result = producer.outputs[0]
        alone = len(view.uses[result]) == 1 and not view.results[result] and producer.scope == node.scope
        parameters = (*node.inputs[1:], *(value for value in producer.inputs[1:] if value != ABSENT))
        if alone and all(is_constant(value) for value in parameters) and _is_inference(node):
            pairs.append((producer, node))
    return pairs


def _is_inference(node: Node) -> bool:
    outputs = sum(value != ABSENT for value in node.outputs)
    return outputs == 1 and not attribute(node.proto, "training_mode")


def _can_be_low(node: Node, types: Types, policy: Policy) -> bool:
    if node.signature is None:
        return False
    bound = bind(node.signature, [None if value == ABSENT else types[value] for value in node.inputs])
    params = [param for param, found in bound.items() if found == FLOAT]
    return not freedom(policy.target, node.key, node.signature, bound, params, policy.low, node.proto).high


def skip_sums(
    view: View, shapes: Sequence[Shape | None], constants: Constants, norms: Sequence[tuple[Node, Sequence[int]]]
) -> dict[int, int]:
    """Add -> the normalisation of its sum (or a node of one that is written out): ONNX Runtime makes one op of both.

    The conditions are those of its skip_layer_norm_fusion.cc: two activations of one shape, as far as shapes are known.
    """
    heads = {index: index for index, node in enumerate(view.nodes) if node.key == "LayerNormalization"}
    for root, nodes in norms:
        heads |= dict.fromkeys((index for index in nodes if view.nodes[index].key == "ReduceMean"), root.index)
    found: dict[int, int] = {}
    for index, norm in heads.items():
        total = view.producer(view.nodes[index].input(0))
        if total is None or total.key != "Add" or any(constants.is_constant(value) for value in total.inputs):
            continue
        one, other = (shapes[value] for value in total.inputs)
        if one is None or other is None or _may_be_equal(one, other):
            found[total.index] = norm
    return found


def _may_be_equal(one: Shape, other: Shape) -> bool:
    if len(one) != len(other):
        return False
    return all(a == b or None in (a, b) for a, b in zip(one, other, strict=True))
