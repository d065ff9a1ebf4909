"""``python -m onnxamp``."""

from onnxamp.cli import main

main()
