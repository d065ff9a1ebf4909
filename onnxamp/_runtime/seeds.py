"""Seeds for random ops, so that a result draws the same numbers as the original.

ONNX Runtime seeds an op that has no seed of its own with the place of its node in the graph, and a Cast in front of it
changes that place (onnxruntime/core/providers/cpu/generator/random.h).
"""

from collections.abc import Iterator

from onnx import ModelProto, NodeProto

from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._graph.editor import set_attribute
from onnxamp._model.model import Model
from onnxamp._model.protos import copied, nodes_of_model


def with_seeds(model: Model) -> Model:
    """Return a model whose random ops have seeds, in their order; the model itself if none lacks one."""
    if all(attribute(node, "seed") is not None for node in _random(model.proto)):
        return model
    proto = copied(model.proto)
    for number, node in enumerate(_random(proto), 1):
        if attribute(node, "seed") is None:
            set_attribute(node, "seed", float(number))
    # It is in no file.
    return Model(proto, model.folder, repairs=model.repairs)


def draws_numbers(model: Model) -> bool:
    """Return whether a model has random ops, whose numbers go on from one run of a session to the next."""
    return any(True for _ in _random(model.proto))


def _random(model: ModelProto) -> Iterator[NodeProto]:
    """Return the random ops of a model and its functions."""
    random = op_facts().random
    return (node for node in nodes_of_model(model) if op_key(node) in random)
