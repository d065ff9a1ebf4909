"""How many threads to use: processes that share a machine must not each take every core."""

import os
from typing import Final

from onnxamp._errors import ArgumentError

THREADS: Final = "ONNXAMP_THREADS"
"""Environment variable: the number of threads that one operator of ONNX Runtime may use in this process."""


def thread_limit() -> int:
    """The value of ONNXAMP_THREADS; 0 if it is not set, which leaves the choice to ONNX Runtime.

    Raises:
        ArgumentError: it is not a number.
    """
    text = os.environ.get(THREADS, "0")
    if not text.isdecimal():
        raise ArgumentError(f"The environment variable {THREADS} must be a number of threads, not {text!r}.")
    return int(text)


def core_count() -> int:
    """The number of cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
