"""The pass that refuses models whose nodes name values in attributes, which new names and Casts would invalidate."""

from itertools import chain

from onnxamp._base.errors import ModelError
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._model.protos import all_nodes
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult


def apply(draft: Draft, options: Options) -> PassResult:
    """Refuse such models, unless nothing will be changed.

    Raises:
        ModelError: a node names values in its attributes.
    """
    if options.level == Level.O0:
        return PassResult(draft)
    naming = op_facts().value_names
    main = (node.proto for node in draft.graph.nodes_of(naming))
    inner = chain.from_iterable(
        all_nodes(function.node) for function in draft.proto.functions
    )
    calls = (node for node in inner if op_key(node) in naming)
    node = next(chain(main, calls), None)
    if node is None:
        return PassResult(draft)
    given = (attribute(node, name) or () for name in naming[op_key(node)])
    texts = chain.from_iterable(
        [one] if isinstance(one, bytes) else one for one in given
    )
    names = ", ".join(text.decode(errors="replace") for text in texts)
    raise ModelError(
        f"The node {node.name or node.output[0]!r} ({op_key(node)}) names the values that it depends on in its"
        f" attributes ({names}), which changes of the graph would break: convert the model before gradients are"
        " added to it."
    )
