"""Profiling one model in a process of its own: time per op, and device memory.

A separate process is needed because ONNX Runtime's builds on PyPI record on CUDA how long *launching* a kernel takes,
unless launches are blocking (``CUDA_LAUNCH_BLOCKING``), which the driver must know when it starts; and because memory
can be attributed to the model only if nothing else is loaded.
"""

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from onnxamp._bench.executed import executed
from onnxamp._bench.records import OpTime
from onnxamp._errors import RuntimeFailure
from onnxamp._ops.facts import op_facts
from onnxamp._runtime.bound import bind
from onnxamp._runtime.custom_ops import active_libraries, custom_ops
from onnxamp._runtime.device import device_memory_used
from onnxamp._runtime.profile import engine_kernels, times_of
from onnxamp._runtime.session import Provider, cuda_available, make_session, short_provider
from onnxamp._runtime.values import Feed

_PACKAGES: Final = Path(__file__).parents[2]
_SUFFIX: Final = "_kernel_time"
_LOWEST: Final = ("bfloat16", "float16", "float", "double")
_NAMES: Final = {"float": "float32", "double": "float64"}


@dataclass(frozen=True, slots=True)
class Profile:
    """The fields of :class:`Bench` that need a profile."""

    ops: tuple[OpTime, ...]
    memory: int | None
    odd: Mapping[str, int]


def profile(
    path: Path,
    feeds: Mapping[str, Feed],
    provider: Provider,
    cuda_options: Mapping[str, str],
    threads: int = 0,
    runs: int = 5,
) -> Profile:
    """Profile the model in a file.

    Args:
        path: the file.
        feeds: arrays by input name.
        provider: where to run it.
        cuda_options: options of the CUDA provider.
        threads: as for :func:`~onnxamp._runtime.session.make_session`.
        runs: at least 1; a run to warm up comes on top.

    Raises:
        RuntimeFailure: the model does not run, an input is not a tensor, or the process ends without a profile.
    """
    with TemporaryDirectory(prefix="onnxamp-") as folder:
        spec, given, result = (Path(folder, name) for name in ("spec.json", "feeds.npz", "result.json"))
        np.savez(given, **{str(number): _array(name, feed) for number, (name, feed) in enumerate(feeds.items())})
        task = {
            "model": str(Path(path).absolute()), "names": list(feeds), "provider": provider,
            "options": dict(cuda_options), "threads": threads, "runs": runs, "feeds": str(given),
            "result": str(result), "libraries": active_libraries(), "prefix": str(Path(folder, "profile")),
        }  # fmt: skip
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
        events = json.loads(Path(facts["profile"]).read_text(encoding="utf-8"))
    return Profile(op_times(events), facts["memory"], odd_channels(events))


def _array(name: str, feed: Feed) -> Any:
    if not isinstance(feed, np.ndarray):
        raise RuntimeFailure(
            f"Input {name!r} is not a tensor: models with such inputs can be timed, not profiled (--no-profile)."
        )
    return feed


def op_times(events: Sequence[Mapping[str, Any]]) -> tuple[OpTime, ...]:
    """Nodes of a profile by op, provider and type, slowest first.

    Control flow is left out: its time is that of the nodes in its bodies, which are listed.
    """
    seconds, kinds = times_of(events), dict[str, tuple[str, str, str]]()
    for name, args in _nodes(events):
        if args["op_name"] in op_facts().control_flow:
            continue
        if name in seconds:  # a graph that an engine compiles is not: its kernels stand in its place
            kinds.setdefault(name, (args["op_name"], short_provider(args["provider"]), _dtype(args)))
    for event in engine_kernels(events):
        kinds.setdefault(event["name"].partition("::")[2], _kernel_kind(event["args"]))
    spent, counts = defaultdict[tuple[str, str, str], float](float), Counter(kinds.values())
    for name, kind in kinds.items():
        spent[kind] += seconds.get(name, 0.0)
    rows = [OpTime(*kind, counts[kind], total) for kind, total in spent.items()]
    return tuple(sorted(rows, key=lambda row: (-row.seconds, row.op)))


def _kernel_kind(args: Mapping[str, Any]) -> tuple[str, str, str]:
    """Op, provider and type of a kernel that a compiling engine lists."""
    provider = str(args.get("ep", ""))
    words = executed().kernels.get(provider, {})
    dtype = str(args.get(words.get("kernel", ""), "")).rpartition("_")[2]
    return (
        str(args.get(words.get("op", ""), "?")),
        short_provider(provider),
        words.get("types", {}).get(dtype, "no floats"),
    )


def odd_channels(events: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Op type -> number of low-precision convolutions and matrix products whose channels are not a multiple of 8.

    Such shapes are slow on tensor cores, or cannot use them.
    """
    odd = dict[str, str]()
    for name, args in _nodes(events):
        axis = executed().channels.get(args["op_name"])
        if axis is None or _dtype(args) not in ("float16", "bfloat16"):
            continue
        entries = (*args.get("input_type_shape", ())[:1], *args.get("output_type_shape", ()))
        shapes = [shape for entry in entries for shape in entry.values()]
        if any(len(shape) > max(axis, 0) and shape[axis] % 8 for shape in shapes):
            odd[name] = args["op_name"]
    return dict(Counter(odd.values()))


def _nodes(events: Sequence[Mapping[str, Any]]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    for event in events:
        if event.get("cat") == "Node" and event.get("name", "").endswith(_SUFFIX):
            yield event["name"].removesuffix(_SUFFIX), event["args"]


def _dtype(args: Mapping[str, Any]) -> str:
    """The lowest float type that a node reads or writes."""
    types = {name for key in ("input_type_shape", "output_type_shape") for entry in args.get(key, ()) for name in entry}
    lowest = next((name for name in _LOWEST if name in types), "no floats")
    return _NAMES.get(lowest, lowest)


def _child(spec: Path) -> None:
    """What the process does: load, run, and write down where the profile is."""
    task = json.loads(spec.read_text(encoding="utf-8"))
    with np.load(task["feeds"]) as arrays:
        feeds = {name: arrays[str(number)] for number, name in enumerate(task["names"])}
    on_cuda = task["provider"] == "cuda" and cuda_available()  # makes the context, and loads the libraries
    before = device_memory_used() if on_cuda else None
    how = {"threads": task["threads"], "profile_to": task["prefix"], "cuda_options": task["options"]}
    with custom_ops(library=task["libraries"]):
        session = make_session(task["model"], task["provider"], **how)
    run = bind(session, feeds)
    for _ in range(task["runs"]):
        run()
    after = device_memory_used() if on_cuda else None
    memory = None if before is None or after is None else max(after - before, 0)
    facts = {"profile": session.end_profiling(), "memory": memory}
    Path(task["result"]).write_text(json.dumps(facts), encoding="utf-8")


if __name__ == "__main__":
    _child(Path(sys.argv[1]))
