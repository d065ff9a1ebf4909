"""Sentences about two models on a sample, besides the numbers by which they differ."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final

import numpy as np

from onnxamp._base.words import shortened
from onnxamp._numerics.paired import PairedOutputs
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.sessions.values import Feeds


def mismatches(reference: Outputs, result: Outputs) -> Iterator[str]:
    """Yield sentences about differences of outputs that no limit allows."""
    for name, value in reference.items():
        for text in _differences(value, result[name]):
            yield f"Output {name!r}: {text}"


def unmatched(reference: DataflowGraph, result: DataflowGraph) -> tuple[str, ...]:
    """Return sentences about inputs and outputs that only one of the models has, and that are not compared."""
    inputs = [
        f"Only the reference takes the input {name!r}."
        for name in reference.inputs
        if name not in result.inputs and name not in result.defaults
    ]
    outputs = [
        f"Only the result has the output {name!r}; it is not compared."
        for name in result.outputs
        if name not in reference.outputs
    ]
    return (*inputs, *outputs)


def nan_inputs(feeds: Feeds) -> Iterator[str]:
    """Yield sentences about inputs with NaN, which spreads through the model."""
    for name, feed in feeds.items():
        if not isinstance(feed, np.ndarray) or feed.dtype.kind != "f":
            continue
        if count := int(np.isnan(feed).sum()):
            yield f"Input {name!r} holds NaN in {count:,} of {feed.size:,} elements."


def left_to_cpu(result: Session) -> Iterator[str]:
    """Yield a sentence about the nodes that the engine left to the CPU."""
    left = result.left_to_cpu()
    if left:
        ops = [f"{op} ({times})" for op, times in left.most_common()]
        listed = shortened(ops, 5, "op type")
        yield f"The engine left {left.total()} nodes to the CPU: {listed}."


def faults(reference: Session, result: Session, ran: PairedOutputs) -> Iterator[str]:
    """Yield sentences about what onnxamp could not run as it wanted to."""
    report = "This is a fault of onnxamp; please report it."
    if ran.strayed:
        yield (
            f"Layers are compared with a prepared form of the reference, which computes another {ran.strayed!r} than the"
            f" reference itself. {report}"
        )
    if ran.apart is not None:
        yield f"The values inside could not be compared: {ran.apart} Both models run as a whole. {report}"
    if reference.changed:
        yield f"The reference ran in a prepared form, as it does not run as it is: {reference.changed}"
    for which, session in (("reference", reference), ("result", result)):
        if session.joined:
            yield f"The {which} ran as a whole, because it does not run in pieces: {session.joined} {report}"


def _differences(reference: Any, result: Any) -> list[str]:
    """Return the differences of sequences, maps and optionals as such; their elements are compared one by one."""
    if isinstance(reference, Mapping) and isinstance(result, Mapping):
        lost = [key for key in reference if key not in result]
        new = [key for key in result if key not in reference]
        texts = {"The map lacks": lost, "Only the result's map has": new}
        return [f"{text} the {_keys(keys)}." for text, keys in texts.items() if keys]
    if isinstance(reference, list) and isinstance(result, list):
        if len(reference) != len(result):
            return [
                f"The sequence has {len(result)} elements instead of {len(reference)}."
            ]
        return [*chain.from_iterable(map(_differences, reference, result))]
    if type(reference) is not type(result):
        return [
            f"It is {type(result).__name__} instead of {type(reference).__name__}."
        ]
    return []


_MOST_KEYS: Final = 5
"""Keys that a sentence names."""


def _keys(keys: Sequence[Any]) -> str:
    named = ", ".join(map(repr, keys[:_MOST_KEYS]))
    if len(keys) == 1:
        return f"key {named}"
    return f"{len(keys)} keys {named}{', ...' if len(keys) > _MOST_KEYS else ''}"
