"""Extraction of the region around a node and its inputs from a model: a small model that reproduces the numbers.

The region is here, as a model of its own, and as files.
"""

import re
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Final, NamedTuple
from zipfile import ZipFile

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto, helper

from onnxamp._dtypes import FLOAT16
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin, View, Wiring, wire
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import INLINE_LIMIT, Model, weight_bytes
from onnxamp._model.protos import copied, copy_fields, node_bodies, tensors_of
from onnxamp._model.saving import save_model
from onnxamp._model.staging import write_file
from onnxamp._model.weights import embed
from onnxamp._ops.facts import op_facts
from onnxamp._paths import as_path
from onnxamp._runtime.values import Array, typed

_HELD: Final = frozenset({Origin.INITIALIZER, Origin.SPARSE, Origin.DEFAULT})
_SUGGESTIONS: Final = 5


class MainGraph(NamedTuple):
    """A main graph with the information needed to choose a region."""

    view: Graph
    wiring: Wiring
    constant: Collection[int]
    """Nodes that compute from constants alone."""

    @classmethod
    def of(cls, view: Graph) -> "MainGraph":
        """Analyze a model. Complexity: linear in nodes and reads of all scopes."""
        wiring = wire(view)
        return cls(view, wiring, _constant(view, wiring))

    def producers(self, node: int) -> Iterator[int]:
        """Yield nodes whose outputs a node needs."""
        values = (self.view.values[value] for value in self.wiring.needs[node])
        return (value.producer for value in values if value.producer != ABSENT)

    def consumers(self, node: int) -> Iterator[int]:
        """Yield nodes that need a node's outputs."""
        return (
            reader
            for value in self.view.nodes[node].writes
            for reader in self.wiring.readers.get(value, ())
        )


class Cut(NamedTuple):
    """A region by index: nodes in topological order, and the values that enter it, leave it, and are inside it."""

    nodes: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[int, ...]


def find_nodes(view: View, around: Iterable[str]) -> list[Node]:
    """Return the nodes of all scopes with these names, in the file's order.

    Args:
        around: names of nodes or of their outputs; any other text is a regular expression for whole names.

    Raises:
        ArgumentError: one of them names nothing; the message suggests similar names.

    Complexity: linear in names for each, and slower only if there is an error.
    """
    chosen: dict[int, Node] = {}
    for text in around:
        matches, reason = _compiled(text)
        nodes = _named(view, text.__eq__) or _named(view, matches)
        if not nodes:
            raise ArgumentError(_unknown(view, text, reason))
        chosen |= {node.index: node for node in nodes}
    return [chosen[index] for index in sorted(chosen)]


def _named(view: View, fits: Callable[[str], object]) -> list[Node]:
    return [
        node
        for node in view.nodes
        if any(fits(name) for name in (node.proto.name, *node.proto.output) if name)
    ]


def _compiled(text: str) -> tuple[Callable[[str], object], str]:
    """Return the matcher of a regular expression, and "".

    If the text is not one, because names may contain brackets, return a matcher of nothing and the reason.
    """
    try:
        return re.compile(text).fullmatch, ""
    except re.error as error:
        return lambda _: None, str(error)


def _unknown(view: View, text: str, reason: str) -> str:
    """Return the message about an unknown name; ``reason`` says why it is not a regular expression, if it is not."""
    head = f"No node or node output is called {text!r}, or matches it as a regular expression"
    if reason:
        head = f"No node or node output is called {text!r}, and it is not a regular expression ({reason})"
    for value in view.values:
        if value.name == text and value.producer == ABSENT:
            readers = dict.fromkeys(
                node.label for node, _ in view.consumers(value.index)
            )
            named = ", ".join(map(repr, [*readers][:_SUGGESTIONS])) or "nothing"
            article = "an" if value.origin.value[0] in "aeiou" else "a"
            return f"{head}: it is {article} {value.origin.value}, read by {named}."
    labels = dict.fromkeys(node.label for node in view.nodes)
    outputs = (name for node in view.nodes for name in node.proto.output if name)
    close = [name for name in labels if text and text.lower() in name.lower()]
    close = close or get_close_matches(
        text, dict.fromkeys([*labels, *outputs]), _SUGGESTIONS, 0.5
    )
    if not close:
        return f"{head}; 'onnxamp inspect -v' lists the nodes."
    return f"{head}; similar names are {', '.join(map(repr, close[:_SUGGESTIONS]))}."


def _constant(view: View, wiring: Wiring) -> set[int]:
    constant = set[int]()
    for node in view.order:
        if node.scope != 0 or node.key in op_facts().random:
            continue
        values = [view.values[value] for value in wiring.needs[node.index]]
        held = [
            value.origin in _HELD or value.producer in constant for value in values
        ]
        if node.key == "Constant" or (held and all(held) and not node.bodies):
            constant.add(node.index)
    return constant


def choose(
    graph: MainGraph, center: Collection[int], before: int, after: int
) -> set[int]:
    """Return the main-graph nodes around those of ``center``.

    Raises:
        ArgumentError: the region would need a model input that is not a tensor.

    Complexity: linear in the region's nodes and their reads.
    """
    region = _reached(graph, center, graph.producers, before)
    region |= _reached(graph, center, graph.consumers, after)
    waiting = list(region)
    while waiting:
        for value in graph.wiring.needs[waiting.pop()]:
            producer = graph.view.values[value].producer
            if _comes_along(graph, value) and producer not in region:
                region.add(producer)
                waiting.append(producer)
    return region


def _reached(
    graph: MainGraph,
    start: Iterable[int],
    neighbors: Callable[[int], Iterable[int]],
    limit: int,
) -> set[int]:
    """Return nodes within ``limit`` steps.

    Nodes that do not count as steps are followed first, so that every path is the shortest.
    """
    steps = dict.fromkeys(start, 0)
    waiting = deque(steps)
    while waiting:
        node = waiting.popleft()
        for other in neighbors(node):
            key = graph.view.nodes[other].key
            is_free = key in op_facts().idle
            count = steps[node] + (not is_free)
            if count < steps.get(other, limit + 1) and key not in op_facts().random:
                steps[other] = count
                (waiting.appendleft if is_free else waiting.append)(other)
    return set(steps)


def _comes_along(graph: MainGraph, value: int) -> bool:
    """Return whether the producer of an input must be in the region because the value cannot be recorded."""
    producer = graph.view.producer(value)
    type_name = graph.view.types[value]
    is_tensor = type_name is None or type_name.startswith("tensor(")
    if producer is not None:
        return (
            producer.key in op_facts().idle
            or producer.index in graph.constant
            or not is_tensor
        )
    entering = graph.view.values[value]
    if not is_tensor and entering.origin is Origin.INPUT:
        raise ArgumentError(
            f"The region would read the model input {entering.name!r}, a {type_name}, which an .npz file cannot"
            " hold: choose a node further downstream, or include fewer nodes before it (--before)."
        )
    return False


def cut_out(graph: MainGraph, nodes: Collection[int], center: Collection[int]) -> Cut:
    """Cut nodes out of the main graph: values from other nodes enter the region, and values that others read leave it.

    Nodes on which no leaving value depends are left out.
    """
    view = graph.view
    needs = graph.wiring.needs
    leaves = list(_leaving(graph, nodes, center))
    kept = set[int]()
    waiting = [view.values[value].producer for value in leaves]
    while waiting:
        node = waiting.pop()
        if node in nodes and node not in kept:
            kept.add(node)
            waiting += graph.producers(node)
    made = {value for node in nodes for value in view.nodes[node].writes}
    reads = [value for node in sorted(nodes) if node in kept for value in needs[node]]
    read = dict.fromkeys(value for value in reads if value not in made)
    enters = [value for value in read if view.values[value].origin not in _HELD]
    ordered = [node.index for node in view.order if node.index in kept]
    weights = dict.fromkeys(
        v for node in ordered for v in needs[node] if view.values[v].origin in _HELD
    )
    return Cut(tuple(ordered), tuple(enters), tuple(leaves), tuple(weights))


def _leaving(
    graph: MainGraph, nodes: Collection[int], center: Collection[int]
) -> Iterator[int]:
    """Yield values that other nodes read, and those of the center, in the file's order."""
    readers = graph.wiring.readers
    results = graph.view.results
    for node in sorted(nodes):
        outputs = graph.view.nodes[node].writes
        used = [value for value in outputs if readers.get(value) or results[value]]
        for value in (used or outputs) if node in center else used:
            is_result = any(scope == 0 for scope, _ in results[value])
            is_read = node not in graph.constant and any(
                n not in nodes for n in readers.get(value, ())
            )
            if node in center or is_result or is_read:
                yield value


_EXPECTED: Final = ".expected"
"""Suffix of the file of expected outputs; readers of input folders ignore it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Some nodes of a model as a separate model, with the values that they computed.

    Arrays have the dtypes that the values have in the model as written: float16 stays float16.

    Example:
        >>> import onnxamp
        >>> region = onnxamp.extract_region("models/encoder.onnx", "pooled", before=0, provider="cpu")
        >>> region.nodes, region.expected["pooled"].dtype.name
        (('pooler/tanh',), 'float32')
    """

    model: ModelProto
    inputs: Mapping[str, Array]
    """The arrays that entered the region, by input."""
    expected: Mapping[str, Array]
    """The outputs of the region in the whole model; tensors only."""
    around: tuple[str, ...]
    """The nodes at its center: name, or first output."""
    nodes: tuple[str, ...]
    """All nodes, in topological order."""
    source: str
    """The whole model's name in reports."""
    total: int
    """Number of nodes in the whole model's main graph."""
    ran_on: str
    """The engine: "CUDA (device)", "CPU, emulated float16", "CPU"."""
    sample: str
    """The source of the numbers."""
    differing: Mapping[str, float]
    """Outputs that the region, run alone in the same way, does not reproduce bit for bit, for example because of random
    ops, with the largest difference relative to the largest element."""
    notes: tuple[str, ...]
    """Sentences about unexpected properties of the region."""


class Recorded(NamedTuple):
    """Values at the border of a region by name; None for those that are not tensors."""

    inputs: Mapping[str, Array | None]
    outputs: Mapping[str, Array | None]

    @property
    def entered(self) -> dict[str, Array]:
        """The inputs that are tensors; all inputs are, once the region is assembled."""
        return {
            name: value for name, value in self.inputs.items() if value is not None
        }

    @property
    def expected(self) -> dict[str, Array]:
        """The outputs that are tensors."""
        return {
            name: value for name, value in self.outputs.items() if value is not None
        }


def assembled(
    opened: Model, main: MainGraph, cut: Cut, recorded: Recorded
) -> ModelProto:
    """Return the region as a model: nodes as written, weights embedded, types and shapes as recorded.

    Raises:
        ArgumentError: a value that enters is not a tensor. ExternalDataError: weights cannot be read.

    Complexity: linear in the region, and in names of the whole model.
    """
    source = opened.proto
    view = main.view
    result = ModelProto()
    copy_fields(source, result, but={"graph", "functions", "training_info"})
    graph = result.graph
    graph.name = f"{source.graph.name or 'model'}_region"
    graph.doc_string = f"{len(cut.nodes)} nodes cut out of {source.graph.name!r}."
    graph.input.extend(
        _declared(name, value) for name, value in recorded.inputs.items()
    )
    graph.node.extend(view.nodes[index].proto for index in cut.nodes)
    weights = {view.values[value].name for value in cut.weights}
    graph.initializer.extend(
        tensor for tensor in source.graph.initializer if tensor.name in weights
    )
    graph.sparse_initializer.extend(
        item for item in source.graph.sparse_initializer if item.values.name in weights
    )
    # Callers may override these.
    graph.input.extend(entry for entry in source.graph.input if entry.name in weights)
    for value in cut.outputs:
        name = view.values[value].name
        graph.output.append(_declared(name, recorded.outputs[name], view.types[value]))
    graph.value_info.extend(_known_types(source, view, cut))
    result.functions.extend(_called(source, graph.node))
    for tensor in tensors_of(result):
        embed(tensor, opened.folder)
    return result


def _declared(
    name: str, value: Array | None, kind: str | None = None
) -> ValueInfoProto:
    """Return the declaration of a recorded value; only of its type if it is not a tensor."""
    if value is not None:
        return helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
    if kind is None:
        raise ArgumentError(
            f"The value {name!r} at the border of the region is not a tensor, so an .npz file cannot hold"
            " it: include more or fewer nodes (--before, --after)."
        )
    return ValueInfoProto(name=name, type=typed(kind))


def _known_types(source: ModelProto, view: View, cut: Cut) -> Iterator[ValueInfoProto]:
    """Yield the declared types of values inside the region, because schemas do not know the outputs of custom ops.

    Declared shapes are left out, because some have symbolic sizes that are now known.
    """
    border = {view.values[value].name for value in (*cut.inputs, *cut.outputs)}
    inside = {
        name for index in cut.nodes for name in view.nodes[index].proto.output
    } - border
    for entry in (*source.graph.value_info, *source.graph.output):
        if entry.name in inside:
            kept = copied(entry)
            if kept.type.HasField("tensor_type"):
                kept.type.tensor_type.ClearField("shape")
            yield kept


def _called(source: ModelProto, nodes: Iterable[NodeProto]) -> list[FunctionProto]:
    """Return the model-local functions that nodes call, at any depth."""
    functions = {
        (function.domain, function.name): function for function in source.functions
    }
    called = set[tuple[str, str]]()
    waiting: list[NodeProto] = list(nodes) if functions else []
    while waiting:
        node = waiting.pop()
        waiting += [inner for _, body in node_bodies(node) for inner in body.node]
        key = node.domain, node.op_type
        if key in functions and key not in called:
            called.add(key)
            waiting += functions[key].node
    return [function for key, function in functions.items() if key in called]


def region_files(path: str | PathLike[str]) -> tuple[Path, Path, Path]:
    """Return the files that :func:`save_region` writes: the model, its inputs, and the expected outputs."""
    model = as_path(path)
    base = model.with_suffix("") if model.suffix == ".onnx" else model
    return (
        model,
        base.with_name(f"{base.name}.npz"),
        base.with_name(f"{base.name}{_EXPECTED}"),
    )


def save_region(region: Region, path: str | PathLike[str]) -> tuple[Path, Path, Path]:
    """Write a region: PATH.onnx (the model), PATH.npz (its inputs), PATH.expected (its outputs, also in npz format).

    Args:
        region: the result of :func:`extract_region`.
        path: where to write the model, with or without ``.onnx``; the other files go next to it.

    Returns:
        The paths of the model, its inputs and its expected outputs.

    Raises:
        ArgumentTypeError: ``region`` is not a Region, or ``path`` is not a path.
        OutputError: a file cannot be written.

    Example:
        >>> import onnxamp, tempfile
        >>> region = onnxamp.extract_region("models/encoder.onnx", "pooled", provider="cpu")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     [path.name for path in onnxamp.save_region(region, f"{folder}/small.onnx")]
        ['small.onnx', 'small.npz', 'small.expected']
    """
    if not isinstance(region, Region):
        raise ArgumentTypeError(
            f"region must be a Region, as extract_region returns, not {type(region).__name__}."
        )
    if not isinstance(path, (str, PathLike)):
        raise ArgumentTypeError(
            f"path must be a string or a path, not {type(path).__name__}."
        )
    model, inputs, expected = region_files(path)
    copy = copied(region.model)
    save_model(
        copy,
        model,
        WeightConverter(FLOAT16, None),
        external=weight_bytes(copy) > INLINE_LIMIT,
    )
    write_file(inputs, _archive(region.inputs))
    write_file(expected, _archive(region.expected))
    return model, inputs, expected


def _archive(arrays: Mapping[str, Array]) -> bytes:
    """Return an ``.npz`` archive. numpy.savez would refuse some names ("file")."""
    stream = BytesIO()
    with ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                held = array.astype(np.str_) if array.dtype.kind == "O" else array
                np.lib.format.write_array(
                    member, np.asarray(held, order="C"), allow_pickle=False
                )
    return stream.getvalue()
