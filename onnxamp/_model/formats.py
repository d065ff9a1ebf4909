"""Files that are no ONNX model in protobuf's binary form: read if they are one in text, and else named."""

import re
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile, ZipFile

from google.protobuf import json_format, text_format
from onnx import ModelProto, parser

from onnxamp._ops.targets import read_table

_HEAD: Final = 4096
"""Bytes in which a format shows."""


_CONTROL: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


def _is_page(data: bytes) -> bool:
    return data[:_HEAD].lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _is_safetensors(data: bytes) -> bool:
    return 0 < int.from_bytes(data[:8], "little") <= len(data) and data[8:10] == b'{"'


def _is_tensorflow(data: bytes) -> bool:
    return any(
        op in data
        for op in (b"\x12\x0bPlaceholder", b"\x12\x05Const", b"\x12\x0bVarHandleOp")
    )


def _holds_model(data: bytes) -> bool:
    """Return whether it is an archive with a file that has the name of a model."""
    if not data.startswith(b"PK\x03\x04"):
        return False
    try:
        with ZipFile(BytesIO(data)) as archive:
            return any(name.endswith(".onnx") for name in archive.namelist())
    except BadZipFile:
        return False


_SIGNS: Final = {
    "page": _is_page,
    "safetensors": _is_safetensors,
    "tensorflow": _is_tensorflow,
    "holds model": _holds_model,
}
"""Tests for formats without fixed bytes, by name in ``_data/formats.toml``."""


def _is_in(row: dict[str, Any], data: bytes) -> bool:
    """Return whether data are in the format of a row of ``_data/formats.toml``."""
    if "sign" in row:
        return _SIGNS[row["sign"]](data)
    start = data[row.get("at", 0) :]
    return start.startswith(tuple(text.encode("latin-1") for text in row["starts"]))


def name_format(data: bytes) -> str | None:
    """Return the kind of a file that is not an ONNX model, with advice, as the end of a sentence; None if unknown."""
    rows = read_table("formats")["format"]
    found = next((row for row in rows if _is_in(row, data)), None)
    return None if found is None else f"is {found['what']}: {found['remedy']}."


def is_text(path: Path) -> bool:
    """Return whether a model file is in text. Lengths and tags of the binary form are control characters."""
    with path.open("rb") as file:
        return not _CONTROL.search(file.read(_HEAD))


def parse_text(data: bytes) -> ModelProto | None:
    """Return the model in a text file: protobuf's text format, protobuf's JSON, or ONNX's own syntax.

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
        return (
            text_format.Parse(data, ModelProto())
            if b":" in head or b"{" in head
            else None
        )
    except (
        json_format.ParseError,
        text_format.ParseError,
        parser.ParseError,
        ValueError,
        RecursionError,
    ):
        return None
