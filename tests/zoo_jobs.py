"""What workers are told to do in tests: they import it by name."""

import ctypes
import os
import signal
import time


def square_or_die(item: int | str) -> int:
    """A number squared; words say how to die."""
    if item == "segfault":
        ctypes.string_at(0)
    elif item == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif item == "left":
        os._exit(3)
    return int(item) ** 2


def slow(item: float) -> float:
    time.sleep(item)
    return item


def process(_: object) -> tuple[int, str]:
    return os.getpid(), os.environ["ONNXAMP_THREADS"]
