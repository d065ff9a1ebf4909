"""The pass that computes arithmetic of constant numbers, such as Pow(32, -0.5).

Runtimes do the same while they load a model. Here, it saves the Casts of a number that nodes compute in float32 and low
precision reads: a constant is stored in the precision in which it is read.
"""

import numpy as np
from onnx import numpy_helper

from onnxamp._facts.dtypes import FLOAT
from onnxamp._graph.evaluate import ARITHMETIC, Array, Evaluator
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT
from onnxamp._model.protos import copied
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, Passed
from onnxamp._rewrite.fold import apply_folds
from onnxamp._rewrite.fold_search import Fold


def apply(draft: Draft, options: Options) -> Passed:
    """Replace nodes that compute one float32 number from constants by that number; return the same draft if none do."""
    if options.level == Level.O0:
        return Passed(draft)
    graph = draft.graph
    numbers = _numbers(graph)
    folds = [
        _constant(graph, value, numbers[value])
        for value in numbers
        if _is_read(graph, value, numbers)
    ]
    if not folds:
        return Passed(draft)
    result = copied(graph.model)
    apply_folds(graph, folds, result)
    return Passed(Draft(result, graph.folder))


def _numbers(graph: Graph) -> dict[int, Array]:
    """Return the numbers that are computed from constants alone, by value. Linear in nodes."""
    found = dict[int, Array]()
    evaluator = Evaluator(graph)
    stored = graph.constants.tensors
    for node in graph.nodes_of(ARITHMETIC):
        read = node.inputs
        if ABSENT in read or not all(
            value in stored or value in found for value in read
        ):
            continue
        known = {
            value: found[value] if value in found else evaluator.stored(value)
            for value in read
        }
        given = [known[value] for value in read]
        if any(
            array is None or array.size != 1 or array.dtype != np.float32
            for array in given
        ):
            continue
        results = evaluator.run(node, given)
        if results is not None and graph.types[node.outputs[0]] == FLOAT:
            found[node.outputs[0]] = results[0]
    return found


def _is_read(graph: Graph, value: int, numbers: dict[int, Array]) -> bool:
    """Return whether a result, or a node that is not computed itself, reads a number."""
    readers = (node for node, _ in graph.consumers(value))
    is_needed = any(numbers.keys().isdisjoint(node.outputs) for node in readers)
    return is_needed or bool(graph.results[value])


def _constant(graph: Graph, value: int, number: Array) -> Fold:
    """Return the Constant that replaces what computes a number."""
    index = graph.values[value].producer
    return Fold(
        kind="constant",
        op="Constant",
        opset=1,
        nodes=frozenset((index,)),
        last=index,
        inputs=(),
        attributes={"value": numpy_helper.from_array(number)},
    )
