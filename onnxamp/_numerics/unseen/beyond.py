"""Comparisons beyond the samples: on branches that no sample takes, other sizes, and other numbers of trips.

Both models take the same branches and get the same inputs there. What cannot run is named.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Final, NamedTuple

import numpy as np

from onnxamp._base.errors import OnnxAmpError
from onnxamp._base.records import record
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._numerics.unseen.larger import (
    OtherInputs,
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


class Excursion(NamedTuple):
    """A comparison beyond the samples.

    Attributes:
        what: the branches or sizes, in words.
        samples: the inputs.
        reference: the original, which takes these branches or sizes, and keeps its outputs.
        alone: the same for each single branch, if there are several: with all together, the values at hand may suit
            none.
        is_hard: whether the inputs are made to be hard, so that limits are wider.
        is_empty: whether padding is all that the inputs hold, so that outputs mean nothing and only NaN and Inf count.
    """

    what: str
    samples: Samples
    reference: Session
    alone: tuple["Excursion", ...] = ()
    is_hard: bool = False
    is_empty: bool = False


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
    branches = _OtherBranches(reference, at_hand, flow.conditions, set(taken))
    excursions = list[Excursion]()
    if runs:
        excursions += branches.found()
    else:
        branches.refuse_all()
    not_run = [*branches.refused, *_idle_loops(reference, at_hand)]
    if runs and samples.draw is not None:
        other = _DrawnExcursions(reference, samples, samples.draw)
        excursions += other.found()
        not_run += other.refused
    return Beyond(tuple(excursions), tuple(not_run))


class _DrawnExcursions:
    """Random inputs of other kinds than the samples: other sizes, masks and numbers of trips.

    Attributes:
        refused: clauses about those that cannot be run.
    """

    def __init__(self, reference: Session, samples: Samples, draw: Draw) -> None:
        self.reference = reference
        self.samples = samples
        self.draw = draw
        self.refused = list[str]()

    def found(self) -> Iterator[Excursion]:
        """Yield comparisons on such inputs, on which the reference runs."""
        draw, reference = self.draw, self.reference
        empty = empty_draw(draw, reference)
        larger = larger_draw(draw, reference)
        yield from self._tried(larger)
        yield from self._tried(empty())
        if larger is None or larger.samples is None or larger.reference is None:
            yield from _masks(self.samples, draw, reference)
        else:
            yield from _masks(
                larger.samples, larger.samples.draw or draw, larger.reference
            )
        feeds = check_inputs(reference.model.proto, self.samples[0])
        for trips in other_trips(reference, feeds):
            yield from self._tried(trips)

    def _tried(self, inputs: OtherInputs | None) -> Iterator[Excursion]:
        """Yield the comparison on inputs on which the reference runs; note why it does not run on others."""
        if inputs is None:
            return
        if inputs.samples is None or inputs.reference is None:
            self.refused.append(f"{inputs.what} ({inputs.why})")
        else:
            yield Excursion(inputs.what, inputs.samples, inputs.reference)


def _masks(samples: Samples, draw: Draw, reference: Session) -> Iterator[Excursion]:
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
            yield Excursion(
                what,
                inputs,
                reference.alone(),
                is_empty=is_padding and not keeps,
            )


def _at_hand(samples: Samples) -> Samples:
    """Return the first samples."""
    count = min(_AT_HAND, max(samples.taken, 1))
    readers = [partial(samples.__getitem__, number) for number in range(count)]
    return Samples(samples.description, readers, samples.draw)


class _OtherBranches:
    """The branches that no sample takes.

    Attributes:
        refused: clauses about those that cannot be run.
    """

    def __init__(
        self,
        reference: Session,
        samples: Samples,
        conditions: Sequence[Condition],
        taken: set[Branch],
    ) -> None:
        self.reference = reference
        self.samples = samples
        self.refused = list[str]()
        self.left = list[tuple[Condition, bool]]()
        self.runs = 0
        for condition, holds in uncovered(conditions, taken):
            if condition.ends:
                self.left.append((condition, holds))
            else:
                why = "the loop around it might not end"
                self.refuse(condition, holds=holds, why=why)

    def refuse(self, condition: Condition, *, holds: bool, why: str) -> None:
        """Note that a branch cannot be run."""
        self.refused.append(f"{branch_name(condition, holds=holds)} ({why})")

    def refuse_all(self) -> None:
        """Note that no branch is run."""
        for condition, holds in self.left:
            known = "no sample takes it"
            unknown = "whether a sample takes it is unknown"
            why = unknown if condition.repeats else known
            self.refuse(condition, holds=holds, why=why)

    def found(self) -> Iterator[Excursion]:
        """Yield comparisons that cover the branches, as many as possible in each."""
        while self.left and self.runs < _RUNS:
            chosen = self._together()
            excursion, _ = self._run(chosen)
            if excursion is None:
                yield from self._one_by_one(chosen)
                continue
            if len(chosen) > 1:
                alone = [
                    Excursion(_named([one]), self.samples, self._session([one]))
                    for one in chosen
                ]
                excursion = excursion._replace(alone=tuple(alone))
            yield excursion
            self.left = [one for one in self.left if one not in chosen]
        for condition, holds in self.left:
            why = f"it takes more than {_RUNS} runs"
            self.refuse(condition, holds=holds, why=why)
        self.left = []

    def _together(self) -> list[tuple[Condition, bool]]:
        """Return branches that do not contradict each other, the first of those that are left among them."""
        forced: dict[str, bool] = {}
        chosen = []
        for condition, holds in self.left:
            way = way_to(condition, holds=holds)
            if all(forced.get(key, side) is side for key, side in way.items()):
                forced |= way
                chosen.append((condition, holds))
        return chosen

    def _one_by_one(
        self, chosen: Sequence[tuple[Condition, bool]]
    ) -> Iterator[Excursion]:
        """Yield those that run by themselves."""
        for one in chosen:
            excursion, why = self._run([one]) if self.runs < _RUNS else (None, "")
            if excursion is not None:
                yield excursion
            else:
                condition, holds = one
                why = why or f"it takes more than {_RUNS} runs"
                self.refuse(condition, holds=holds, why=why)
            self.left.remove(one)

    def _session(self, chosen: Sequence[tuple[Condition, bool]]) -> Session:
        forced: dict[str, bool] = {}
        for condition, holds in chosen:
            forced |= way_to(condition, holds=holds)
        return self.reference.anew(forced)

    def _run(
        self, chosen: Sequence[tuple[Condition, bool]]
    ) -> tuple[Excursion | None, str]:
        """Return the comparison if the reference runs through these branches, or why it does not."""
        self.runs += 1
        session = self._session(chosen)
        try:
            for number, sample in enumerate(self.samples):
                feeds = check_inputs(session.model.proto, sample)
                session.run_sample(number, feeds)
        except (OnnxAmpError, MemoryError) as error:
            return None, f"the values at hand do not suit it: {in_short(error)}"
        return Excursion(_named(chosen), self.samples, session), ""


def _named(chosen: Sequence[tuple[Condition, bool]]) -> str:
    """Return branches in words."""
    names = [branch_name(one, holds=holds) for one, holds in chosen[:_NAMED]]
    count = len(chosen) - len(names)
    more = f" and {count} more branches" if count else ""
    return ", ".join(names) + more


def _idle_loops(reference: Session, samples: Samples) -> Iterator[str]:
    """Yield clauses about the loops of the main graph whose body no sample runs."""
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
            yield f"the body of {label} (no sample makes it run)"


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
