"""The schemas that stand in for those of ONNX Runtime where it is not installed."""

import json
import subprocess
import sys
from dataclasses import asdict

import onnxruntime
import pytest
from repository import ROOT

from onnxamp._facts.signature import RUNTIME_DOMAINS, installed_schemas, stored_schemas

STORED = json.loads((ROOT / "onnxamp" / "_data" / "runtime_schemas.json").read_text(encoding="utf-8"))


@pytest.mark.skipif(onnxruntime.__version__ != STORED["onnxruntime"], reason="the table is of another onnxruntime")
def test_stored_schemas_are_those_of_the_library() -> None:
    def told(schemas: object) -> dict[tuple[str, str], list[dict[str, object]]]:
        return {
            key: [asdict(version) for version in versions]
            for key, versions in schemas.items()
            if key[0] in RUNTIME_DOMAINS
        }

    assert told(stored_schemas()) == told(installed_schemas())


@pytest.mark.slow
def test_ops_of_onnx_runtime_are_lowered_without_it() -> None:
    """FusedMatMul is no op of ONNX: without its schema, its types would be unknown, and it would stay in float32."""
    code = """
import sys; sys.modules.update(onnxruntime=None)
import onnx, onnxamp
text = '''<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
    g (float[2,2] x) => (float[2,2] y) { h = com.microsoft.FusedMatMul (x, x)  y = MatMul (h, h) }'''
print([row.low for row in onnxamp.plan_model(onnx.parser.parse_model(text)).rows])
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[True,", "True]"]
