"""Copying ONNX messages field by field, so that what is left out (mostly weights) is never held twice.

A model of more than 2 GB cannot be serialised as one message, so nothing here calls ``SerializeToString``.
"""

from collections.abc import Container
from os import PathLike
from typing import TypeAlias, TypeVar

from google.protobuf.message import Message
from onnx import ModelProto

BaseDir: TypeAlias = str | PathLike[str] | None
"""Folder that external data lies in; None if all tensors hold their data."""


M = TypeVar("M", bound=Message)


def copied(message: M) -> M:
    """A copy of a message with all that it holds."""
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def copy_fields(source: Message, target: Message, but: Container[str] = ()) -> None:
    """Copy all set fields of a message except those named in ``but``. Unknown fields are not copied."""
    for field, value in source.ListFields():
        if field.name in but:
            continue
        if hasattr(value, "extend"):
            getattr(target, field.name).extend(value)
        elif isinstance(value, Message):
            getattr(target, field.name).CopyFrom(value)
        else:
            setattr(target, field.name, value)


def copy_without(model: ModelProto, *graph_fields: str) -> ModelProto:
    """A copy of a model without some fields of its main graph."""
    result = ModelProto()
    copy_fields(model, result, {"graph"})
    copy_fields(model.graph, result.graph, graph_fields)
    return result
