"""A run with ONNX Runtime's profiler in a process of its own: its events, and the device memory of the model.

A separate process is needed because ONNX Runtime's builds on PyPI record on CUDA how long *launching* a kernel takes,
unless launches are blocking (``CUDA_LAUNCH_BLOCKING``), which the driver must know when it starts; and because memory
can be attributed to the model only if nothing else is loaded.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from onnxamp._errors import OnnxAmpError, RuntimeFailure
from onnxamp._runtime.bound import bind
from onnxamp._runtime.custom_ops import active_libraries, custom_ops
from onnxamp._runtime.device import device_memory_used
from onnxamp._runtime.session import Provider, cuda_available, make_session
from onnxamp._runtime.values import Feed
from onnxamp._workers.folders import temporary_folder

_PACKAGES: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class ProfiledRun:
    """Events of the profiler, and bytes of device memory that the model takes, if they are known."""

    events: Sequence[Mapping[str, Any]]
    memory: int | None


def profiled_run(
    path: Path,
    feeds: Mapping[str, Feed],
    provider: Provider,
    *,
    cuda_options: Mapping[str, str] | None = None,
    threads: int = 0,
    runs: int = 5,
    optimize: bool = True,
) -> ProfiledRun:
    """Run the model in a file.

    Args:
        path: the file.
        feeds: arrays by input name.
        provider: where to run it.
        cuda_options: options of the CUDA provider.
        threads, optimize: as for :func:`~onnxamp._runtime.session.make_session`.
        runs: at least 1.

    Raises:
        RuntimeFailure: the model does not run, an input is not a tensor, or the process ends without a profile.
    """
    with temporary_folder() as folder:
        spec, given, result = (
            Path(folder, name) for name in ("spec.json", "feeds.npz", "result.json")
        )
        np.savez(
            given,
            **{
                str(number): _array(name, feed) for number, (name, feed) in enumerate(feeds.items())
            },
        )
        task = {
            "model": str(Path(path).absolute()),
            "names": list(feeds),
            "provider": provider,
            "options": dict(cuda_options or {}),
            "threads": threads,
            "runs": runs,
            "optimize": optimize,
            "feeds": str(given),
            "result": str(result),
            "libraries": active_libraries(),
            "prefix": str(Path(folder, "profile")),
        }
        spec.write_text(json.dumps(task), encoding="utf-8")
        paths = os.pathsep.join(filter(None, (str(_PACKAGES), os.environ.get("PYTHONPATH"))))
        child = subprocess.run(
            [sys.executable, "-m", __name__, str(spec)],
            env=os.environ | {"CUDA_LAUNCH_BLOCKING": "1", "PYTHONPATH": paths},
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if child.returncode or not result.exists():
            last = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise RuntimeFailure(f"Profiling {path} failed (exit code {child.returncode}): {last}")
        facts = json.loads(result.read_text(encoding="utf-8"))
        if "fault" in facts:
            raise RuntimeFailure(facts["fault"])
        events = read_events(Path(facts["profile"]))
    return ProfiledRun(events, facts["memory"])


def read_events(path: Path) -> Sequence[Mapping[str, Any]]:
    """The events that ONNX Runtime's profiler wrote.

    Raises:
        RuntimeFailure: the file is not whole, as on a full disk, which ONNX Runtime does not notice.
    """
    try:
        events: Sequence[Mapping[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RuntimeFailure(
            f"ONNX Runtime did not write its whole profile to {str(path.parent)!r}: is the disk full? TMPDIR names"
            " another folder."
        ) from error
    return events


def _array(name: str, feed: Feed) -> Any:
    if not isinstance(feed, np.ndarray):
        raise RuntimeFailure(
            f"Input {name!r} is not a tensor: models with such inputs can be timed, not profiled (--no-profile)."
        )
    return feed


def _child(spec: Path) -> None:
    """What the process does: load, run, and write down where the profile is, or why there is none."""
    task = json.loads(spec.read_text(encoding="utf-8"))
    try:
        facts = _profiled(task)
    except OnnxAmpError as error:
        facts = {"fault": str(error)}
    Path(task["result"]).write_text(json.dumps(facts), encoding="utf-8")


def _profiled(task: Mapping[str, Any]) -> dict[str, Any]:
    """Where the profile is, and the device memory that the model takes."""
    with np.load(
        task["feeds"], allow_pickle=True
    ) as arrays:  # strings are objects; the parent wrote the file
        feeds = {name: arrays[str(number)] for number, name in enumerate(task["names"])}
    on_cuda = (
        task["provider"] == "cuda" and cuda_available()
    )  # makes the context, and loads the libraries
    before = device_memory_used() if on_cuda else None
    how = {
        "threads": task["threads"],
        "profile_to": task["prefix"],
        "cuda_options": task["options"],
        "optimize": task["optimize"],
    }
    with custom_ops(library=task["libraries"]):
        session = make_session(task["model"], task["provider"], **how)
    run = bind(session, feeds)
    for _ in range(task["runs"]):
        run()
    after = device_memory_used() if on_cuda else None
    memory = None if before is None or after is None else max(after - before, 0)
    return {"profile": session.end_profiling(), "memory": memory}


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
