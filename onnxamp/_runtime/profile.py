"""Time per node, from ONNX Runtime's own profile.

The profile is a list of events. Those of category "Node", "<node>_kernel_time", hold the host's time per node; of
category "Session", "model_run" spans one run. Builds with CUPTI add events of category "Kernel", with the device's
time, after the node that launched them. Builds without it, such as those on PyPI, show only how long launching took on
CUDA, unless launches block (``CUDA_LAUNCH_BLOCKING=1``): a model runs in a process of its own there, where they do.

A plugin provider that compiles the graph runs it as one node. It may list its own kernels, as OpenVINO does: events of
category "Kernel", "OV::<name>", that name the event of that node. They replace it, each under the name that the engine
gives it: that of one of the fused nodes, or a new one.

A plugin provider that hands its kernels to a device without waiting, such as WebGPU's, only shows the time of the host.
Such times are not reported.
"""

import json
import os
import pickle
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np
import onnx
from onnx import ModelProto

from onnxamp._base.errors import ArgumentError, RuntimeFailure
from onnxamp._base.temporary import temporary_folder
from onnxamp._runtime.child import Child
from onnxamp._runtime.servers import answer_with
from onnxamp._runtime.sessions.plugins import device_memory_used
from onnxamp._runtime.sessions.session import (
    Provider,
    bind,
    cuda_available,
    make_session,
    run,
)
from onnxamp._runtime.sessions.starting import Surroundings
from onnxamp._runtime.sessions.values import Feed, Feeds


def profiled_run(
    path: Path,
    feeds: Feeds,
    provider: Provider,
    *,
    cuda_options: Mapping[str, str] | None = None,
    threads: int = 0,
    runs: int = 5,
    optimize: bool = True,
) -> tuple[Sequence[Mapping[str, Any]], int | None]:
    """Run the model in a file.

    Args:
        path: the file.
        feeds: arrays by input name.
        provider: where to run it.
        cuda_options: options of the CUDA provider.
        threads, optimize: as for :func:`~onnxamp._runtime.sessions.session.make_session`.
        runs: at least 1.

    Raises:
        RuntimeFailure: the model does not run, an input is not a tensor, or the process ends without a profile.

    Returns:
        Events of the profiler, and bytes of device memory that the model takes, if they are known.
    """
    arrays = {name: _array(name, feed) for name, feed in feeds.items()}
    child = Child(__name__)
    with temporary_folder() as folder, ExitStack() as stack:
        how = {
            "threads": threads,
            "optimize": optimize,
            "cuda_options": dict(cuda_options or {}),
            "profile_to": str(Path(folder, "profile")),
        }
        model = str(Path(path).absolute())
        task = model, arrays, provider, runs, Surroundings.here(), how
        spec = Path(folder, "task.pickle")
        spec.write_bytes(pickle.dumps(task))
        stack.callback(child.end)
        facts = child.ask({"spec": str(spec)})
        if facts is None:
            raise RuntimeFailure(
                f"Profiling {path} failed: its process {child.ended}."
            )
        if "fault" in facts:
            raise RuntimeFailure(facts["fault"])
        events = read_events(Path(facts["profile"]))
    return events, facts["memory"]


def read_events(path: Path) -> Sequence[Mapping[str, Any]]:
    """Return the events that ONNX Runtime's profiler wrote.

    Raises:
        RuntimeFailure: the file is not whole, as on a full disk, which ONNX Runtime does not notice.
    """
    try:
        events: Sequence[Mapping[str, Any]] = json.loads(
            path.read_text(encoding="utf-8")
        )
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


def serve() -> None:
    """Profile models in a process in which launches block."""
    os.environ[_BLOCKING] = "1"
    answer_with(lambda: _profiled)


def _profiled(spec: str) -> dict[str, Any]:
    """Return the path of the profile, and the device memory that the model takes."""
    task = pickle.loads(Path(spec).read_bytes())  # noqa: S301 - the parent wrote it
    path, feeds, provider, runs, surroundings, how = task
    surroundings.enter()
    # makes the context, and loads the libraries
    on_cuda = provider == "cuda" and cuda_available()
    before = device_memory_used() if on_cuda else None
    session = make_session(path, provider, **how)
    run = bind(session, feeds)
    for _ in range(runs):
        run()
    after = device_memory_used() if on_cuda else None
    memory = None if before is None or after is None else max(after - before, 0)
    return {"profile": session.end_profiling(), "memory": memory}


_OF_NODE: Final = "_kernel_time"
_OF_ENGINE: Final = "parent_ort_event_name"
_BLOCKING: Final = "CUDA_LAUNCH_BLOCKING"
_CUDA: Final = "CUDAExecutionProvider"
_WAITS: Final = frozenset({_CUDA, "CPUExecutionProvider"})
"""Providers whose events of nodes end when their kernels do, on CUDA because launches block."""


def node_times(
    model: ModelProto | str | PathLike[str],
    feeds: Feeds,
    provider: Provider = "cpu",
    runs: int = 5,
    *,
    optimize: bool = True,
) -> dict[str, float]:
    """Seconds that each node takes per run: the median of several runs after a warm-up.

    A node in a body counts each time it runs, and again as part of the node with the body. Nodes without a name have
    the name that ONNX Runtime gives them; fused nodes that of the result, or the one that the engine gives them. Empty
    if the engine does not report the times of its kernels.

    Args:
        model, provider, optimize: as for :func:`~onnxamp._runtime.sessions.session.make_session`.
        feeds: by input name.
        runs: at least 1.

    Raises:
        ArgumentError: ``runs`` is too small. RuntimeFailure: the model does not run.
    """
    if runs < 1:
        raise ArgumentError(f"runs must be at least 1, not {runs}.")
    with temporary_folder() as folder:
        if provider == "cuda" and os.environ.get(_BLOCKING) != "1":
            if isinstance(model, ModelProto):
                path = Path(folder, "model.onnx")
                onnx.save(model, path)
            else:
                path = Path(model)
            # One run more, because the first is the warm-up.
            events, _ = profiled_run(
                path, feeds, provider, runs=runs + 1, optimize=optimize
            )
            return times_of(events)
        session = make_session(
            model, provider, optimize=optimize, profile_to=str(Path(folder, "profile"))
        )
        for _ in range(runs + 1):
            run(session, feeds)
        events = read_events(Path(session.end_profiling()))
    return times_of(events)


def times_of(events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return seconds by node of a profile: the median of all runs but the first, the warm-up; empty if it has none.

    Complexity: linear in events, but for a search among runs.
    """
    if is_dispatch_only(events):
        return {}
    starts = sorted(
        event["ts"] for event in events if event.get("name") == "model_run"
    )
    kernels = engine_kernels(events)
    compiled = {event["args"][_OF_ENGINE] for event in kernels}
    shown = any(
        event.get("cat") == "Kernel" and _OF_ENGINE not in event.get("args", {})
        for event in events
    )
    spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    node = ""
    number = 0
    for event in kernels:
        number = bisect_right(starts, event["ts"])
        spent[event["name"].partition("::")[2]][number] += event["dur"] * 1e-6
    for event in events:
        name = event.get("name", "")
        if name in compiled or _OF_ENGINE in event.get("args", {}):
            continue
        if _is_of_node(event):
            node = name.removesuffix(_OF_NODE)
            number = bisect_right(starts, event["ts"])
            on_device = shown and event.get("args", {}).get("provider") == _CUDA
            spent[node][number] += 0.0 if on_device else event["dur"] * 1e-6
        elif event.get("cat") == "Kernel" and node:
            spent[node][number] += event["dur"] * 1e-6
    # Run 0 is what happens before the first run begins, and run 1 is the warm-up.
    measured = range(2, len(starts) + 1)
    if not measured:
        return {}
    times = {}
    for name, by_run in spent.items():
        times[name] = median(by_run.get(run, 0.0) for run in measured)
    return times


def _is_of_node(event: Mapping[str, Any]) -> bool:
    return event.get("cat") == "Node" and event.get("name", "").endswith(_OF_NODE)


def node_events(
    events: Iterable[Mapping[str, Any]],
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the events with the times of nodes, with the names of the nodes."""
    for event in filter(_is_of_node, events):
        yield event["name"].removesuffix(_OF_NODE), event


def is_dispatch_only(events: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether an engine reports the time of the host for its nodes rather than that of its kernels."""
    nodes = (event for _, event in node_events(events))
    waits = all(event["args"].get("provider") in _WAITS for event in nodes)
    return not (waits or any(event.get("cat") == "Kernel" for event in events))


def engine_kernels(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the events of kernels that a compiling provider lists, in the order in which they ran."""
    return [
        event
        for event in events
        if event.get("cat") == "Kernel" and _OF_ENGINE in event.get("args", {})
    ]
