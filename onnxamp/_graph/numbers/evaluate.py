"""Evaluation of nodes on small constants: NumPy does arithmetic, onnx's reference evaluator everything else."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product
from math import prod
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import elem_of
from onnxamp._facts.ops import attribute, op_facts
from onnxamp._graph.constants import MAKERS, written_numbers
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import elements
from onnxamp._graph.view import ABSENT, Node
from onnxamp._model.weights import read_array

_MOST: Final = 1024
"""Most elements of a constant to compute with: settings are small, and two of them broadcast to at most 8 MB."""

ALTERNATIVES: Final = 8
"""Most values that one operand may have, as the outputs of Ifs do; more of them are left out."""


Array: TypeAlias = NDArray[Any]


class Number(NamedTuple):
    """The elements of a value."""

    array: Array
    stretched: bool = False
    """Whether ``array`` is one number that all elements equal, and their count is unknown."""

    @property
    def uniform(self) -> "Number | None":
        """The number that all elements equal; None if they differ."""
        flat = self.array.reshape(-1)
        if not flat.size or (flat != flat[0]).any():
            return None
        return Number(flat[:1].reshape(()), stretched=True)


Numbers: TypeAlias = tuple[Number, ...]
"""The values that an operand may have; none if it is not known."""


class Computation(NamedTuple):
    """A node that computes something from constants, with its inputs, None for omitted ones, and its results."""

    node: Node
    inputs: Sequence[Array | None]
    results: Sequence[Array]


class Evaluator:
    """Runs nodes on small constants, each distinct computation once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.defaults = graph.ask(overridable_defaults)
        self.computations = list[Computation]()
        self.done = dict[object, Sequence[Array] | None]()

    def numbers_of(self, value: int, numbers: Mapping[int, Numbers]) -> Numbers:
        """Return the numbers that an operand may have, computed or stored; none if they are too many."""
        if value in numbers:
            return numbers[value]
        tensor = self.graph.constants.tensors.get(value) or self.defaults.get(value)
        if tensor is not None:
            array = _small(tensor, self.graph)
            return () if array is None else (Number(array),)
        maker = self.graph.producer(value, *MAKERS)
        number = None if maker is None else _made(maker, self.graph)
        return () if number is None else (number,)

    def sizes(self, values: Iterable[int]) -> list[int | None]:
        """Return the number of elements of values; None if it is unknown."""
        shapes = [self.graph.shapes[value] for value in values]
        return [
            None if shape is None or None in shape else elements(shape)
            for shape in shapes
        ]

    def computed(
        self,
        node: Node,
        operands: Sequence[int],
        given: Sequence[Numbers],
        outputs: Sequence[int],
    ) -> dict[int, Numbers]:
        """Return the results of a node for each combination of its operands."""
        if node.key in MAKERS:
            number = _made(node, self.graph)
            return {} if number is None else {outputs[0]: (number,)}
        rows: list[tuple[Number, ...]] = []
        for chosen in islice(product(*given), ALTERNATIVES):
            by_value = dict(zip(operands, chosen, strict=True))
            results = self._run(node, by_value)
            if results is None:
                return {}
            rows.append(results)
        columns = zip(*rows, strict=True)
        return dict(zip(outputs, map(tuple, columns), strict=False))

    def _run(
        self, node: Node, by_value: Mapping[int, Number]
    ) -> tuple[Number, ...] | None:
        """Return the results of a node for one choice of operands; None if they are not known."""
        # A stretched number stands for any count of elements, so only ops that compute each alone can take it.
        stretched = any(one.stretched for one in by_value.values())
        if stretched and node.key not in op_facts().elementwise:
            return None
        arrays = [
            self._array(node, port, by_value) for port in range(len(node.inputs))
        ]
        results = self.run(node, arrays)
        if results is None:
            return None
        self.computations.append(Computation(node, arrays, results))
        return tuple(Number(array, stretched) for array in results)

    def _array(
        self, node: Node, port: int, by_value: Mapping[int, Number]
    ) -> Array | None:
        """Return the array of an input; None for an omitted one."""
        value = node.inputs[port]
        if value in by_value:
            return by_value[value].array
        elem = elem_of(self.graph.types[value]) or TensorProto.FLOAT
        if value == ABSENT:
            return None
        # Only an input that no result depends on has no number here: its type is enough.
        return np.zeros((), helper.tensor_dtype_to_np_dtype(elem))

    def run(
        self, node: Node, arrays: Sequence[Array | None]
    ) -> Sequence[Array] | None:
        """Return the outputs of a node for these inputs, None standing for omitted ones; None if it cannot run."""
        proto = node.proto
        attributes = tuple(
            item.SerializeToString(deterministic=True) for item in proto.attribute
        )
        given = tuple(
            None if array is None else (array.dtype.str, array.shape, array.tobytes())
            for array in arrays
        )
        # Bytes stand for the arrays, which cannot be keys of a dictionary.
        key = proto.domain, proto.op_type, attributes, given, len(proto.output)
        if key not in self.done:
            outputs = _by_numpy(node, arrays)
            if outputs is None:
                outputs = _evaluated(proto, arrays, self.graph.book.opsets)
            self.done[key] = outputs
        return self.done[key]


ARITHMETIC: Final[Mapping[str, np.ufunc]] = {
    "Abs": np.abs,
    "Add": np.add,
    "Div": np.divide,
    "Exp": np.exp,
    "Log": np.log,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Pow": np.power,
    "Reciprocal": np.reciprocal,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
}
"""The functions of NumPy that onnx's reference calls for ops on float32. Importing the reference takes longer than
all of these calls."""


def _by_numpy(node: Node, arrays: Sequence[Array | None]) -> Sequence[Array] | None:
    """Return the output of plain arithmetic on float32; None for all else, and for ops of early opsets."""
    function = ARITHMETIC.get(node.key)
    given = [
        array for array in arrays if array is not None and array.dtype == np.float32
    ]
    is_plain = len(given) == len(arrays) and not node.proto.attribute
    if function is None or not is_plain or len(given) != function.nin:
        return None
    # Numbers may overflow here as they do at run-time, without warnings.
    with np.errstate(all="ignore"):
        try:
            result = np.asarray(function(*given))
        except ValueError:
            # The shapes do not fit, so the model is wrong there.
            return None
    return [result] if result.size <= _MOST else None


def _evaluated(
    proto: NodeProto, arrays: Sequence[Array | None], opsets: Mapping[str, int]
) -> Sequence[Array] | None:
    """Return the outputs of a node as onnx's reference computes them; None if it cannot or they are large."""
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - slow to import

    feeds = {
        name: array
        for name, array in zip(proto.input, arrays, strict=True)
        if array is not None
    }
    try:
        with np.errstate(all="ignore"):
            results = ReferenceEvaluator(proto, opsets=dict(opsets)).run(None, feeds)
    except Exception:  # noqa: BLE001 - whatever is wrong with the node, its result is not known then
        return None
    outputs = [np.asarray(result) for result in results]
    is_small = all(
        output.size <= _MOST and output.dtype.kind != "O" for output in outputs
    )
    return outputs if is_small else None


def _made(node: Node, graph: Graph) -> Number | None:
    """Return the numbers that a Constant or ConstantOfShape makes; None if they are many, or no numbers."""
    proto = node.proto
    if node.key == "ConstantOfShape":
        held = attribute(proto, "value")
        array = np.zeros(1, np.float32) if held is None else _small(held, graph)
        return None if array is None else Number(array, stretched=True).uniform
    held = attribute(proto, "value")
    array = written_numbers(proto) if held is None else _small(held, graph)
    return Number(array) if array is not None and array.size <= _MOST else None


def _small(tensor: TensorProto, graph: Graph) -> Array | None:
    """Return the elements of a tensor; None if they are many, or no numbers."""
    if prod(tensor.dims) > _MOST or tensor.data_type in (
        TensorProto.STRING,
        TensorProto.UNDEFINED,
    ):
        return None
    try:
        if tensor.data_location == TensorProto.EXTERNAL:
            return read_array(tensor, graph.folder)
        return numpy_helper.to_array(tensor)
    except (OnnxAmpError, ValueError, TypeError):
        return None


def overridable_defaults(graph: Graph) -> dict[int, TensorProto]:
    """Return value -> the tensor that callers may override."""
    values = {value.name: value.index for value in graph.overridable()}
    # Most models have none, and many weights.
    tensors = graph.scopes[0].proto.initializer if values else ()
    return {values[tensor.name]: tensor for tensor in tensors if tensor.name in values}
