"""The forward pass of training, made from an inference model, and what a step is fed: batch statistics, dropout and its
masks, weights as inputs, batches ordered by seed and epoch, and feeds cast to the input types.
"""

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    GradientError,
    ModelError,
)
from onnxamp._facts.dtypes import FLOAT, FLOAT_TENSORS, FORMATS, LOW_ELEMS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._facts.tables import read_table
from onnxamp._gradients.pointwise import RUNNING
from onnxamp._gradients.walk import find_path
from onnxamp._gradients.writer import MIN_OPSET, Tensor, Writer
from onnxamp._graph.editor import GraphEditor, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Dims, symbolic_shapes
from onnxamp._graph.view import ABSENT, Node, Origin, inline_functions
from onnxamp._model.protos import copied
from onnxamp._model.weights import convert
from onnxamp._options.doors import door
from onnxamp._options.values import WHOLE, checked_number
from onnxamp._rewrite.casts import remove_redundant_casts
from onnxamp._rewrite.inline import inline
from onnxamp._rewrite.upgrade import upgraded
from onnxamp._runtime.emulate import without_rounding
from onnxamp._runtime.values import check_shape

_FACTS: Final = read_table("training")
Feeds = Mapping[str, NDArray[Any]]


class Mask(NamedTuple):
    """A dropout mask, which the caller feeds: a bool tensor, True where an element is kept."""

    name: str
    dims: Dims
    ratio: float


class TrainingModel(NamedTuple):
    """A model in training mode.

    ``statistics``: running statistics (initializers), each with the value that replaces it after the step.
    """

    model: ModelProto
    statistics: Mapping[str, str]
    masks: tuple[Mask, ...]


def training_model(model: ModelProto, opset: int = MIN_OPSET) -> TrainingModel:
    """Return the model in training mode, with its functions inlined, at ``opset`` or later.

    Raises:
        OpsetError: a node cannot be upgraded to that opset.
        ModelError: a running statistic of a BatchNormalization is not an initializer.
        GradientError: the shape of a dropout mask is unknown, or a dropout ratio is computed.
    """
    if model.functions:
        model, _ = inline(model)
    graph = upgraded(Graph.of(model), opset)
    writer = Writer(GraphEditor(graph))
    statistics: dict[str, str] = {}
    masks: list[Mask] = []
    for node in graph.at(graph.scopes[0].nodes):
        if node.key == "Dropout" and (ratio := _ratio(graph, node)):
            masks.append(_write_dropout(graph, node, ratio, writer))
        elif node.key == "BatchNormalization":
            statistics |= _over_the_batch(graph, node, writer.editor)
    return TrainingModel(writer.finish(), statistics, tuple(masks))


def _over_the_batch(graph: Graph, node: Node, editor: GraphEditor) -> dict[str, str]:
    """Switch a BatchNormalization to training mode, and return its running statistics with their successors."""
    statistics = (graph.values[value] for value in node.inputs[3:])
    if any(value.origin is not Origin.INITIALIZER for value in statistics):
        raise ModelError(
            f"The running statistics of {node.label!r} (BatchNormalization) must be initializers."
        )
    proto = editor.node(node.index)
    set_attribute(proto, "training_mode", 1)
    del proto.output[1:]
    names = (f"{node.label}/{RUNNING}/{name}" for name in ("mean", "variance"))
    proto.output.extend(map(editor.names.fresh, names))
    return dict(zip(proto.input[3:5], proto.output[1:3], strict=True))


def _ratio(graph: Graph, node: Node) -> float:
    """Return the ratio of a Dropout; its schema's default is 0.5.

    Raises:
        GradientError: it is computed.
    """
    value = node.input(1)
    ratio = 0.5 if value == ABSENT else graph.constants.scalar(value)
    if ratio is None:
        raise GradientError(
            f"The ratio of {node.label!r} (Dropout) is computed; training needs a constant one."
        )
    return ratio


def _write_dropout(graph: Graph, node: Node, ratio: float, writer: Writer) -> Mask:
    """Write Where(mask, x / (1 - ratio), 0), and return its mask."""
    shape = graph.ask(symbolic_shapes)[node.inputs[0]]
    if shape is None or None in shape:
        raise GradientError(
            f"The shape of the mask of {node.label!r} (Dropout) is unknown: {shape}."
        )
    writer.prefix = node.label
    name = writer.editor.names.fresh(f"{node.label}/mask")
    mask = writer.input(name, TensorProto.BOOL, shape)
    x = Tensor(writer, node.proto.input[0], TensorProto.FLOAT)
    scaled = x * (1 / (1 - ratio))
    mask.op("Where", scaled, x.like(0), into=node.proto.output[0])
    writer.nodes[-1].name = node.proto.name
    writer.replace(node.index)
    return Mask(mask.name, shape, ratio)


def find_weights(graph: Graph, loss: str, among: Container[str]) -> list[str]:
    """Return the initializers in ``among`` that are trainable: float32, not settings, and the loss depends on them.

    A consumer of an Identity counts as a consumer of the initializer that the Identity passes on.

    Raises:
        GradientError: there are none.
    """
    names = graph.scopes[0].names
    candidates = {
        value: tensor
        for value, tensor in graph.constants.tensors.items()
        if tensor.data_type == TensorProto.FLOAT
        and tensor.name in among
        and graph.values[value].origin is Origin.INITIALIZER
    }
    trained = set()
    path, _ = find_path(graph, candidates, names[loss])
    for node in path:
        if node.index in graph.passing:
            continue
        settings = _FACTS["settings"].get(node.key, ())
        for port, value in enumerate(map(graph.passed_on, node.inputs)):
            if value not in candidates or port in settings:
                continue
            # A scalar, or a single number in an op that formulas are written with, is a constant of a formula.
            dims = candidates[value].dims
            is_single = int(np.prod(dims)) == 1
            if not is_single or (dims and node.key not in _FACTS["formulas"]):
                trained.add(value)
    if not trained:
        raise GradientError(
            f"The loss {loss!r} depends on no float initializer of the model, so nothing can be trained. Start from the"
            " float32 model; onnxamp.amp.decorate(model, level='O2') gives it low-precision weights for training."
        )
    return [tensor.name for value, tensor in candidates.items() if value in trained]


def as_inputs(
    graph: Graph, names: Iterable[str]
) -> tuple[ModelProto, dict[str, NDArray[Any]]]:
    """Return the model with float32 initializers as inputs, and their arrays."""
    writer = Writer(GraphEditor(graph))
    arrays = {}
    for name in names:
        value = graph.scopes[0].names[name]
        arrays[name] = numpy_helper.to_array(writer.editor.weight(value))
        writer.editor.drop_weight(value)
        writer.input(name, TensorProto.FLOAT, arrays[name].shape)
    return writer.finish(), arrays


class Masters(NamedTuple):
    """A model whose floats are float32.

    Attributes:
        model: the model.
        dtype: the low-precision type of the original; None if it had none.
        copies: low-precision initializers of the original that are copies of a float32 one, with its name: they share
            one master.
        lowered: whether each node was in low precision, by label. Nodes with mixed inputs, Casts and Constants are left
            out.
    """

    model: ModelProto
    dtype: str | None
    copies: Mapping[str, str]
    lowered: Mapping[str, bool]


def find_masters(model: ModelProto) -> Masters:
    """Return the float32 model that a converted model was made from; a model without low precision is returned
    unchanged.

    Raises:
        ModelError: float16 and bfloat16 values are mixed.
    """
    graph = Graph.of(inline_functions(model))
    dtypes = [low.name for low in FORMATS.values() if low.tensor in graph.types]
    if not dtypes:
        return Masters(model, None, {}, {})
    if len(dtypes) > 1:
        raise ModelError(
            "The model holds float16 and bfloat16 values: training takes one low-precision type."
        )
    copies = _copies(graph)
    # Casts to low precision and back are left over once everything is float32.
    masters = remove_redundant_casts(without_rounding(_prepared(graph, copies)))
    return Masters(masters, dtypes[0], copies, _lowered(graph))


def _copies(graph: Graph) -> dict[str, str]:
    """Map low-precision initializers to the float32 ones that a conversion copied them from, judged by names and
    numbers.
    """
    weights = {
        tensor.name: tensor
        for value, tensor in graph.constants.tensors.items()
        if graph.values[value].scope == 0 and graph.values[value].producer == ABSENT
    }
    copies = {}
    for name, tensor in weights.items():
        low = LOW_ELEMS.get(tensor.data_type)
        stem = name.rpartition(f"_{low.suffix}")[0] if low is not None else ""
        exact = weights.get(stem)
        if exact is None or exact.data_type != TensorProto.FLOAT:
            continue
        if exact.dims != tensor.dims:
            continue
        rounded = _tensor(numpy_helper.to_array(exact), name, low)
        if rounded.raw_data == numpy_helper.to_array(tensor).tobytes():
            copies[name] = stem
    return copies


def _prepared(graph: Graph, copies: Mapping[str, str]) -> ModelProto:
    """Return a copy with Casts in place of copied initializers, and with its nodes named by their labels, because
    labels change when Casts are removed.
    """
    editor = GraphEditor(graph)
    scope = graph.scopes[0]
    for low, exact in copies.items():
        cast = editor.make("Cast", [exact], [low], f"{low}/copy", to=TensorProto.FLOAT)
        editor.insert(0, scope.nodes.start, cast)
        editor.drop_weight(scope.names[low])
    for index in scope.nodes:
        editor.node(index).name = graph.nodes[index].label
    return editor.finish()


def _lowered(graph: Graph) -> dict[str, bool]:
    """Return whether each node is low, by label; nodes with floats of both kinds are left out."""
    by_label: dict[str, set[bool]] = {}
    for node in graph.at(graph.scopes[0].nodes):
        if node.key not in op_facts().idle:
            kinds = {*graph.types_of((*node.inputs, *node.outputs))} & FLOAT_TENSORS
            sides = by_label.setdefault(node.label, set())
            sides.update(kind != FLOAT for kind in kinds)
    return {label: sides.pop() for label, sides in by_label.items() if len(sides) == 1}


def with_arrays(
    model: ModelProto, arrays: Mapping[str, NDArray[np.float32]]
) -> ModelProto:
    """Return a copy of the model whose initializers hold these numbers; each keeps its type.

    Finite numbers that a low-precision type cannot hold become its largest.
    """
    result = copied(model)
    for tensor in result.graph.initializer:
        if tensor.name in arrays:
            low = LOW_ELEMS.get(tensor.data_type)
            tensor.CopyFrom(_tensor(arrays[tensor.name], tensor.name, low))
    return result


def _tensor(array: NDArray[Any], name: str, low: Format | None) -> TensorProto:
    if low is None:
        return numpy_helper.from_array(array, name)
    ((raw, _),) = convert([(array, low.max_finite)], low)
    return TensorProto(name=name, data_type=low.elem, dims=array.shape, raw_data=raw)


def trained_model(
    source: ModelProto,
    masters: Masters,
    arrays: Mapping[str, NDArray[Any]],
    stored: Mapping[str, str],
) -> ModelProto:
    """Return the model that training started from, with its trained weights stored in some types.

    Args:
        source: the model.
        masters: the float32 model that is trained in its place.
        arrays: the trained weights and running statistics.
        stored: float32 weight -> "float16", "bfloat16" or "float64"; all others keep their original type.
    """
    copies = {
        copy: arrays[name] for copy, name in masters.copies.items() if name in arrays
    }
    result = with_arrays(source, {**arrays, **copies})
    converted = {
        tensor.name: stored[tensor.name]
        for tensor in result.graph.initializer
        if tensor.data_type == TensorProto.FLOAT
        and tensor.name in arrays
        and stored.get(tensor.name, "float32") != "float32"
    }
    return _stored(Graph.of(result), converted) if converted else result


def _stored(graph: Graph, weights: Mapping[str, str]) -> ModelProto:
    """Return the model with float32 initializers stored in other types; a Cast after each restores float32.

    Initializers keep their names. Finite numbers beyond the range of the type become its largest ones. An initializer
    that is an output of the model does not change. Complexity: linear in the number of nodes.

    Args:
        graph: a well-formed model.
        weights: names of float32 initializers -> "float16", "bfloat16" or "float64".
    """
    editor = GraphEditor(graph)
    scope = graph.scopes[0]
    for name, dtype in weights.items():
        value = scope.names[name]
        if graph.results[value]:
            continue
        raised = editor.names.fresh(f"{name}/float32")
        for node, port in graph.uses[value]:
            editor.node(node).input[port] = raised
        cast = editor.make(
            "Cast", [name], [raised], editor.names.fresh(f"{raised}/cast"), to=1
        )
        editor.insert(0, scope.nodes.start, cast)
        tensor = editor.weight(value)
        low = FORMATS.get(dtype)
        array = numpy_helper.to_array(tensor).astype(np.float32 if low else np.float64)
        tensor.CopyFrom(_tensor(array, name, low))
    return editor.finish()


class LabelClasses(NamedTuple):
    """The values that labels may have: whole numbers from 0 to below ``number``, or ``ignored``.

    ``axis`` is the axis of the classes, along which labels may have size 1. ``number`` and ``ignored`` may be None.
    """

    label: str
    number: int | None
    axis: int
    ignored: int | None


@door
@dataclass(frozen=True, slots=True)
class Batches:
    """One epoch of batches, shuffled by seed and epoch, so that resumed training sees the same batches.

    Args:
        arrays: one array per input of the model, and the labels. Their first axes are the samples.
        size: samples per batch; the last batch may be smaller.
        seed, epoch: determine the order.

    Raises:
        ArgumentError: there are no samples, or the arrays have different numbers of samples.
        ArgumentTypeError: ``arrays`` is no dict of arrays, or another argument not a whole number.

    Example:
        >>> import numpy as np
        >>> from onnxamp.train import Batches
        >>> batches = Batches({"x": np.zeros((10, 6)), "label": np.zeros(10, np.int64)}, size=4)
        >>> [batch["x"].shape for batch in batches]
        [(4, 6), (4, 6), (2, 6)]
    """

    arrays: Mapping[str, NDArray[Any]]
    size: int
    seed: int = 0
    epoch: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.arrays, Mapping):
            raise ArgumentTypeError(
                "arrays must be a dict of arrays, by the names of the inputs and the labels, not"
                f" {type(self.arrays).__name__}."
            )
        counts = {
            name: _sample_count(name, array) for name, array in self.arrays.items()
        }
        what = "a positive whole number"
        checked_number("size", self.size, what, lambda n: n > 0, WHOLE)
        what = "a whole number, 0 or greater"
        checked_number("seed", self.seed, what, lambda n: n >= 0, WHOLE)
        checked_number("epoch", self.epoch, what, lambda n: n >= 0, WHOLE)
        sizes = set(counts.values())
        if len(sizes) != 1 or 0 in sizes:
            raise ArgumentError(
                f"All arrays need the same number of samples, at least one; they have {counts}."
            )

    def after(self, epochs: int) -> "Batches":
        """Return the batches of a later epoch."""
        return replace(self, epoch=self.epoch + epochs)

    @property
    def samples(self) -> int:
        """The number of samples."""
        return int(next(iter(self.arrays.values())).shape[0])

    def __len__(self) -> int:
        return (self.samples + self.size - 1) // self.size

    def __iter__(self) -> Iterator[dict[str, NDArray[Any]]]:
        random = np.random.default_rng([self.seed, self.epoch])
        order = random.permutation(self.samples)
        for start in range(0, self.samples, self.size):
            rows = order[start : start + self.size]
            yield {name: array[rows] for name, array in self.arrays.items()}


def _sample_count(name: str, array: NDArray[Any]) -> int:
    """Return the number of samples in an array.

    Raises:
        ArgumentTypeError: it is no array.
    """
    if not hasattr(array, "shape") or not hasattr(array, "ndim"):
        raise ArgumentTypeError(
            f"{name!r} must be an array, not {type(array).__name__}."
        )
    return int(array.shape[0]) if array.ndim else 0


def typed_feeds(
    model: ModelProto, feeds: Mapping[str, Any], classes: LabelClasses | None
) -> dict[str, NDArray[Any]]:
    """Return the feeds cast to the element types of the inputs; for example, float64 data is rounded to float32.

    Args:
        model: the model that the feeds are for.
        feeds: arrays by name.
        classes: the valid labels, if ONNX Runtime would accept invalid ones or count negative ones from the end.

    Raises:
        ArgumentError: an array has the wrong kind (such as floats for integers) or the wrong shape, the number of
            labels differs from the number of samples, or a label is not a class.
    """
    typed: dict[str, NDArray[Any]] = {}
    for entry in model.graph.input:
        if entry.name not in feeds:
            continue
        kind = entry.type.tensor_type
        array = np.asarray(feeds[entry.name])
        if classes is not None and entry.name == classes.label:
            array = _without_axis(array, classes.axis, len(kind.shape.dim))
        wanted = np.dtype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        is_castable = np.can_cast(array.dtype, wanted, "same_kind")
        if array.dtype != wanted and not is_castable:
            raise ArgumentError(
                f"The input {entry.name!r} takes {wanted} numbers, not {array.dtype}."
            )
        if kind.HasField("shape"):
            check_shape(entry.name, array.shape, kind.shape)
        typed[entry.name] = array.astype(wanted, copy=False)
    if classes is not None:
        _check_labels(model, typed, classes)
    return typed


def _without_axis(labels: NDArray[Any], axis: int, rank: int) -> NDArray[Any]:
    """Return the labels in this rank, without the class axis of size 1 that datasets often store."""
    has_axis = labels.ndim == rank + 1 and labels.shape[axis] == 1
    return labels.squeeze(axis) if has_axis else labels


def _check_labels(model: ModelProto, feeds: Feeds, classes: LabelClasses) -> None:
    label = classes.label
    count = classes.number
    others = dict(feeds)
    labels = feeds[label]
    del others[label]
    sizes = _named_sizes(model, others)
    for dim, size in _named_sizes(model, {label: labels}).items():
        if sizes.get(dim, size) != size:
            raise ArgumentError(
                f"The labels {label!r} have the size {size} in {dim!r}, and other inputs {sizes[dim]}: pass as"
                " many of each."
            )
    is_wrong = (labels < 0) | (labels >= (np.inf if count is None else count))
    if classes.ignored is not None:
        is_wrong &= labels != classes.ignored
    wrong = labels[is_wrong]
    if wrong.size:
        least = "0 or more" if count is None else f"classes from 0 to {count - 1}"
        raise ArgumentError(
            f"The labels {label!r} must be {least}, but {wrong.size} of {labels.size} are not, such as"
            f" {wrong[0]}: correct them, or leave these samples out."
        )


def draw_masks(
    masks: Sequence[Mask], model: ModelProto, feeds: Feeds, seed: int, step: int
) -> dict[str, NDArray[np.bool_]]:
    """Draw dropout masks from a counter-based generator keyed by seed and step, so that resumed training draws the
    same.

    Raises:
        ArgumentError: the feeds do not determine the shape of a mask.
    """
    sizes = _named_sizes(model, feeds)
    generator = np.random.Generator(np.random.Philox(key=[seed, step]))
    drawn = {}
    for mask in masks:
        shape = [
            dim if isinstance(dim, int) else sizes.get(str(dim), -1)
            for dim in mask.dims
        ]
        if -1 in shape:
            raise ArgumentError(
                f"The dropout mask {mask.name!r} has the size {mask.dims[shape.index(-1)]!r}, which no input has."
            )
        drawn[mask.name] = generator.random(shape, np.float32) >= mask.ratio
    return drawn


def _named_sizes(model: ModelProto, feeds: Feeds) -> dict[str, int]:
    """Return the sizes of the dimensions that have a name."""
    sizes: dict[str, int] = {}
    for entry in model.graph.input:
        if entry.name in feeds:
            dims = entry.type.tensor_type.shape.dim
            for dim, size in zip(dims, feeds[entry.name].shape, strict=False):
                if dim.dim_param:
                    sizes[dim.dim_param] = size
    return sizes
