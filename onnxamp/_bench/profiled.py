"""Profiling one model: time per op, device memory, and shapes that are slow."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from onnxamp._bench.executed import executed
from onnxamp._bench.records import OpTime
from onnxamp._ops.facts import op_facts
from onnxamp._runtime.profile import engine_kernels, is_dispatch_only, times_of
from onnxamp._runtime.profiled_run import profiled_run
from onnxamp._runtime.session import Provider, short_provider
from onnxamp._runtime.values import Feed

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
    found = profiled_run(path, feeds, provider, cuda_options=cuda_options, threads=threads, runs=runs)
    return Profile(op_times(found.events), found.memory, odd_channels(found.events))


def op_times(events: Sequence[Mapping[str, Any]]) -> tuple[OpTime, ...]:
    """Nodes of a profile by op, provider and type, slowest first.

    Control flow is left out: its time is that of the nodes in its bodies, which are listed.
    """
    untold = is_dispatch_only(events)
    seconds, kinds = times_of(events), dict[str, tuple[str, str, str]]()
    for name, args in _nodes(events):
        if args["op_name"] in op_facts().control_flow:
            continue
        if untold or name in seconds:  # a graph that an engine compiles is not: its kernels stand in its place
            kinds.setdefault(name, (args["op_name"], short_provider(args["provider"]), _dtype(args)))
    for event in engine_kernels(events):
        kinds.setdefault(event["name"].partition("::")[2], _kernel_kind(event["args"]))
    spent, counts = defaultdict[tuple[str, str, str], float](float), Counter(kinds.values())
    for name, kind in kinds.items():
        spent[kind] += seconds.get(name, 0.0)
    rows = [OpTime(*kind, counts[kind], None if untold else total) for kind, total in spent.items()]
    return tuple(sorted(rows, key=lambda row: (-(row.seconds or 0.0), row.op)))


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
