"""Trained models, whose weights may be stored in another type than the one in which the model computes."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import FORMATS
from onnxamp._errors import ArgumentError, MissingModelError, ModelError
from onnxamp._graph.graph import Graph
from onnxamp._graph.names import NewNames
from onnxamp._model.storage import write_file
from onnxamp._paths.reading import reason_of
from onnxamp.train._masters import Masters, with_arrays


def trained_model(
    source: ModelProto, masters: Masters, arrays: Mapping[str, NDArray[Any]], save_dtype: str | None
) -> ModelProto:
    """The model that training started from, with its trained weights stored in a type.

    Args:
        source: the model.
        masters: what is trained in its place.
        arrays: the trained weights and running statistics.
        save_dtype: "float16", "bfloat16" or "float64"; "float32" or None for the type that each weight came in.
    """
    copies = {copy: arrays[name] for copy, name in masters.copies.items() if name in arrays}
    result = with_arrays(source, {**arrays, **copies})
    if save_dtype not in (None, "float32"):
        exact = (
            t.name
            for t in result.graph.initializer
            if t.data_type == TensorProto.FLOAT and t.name in arrays
        )
        _store_weights(result, exact, save_dtype)
    return result


def _store_weights(model: ModelProto, weights: Iterable[str], dtype: str) -> None:
    """Store float32 initializers of a model in another type, in place; a Cast behind each gives the model float32.

    Initializers keep their names. Numbers beyond the range of the type become its largest ones. An initializer that is
    an output of the model stays as it is. Linear in nodes.

    Args:
        model: a well-formed model.
        weights: names of float32 initializers.
        dtype: "float16", "bfloat16" or "float64".
    """
    elem = getattr(TensorProto, "DOUBLE" if dtype == "float64" else dtype.upper())
    limit = FORMATS[dtype].max_finite if dtype in FORMATS else np.inf
    graph, wanted, casts = Graph.of(model), set(weights), []
    names = NewNames(graph.all_names())
    for tensor in model.graph.initializer:
        value = graph.scopes[0].names[tensor.name]
        if tensor.name not in wanted or graph.results[value]:
            continue
        raised = names.fresh(f"{tensor.name}/float32")
        for node, port in graph.uses[value]:
            graph.nodes[node].proto.input[port] = raised
        casts.append(
            helper.make_node("Cast", [tensor.name], [raised], names.fresh(f"{raised}/cast"), to=1)
        )
        array = np.clip(numpy_helper.to_array(tensor), -limit, limit).astype(
            helper.tensor_dtype_to_np_dtype(elem)
        )
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    nodes = [*casts, *model.graph.node]
    copies = [type(node).FromString(node.SerializeToString()) for node in nodes]
    del model.graph.node[:]
    model.graph.node.extend(copies)


def write_checkpoint(path: Path, state: Mapping[str, NDArray[Any]]) -> None:
    """Write a state; an existing file is replaced once the new one is complete.

    Raises:
        OutputError: it cannot be written.
    """
    import safetensors.numpy  # noqa: PLC0415 - only checkpoints need it

    arrays = {
        name: np.ascontiguousarray(array).reshape(array.shape) for name, array in state.items()
    }
    write_file(path, safetensors.numpy.save(arrays, metadata={"kind": "onnxamp training state"}))


def read_checkpoint(path: Path) -> dict[str, NDArray[Any]]:
    """What :func:`write_checkpoint` wrote.

    Raises:
        ModelError: the file cannot be read.
    """
    import safetensors.numpy  # noqa: PLC0415 - only checkpoints need it

    try:
        return dict(safetensors.numpy.load(path.read_bytes()))
    except OSError as error:
        kind = MissingModelError if isinstance(error, FileNotFoundError) else ModelError
        raise kind(f"Cannot read {str(path)!r}: {reason_of(error)}.") from None
    except safetensors.SafetensorError as error:
        raise ModelError(f"{str(path)!r} is not a checkpoint, or is truncated: {error}.") from None


def check_state(state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check that a state has the arrays of a network.

    Raises:
        ArgumentError: it is the state of another network.
    """
    for name in sorted(shapes.keys() | state.keys()):
        if name not in shapes or name not in state or np.shape(state[name]) != shapes[name]:
            raise ArgumentError(
                f"The state is that of another network: {name!r} is missing, unknown or of another shape."
            )
