"""Nodes that ONNX Runtime merges if no Cast stands between them, so they must have one precision."""

from collections.abc import Callable

from onnxamp._decide.patterns.find import patterns_of
from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._facts.kernels import kernel_table
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import CPU, target_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.match import declared_axes
from onnxamp._graph.shapes import Shape
from onnxamp._graph.targets.freedom import Typed, freedom
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.options import Options


def batch_norm_folds(graph: Graph, options: Options) -> list[tuple[int, int]]:
    """Return (producer, BatchNormalization) pairs that ONNX Runtime folds into one Conv, ConvTranspose or Gemm.

    The conditions are those of its conv_bn_fusion.cc and matmul_bn_fusion.cc: inference mode, constant parameters
    and weights, and a producer that has no other consumer. There is no pair if the target has no low-precision kernel
    for the normalization: folding happens at load time, but the model must also load with optimizations off. If scales
    may be low, dequantized weights count as well: TensorRT fuses products of these with the nodes after them.
    """
    if not options.folds_batch_norm:
        return []
    constants = graph.constants.is_constant
    dequantize = op_facts().dequantize
    keeps_scales = target_of(options.target).fuses_quantized

    def is_stored(value: int) -> bool:
        """Return whether a value is constant, or dequantized if scales may be low."""
        is_dequantized = graph.producer(value, *dequantize) is not None
        return constants(value) or (is_dequantized and not keeps_scales)

    pairs = constant_batch_norms(graph, is_stored)
    return [
        (one.index, norm.index)
        for one, norm in pairs
        if _can_be_low(graph, norm, options)
    ]


def constant_batch_norms(
    graph: Graph, is_constant: Callable[[int], bool]
) -> list[tuple[Node, Node]]:
    """Return (producer, BatchNormalization) pairs in inference mode, with constant parameters and no other consumer."""
    pairs = []
    for node in graph.nodes_of(op_facts().folded):
        producer = graph.producer(node.input(0), *op_facts().folds_into)
        if producer is None:
            continue
        alone = graph.only_reader(producer.outputs[0]) is node
        weights = {*producer.inputs[1:]} - {ABSENT}
        are_constant = all(map(is_constant, (*node.inputs[1:], *weights)))
        is_inference = not attribute(node.proto, "training_mode")
        if alone and are_constant and is_inference and len(node.writes) == 1:
            pairs.append((producer, node))
    return pairs


def _can_be_low(graph: Graph, node: Node, options: Options) -> bool:
    """Return whether the target has a kernel for the node with all of its float32 parameters in low precision."""
    if node.signature is None:
        return False
    typed = Typed.of(node, graph.types)
    params = [param for param, kind in typed.bound.items() if kind == FLOAT]
    return not freedom(options.target, typed, params, options.low).high


def skip_sums(graph: Graph) -> dict[int, int]:
    """Return Add -> the normalization of its sum (or the core of a decomposed one); ONNX Runtime fuses both.

    The conditions are those of its skip_layer_norm_fusion.cc: two activations of one shape, if shapes are known.
    """
    heads = [(node, node.index) for node in graph.nodes_of({"LayerNormalization"})]
    for match in patterns_of(graph, "normalization"):
        means = (node for node in graph.at(match.nodes) if node.key == "ReduceMean")
        heads += ((node, match.core) for node in means)
    sums: dict[int, int] = {}
    for head, norm in heads:
        total = graph.producer(head.input(0), "Add")
        if total is None:
            continue
        if any(map(graph.constants.is_constant, total.inputs)):
            continue
        one, other = (graph.shapes[value] for value in total.inputs)
        if one is None or other is None or _may_be_equal(one, other):
            sums[total.index] = norm
    return sums


def _may_be_equal(one: Shape, other: Shape) -> bool:
    """Return whether two shapes are equal as far as their sizes are known."""
    if len(one) != len(other):
        return False
    return all(a == b or None in (a, b) for a, b in zip(one, other, strict=True))


def absorbed_casts(graph: Graph, low: Format, target: str = "any") -> dict[int, str]:
    """Return inputs of decomposed normalizations that must not be cast on their own -> label of the first consumer.

    If a Cast feeds only the mean and the subtraction, or the square and the division, ONNX Runtime's
    layer_norm_fusion.cc takes it into the fused node, and then cannot load the model. From opset 17 on,
    LayerNormalization requires one type for input and scale. No CUDA kernel takes two types in bfloat16, and no kernel
    of the target takes two in float16 (seen with 1.31.1).
    """
    absorbed: dict[int, str] = {}
    mixed = low.name != "bfloat16" and _mixes(target, low)
    if graph.book.opsets[""] < 17 and mixed:
        return absorbed
    for norm in patterns_of(graph, "normalization"):
        for first in graph.at(norm.nodes):
            value = _centered_alone(graph, first)
            if value == ABSENT and not mixed:
                value = _divided_square(graph, first)
            if graph.types[value] != FLOAT:
                continue
            absorbed[value] = first.label
            before = graph.producer(value)
            # ONNX Runtime eliminates these ops first, so a Cast before them would be absorbed as well.
            while before is not None and before.key in op_facts().eliminated:
                absorbed[before.inputs[0]] = first.label
                before = graph.producer(before.inputs[0])
    return absorbed


def _mixes(target: str, low: Format) -> bool:
    """Return whether the target normalizes low precision with a float32 scale.

    On the CPU, ONNX Runtime inserts Casts.
    """
    if not target_of(target).limits_types or device_of(target) == CPU:
        return True
    rows = [
        row.types
        for row in kernel_table(target).get("LayerNormalization", ())
        if row.covers(1)
    ]
    both = ((types.get("T", {low.tensor}), types.get("V", {FLOAT})) for types in rows)
    return not rows or any(
        low.tensor in data and FLOAT in scale for data, scale in both
    )


def _centered_alone(graph: Graph, mean: Node) -> int:
    """Return the x of a mean whose only consumer is x - mean(x); ABSENT for any other node."""
    if mean.key != "ReduceMean" or not _reduces_last(graph, mean):
        return ABSENT
    readers = [node for node, _ in graph.consumers(mean.outputs[0])]
    centered = readers and all(
        node.key == "Sub" and node.input(0) == mean.inputs[0] for node in readers
    )
    return mean.inputs[0] if centered else ABSENT


def _divided_square(graph: Graph, square: Node) -> int:
    """Return the value that a Pow squares and a Div divides; ABSENT for any other node."""
    if square.key != "Pow" or graph.constants.uniform(square.input(1)) != 2.0:
        return ABSENT
    readers = [(node.key, port) for node, port in graph.consumers(square.inputs[0])]
    return square.inputs[0] if ("Div", 0) in readers else ABSENT


def _reduces_last(graph: Graph, mean: Node) -> bool:
    """Return whether the axes may include the last one: only then can it be a LayerNormalization."""
    axes = declared_axes(graph, mean)
    shape = graph.shapes[mean.inputs[0]]
    # Unknown axes, or axes of an unknown shape, may include it.
    return not axes or shape is None or -1 in axes or len(shape) - 1 in axes
