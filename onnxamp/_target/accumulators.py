"""Which low-precision kernels accumulate in float32, by target: ``accumulate.toml`` in its folder."""

from collections.abc import Mapping
from functools import cache
from typing import Any

from onnxamp._ops.targets import target_table
from onnxamp._target.versions import is_older, version_meant


@cache
def float32_accumulators(target: str, dtype: str) -> frozenset[str]:
    """Return the op types whose kernels for a low-precision type accumulate in float32 on a target.

    Ops that lose digits all the same, because they subtract the mean in low precision, are left out. Nothing is known
    of a target without a row.

    Args:
        target: the target, possibly with a version of ONNX Runtime ("cuda@1.24"); the newest known one without it.
        dtype: "float16" or "bfloat16".
    """
    version = version_meant(target)
    return frozenset(
        row["op"]
        for row in target_table(target, "accumulate").get("rows", ())
        if dtype in row["types"]
        and row["accumulator"] == "float32"
        and not row.get("cancels", False)
        and _holds(row, version)
    )


def _holds(row: Mapping[str, Any], version: str) -> bool:
    """Return whether a row is about a version of ONNX Runtime."""
    is_early = "since" in row and is_older(version, row["since"])
    is_late = "before" in row and not is_older(version, row["before"])
    return not is_early and not is_late
