"""Write the schemas of ONNX Runtime's own ops, which are read where it is not installed.

.venv/bin/python scripts/make_schemas.py

The source is the installed library; the file names its version. Ops of the standard domains are not in it, since onnx
has their schemas.
"""

import json
from pathlib import Path

import onnxruntime

from onnxamp._facts.signature import RUNTIME_DOMAINS, Signature, installed_schemas

OUTPUT = Path(__file__).resolve().parent.parent / "onnxamp" / "_data" / "runtime_schemas.json"


def row(schema: Signature) -> dict[str, object]:
    """A schema as data; ports are lists of a name, a type, and three facts in the order of ``Port``."""
    ports = [
        [[port.name, port.type, port.variadic, port.homogeneous, port.optional] for port in side]
        for side in (schema.inputs, schema.outputs)
    ]
    return {
        "domain": schema.domain,
        "op": schema.op_type,
        "since": schema.since,
        "params": {name: sorted(types) for name, types in sorted(schema.params.items())},
        "least": [schema.min_inputs, schema.min_outputs],
        "most": [schema.max_inputs, schema.max_outputs],
        "inputs": ports[0],
        "outputs": ports[1],
    }


if __name__ == "__main__":
    schemas = [
        row(schema)
        for (domain, _), versions in sorted(installed_schemas().items())
        if domain in RUNTIME_DOMAINS
        for schema in versions
    ]
    lines = ",\n".join(json.dumps(schema, separators=(",", ":")) for schema in schemas)
    text = f'{{"onnxruntime": "{onnxruntime.__version__}",\n"schemas": [\n{lines}\n]}}\n'
    OUTPUT.write_text(text, encoding="utf-8")
