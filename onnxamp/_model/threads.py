"""How many threads there are to use: processes that share a machine must not all take every core."""

import os
from typing import Final

from onnxamp._errors import ArgumentError

THREADS: Final = "ONNXAMP_THREADS"
"""Environment variable: threads that one operator of ONNX Runtime may use in this process."""


def thread_limit() -> int:
    """What ONNXAMP_THREADS says; 0, which leaves the choice to ONNX Runtime, where it is not set.

    Raises:
        ArgumentError: it is set to something else than a number.
    """
    text = os.environ.get(THREADS, "0")
    if not text.isdecimal():
        raise ArgumentError(f"The environment variable {THREADS} must be a number of threads, not {text!r}.")
    return int(text)


def core_count() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
