"""Loops that run no trip, one, and many, where an input says how often they run."""

from collections.abc import Iterable, Iterator
from typing import Final

import numpy as np

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.ops import op_facts, op_key
from onnxamp._numerics.unseen.excursions import Excursion, NotRun
from onnxamp._numerics.unseen.larger import apart, in_short
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.inputs.samples import held_samples
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.sessions.values import Feeds, check_inputs

_FEW: Final = (0, 1)
"""Numbers of trips at which bodies and what follows them behave otherwise than in between."""

_USUAL: Final = 4
"""The number of trips from which growth is counted: random inputs ask for at most as many."""

_MANY: Final = (64, 32, 16, 8)
"""Numbers of trips that are tried, the largest first: errors that add up show in them."""


def other_trips(reference: Session, feeds: Feeds) -> Iterator[Excursion | NotRun]:
    """Yield inputs with which the loops of a model run no trip, one, and as many as their growth allows, as far as it
    runs on them.

    A loop whose values grow faster than its trips leaves any range sooner or later, float32's as well, so nothing
    follows from many trips.

    Args:
        reference: the original.
        feeds: a random sample.
    """
    names = _trip_inputs(reference.prepare(feeds).flow)
    names = [name for name in names if _is_number(feeds.get(name))]
    if not names:
        return
    for count in _FEW:
        trips, _ = _run(reference, feeds, names, count)
        yield trips
    few, usual = _run(reference, feeds, names, _USUAL)
    if isinstance(few, NotRun):
        yield few
        return
    for count in _MANY:
        trips, outputs = _run(reference, feeds, names, count)
        most = _largest(usual) * count / _USUAL
        if isinstance(trips, Excursion) and _largest(outputs) <= most:
            yield trips
            return
    why = "values grow faster than the number of trips"
    if isinstance(trips, NotRun):
        why = trips.why
    listed = " and ".join(map(repr, names))
    what = f"more than {_USUAL} trips of the loops that {listed} counts"
    yield NotRun(what, why)


def _trip_inputs(flow: DataflowGraph) -> list[str]:
    """Return the inputs that say how often loops of the main graph run."""
    carriers = op_facts().carriers
    names = dict[str, None]()
    for node in flow.nodes:
        name = node.input[0] if op_key(node) == "Loop" else ""
        while name in flow.maker and op_key(flow.nodes[flow.maker[name]]) in carriers:
            name = flow.nodes[flow.maker[name]].input[0]
        if name in flow.inputs:
            names[name] = None
    return list(names)


def _is_number(feed: object) -> bool:
    return isinstance(feed, np.ndarray) and feed.dtype.kind in "iu" and feed.size == 1


def _run(
    reference: Session, feeds: Feeds, names: Iterable[str], count: int
) -> tuple[Excursion | NotRun, Outputs]:
    """Run the model with so many trips, and return the comparison and its outputs."""
    changed = {name: np.full_like(feeds[name], count) for name in names}
    inputs = {**feeds, **changed}
    what = ", ".join(f"{name}={count}" for name in changed)
    session = apart(reference)
    try:
        checked = check_inputs(session.model.proto, inputs)
        outputs = session.run_sample(0, checked)
    except (OnnxAmpError, MemoryError) as error:
        return NotRun(what, in_short(error) or "too little memory"), {}
    return Excursion(what, held_samples(what, [inputs]), session), outputs


def _largest(outputs: Outputs) -> float:
    """Return the largest magnitude of the floats among outputs; infinite if one is no number."""
    largest = 0.0
    for output in outputs.values():
        if isinstance(output, np.ndarray) and output.dtype.kind == "f" and output.size:
            largest = max(
                largest, float(np.nan_to_num(np.abs(output), nan=np.inf).max())
            )
    return largest
