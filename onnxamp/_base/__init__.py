"""What every room stands on: errors, paths, processes, the state of a job, and the door to the rooms apart."""

from typing import Final

VERSION: Final = "0.1.0"
"""The version of onnxamp."""
