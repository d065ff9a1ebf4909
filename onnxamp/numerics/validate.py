"""Validation of a conversion: the original and the result on the same inputs, on CUDA or by honest emulation."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, helper

from onnxamp.errors import OnnxAmpError, RuntimeFailure
from onnxamp.numerics.metrics import TensorDiff, compare, first_bad
from onnxamp.runtime.emulate import emulate
from onnxamp.runtime.inputs import check_inputs, random_inputs
from onnxamp.runtime.session import Feed, Provider, cuda_available, make_session, run
from onnxamp.storage import folder_of, load_model

TOLERANCES: Mapping[str, float] = {"float16": 1e-2, "bfloat16": 5e-2}
"""Relative L2 error per output up to which a conversion counts as accurate."""

_VALUES_AT_A_TIME = 64
"""Intermediate values that one run returns while the first bad one is searched."""


@dataclass(frozen=True, slots=True)
class FirstBad:
    """The first value of the graph, in execution order, that goes wrong: its name, its node, and how."""

    value: str
    op: str
    alarm: str


@dataclass(frozen=True, slots=True)
class Validation:
    """What the comparison ran on and found.

    ``ran_on`` is "CUDA" or "CPU, emulated <dtype>"; ``inputs`` says where the numbers came from; ``skipped`` says why
    nothing could be compared; ``failure`` is one sentence if the result is broken, ``warnings`` what is merely inexact.
    """

    ran_on: str
    inputs: str
    outputs: tuple[TensorDiff, ...] = ()
    first_bad: FirstBad | None = None
    skipped: str | None = None
    failure: str | None = None
    warnings: tuple[str, ...] = ()
    inexact: frozenset[str] = frozenset()
    """Outputs that the warnings speak of."""


def validate(
    original: Path,
    result: Path,
    dtype: str,
    *,
    feeds: Mapping[str, Feed] | None = None,
    dims: Mapping[str, int] | None = None,
    seed: int = 0,
    provider: Provider | None = None,
) -> Validation:
    """Run both models on the same inputs and compare their outputs.

    On CUDA the result runs as it is, and the original in float32 with TF32 off. On CPU, where ONNX Runtime would
    compute float16 in float32 and hide what a GPU does, the result is emulated (:mod:`onnxamp.runtime.emulate`).

    Args:
        feeds: inputs by name; made up (seeded, see :mod:`onnxamp.runtime.random_inputs`) where None.
        dims: sizes of named dimensions for made-up inputs.
        provider: "cuda" or "cpu"; None for CUDA where there is one.

    Raises:
        ArgumentError: ``feeds`` or ``dims`` do not fit the model.
    """
    chosen: Provider = provider or ("cuda" if cuda_available() else "cpu")
    ran_on = "CUDA" if chosen == "cuda" else f"CPU, emulated {dtype}"
    proto = load_model(original)
    source = "given inputs" if feeds is not None else f"made-up inputs (seed {seed})"
    checked = check_inputs(proto, feeds) if feeds is not None else random_inputs(proto, seed=seed, dims=dims)
    try:
        session = make_session(original, chosen)
    except RuntimeFailure as error:
        return Validation(ran_on, source, skipped=f"The original model does not load: {error}")
    try:
        reference = run(session, checked)
    except RuntimeFailure as error:
        hint = "" if feeds is not None else " Real inputs (--inputs data.npz) or sizes (--dim name=N) may help."
        return Validation(ran_on, source, skipped=f"The original model does not run: {error}{hint}")
    try:
        found = run(*_prepared(result, chosen, checked))
    except OnnxAmpError as error:
        return Validation(ran_on, source, failure=f"The converted model does not run: {error}")
    diffs = tuple(diff for name in reference for diff in _compare(name, reference[name], found[name]))
    alarms = [f"Output {name!r}: {text}" for name in reference for text in _lost(reference[name], found[name])]
    alarms += [f"Output {diff.name!r}: {diff.alarm}" for diff in diffs if diff.alarm and not _shape_only(diff)]
    bad = _search(proto, original, result, chosen, checked) if alarms else None
    inexact = _warnings(diffs, dtype)
    failure = alarms[0] if alarms else None
    return Validation(ran_on, source, diffs, bad, None, failure, tuple(inexact.values()), frozenset(inexact))


def _shape_only(diff: TensorDiff) -> bool:
    """Outputs whose size depends on the data may differ by an element that crossed a threshold."""
    sizes_differ = diff.reference_shape != diff.result_shape
    return sizes_differ and len(diff.reference_shape) == len(diff.result_shape)


def _lost(reference: Any, found: Any) -> list[str]:
    """What is wrong with sequences and optionals as such; their elements are compared one by one."""
    if isinstance(reference, list) and isinstance(found, list):
        if len(reference) != len(found):
            return [f"The sequence has {len(found)} elements instead of {len(reference)}."]
        return [text for one, other in zip(reference, found, strict=True) for text in _lost(one, other)]
    if type(reference) is not type(found):
        return [f"It is {type(found).__name__} instead of {type(reference).__name__}."]
    return []


def _warnings(diffs: Sequence[TensorDiff], dtype: str) -> dict[str, str]:
    """Output -> what is inexact about it, though not broken."""
    limit, found = TOLERANCES[dtype], {}
    for diff in diffs:
        if _shape_only(diff):
            found[diff.name] = (
                f"Output {diff.name!r} has shape {diff.result_shape}, the original {diff.reference_shape}."
            )
        elif diff.alarm is None and diff.rel_l2 > limit and diff.reference_dtype.startswith(("float", "bfloat")):
            usual = f"relative L2; up to {limit:g} is usual for {dtype}"
            found[diff.name] = f"Output {diff.name!r} is off by {diff.rel_l2:.2g} ({usual})."
    return found


def _prepared(result: Path, provider: Provider, feeds: Mapping[str, Feed]) -> tuple[Any, dict[str, Feed]]:
    """Session and feeds for the result: itself on CUDA, its emulation on CPU."""
    proto, folder = load_model(result), folder_of(result)
    if provider == "cpu":
        return make_session(emulate(proto, base_dir=folder), "cpu"), dict(feeds)
    wanted = {entry.name: entry.type.tensor_type.elem_type for entry in proto.graph.input}
    rounded = {name: _as_declared(feed, wanted.get(name, 0)) for name, feed in feeds.items()}
    return make_session(result, "cuda"), rounded


def _as_declared(feed: Feed, elem: int) -> Feed:
    """A float32 feed for an input that the conversion made low."""
    if not elem or not isinstance(feed, np.ndarray) or feed.dtype != np.float32:
        return feed
    dtype = helper.tensor_dtype_to_np_dtype(elem)
    return feed if dtype == feed.dtype else feed.astype(dtype)


def _compare(name: str, reference: Any, found: Any) -> Iterator[TensorDiff]:
    if isinstance(reference, list) and isinstance(found, list):
        for position, (one, other) in enumerate(zip(reference, found, strict=False)):
            yield from _compare(f"{name}[{position}]", one, other)
    elif isinstance(reference, np.ndarray) and isinstance(found, np.ndarray):
        yield compare(name, reference, found)


def _search(
    original: ModelProto, source: Path, result: Path, provider: Provider, feeds: Mapping[str, Feed]
) -> FirstBad | None:
    """The first intermediate value of the main graph that goes wrong, searched a few values at a time."""
    converted, folder = load_model(result), folder_of(result)
    lowered = converted if provider == "cuda" else emulate(converted, base_dir=folder)
    theirs = {name for node in lowered.graph.node for name in node.output}
    pairs = []
    for node in original.graph.node:
        for name in node.output:
            other = next((n for n in (name, f"{name}_fp16", f"{name}_bf16", f"{name}_fp32") if n in theirs), None)
            if name and other is not None:
                pairs.append((name, other, node.op_type))
    for start in range(0, len(pairs), _VALUES_AT_A_TIME):
        group = pairs[start : start + _VALUES_AT_A_TIME]
        try:
            one = _run_with(original, folder_of(source), provider, feeds, [name for name, _, _ in group])
            two = _run_with(lowered, folder, provider, feeds, [name for _, name, _ in group])
        except OnnxAmpError:
            return None
        for name, other, op in group:
            a, b = one[name], two[other]
            if isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.shape == b.shape and first_bad(a, b):
                return FirstBad(name, op, str(compare(name, a, b).alarm))
    return None


def _run_with(
    model: ModelProto, folder: Path, provider: Provider, feeds: Mapping[str, Feed], names: Sequence[str]
) -> dict[str, Any]:
    """Run a model with other outputs: some of its intermediate values."""
    copy = ModelProto()
    copy.CopyFrom(model)
    del copy.graph.output[:]
    for name in dict.fromkeys(names):
        copy.graph.output.add(name=name)
    return run(make_session(copy, provider, base_dir=folder, optimize=False), feeds)
