"""Translate onnx-graphsurgeon's graphs. They are never edited: its exporter loses metadata and doc strings."""

import sys
from typing import Any

from onnx import ModelProto

from onnxamp._errors import ModelError


def is_graphsurgeon(model: object) -> bool:
    """Whether ``model`` is a graphsurgeon Graph. Does not import graphsurgeon: if nobody has, it is not."""
    module = sys.modules.get("onnx_graphsurgeon")
    return module is not None and isinstance(model, module.Graph)


def from_graphsurgeon(graph: Any) -> ModelProto:
    """The ModelProto of a Graph.

    Raises:
        ModelError: graphsurgeon cannot export it.
    """
    import onnx_graphsurgeon as gs  # noqa: PLC0415 - the caller has imported it

    try:
        return gs.export_onnx(graph)  # type: ignore[no-any-return]
    except Exception as error:
        raise ModelError(
            f"onnx-graphsurgeon cannot export the graph {graph.name!r}: {error}"
        ) from error


def to_graphsurgeon(model: ModelProto) -> Any:
    """The Graph of a ModelProto."""
    import onnx_graphsurgeon as gs  # noqa: PLC0415

    return gs.import_onnx(model)
