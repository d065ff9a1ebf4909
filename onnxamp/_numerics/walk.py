"""Walking two models side by side, a few nodes at a time: outputs of both, and every value that they share compared.

In each step some nodes of the reference run, then those of the result that make the same values, then, in one more
piece, the result's ops fed with the reference's values. What is compared is reduced where it is, and what nobody needs
any more is dropped, so that memory holds one step and the values that later steps read.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from onnxamp._errors import RuntimeFailure
from onnxamp._numerics.pairing import Pairing
from onnxamp._runtime.flow import Flow
from onnxamp._runtime.measure import Measurement, measure
from onnxamp._runtime.pieces import Piece, Runner
from onnxamp._runtime.session import Provider
from onnxamp._runtime.side import BUDGET, Side, ancestors, parts_of, start
from onnxamp._runtime.values import Feed

if TYPE_CHECKING:
    import onnxruntime as ort

_LOCAL: Final = "/local"
"""What names of replayed values end in."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One value of both models on one sample; ``note`` says why something could not be measured."""

    local: Measurement | None
    accumulated: Measurement | None
    note: str | None


@dataclass(frozen=True, slots=True)
class Walked:
    """What one sample gave: the outputs of both models, and the values that they share, in the reference's order."""

    reference: Mapping[str, Any]
    result: Mapping[str, Any]
    compared: Mapping[str, Compared]
    failure: str | None = None
    """Why the result could not be run to its end; then its outputs are missing."""


@dataclass(frozen=True, slots=True)
class _Step:
    reference: tuple[int, ...]
    result: tuple[tuple[int, ...], ...]
    compared: tuple[str, ...]


@dataclass(slots=True)
class Walk:
    """Two models, and the steps in which they run: found with the first sample, repeated with the others."""

    reference: Runner
    result: Runner
    pairing: Pairing
    budget: int = BUDGET
    _steps: list[_Step] = field(default_factory=list)

    def run(
        self,
        reference_feeds: Mapping[str, Feed],
        result_feeds: Mapping[str, Feed],
        progress: Callable[[int, int], None] | None = None,
    ) -> Walked:
        """Run one sample through both.

        Args:
            reference_feeds, result_feeds: the sample as either model takes it.
            progress: called with the reference's nodes that have run, and their number.

        Raises:
            RuntimeFailure: the reference does not load or run; the message names the outputs of the piece that fails.
        """
        reads = self.pairing.reads()
        reads.update(list(self.pairing.shared))
        one = start(self.reference, reference_feeds, reads)
        other = start(self.result, result_feeds, Counter(list(self.pairing.shared) if self.pairing.accumulated else ()))
        compared: dict[str, Compared] = {}
        if not self._steps:
            self._steps = list(_steps(one.flow, other.flow, self.pairing, self.budget))
        done, total = 0, len(one.flow.nodes)
        for step in self._steps:
            one.run(step.reference)
            try:
                for nodes in step.result:
                    other.run(nodes)
                    if len(step.result) > 1:
                        self.result.forget()
            except RuntimeFailure as error:
                return Walked({}, {}, compared, str(error))
            compared |= self._compare(step, one, other)
            self.reference.forget()
            self.result.forget()
            done += len(step.reference)
            if progress is not None:
                progress(done, total)
        return Walked(_outputs(one), _outputs(other), compared)

    def _compare(self, step: _Step, one: Side, other: Side) -> dict[str, Compared]:
        replayed = self._replay(step.compared, one)
        found = {}
        for name in step.compared:
            accumulated, note = None, None
            if self.pairing.accumulated:
                accumulated, note = _measured(one.values.get(name), other.values.get(name), one.runner.provider)
            local, trouble = replayed.get(name), None
            if isinstance(local, str):
                local, trouble = None, local
            elif local is not None:
                local, trouble = _measured(one.values.get(name), local, one.runner.provider)
            found[name] = Compared(local, accumulated, note or trouble)
            replayed.pop(name, None)
        replays = (self.pairing.shared[name] for name in step.compared)
        one.used([*step.compared, *(name for replay in replays if replay is not None for name in replay.reads)])
        other.used(step.compared if self.pairing.accumulated else ())
        return found

    def _replay(self, targets: Sequence[str], one: Side) -> "dict[str, ort.OrtValue | str]":
        """Target -> what the result's op makes of the reference's values; a sentence where it fails."""
        able = [name for name in targets if self.pairing.shared[name] is not None]
        if not able:
            return {}
        try:
            return dict(self._replay_together(able, one))
        except RuntimeFailure as error:
            if len(able) == 1:
                return {able[0]: str(error)}
        found: dict[str, ort.OrtValue | str] = {}
        for name in able:
            found |= self._replay([name], one)
        return found

    def _replay_together(self, targets: Sequence[str], one: Side) -> "dict[str, ort.OrtValue]":
        replays = [replay for name in targets if (replay := self.pairing.shared[name]) is not None]
        nodes = tuple(sorted({node for replay in replays for node in replay.nodes}))
        flow = self.result.flow
        made = [name for node in nodes for name in flow.nodes[node].output]
        renamed = {name: _local_name(flow, name) for name in made if name in self.pairing.standing}
        rounded = frozenset[str]().union(*(replay.rounded for replay in replays))
        wanted = tuple(renamed.get(name, name) for name in targets)
        found = self.result.run(Piece(nodes, wanted, tuple(renamed.items()), rounded), one.values)
        return dict(zip(targets, found.values(), strict=True))


def _local_name(flow: Flow, name: str) -> str:
    name += _LOCAL
    while name in flow.names:
        name += "_"
    return name


def _outputs(side: Side) -> dict[str, Any]:
    return {name: side.output(name) for name in side.flow.outputs}


def _measured(
    reference: "ort.OrtValue | None", found: "ort.OrtValue | None", provider: Provider
) -> tuple[Measurement | None, str | None]:
    if reference is None or found is None:
        return None, "not computed"
    if not reference.is_tensor() or not found.is_tensor():
        return None, "not a tensor"
    shapes = reference.shape(), found.shape()
    if shapes[0] != shapes[1]:
        return None, f"shape {tuple(shapes[1])} instead of {tuple(shapes[0])}"
    try:
        return measure(reference, found, provider), None
    except RuntimeFailure as error:
        return None, str(error)


def _steps(reference: Flow, result: Flow, pairing: Pairing, budget: int) -> Iterator[_Step]:
    """Cut the reference's nodes where the budget ends; give each part the result's nodes that make the same values.

    Complexity: linear in the nodes of both.
    """
    done: set[int] = set()
    if pairing.shared:
        budget //= 3  # a step holds the values of the reference, of the result, and the replayed ones
    for part in parts_of(reference, range(len(reference.nodes)), budget):
        made = [name for node in part for name in reference.nodes[node].output]
        targets = tuple(name for name in made if name in pairing.shared)
        needed = ancestors(result, targets, done)
        yield _Step(part, tuple(parts_of(result, needed, budget)), targets)
    rest = ancestors(result, result.outputs, done)
    yield _Step((), tuple(parts_of(result, rest, budget)), ())
