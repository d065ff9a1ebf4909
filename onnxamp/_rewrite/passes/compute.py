"""The pass that computes arithmetic of constant numbers, such as Pow(32, -0.5), and casts stored doubles to float32.

Runtimes do the same while they load a model. Here, it saves the Casts of a number that nodes compute in float32 and low
precision reads: a constant is stored in the precision in which it is read. Weights that are stored as doubles become
float32 weights, so that their numbers are looked at before they are lowered.
"""

from collections.abc import Iterator, Mapping
from math import prod
from typing import Final

import numpy as np
from onnx import TensorProto, numpy_helper

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
from onnxamp._model.weights import read_array
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._rewrite import Draft, PassResult
from onnxamp._rewrite.passes.fold import apply_folds
from onnxamp._rewrite.passes.fold_search import Fold

_MOST: Final = 1 << 24
"""Elements of the largest tensor of doubles that is read, so that the model stays small enough to be copied."""


def apply(draft: Draft, options: Options) -> PassResult:
    """Replace nodes that compute one float32 number from constants, or cast stored doubles, by their result.

    Return the same draft if there are none.
    """
    if options.level == Level.O0:
        return PassResult(draft)
    graph = draft.graph
    numbers = _numbers(graph)
    folds = [
        _constant(graph, value, number.array)
        for value, (number,) in numbers.items()
        if _is_read(graph, value, numbers)
    ]
    folds += _cast_doubles(graph, numbers)
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


def _cast_doubles(graph: Graph, numbers: Mapping[int, Numbers]) -> Iterator[Fold]:
    """Yield the folds of Casts to float32 of stored doubles that nothing else reads, but for known numbers."""
    for value, tensor in graph.constants.tensors.items():
        if tensor.data_type != TensorProto.DOUBLE or prod(tensor.dims) > _MOST:
            continue
        casts = [node for node, _ in graph.consumers(value)]
        is_cast = all(
            node.key == "Cast" and graph.types[node.outputs[0]] == FLOAT
            for node in casts
        )
        if not is_cast or graph.results[value]:
            continue
        # As Cast does, it makes numbers beyond the range of float32 infinite.
        with np.errstate(over="ignore"):
            array = read_array(tensor, graph.folder).astype(np.float32)
        for node in casts:
            if node.outputs[0] not in numbers:
                yield _constant(graph, node.outputs[0], array)


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
