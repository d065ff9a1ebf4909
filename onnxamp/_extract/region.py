"""The region as a model of its own, and as files."""

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
from onnxamp._errors import ArgumentError
from onnxamp._extract.cutout import Cut
from onnxamp._graph.types import infer_types
from onnxamp._graph.view import View, node_bodies
from onnxamp._model.saving import save_model
from onnxamp._model.storage import INLINE_LIMIT, WeightConverter, tensors_of, weight_bytes, write_file
from onnxamp._model.weights import embed
from onnxamp._numerics.beside import Opened
from onnxamp._runtime.inputs import Array
from onnxamp._runtime.protos import copy_fields
from onnxamp._runtime.values import type_proto

_EXPECTED: Final = ".expected"
"""What the file of expected outputs ends in. Those who read folders of inputs do not take it for one."""


@dataclass(frozen=True, slots=True)
class Region:
    """Some nodes of a model as a model of its own, and what they were seen to compute.

    Arrays have the types that the values have in the model as written: float16 stays float16.
    """

    model: ModelProto
    inputs: Mapping[str, Array]
    """What entered the region, by input."""
    expected: Mapping[str, Array]
    """What the whole model made of it, by output that is a tensor."""
    around: tuple[str, ...]
    """The nodes in the middle: name, or first output."""
    nodes: tuple[str, ...]
    """All nodes, in an order that runs."""
    source: str
    """How reports name the whole model."""
    total: int
    """Number of nodes of its main graph."""
    ran_on: str
    """What computed: "CUDA (device)", "CPU, emulated float16", "CPU"."""
    sample: str
    """Where the numbers come from."""
    differing: Mapping[str, float]
    """Outputs that the region, run alone in the same way, does not give to the bit: random ops are like that. With the
    largest difference over the largest element."""
    notes: tuple[str, ...]
    """What is not as one would think, in sentences."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """Values at the border of a region, by name; None for what is no tensor."""

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


def assembled(opened: Opened, view: View, cut: Cut, recorded: Recorded) -> ModelProto:
    """The region as a model: nodes as they are written, weights read in, types and shapes as they were recorded.

    Raises:
        ArgumentError: a value that enters is no tensor. ExternalDataError: weights cannot be read.

    Complexity: linear in the region, and in names of the whole model.
    """
    source, result = opened.proto, ModelProto()
    copy_fields(source, result, but={"graph", "functions", "training_info"})
    graph = result.graph
    graph.name = f"{source.graph.name or 'model'}_region"
    graph.doc_string = f"{len(cut.nodes)} nodes cut out of {source.graph.name!r}."
    graph.input.extend(_declared(name, value) for name, value in recorded.inputs.items())
    graph.node.extend(view.nodes[index].proto for index in cut.nodes)
    weights = {view.values[value].name for value in cut.weights}
    graph.initializer.extend(tensor for tensor in source.graph.initializer if tensor.name in weights)
    graph.sparse_initializer.extend(item for item in source.graph.sparse_initializer if item.values.name in weights)
    graph.input.extend(entry for entry in source.graph.input if entry.name in weights)  # callers may override these
    types = infer_types(view)
    for value in cut.outputs:
        name = view.values[value].name
        graph.output.append(_declared(name, recorded.outputs[name], types[value]))
    graph.value_info.extend(_known_types(source, view, cut))
    result.functions.extend(_called(source, graph.node))
    for tensor in tensors_of(result):
        embed(tensor, opened.folder)
    return result


def _declared(name: str, value: Array | None, kind: str | None = None) -> ValueInfoProto:
    """A declaration of what was recorded; of its type alone where that is no tensor."""
    if value is not None:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
    if kind is None:
        raise ArgumentError(
            f"The value {name!r} at the border of the region is no tensor, and files of arrays cannot hold it:"
            " take more or fewer nodes (--before, --after)."
        )
    return ValueInfoProto(name=name, type=type_proto(kind))


def _known_types(source: ModelProto, view: View, cut: Cut) -> Iterator[ValueInfoProto]:
    """Declared types of values inside: of what ops outside ai.onnx make they tell more than schemas.

    Declared shapes are left out: some hold names of sizes that are now known.
    """
    border = {view.values[value].name for value in (*cut.inputs, *cut.outputs)}
    inside = {name for index in cut.nodes for name in view.nodes[index].proto.output} - border
    for entry in (*source.graph.value_info, *source.graph.output):
        if entry.name in inside:
            kept = ValueInfoProto()
            kept.CopyFrom(entry)
            if kept.type.HasField("tensor_type"):
                kept.type.tensor_type.ClearField("shape")
            yield kept


def _called(source: ModelProto, nodes: Iterable[NodeProto]) -> list[FunctionProto]:
    """The model-local functions that nodes call, at any depth."""
    functions = {(function.domain, function.name): function for function in source.functions}
    found = set[tuple[str, str]]()
    waiting: list[NodeProto] = list(nodes) if functions else []
    while waiting:
        node = waiting.pop()
        waiting += [inner for _, body in node_bodies(node) for inner in body.node]
        key = node.domain, node.op_type
        if key in functions and key not in found:
            found.add(key)
            waiting += functions[key].node
    return [function for key, function in functions.items() if key in found]


def region_files(path: str | PathLike[str]) -> tuple[Path, Path, Path]:
    """The files that :func:`save_region` writes: the model, its inputs, and what is expected."""
    model = Path(path)
    base = model.with_suffix("") if model.suffix == ".onnx" else model
    return model, base.with_name(f"{base.name}.npz"), base.with_name(f"{base.name}{_EXPECTED}")


def save_region(region: Region, path: str | PathLike[str]) -> tuple[Path, Path, Path]:
    """Write PATH.onnx (the model), PATH.npz (its inputs), and PATH.expected (its outputs, an ``.npz`` archive, too).

    Args:
        path: where the model goes; the other files lie beside it.

    Returns:
        The three paths.

    Raises:
        OutputError: one cannot be written.
    """
    model, inputs, expected = region_files(path)
    copy = ModelProto()
    copy.CopyFrom(region.model)
    save_model(copy, model, WeightConverter(FLOAT16, None), external=weight_bytes(copy) > INLINE_LIMIT)
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
