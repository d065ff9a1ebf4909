"""The pass that quantizes the inputs of a Concat instead of its result, so that the Concat joins integers.

ONNX Runtime's CPU provider fuses dequantized inputs, Concat and QuantizeLinear into a kernel that takes float32 scales
alone. Rounding each input by the scale of the result gives the same integers, and nothing is fused.
"""

from collections.abc import Iterator

from onnxamp._decide.listed import find_listed
from onnxamp._decide.overrides import find_overrides
from onnxamp._decide.patterns.quantized_units import fused_blindly
from onnxamp._facts.signature import newer_versions
from onnxamp._facts.targets import target_of
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.freedom import Typed, runs_on
from onnxamp._graph.view import Node
from onnxamp._model.protos import copied
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult


def apply(draft: Draft, options: Options) -> PassResult:
    """Requantize before each Concat that may be low; return the same draft if there is none.

    Complexity: linear in nodes.
    """
    if target_of(options.target).fuses_quantized or options.level == Level.O0:
        return PassResult(draft)
    graph = draft.graph
    pairs = list(_pairs(graph, options))
    if not pairs:
        return PassResult(draft)
    editor = GraphEditor(graph)
    for node, quantize in pairs:
        quantized = dict[str, str]()
        for name in dict.fromkeys(node.proto.input):
            quantized[name] = editor.names.fresh(f"{name}_{node.label}")
            one = copied(quantize.proto)
            one.name = one.output[0] = quantized[name]
            one.input[0] = name
            editor.insert(quantize.scope, quantize.index, one)
        joined = editor.node(node.index)
        joined.input[:] = [quantized[name] for name in joined.input]
        editor.undeclare(node.scope, joined.output)
        joined.output[0] = quantize.proto.output[0]
        editor.move(node.index, quantize.index)
        editor.remove(quantize.index)
    what = "a Concat" if len(pairs) == 1 else f"{len(pairs):,} Concats"
    note = f"Quantized the inputs of {what} instead of the result: ONNX Runtime fuses a dequantized Concat only in float32."
    return PassResult(Draft(editor.finish(), graph.folder), (note,))


def _pairs(graph: Graph, options: Options) -> Iterator[tuple[Node, Node]]:
    """Yield float32 nodes that are fused blindly, each with the node that quantizes its result by a single scale."""
    fused = list(fused_blindly(graph))
    # Overrides take longer to find than the nodes that they may be about.
    kept = set[int]()
    if fused:
        kept.update(find_overrides(graph, options).of_node)
        kept.update(find_listed(graph, options).black)
    for node in fused:
        quantize = graph.only_reader(node.outputs[0])
        assert quantize is not None
        if (
            node.index not in kept
            and graph.is_float_output(node)
            and graph.shapes[quantize.input(1)] in ((), (1,))
            and _may_be_low(graph, node, quantize, options)
        ):
            yield node, quantize


def _may_be_low(graph: Graph, node: Node, quantize: Node, options: Options) -> bool:
    """Return whether a scale has a low form at this opset, or one that the model may reach, and the target joins
    integers.
    """
    signature = node.signature
    scales = quantize.signature
    assert signature is not None
    assert scales is not None
    integers = graph.types[quantize.outputs[0]]
    assert integers is not None
    joined = Typed(signature, dict.fromkeys(signature.params, integers), node.proto)
    reached = newer_versions(scales) if options.opset == "auto" else ()
    is_known = any(
        options.low.tensor in form.params[form.inputs[0].type]
        for form in (scales, *reached)
    )
    return is_known and runs_on(options.target, joined)
