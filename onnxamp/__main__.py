"""``python -m onnxamp``."""

from onnxamp._cli import main

main()
