"""The common behavior of the functions of other converters: they lower everything that is not blocked."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from onnx import ModelProto, TensorProto, numpy_helper

from onnxamp._amp import named_hazards
from onnxamp._base.errors import ArgumentError, ArgumentTypeError, HazardWarning, warn
from onnxamp._base.records import record
from onnxamp._convert.convert import Converted
from onnxamp._convert.plan import make_plan
from onnxamp._graph.constants import constant_tensors
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._job import Request, say_nothing
from onnxamp._job.in_memory import convert_in_memory
from onnxamp._model.model import Model, load_external_data
from onnxamp._model.protos import copied
from onnxamp._model.weights import read_array
from onnxamp._options.lists import Preset
from onnxamp._options.options import Options
from onnxamp._options.values import Level, checked_names
from onnxamp._runtime.inputs.samples import SamplesLike
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.sessions.session import Provider


@record
class Range:
    """The range of magnitudes that numbers other than 0, infinities and NaN are limited to.

    Raises:
        ArgumentError: the range is empty, or not positive.
    """

    least: float
    most: float

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.most:
            raise ArgumentError(
                f"min_positive_val must be positive and at most max_finite_val, not {self.least!r} and {self.most!r}."
            )

    def changes(self, numbers: NDArray[Any]) -> bool:
        """Return whether any number is outside the range."""
        return numbers.dtype == np.float32 and bool(
            self.outside(np.abs(numbers)).any()
        )

    def outside(self, magnitudes: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which magnitudes are outside the range."""
        small = (magnitudes > 0) & (magnitudes < self.least)
        large = (magnitudes > self.most) & (magnitudes < inf)
        outside: NDArray[np.bool_] = small | large
        return outside

    def limited(self, numbers: NDArray[Any]) -> NDArray[Any]:
        """Return the numbers in their own type, with those outside the range moved to its nearer end."""
        magnitudes = np.abs(numbers)
        ends = np.copysign(np.clip(magnitudes, self.least, self.most), numbers)
        limited = np.where(self.outside(magnitudes), ends, numbers)
        return limited.astype(numbers.dtype, copy=False)


def to_float16(np_array: ArrayLike, within: Range) -> NDArray[np.float16]:
    """Return the numbers in float16, limited to a range and otherwise rounded as in NumPy."""
    with np.errstate(over="ignore"):  # infinities that stay, and large numbers
        return within.limited(np.asarray(np_array, np.float64)).astype(np.float16)


def tensor_to_float16(tensor: TensorProto, within: Range) -> TensorProto:
    """Convert a float32 tensor in place, and return it; a tensor of another type does not change.

    Raises:
        ArgumentTypeError: it is not a tensor. ArgumentError: its data is in another file.
    """
    if not isinstance(tensor, TensorProto):
        raise ArgumentTypeError(
            f"tensor must be an onnx.TensorProto, not {type(tensor).__name__}."
        )
    if tensor.data_type == TensorProto.FLOAT:
        low = to_float16(_numbers(tensor), within)
        result = numpy_helper.from_array(low, tensor.name)
        result.doc_string = tensor.doc_string
        tensor.CopyFrom(result)
    return tensor


def largest_change(tensor: TensorProto, within: Range) -> float:
    """Return the largest difference that float16 makes to a float32 tensor; 0 if it is empty.

    Raises:
        ArgumentTypeError: it is not a tensor. ArgumentError: it is not float32, or its data is in another file.
    """
    if not isinstance(tensor, TensorProto):
        raise ArgumentTypeError(
            f"tensor must be an onnx.TensorProto, not {type(tensor).__name__}."
        )
    if tensor.data_type != TensorProto.FLOAT:
        raise ArgumentError(f"The tensor {tensor.name!r} is not float32.")
    numbers = _numbers(tensor)
    changed = np.abs(numbers - to_float16(numbers, within).astype(np.float32))
    return float(changed.max(initial=0.0))


def _numbers(tensor: TensorProto) -> NDArray[Any]:
    if tensor.data_location == TensorProto.EXTERNAL:
        raise ArgumentError(
            f"The data of the tensor {tensor.name!r} is in another file: load it first."
        )
    return numpy_helper.to_array(tensor)


_NO_LISTS: Final = Preset("none", "", {}, {}, folds_batch_norm=False)


def convert_all_but(
    model: Model,
    op_types: Iterable[str],
    *,
    known: Iterable[str] = (),
    within: Range | None = None,
    samples: SamplesLike | None = None,
    provider: Provider | None = None,
    **options: Any,
) -> ModelProto:
    """Lower every op of a model that is not blocked, regardless of the cost of Casts, and warn of hazards.

    Args:
        model: the model; it is not changed.
        op_types: op types to keep in float32, in any domain.
        known: names among them that cause no warning if the model has no such op.
        within: the range that weights are limited to if they become low precision.
        samples: the inputs for ``data_max``.
        provider: where the model runs for ``data_max``.
        options: further options of the conversion.

    Raises:
        As :func:`onnxamp.convert_model`.
    """
    black = _keys(model.ask(graph_of), op_types, known)
    keywords = {"strict": True, "lists": _NO_LISTS, "black_list": black, "fold": False}
    settings = Options.of(Level.O2, keywords | options)
    request = Request(
        model=model, asked=settings, run=RunOptions(samples=samples, provider=provider)
    )
    converted, _ = convert_in_memory(request)
    plan = make_plan(converted.analysis)
    warn(named_hazards(plan.hazards, settings), HazardWarning)
    # Which weights become float16 is known only now. The plan keeps the decisions, which depend on the weights.
    limited = None if within is None else _limited(converted, within)
    if limited is not None:
        # These warnings were already given.
        again = replace(request, model=Model(limited), plan=plan, warn=say_nothing)
        converted, _ = convert_in_memory(again)
    return converted.embedded()


def _keys(graph: Graph, op_types: Iterable[str], known: Iterable[str]) -> list[str]:
    """Return op types with the domains that they have in the model, and missing op types that are not ``known``."""
    in_model: dict[str, dict[str, None]] = {}
    for node in graph.nodes:
        in_model.setdefault(node.proto.op_type, {})[node.key] = None
    expected = frozenset(known)
    keys = list[str]()
    for name in checked_names("A list of op types", op_types):
        if name in in_model:
            keys += in_model[name]
        elif name not in expected:
            keys.append(name)  # the conversion warns of it
    return keys


def _limited(converted: Converted, within: Range) -> ModelProto | None:
    """Return the prepared model with all weights that become low precision limited to a range; None if they already
    are.

    Weights are limited before they are converted, so that they are rounded once. A plan preserves the decisions.
    """
    graph = converted.analysis.graph
    edits = converted.analysis.edits
    low = {*edits.weights, *(copy.value for copy in edits.copies)}
    for node in edits.attributes:  # Constants
        low.update(graph.nodes[node].outputs)
    tensors: Mapping[int, Any] = graph.constants.tensors
    beyond = [
        value
        for value in low & tensors.keys()
        if within.changes(read_array(tensors[value], graph.folder))
    ]
    if not beyond:
        return None
    result = copied(graph.model)
    if graph.folder is not None:
        load_external_data(result, graph.folder)
    mine = constant_tensors(Graph.of(result))
    for value in beyond:
        tensor = mine[value]
        limited = within.limited(numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(limited, tensor.name))
    return result
