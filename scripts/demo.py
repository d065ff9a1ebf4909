"""Convert a model of the zoo and show the report. Sets up its own environment.

python3 scripts/demo.py [arguments of `onnxamp convert`]
"""

import sys

from bootstrap import BIN, ROOT, ensure, run

if __name__ == "__main__":
    ensure("gpu")
    (ROOT / "build").mkdir(exist_ok=True)
    arguments = sys.argv[1:] or ["models/encoder.onnx", "-o", "build/encoder_fp16.onnx", "--level", "O2"]
    print("onnxamp convert", *arguments, file=sys.stderr)
    run([str(BIN / "onnxamp"), "convert", *arguments])
