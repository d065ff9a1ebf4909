"""Comparisons beyond the samples: on branches that no sample takes, other sizes, and other numbers of trips.

Both models take the same branches and get the same inputs there. What cannot run is named.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, TypeAlias

import numpy as np

from onnxamp._base.errors import OnnxAmpError
from onnxamp._base.records import record
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._numerics.unseen.excursions import Excursion, NotRun
from onnxamp._numerics.unseen.larger import (
    empty_draw,
    in_short,
    larger_draw,
)
from onnxamp._numerics.unseen.trips import other_trips
from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.draws import Draw
from onnxamp._runtime.inputs.samples import Samples, held_samples
from onnxamp._runtime.piecewise.choices import (
    Branch,
    Condition,
    branch_name,
    uncovered,
    way_to,
)
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.piecewise.pieces import Execution, run_alone
from onnxamp._runtime.sessions.values import check_inputs

_AT_HAND: Final = 4
"""Samples whose values a branch gets: it may cost as much as a sample that takes it."""

_RUNS: Final = 8
"""Runs through other branches at most. One or two cover all of most models."""

_NAMED: Final = 3
"""Branches that a text names."""

_Side: TypeAlias = tuple[Condition, bool]
"""A condition, and whether the branch is meant that runs if it holds."""


@record
class Beyond:
    """All comparisons beyond the samples, and clauses about what cannot be run."""

    excursions: tuple[Excursion, ...] = ()
    not_run: tuple[str, ...] = ()


def find_beyond(
    reference: Session, samples: Samples, taken: Iterable[Branch], *, runs: bool
) -> Beyond:
    """Find what the samples leave out, and run the reference there.

    Args:
        reference: the original.
        samples: the samples that it ran on.
        taken: the branches that it took.
        runs: whether to run it; if not, branches and loops are only named.
    """
    at_hand = _at_hand(samples)
    flow = reference.prepare(check_inputs(reference.model.proto, at_hand[0])).flow
    sides = uncovered(flow.conditions, taken)
    parts = [*_other_branches(reference, at_hand, sides, runs=runs)]
    parts += _idle_loops(reference, at_hand)
    if runs and samples.draw is not None:
        parts += _drawn(reference, samples, samples.draw)
    excursions = (part for part in parts if isinstance(part, Excursion))
    not_run = (part.clause for part in parts if isinstance(part, NotRun))
    return Beyond(tuple(excursions), tuple(not_run))


def _drawn(
    reference: Session, samples: Samples, draw: Draw
) -> Iterator[Excursion | NotRun]:
    """Yield random inputs of other kinds than the samples: other sizes, masks and numbers of trips."""
    empty = empty_draw(draw, reference)
    larger = larger_draw(draw, reference)
    emptied = empty()
    yield from filter(None, (larger, emptied))
    if isinstance(larger, Excursion):
        inputs = larger.samples
        yield from _masks(inputs, inputs.draw or draw, larger.reference)
    else:
        yield from _masks(samples, draw, reference)
    feeds = check_inputs(reference.model.proto, samples[0])
    yield from other_trips(reference, feeds)


def _masks(
    samples: Samples, draw: Draw, reference: Session
) -> Iterator[Excursion | NotRun]:
    """Yield comparisons on masks that keep all elements of a row, or none, where no sample of a draw has such rows."""
    maker = draw.maker()
    feeds = samples[0]
    for keeps, kept in ((True, "all"), (False, "none")):
        masks = maker.masked(feeds, keeps=keeps)
        changed = {
            name: mask
            for name, mask in masks.items()
            if not np.array_equal(mask, np.asarray(feeds[name]))
        }
        if changed:
            named = ", ".join(f"{name!r}" for name in changed)
            what = f"{kept} of each row kept by {named}"
            inputs = held_samples(what, [{**feeds, **changed}])
            is_padding = all(
                maker.tells_padding(name, mask.shape) for name, mask in changed.items()
            )
            is_empty = is_padding and not keeps
            session = reference.alone()
            yield _tried(Excursion(what, inputs, session, is_empty=is_empty))


def _at_hand(samples: Samples) -> Samples:
    """Return the first samples."""
    count = min(_AT_HAND, max(samples.taken, 1))
    readers = [partial(samples.__getitem__, number) for number in range(count)]
    return Samples(samples.description, readers, samples.draw)


def _other_branches(
    reference: Session, samples: Samples, sides: Sequence[_Side], *, runs: bool
) -> Iterator[Excursion | NotRun]:
    """Yield comparisons that cover these branches, if the model runs, and the branches that none covers."""
    for condition, holds in sides:
        if not condition.ends:
            why = "the loop around it might not end"
            yield NotRun(branch_name(condition, holds=holds), why)
    left = [(condition, holds) for condition, holds in sides if condition.ends]
    if runs:
        yield from _BranchRuns(reference, samples, left).found()
        return
    for condition, holds in left:
        known = "no sample takes it"
        unknown = "whether a sample takes it is unknown"
        why = unknown if condition.repeats else known
        yield NotRun(branch_name(condition, holds=holds), why)


class _BranchRuns:
    """Runs through the branches that no sample takes."""

    def __init__(
        self, reference: Session, samples: Samples, left: Sequence[_Side]
    ) -> None:
        self.reference = reference
        self.samples = samples
        self.left = left
        self.runs = 0

    def found(self) -> Iterator[Excursion | NotRun]:
        """Yield comparisons that cover the branches, as many as possible in each, and the branches that do not run."""
        while self.left and self.runs < _RUNS:
            chosen = self._together()
            self.left = [one for one in self.left if one not in chosen]
            outcome = self._run(chosen)
            if len(chosen) == 1:
                yield outcome
            elif isinstance(outcome, NotRun):
                yield from (self._run([one]) for one in chosen)
            else:
                alone = [
                    Excursion(_named([one]), self.samples, self._session([one]))
                    for one in chosen
                ]
                yield outcome._replace(alone=tuple(alone))
        yield from (self._run([one]) for one in self.left)

    def _together(self) -> list[_Side]:
        """Return branches that do not contradict each other, the first of those that are left among them."""
        forced: dict[str, bool] = {}
        chosen = []
        for condition, holds in self.left:
            way = way_to(condition, holds=holds)
            if all(forced.get(key, side) is side for key, side in way.items()):
                forced |= way
                chosen.append((condition, holds))
        return chosen

    def _session(self, chosen: Sequence[_Side]) -> Session:
        forced: dict[str, bool] = {}
        for condition, holds in chosen:
            forced |= way_to(condition, holds=holds)
        return self.reference.anew(forced)

    def _run(self, chosen: Sequence[_Side]) -> Excursion | NotRun:
        """Return the comparison if the reference runs through these branches, or why it does not."""
        what = _named(chosen)
        if self.runs == _RUNS:
            return NotRun(what, f"it takes more than {_RUNS} runs")
        self.runs += 1
        return _tried(Excursion(what, self.samples, self._session(chosen)))


def _tried(excursion: Excursion) -> Excursion | NotRun:
    """Return the comparison if the reference runs there, or why it does not."""
    session = excursion.reference
    try:
        for number, sample in enumerate(excursion.samples):
            feeds = check_inputs(session.model.proto, sample)
            session.run_sample(number, feeds)
    except (OnnxAmpError, MemoryError) as error:
        why = f"the values at hand do not suit it: {in_short(error)}"
        return NotRun(excursion.what, why)
    return excursion


def _named(chosen: Sequence[_Side]) -> str:
    """Return branches in words."""
    names = [branch_name(one, holds=holds) for one, holds in chosen[:_NAMED]]
    count = len(chosen) - len(names)
    more = f" and {count} more branches" if count else ""
    return ", ".join(names) + more


def _idle_loops(reference: Session, samples: Samples) -> Iterator[NotRun]:
    """Yield the loops of the main graph whose body no sample runs."""
    stopped = dict[str, None]()
    ran = set[str]()
    for sample in samples:
        feeds = check_inputs(reference.model.proto, sample)
        executor = reference.prepare(feeds)
        reads = _trip_values(executor.flow)
        names = dict.fromkeys(name for name, _ in chain.from_iterable(reads.values()))
        execution = run_alone(executor, feeds, [*names]) if names else None
        for label, loop in reads.items():
            if execution is not None and _stops(execution, loop):
                stopped[label] = None
            else:
                ran.add(label)
    # A loop is idle only if no sample runs it.
    for label in stopped:
        if label not in ran:
            yield NotRun(f"the body of {label}", "no sample makes it run")


def _trip_values(flow: DataflowGraph) -> Mapping[str, list[tuple[str, int | None]]]:
    """Return the values that tell how often loops run, by loop: numbers, or values whose axis counts."""
    loops = {}
    for node in flow.nodes:
        if op_key(node) not in op_facts().repeats:
            continue
        reads: list[tuple[str, int | None]] = []
        if op_key(node) == "Loop":  # the number of trips, and the condition
            reads = [(name, None) for name in node.input[:2] if name]
        else:
            scanned = attribute(node, "num_scan_inputs") or 0
            axes = attribute(node, "scan_input_axes") or [0] * scanned
            reads = [*zip(node.input[len(node.input) - scanned :], axes, strict=True)]
        if reads:
            label = node.name or node.output[0]
            loops[f"{op_key(node)} {label!r}"] = reads
    return loops


def _stops(execution: Execution, reads: Sequence[tuple[str, int | None]]) -> bool:
    """Return whether one of the values that a loop reads makes it run no trip."""
    for name, axis in reads:
        value = np.asarray(execution.output(name))
        if axis is not None and value.shape[axis] == 0:
            return True
        if axis is None and value.size and value.reshape(-1)[0] <= 0:
            return True
    return False
