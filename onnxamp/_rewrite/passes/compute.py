"""The pass that computes arithmetic of constant numbers, such as Pow(32, -0.5).

Runtimes do the same while they load a model. Here, it saves the Casts of a number that nodes compute in float32 and low
precision reads: a constant is stored in the precision in which it is read.
"""

from collections.abc import Mapping

import numpy as np
from onnx import numpy_helper

from onnxamp._facts.dtypes import FLOAT
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.evaluate import (
    ARITHMETIC,
    Array,
    Evaluator,
    Number,
    Numbers,
)
from onnxamp._model.protos import copied
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult
from onnxamp._rewrite.passes.fold import apply_folds
from onnxamp._rewrite.passes.fold_search import Fold


def apply(draft: Draft, options: Options) -> PassResult:
    """Replace nodes that compute one float32 number from constants by that number; return the same draft if none do."""
    if options.level == Level.O0:
        return PassResult(draft)
    graph = draft.graph
    numbers = _numbers(graph)
    folds = [
        _constant(graph, value, number.array)
        for value, (number,) in numbers.items()
        if _is_read(graph, value, numbers)
    ]
    if not folds:
        return PassResult(draft)
    result = copied(graph.model)
    apply_folds(graph, folds, result)
    return PassResult(Draft(result, graph.folder))


def _numbers(graph: Graph) -> dict[int, Numbers]:
    """Return the single numbers that are computed from constants alone, by value. Linear in nodes."""
    computed = dict[int, Numbers]()
    evaluator = Evaluator(graph)
    # A look at operands rules out nearly all nodes, which saves reading tensors.
    known = {*graph.constants.tensors}
    known.update(node.outputs[0] for node in graph.nodes_of({"Constant"}))
    for node in graph.nodes_of(ARITHMETIC):
        if not known.issuperset(node.inputs):
            continue
        given = [evaluator.numbers_of(value, computed) for value in node.inputs]
        arrays = [numbers[0].array for numbers in given if numbers]
        is_single = all(
            array.size == 1 and array.dtype == np.float32 for array in arrays
        )
        if len(arrays) < len(given) or not is_single:
            continue
        results = evaluator.run(node, arrays)
        if results is not None and graph.types[node.outputs[0]] == FLOAT:
            computed[node.outputs[0]] = (Number(results[0]),)
            known.add(node.outputs[0])
    return computed


def _is_read(graph: Graph, value: int, numbers: Mapping[int, Numbers]) -> bool:
    """Return whether a result, or a node that is not computed itself, reads a number."""
    readers = (node for node, _ in graph.consumers(value))
    is_needed = any(numbers.keys().isdisjoint(node.outputs) for node in readers)
    return is_needed or bool(graph.results[value])


def _constant(graph: Graph, value: int, number: Array) -> Fold:
    """Return the fold of the node that computes a number into a Constant."""
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
