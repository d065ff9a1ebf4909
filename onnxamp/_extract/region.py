"""A region as a model of its own, and as files."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from os import PathLike
from pathlib import Path
from typing import Final
from zipfile import ZipFile

import numpy as np
from onnx import FunctionProto, ModelProto, NodeProto, ValueInfoProto, helper

from onnxamp._dtypes import FLOAT16
from onnxamp._errors import ArgumentError, ArgumentTypeError
from onnxamp._extract.cutout import Cut, MainGraph
from onnxamp._graph.view import View
from onnxamp._model.blobs import WeightConverter
from onnxamp._model.model import Model
from onnxamp._model.protos import copied, copy_fields, node_bodies, tensors_of
from onnxamp._model.saving import save_model
from onnxamp._model.storage import INLINE_LIMIT, weight_bytes, write_file
from onnxamp._model.weights import embed
from onnxamp._paths.paths import as_path
from onnxamp._runtime.inputs import Array
from onnxamp._runtime.values import typed

_EXPECTED: Final = ".expected"
"""Suffix of the file of expected outputs, which readers of folders of inputs ignore."""


@dataclass(frozen=True, slots=True)
class Region:
    """Some nodes of a model as a model of its own, with the values that they computed.

    Arrays have the dtypes that the values have in the model as written: float16 stays float16.

    Example:
        >>> import onnxamp
        >>> region = onnxamp.extract_region("models/encoder.onnx", "pooled", before=0, provider="cpu")
        >>> region.nodes, region.expected["pooled"].dtype.name
        (('pooler/tanh',), 'float32')
    """

    model: ModelProto
    inputs: Mapping[str, Array]
    """What entered the region, by input."""
    expected: Mapping[str, Array]
    """What the whole model made of it, by output; only tensors."""
    around: tuple[str, ...]
    """The nodes at its centre: name, or first output."""
    nodes: tuple[str, ...]
    """All nodes, in topological order."""
    source: str
    """The whole model's name in reports."""
    total: int
    """Number of nodes in the whole model's main graph."""
    ran_on: str
    """What computed: "CUDA (device)", "CPU, emulated float16", "CPU"."""
    sample: str
    """Where the numbers come from."""
    differing: Mapping[str, float]
    """Outputs that the region, run alone in the same way, does not reproduce bit for bit, as with random ops: the
    largest difference relative to the largest element."""
    notes: tuple[str, ...]
    """Whatever may be unexpected about the region, in sentences."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Values at the border of a region by name; None for those that are not tensors."""

    inputs: Mapping[str, Array | None]
    outputs: Mapping[str, Array | None]

    @property
    def entered(self) -> dict[str, Array]:
        """The inputs that are tensors: all, once the region is assembled."""
        return {name: value for name, value in self.inputs.items() if value is not None}

    @property
    def expected(self) -> dict[str, Array]:
        """The outputs that are tensors."""
        return {name: value for name, value in self.outputs.items() if value is not None}


def assembled(opened: Model, main: MainGraph, cut: Cut, recorded: Recorded) -> ModelProto:
    """The region as a model: nodes as written, weights embedded, types and shapes as recorded.

    Raises:
        ArgumentError: a value that enters is not a tensor. ExternalDataError: weights cannot be read.

    Complexity: linear in the region, and in names of the whole model.
    """
    source, view, result = opened.proto, main.view, ModelProto()
    copy_fields(source, result, but={"graph", "functions", "training_info"})
    graph = result.graph
    graph.name = f"{source.graph.name or 'model'}_region"
    graph.doc_string = f"{len(cut.nodes)} nodes cut out of {source.graph.name!r}."
    graph.input.extend(_declared(name, value) for name, value in recorded.inputs.items())
    graph.node.extend(view.nodes[index].proto for index in cut.nodes)
    weights = {view.values[value].name for value in cut.weights}
    graph.initializer.extend(
        tensor for tensor in source.graph.initializer if tensor.name in weights
    )
    graph.sparse_initializer.extend(
        item for item in source.graph.sparse_initializer if item.values.name in weights
    )
    graph.input.extend(
        entry for entry in source.graph.input if entry.name in weights
    )  # callers may override these
    for value in cut.outputs:
        name = view.values[value].name
        graph.output.append(_declared(name, recorded.outputs[name], view.types[value]))
    graph.value_info.extend(_known_types(source, view, cut))
    result.functions.extend(_called(source, graph.node))
    for tensor in tensors_of(result):
        embed(tensor, opened.folder)
    return result


def _declared(name: str, value: Array | None, kind: str | None = None) -> ValueInfoProto:
    """A declaration of what was recorded; of its type alone if it is not a tensor."""
    if value is not None:
        return helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
        )
    if kind is None:
        raise ArgumentError(
            f"The value {name!r} at the border of the region is not a tensor, and files of arrays cannot hold it:"
            " take more or fewer nodes (--before, --after)."
        )
    return ValueInfoProto(name=name, type=typed(kind))


def _known_types(source: ModelProto, view: View, cut: Cut) -> Iterator[ValueInfoProto]:
    """Declared types of values inside the region: schemas do not know the outputs of custom ops.

    Declared shapes are left out, as some name sizes that are now known.
    """
    border = {view.values[value].name for value in (*cut.inputs, *cut.outputs)}
    inside = {name for index in cut.nodes for name in view.nodes[index].proto.output} - border
    for entry in (*source.graph.value_info, *source.graph.output):
        if entry.name in inside:
            kept = copied(entry)
            if kept.type.HasField("tensor_type"):
                kept.type.tensor_type.ClearField("shape")
            yield kept


def _called(source: ModelProto, nodes: Iterable[NodeProto]) -> list[FunctionProto]:
    """The model-local functions that nodes call, at any depth."""
    functions = {(function.domain, function.name): function for function in source.functions}
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
    """The files that :func:`save_region` writes: the model, its inputs, and what is expected."""
    model = as_path(path)
    base = model.with_suffix("") if model.suffix == ".onnx" else model
    return model, base.with_name(f"{base.name}.npz"), base.with_name(f"{base.name}{_EXPECTED}")


def save_region(region: Region, path: str | PathLike[str]) -> tuple[Path, Path, Path]:
    """Write a region: PATH.onnx (the model), PATH.npz (its inputs), PATH.expected (its outputs, also in npz format).

    Args:
        region: what :func:`extract_region` returned.
        path: where the model goes, with or without ``.onnx``; the other files lie beside it.

    Returns:
        The paths of the model, its inputs and its expected outputs.

    Raises:
        ArgumentTypeError: ``region`` is not a Region, or ``path`` is no path.
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
        raise ArgumentTypeError(f"path must be a string or a path, not {type(path).__name__}.")
    model, inputs, expected = region_files(path)
    copy = copied(region.model)
    save_model(
        copy, model, WeightConverter(FLOAT16, None), external=weight_bytes(copy) > INLINE_LIMIT
    )
    write_file(inputs, _archive(region.inputs))
    write_file(expected, _archive(region.expected))
    return model, inputs, expected


def _archive(arrays: Mapping[str, Array]) -> bytes:
    """An ``.npz`` archive. numpy.savez would refuse some names ("file")."""
    stream = BytesIO()
    with ZipFile(stream, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                held = array.astype(np.str_) if array.dtype.kind == "O" else array
                np.lib.format.write_array(member, np.asarray(held, order="C"), allow_pickle=False)
    return stream.getvalue()
