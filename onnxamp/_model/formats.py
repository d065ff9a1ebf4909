"""Files that are no ONNX model in protobuf's binary form: read if they are one in text, and else named."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Final
from zipfile import BadZipFile, ZipFile

from google.protobuf import json_format, text_format
from onnx import ModelProto, parser

_HEAD: Final = 4096
"""Bytes in which a format shows."""


_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


@dataclass(frozen=True, slots=True)
class _Format:
    """A kind of file that people mistake for a model, how it begins, and what to do instead."""

    what: str
    remedy: str
    holds: Callable[[bytes], bool]


def _starts(*starts: bytes) -> Callable[[bytes], bool]:
    return lambda data: data.startswith(starts)


def _marked(mark: bytes) -> Callable[[bytes], bool]:
    """FlatBuffers name their file type behind the offset of the root (flatbuffers.dev, "File identification")."""
    return lambda data: data[4:8] == mark


def _is_page(data: bytes) -> bool:
    return data[:_HEAD].lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _is_safetensors(data: bytes) -> bool:
    """A header of JSON behind its length (huggingface.co/docs/safetensors)."""
    return 0 < int.from_bytes(data[:8], "little") <= len(data) and data[8:10] == b'{"'


def _is_tensorflow(data: bytes) -> bool:
    """Field ``op`` of a NodeDef with an op that nearly every graph has (tensorflow/core/framework/node_def.proto)."""
    return any(
        op in data for op in (b"\x12\x0bPlaceholder", b"\x12\x05Const", b"\x12\x0bVarHandleOp")
    )


def _holds_model(data: bytes) -> bool:
    """Whether it is an archive that lists a file which is named as models are."""
    if not data.startswith(b"PK\x03\x04"):
        return False
    try:
        with ZipFile(BytesIO(data)) as archive:
            return any(name.endswith(".onnx") for name in archive.namelist())
    except BadZipFile:
        return False


_FORMATS: Final = (
    _Format(
        "a Git LFS pointer, not the model itself",
        "run 'git lfs pull' where it was cloned",
        _starts(b"version https://git-lfs.github.com/"),
    ),
    _Format(
        "an HTML page",
        "download the file itself (on Hugging Face: 'resolve' instead of 'blob' in its address)",
        _is_page,
    ),
    _Format(
        "in ONNX Runtime's ORT format, which cannot be converted",
        "name the .onnx file that it was made from",
        _marked(b"ORTM"),
    ),
    _Format(
        "a TensorFlow Lite model", "export the original to ONNX with tf2onnx", _marked(b"TFL3")
    ),
    _Format(
        "a file of weights in safetensors format",
        "export the model itself to ONNX",
        _is_safetensors,
    ),
    _Format("a GGUF model", "export the original model to ONNX", _starts(b"GGUF")),
    _Format(
        "an HDF5 file, as Keras writes them",
        "export the model to ONNX with tf2onnx",
        _starts(b"\x89HDF\r\n"),
    ),
    _Format("a ZIP archive with an ONNX model in it", "unpack it", _holds_model),
    _Format(
        "a compressed file",
        "unpack it",
        _starts(b"\x1f\x8b", b"BZh", b"\xfd7zXZ\0", b"7z\xbc\xaf\x27\x1c", b"\x28\xb5\x2f\xfd"),
    ),
    _Format(
        "a ZIP archive, as PyTorch and Keras write them",
        "export the model to ONNX, with torch.onnx.export or tf2onnx",
        _starts(b"PK\x03\x04"),
    ),
    _Format(
        "a Python pickle, as PyTorch writes them",
        "export the model with torch.onnx.export",
        _starts(b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"),
    ),
    _Format(
        "an XML file, as OpenVINO writes them",
        "name the .onnx file that it was made from",
        _starts(b"<?xml"),
    ),
    _Format("a TensorFlow graph", "export it to ONNX with tf2onnx", _is_tensorflow),
)


def name_format(data: bytes) -> str | None:
    """What a file is that is no ONNX model, and what to do, as the end of a sentence; None if that is not known."""
    found = next((known for known in _FORMATS if known.holds(data)), None)
    return None if found is None else f"is {found.what}: {found.remedy}."


def is_text(path: Path) -> bool:
    """Whether a model file is in text. Lengths and tags of the binary form are control characters."""
    with path.open("rb") as file:
        return not _CONTROL.search(file.read(_HEAD))


def parse_text(data: bytes) -> ModelProto | None:
    """The model that a file holds in text: protobuf's text format, protobuf's JSON, or ONNX's own syntax.

    Returns:
        The model; None if it is in none of these, or has a mistake.
    """
    head = data[:_HEAD].lstrip()
    if _CONTROL.search(head):
        return None
    try:
        if head.startswith(b"{"):
            return json_format.Parse(data, ModelProto())
        if head.startswith(b"<"):
            return parser.parse_model(data.decode())
        return text_format.Parse(data, ModelProto()) if b":" in head or b"{" in head else None
    except (
        json_format.ParseError,
        text_format.ParseError,
        parser.ParseError,
        ValueError,
        RecursionError,
    ):
        return None
