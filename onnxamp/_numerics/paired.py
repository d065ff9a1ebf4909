"""Running two models side by side, a few nodes at a time, to compare every value that they share.

Each step runs some nodes of the reference, then those of the result that compute the same values, then once more the
result's ops, fed with the reference's values, to tell their own error from what has accumulated. Values are measured
and then dropped, so that memory holds one step and what later steps read.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np

from onnxamp._base.errors import RuntimeFailure
from onnxamp._facts.dtypes import ANY_FLOAT_TENSORS, FLOAT_TENSORS
from onnxamp._model.exponents import exponents_between
from onnxamp._numerics.differences.groups import hidden_errors
from onnxamp._numerics.differences.measure import MEASURABLE, measure
from onnxamp._numerics.differences.metrics import Measurement
from onnxamp._runtime import BUDGET
from onnxamp._runtime.engines import Progress, Session
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.piecewise.parts import ancestors, parts_of
from onnxamp._runtime.piecewise.pieces import Execution, Executor, Piece, start
from onnxamp._runtime.sessions.values import Feeds, check_inputs, from_value, to_value

if TYPE_CHECKING:
    import onnxruntime as ort

_REACH: Final = 64
"""Nodes that may lie between a value of the result and the nearest values that the reference has as well."""


class Replay(NamedTuple):
    """Nodes of the result, in order, that compute a value from values of the reference, and those values."""

    nodes: tuple[int, ...]
    reads: tuple[str, ...]
    rounded: frozenset[str]
    """The ``reads`` that are low precision in the result, but not in the reference."""


class Pairing(NamedTuple):
    """Values that nodes of both models compute under one name, and how the result's ops are fed to be judged alone."""

    shared: Mapping[str, Replay | None]
    """In the reference's order; None if too many nodes lie between a value and the nearest that the reference has."""
    replaceable: frozenset[str]
    """Values of the result that are replaced by the reference's when ops are replayed."""
    exponents: Mapping[str, int]
    """Value -> e, where the result stores it as a multiple by 2^-e of what the reference does."""

    def reads(self) -> Counter[str]:
        """By value of the reference: the number of replays that read it."""
        replays = filter(None, self.shared.values())
        return Counter(chain.from_iterable(replay.reads for replay in replays))


def pair(reference: DataflowGraph, result: DataflowGraph) -> Pairing:
    """Match values by name and type.

    Complexity: linear in nodes, times the few nodes (Casts) between shared values.
    """
    both = reference.own & result.own & result.maker.keys()
    names = [name for name in reference.maker if name in both]
    shared = dict[str, Replay | None]()
    for name in names:
        # A type that is not known may be measurable; the values show.
        kinds = {reference.types.get(name), result.types.get(name)} - {None}
        if MEASURABLE.issuperset(kinds):
            shared[name] = _replay(reference, result, name)
    replaceable = (name for name in names if _can_replace(reference, result, name))
    exponents = exponents_between(reference.exponents, result.exponents)
    return Pairing(shared, frozenset(replaceable), exponents)


def _replay(
    reference: DataflowGraph, result: DataflowGraph, target: str
) -> Replay | None:
    nodes = {result.maker[target]}
    reads = dict[str, None]()
    waiting = list(nodes)
    while waiting:
        for name in result.reads[waiting.pop()]:
            if _can_replace(reference, result, name):
                reads[name] = None
            elif name in result.maker and result.maker[name] not in nodes:
                nodes.add(result.maker[name])
                waiting.append(result.maker[name])
            elif name in result.inputs or name in result.defaults:
                return None
        if len(nodes) > _REACH:
            return None
    rounded = frozenset(
        name
        for name in reads
        if result.low.get(name) not in (None, reference.low.get(name))
    )
    return Replay(tuple(sorted(nodes)), tuple(reads), rounded)


def _can_replace(reference: DataflowGraph, result: DataflowGraph, name: str) -> bool:
    """Return whether the reference's value can be fed to readers of the result's."""
    known = (
        name in reference.maker
        or name in reference.inputs
        or name in reference.defaults
    )
    if not known or name not in reference.own:
        return False
    one = reference.types.get(name)
    other = result.types.get(name)
    if (one or "").startswith("optional"):
        return False  # an empty one could not be fed
    return one == other or (one == "tensor(float)" and name in result.low)


_LOCAL: Final = "/local"
"""Suffix of the names of replayed values."""


class Compared(NamedTuple):
    """One value of both models on one sample; ``note`` says why an error could not be measured."""

    local: Measurement | None
    accumulated: Measurement | None
    note: str | None
    hidden: tuple[float, float] = (0.0, 0.0)
    """The errors, local and accumulated, of the worst group of numbers that the norm of the whole hides."""


class PairedOutputs(NamedTuple):
    """Outputs of both models on one sample, and the values that they share, in the reference's order."""

    reference: Mapping[str, Any]
    result: Mapping[str, Any]
    compared: dict[str, Compared]
    failure: str | None = None
    """Why the result does not run to its end; both outputs are missing then."""
    strayed: str = ""
    """An output that the reference computes otherwise than the form of it that ran here; "" if there is none."""
    apart: str | None = None
    """Why the models do not run side by side, although each runs alone."""


_Step: TypeAlias = tuple[tuple[int, ...], tuple[tuple[int, ...], ...], tuple[str, ...]]
"""Nodes of both models that run together, by position, and the values that are compared then."""


@dataclass(slots=True)
class PairedExecution:
    """Two models run side by side. The steps are found with the first sample and repeated with the others."""

    reference: Executor
    result: Executor
    pairing: Pairing
    budget: int = BUDGET
    kept: tuple[str, ...] = ()
    """Values that are returned beside the outputs."""
    groups: bool = False
    """Whether groups of numbers within each value are compared as well."""
    accumulated: bool = True
    """Whether the result's own values are compared as well as the replayed ones."""
    _steps: list[_Step] = field(default_factory=list)

    def run(self, feeds: Feeds, progress: Progress | None = None) -> PairedOutputs:
        """Run one sample through both models.

        Args:
            feeds: by input, in any float types.
            progress: called with the nodes of the reference that have run, and their number.

        Raises:
            RuntimeFailure: the reference does not load or run; the message names the outputs of the piece that fails.
            ArgumentError: a model has an input that is not fed.
        """
        shared = Counter(list(self.pairing.shared))
        kept = Counter(self.kept)
        one = start(self.reference, feeds, self.pairing.reads() + shared + kept)
        own = shared if self.accumulated else Counter[str]()
        other = start(self.result, feeds, own + kept)
        if not self._steps:
            flows = self.reference.flow, self.result.flow
            self._steps = list(_steps(*flows, self.pairing, self.budget))
        done = 0
        compared = dict[str, Compared]()
        for part, groups, targets in self._steps:
            one.run(part)
            try:
                for nodes in groups:
                    other.run(nodes)
                    if len(groups) > 1:
                        self.result.forget()
            except RuntimeFailure as error:
                return PairedOutputs({}, {}, compared, str(error))
            compared |= self._compare(targets, one, other)
            self.reference.forget()
            self.result.forget()
            done += len(part)
            if progress is not None:
                progress(done, len(self.reference.flow.nodes))
        outputs = _outputs(one, self.kept), _outputs(other, self.kept)
        return PairedOutputs(outputs[0], outputs[1], compared)

    def _compare(
        self, targets: Sequence[str], one: Execution, other: Execution
    ) -> dict[str, Compared]:
        replayed = self._replay(targets, one)
        compared = {}
        for name in targets:
            accumulated = None
            note = None
            exponent = self.pairing.exponents.get(name, 0)
            reference = self._as_stored(one, name)
            result = other.values.get(name)
            if self.accumulated:
                accumulated, note = _measured(reference, result, exponent)
            local = None
            alone = replayed.get(name)
            trouble = None
            if isinstance(alone, str):
                alone, trouble = None, alone
            elif alone is not None:
                local, trouble = _measured(reference, alone, exponent)
            hidden = 0.0, 0.0
            if self.groups:
                hidden = _hidden(reference, alone, result)
            compared[name] = Compared(local, accumulated, note or trouble, hidden)
            replayed.pop(name, None)
        one.used(targets)
        for replay in filter(None, map(self.pairing.shared.get, targets)):
            one.used(replay.reads)
        other.used(targets if self.accumulated else ())
        return compared

    def _as_stored(self, one: Execution, name: str) -> "ort.OrtValue | None":
        """Return a value of the reference as the result stores it."""
        value = one.values.get(name)
        exponent = self.pairing.exponents.get(name)
        if value is None or not exponent:
            return value
        if not value.is_tensor() or value.data_type() not in FLOAT_TENSORS:
            return value
        array = from_value(value)
        with np.errstate(over="ignore"):
            scaled = array.astype(np.float32) * np.float32(2.0**-exponent)
            return to_value(
                np.asarray(scaled).astype(array.dtype)
            )  # of a scalar, NumPy makes no array

    def _replay(
        self, targets: Sequence[str], one: Execution
    ) -> "dict[str, ort.OrtValue | str]":
        """By target: what the result's op makes of the reference's values, or a sentence if it fails."""
        able = [name for name in targets if self.pairing.shared[name] is not None]
        if not able:
            return {}
        try:
            return dict(self._replay_together(able, one))
        except RuntimeFailure as error:
            if len(able) == 1:
                return {able[0]: str(error)}
        replayed: dict[str, ort.OrtValue | str] = {}
        for name in able:
            replayed |= self._replay([name], one)
        return replayed

    def _replay_together(
        self, targets: Sequence[str], one: Execution
    ) -> "dict[str, ort.OrtValue]":
        replays = [
            replay
            for name in targets
            if (replay := self.pairing.shared[name]) is not None
        ]
        # Values may share nodes, such as a Cast, which run once.
        nodes = tuple(sorted(set[int]().union(*(replay.nodes for replay in replays))))
        flow = self.result.flow
        # Results get other names, because nodes that read them are fed with the reference's value of that name.
        renamed = {
            name: _local_name(flow, name)
            for name in flow.outputs_of(nodes)
            if name in self.pairing.replaceable
        }
        rounded = frozenset[str]().union(*(replay.rounded for replay in replays))
        wanted = tuple(renamed.get(name, name) for name in targets)
        reads = set[str]().union(*(replay.reads for replay in replays))
        given = dict(one.values)
        for name in reads & self.pairing.exponents.keys():
            value = self._as_stored(one, name)
            if value is not None:
                given[name] = value
        piece = Piece(nodes, wanted, tuple(renamed.items()), rounded)
        values = self.result.run(piece, given)
        return dict(zip(targets, values.values(), strict=True))


def _local_name(flow: DataflowGraph, name: str) -> str:
    name += _LOCAL
    while name in flow.names:
        name += "_"
    return name


def _outputs(execution: Execution, kept: Sequence[str]) -> dict[str, Any]:
    names = dict.fromkeys((*execution.flow.outputs, *kept))
    return {name: execution.output(name) for name in names}


def _measured(
    reference: "ort.OrtValue | None",
    result: "ort.OrtValue | None",
    exponent: int,
) -> tuple[Measurement | None, str | None]:
    if reference is None or result is None:
        return None, "not computed"
    if not reference.is_tensor() or not result.is_tensor():
        return None, "not a tensor"
    shapes = reference.shape(), result.shape()
    if shapes[0] != shapes[1]:
        return None, f"shape {tuple(shapes[1])} instead of {tuple(shapes[0])}"
    try:
        return measure(reference, result).times(2.0**exponent), None
    except RuntimeFailure as error:
        return None, str(error)


def _hidden(
    reference: "ort.OrtValue | None",
    alone: "ort.OrtValue | None",
    result: "ort.OrtValue | None",
) -> tuple[float, float]:
    """Return the errors of the worst groups of numbers of a value that the norm of the whole hides.

    Args:
        reference: the value.
        alone: what the result's op makes of the reference's values.
        result: what it makes of its own.
    """
    if reference is None or not _is_float(reference):
        return 0.0, 0.0
    results = [
        from_value(value)
        if value is not None
        and _is_float(value)
        and value.shape() == reference.shape()
        else None
        for value in (alone, result)
    ]
    one, other = hidden_errors(from_value(reference), results)
    return one, other


def _is_float(value: "ort.OrtValue") -> bool:
    """Return whether a value is a tensor of floats."""
    return value.is_tensor() and value.data_type() in ANY_FLOAT_TENSORS


def _steps(
    reference: DataflowGraph, result: DataflowGraph, pairing: Pairing, budget: int
) -> Iterator[_Step]:
    """Cut the reference's nodes where the budget ends, and give each part the result's nodes for the same values.

    Complexity: linear in the nodes of both models.
    """
    done: set[int] = set()
    if pairing.shared:
        budget //= 3  # a step holds the values of the reference, of the result, and the replayed ones
    for part in parts_of(reference, range(len(reference.nodes)), budget):
        outputs = reference.outputs_of(part)
        targets = tuple(name for name in outputs if name in pairing.shared)
        needed = ancestors(result, targets, done)
        yield part, tuple(parts_of(result, needed, budget)), targets
    rest = ancestors(result, result.outputs, done)
    yield (), tuple(parts_of(result, rest, budget)), ()


@dataclass(slots=True)
class PairedSessions:
    """Two models to run side by side. What is prepared for one sample serves others that take the same branches."""

    reference: Session
    result: Session
    groups: bool = False
    accumulated: bool = True
    """Both as for :class:`PairedExecution`."""
    _execution: PairedExecution | None = None

    def prepare(self, sample: Feeds) -> None:
        """Prepare both models for a sample that was not checked.

        Raises:
            ArgumentError: it does not fit the reference. Others as :meth:`Session.prepare`.
        """
        feeds = check_inputs(self.reference.model.proto, sample)
        self.reference.prepare(feeds)
        self.result.prepare(feeds)

    def run(self, feeds: Feeds, progress: Progress | None = None) -> PairedOutputs:
        """See :meth:`PairedExecution.run`. Errors of :meth:`Session.prepare` are raised as well."""
        one = self.reference.prepare(feeds)
        other = self.result.prepare(feeds)
        if (
            self._execution is None
            or self._execution.reference is not one
            or self._execution.result is not other
        ):
            self._execution = PairedExecution(
                reference=one,
                result=other,
                pairing=pair(one.flow, other.flow),
                budget=self.reference.budget,
                kept=self.reference.parts_of(one.flow, other.flow),
                groups=self.groups,
                accumulated=self.accumulated,
            )
        return self._execution.run(feeds, progress)
