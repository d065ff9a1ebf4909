"""Nodes that ONNX Runtime merges when no Cast stands between them: they take one precision."""

from onnxamp.constants import Constants
from onnxamp.dtypes import FLOAT
from onnxamp.graph import ABSENT, Node, View
from onnxamp.infer import Types, bind
from onnxamp.kernels import freedom
from onnxamp.ops import attribute, op_facts
from onnxamp.policy import Policy


def batch_norm_folds(view: View, types: Types, constants: Constants, policy: Policy) -> list[tuple[int, int]]:
    """(producer, BatchNormalization) pairs that ONNX Runtime folds into one Conv, ConvTranspose or Gemm.

    The conditions are those of its conv_bn_fusion.cc and matmul_bn_fusion.cc: inference mode, constant parameters
    and weights, and a producer that nobody else reads. Where the target has no low kernel for the normalisation,
    there is no pair: folding happens at load time, but the model must also load with optimisations off.
    """
    if not policy.folds_batch_norm:
        return []
    pairs = []
    for node in view.nodes:
        producer = view.producer(node.input(0)) if node.key in op_facts().folded else None
        if producer is None or producer.key not in op_facts().folds_into:
            continue
        result = producer.outputs[0]
        alone = len(view.uses[result]) == 1 and not view.results[result] and producer.scope == node.scope
        parameters = (*node.inputs[1:], *(value for value in producer.inputs[1:] if value != ABSENT))
        constant = all(constants.is_constant(value) for value in parameters)
        if alone and constant and _is_inference(node) and _can_be_low(node, types, policy):
            pairs.append((producer.index, node.index))
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
