"""Which kernels sum up in float32: the table agrees with kernels, versions and profiles."""

from collections.abc import Iterator
from typing import Any

import pytest

from onnxamp._facts.kernels import takes_anywhere
from onnxamp._facts.signature import lookup
from onnxamp._facts.tables import target_names, target_table
from onnxamp._facts.targets import known_versions

FIELDS = {"op", "types", "accumulator", "source"}


def table() -> dict[str, list[dict[str, Any]]]:
    return {name: target_table(name, "accumulate").get("rows", []) for name in target_names()}


def every_row() -> Iterator[tuple[str, dict[str, Any]]]:
    for target, rows in table().items():
        for row in rows:
            yield target, row


def test_rows_have_sources_and_known_versions() -> None:
    for target, row in every_row():
        assert set(row) - {"cancels", "since", "before"} == FIELDS
        assert set(row["types"]) <= {"float16", "bfloat16"}
        assert row["accumulator"] == "float32" or [row["accumulator"]] == row["types"]
        assert {row.get("since"), row.get("before")} - {None} <= set(known_versions(target))
        assert row["source"].startswith(("asked ", "microsoft/", "onnx/", "openvinotoolkit/", "NVIDIA/"))


def test_rows_are_about_types_that_a_kernel_or_a_function_body_takes() -> None:
    for target, row in every_row():
        domain, _, op_type = row["op"].rpartition("::")
        signature = lookup(domain, op_type, 1 if domain else 24)
        has_body = signature is not None and signature.has_function
        for kind in row["types"]:
            assert has_body or takes_anywhere(target, row["op"], f"tensor({kind})"), (target, row["op"], kind)


def test_each_version_has_one_answer() -> None:
    said: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for target, row in every_row():
        for kind in row["types"]:
            said.setdefault((target, row["op"], kind), []).append(row)
    for key, rows in said.items():
        versions = known_versions(key[0])
        for place in range(len(versions)):
            holding = [row for row in rows if _holds(row, versions, place)]
            assert len(holding) <= 1, (key, versions[place])


def _holds(row: dict[str, Any], versions: tuple[str, ...], place: int) -> bool:
    first = versions.index(row["since"]) if "since" in row else 0
    last = versions.index(row["before"]) if "before" in row else len(versions)
    return first <= place < last


@pytest.mark.parametrize("target", ["cpu", "cuda", "webgpu", "openvino", "tensorrt"])
def test_profiles_say_the_same_of_float16(target: str) -> None:
    profile = target_table(target, "arithmetic")
    versions = known_versions(target)
    float16 = [row for row in table()[target] if "float16" in row["types"]]
    rows = {row["op"]: row for row in float16 if _holds(row, versions, len(versions) - 1)}
    for op, fact in profile["normalizations"].items():
        if op in rows:
            assert rows[op]["accumulator"] == fact["accumulator"], op
