"""What workers are told to do in tests: they import it by name."""

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any


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


def square_of_number(item: object) -> float:
    if isinstance(item, str):
        raise ValueError(item)  # noqa: TRY004
    return float(item) ** 2  # type: ignore[arg-type]


def plain(function: Callable[[Any], Any], _: object) -> Callable[[Any], Any]:
    """The work that is a function."""
    return function


def remembering(memory: dict[str, int]) -> Callable[[object], int]:
    """Counts the works that a worker had."""
    memory["works"] = memory.get("works", 0) + 1
    return lambda _: memory["works"]


def counter(_: object) -> Callable[[object], int]:
    """Counts the items that one worker had."""
    numbers = count(1)
    return lambda _: next(numbers)


def unmakable(_: object) -> Callable[[object], object]:
    raise ValueError("cannot be made")


def die_on(folder: str, times: int, item: str) -> str:
    """A file says how often a worker died of the item."""
    died = len(list(Path(folder).glob(f"{item}-*")))
    if item.startswith("bad") and died < times:
        Path(folder, f"{item}-{died}").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return item.upper()


def home(folder: str, item: int) -> str:
    """The machine of the cluster that runs this, when two items are at work."""
    import ray

    Path(folder, f"begun-{item}").touch()
    while len(list(Path(folder).glob("begun-*"))) < 2:
        time.sleep(0.01)
    return str(ray.get_runtime_context().get_node_id())


def wait_for(folder: str, item: int) -> int:
    """Tells that it has begun, and waits for a word."""
    Path(folder, f"begun-{item}").touch()
    while not Path(folder, "go").exists():
        time.sleep(0.01)
    return item


def terminated_at_exit(path: str) -> None:
    """The worker will get a SIGTERM when it is about to end by itself, and tell in a file if it goes on."""
    atexit.register(terminate_and_tell, path)


def terminate_and_tell(path: str) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    Path(path).write_text("ended by itself")


class TerminatedOnArrival:
    """An item that sends SIGTERM to the worker that unpickles it, where Python 3.11 wraps errors in a RuntimeError."""

    def __reduce__(self) -> tuple[Callable[[], None], tuple[()]]:
        return terminate_while_naming, ()


def terminate_while_naming() -> None:
    class Naming:
        def __set_name__(self, owner: type, name: str) -> None:
            signal.raise_signal(signal.SIGTERM)

    type("Owner", (), {"field": Naming()})
