"""Ascents toward the largest magnitudes of a model's values, within the ranges of its inputs.

Each begins where one step brings most, of a sample and, for small models, of some random inputs. A step goes to the
corner of the inputs' range that the gradient points to; where that brings nothing, the next step is half as long.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from onnxamp._base.errors import GradientError
from onnxamp._facts.dtypes import Format, Range, may_be_float
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.wiring import wire
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.climb import Climb, Seen, Watched
from onnxamp._numerics.unseen.effort import Effort, operations_of
from onnxamp._numerics.unseen.flattened import flattened, sized, with_joined
from onnxamp._numerics.unseen.stressed import Headroom, Proof, Stressed
from onnxamp._runtime.inputs.samples import held_samples
from onnxamp._runtime.sessions.values import Feeds

_TRIES: Final = 3
"""Values without a gradient that are passed over: what makes one hard to differentiate stands in the way of others."""

_CLOSE: Final = 0.25
"""Share of the range from which on an end counts as close to it: rounding may bring a result of others further."""

_GAIN: Final = 1.02
"""How much more a climb must bring that goes on close to the end of the range: an overflow may be near."""


class Ascent:
    """Drives values of a model up.

    Attributes:
        model: the model, at an opset that gradients are written in. A branch that no sample takes may not suit the
            sizes of the samples, so it has none of them.
        flat: the same with the sizes of the samples, and without control flow, as it runs on the first one, if that is
            known.
        names: the values, also those of bodies.
        ranges: the ranges of the inputs that may change.
        low: the low-precision type.
        exponents: those of values that the result stores as ``value * 2**-exponent``. All magnitudes are those that it
            stores.
    """

    def __init__(
        self,
        model: Model,
        names: Sequence[str],
        ranges: Mapping[str, Range],
        sample: Feeds,
        low: Format,
        exponents: Mapping[str, int],
    ) -> None:
        self.model = model
        has_bodies = len(model.ask(graph_of).scopes) > 1
        flattening = flattened(model, sample) if has_bodies else None
        self.inner: dict[str, str]
        """Value in a body -> the value of the flat model that holds what it is in all turns."""
        flat, self.inner = (
            (model, {}) if flattening is None else with_joined(flattening)
        )
        self.flat = sized(flat, sample)
        self.names = names
        self.ranges = ranges
        self.low = low
        self.exponents = exponents
        self.largest: tuple[dict[str, float], ...] = ({}, {})
        """The largest magnitudes of values, on the samples and on the hardest inputs."""

    def climbed(self, given: Sequence[Feeds], steps: int, proof: Proof) -> Stressed:
        """Return the hardest inputs that so many steps find, toward both ends of the value with the least headroom.

        Other values tend to grow with it.
        """
        sloping = self._reached(by_slopes=True)
        if not sloping:
            return Stressed(proof)
        names = self._reached()
        effort = Effort.within(steps, operations_of(self.flat, given[0]))
        # Other samples may take other branches and turns, and a look at all values takes as long as a step.
        if self.inner or effort.is_least:
            given = given[:1]
        watched = Watched.of(self.model, names)
        every = self._stored(watched.largest(given))
        self.largest = (_magnitudes(every), {})
        seen = {name: self._fitting(every[name]) for name in sloping}
        seen = {name: ends for name, ends in seen.items() if ends}
        ranked = sorted(seen, key=lambda name: max(seen[name].values()), reverse=True)
        why = ""
        for name in ranked[:_TRIES]:
            try:
                target = self.inner.get(name, name)
                climb = Climb.toward(self.flat, self.ranges, target)
            except GradientError:  # it speaks of training
                why = why or f"an op before {name!r} has no gradient"
                continue
            most = self.low.max_finite * 2.0 ** self.exponents.get(name, 0)
            ends = self._ends(climb, given, seen[name], effort, most)
            reached = max(there for _, there in ends)
            # The lesser end matters where it comes close to the end of the range.
            least = min(reached, most * _CLOSE)
            chosen = [inputs for inputs, there in ends if there >= least]
            hard = self._stored(watched.largest(chosen))
            self.largest = (_magnitudes(every), _magnitudes(hard))
            headroom = Headroom(
                value=name,
                seen=max(seen[name].values()).magnitude,
                stressed=self.largest[1][name],
                range=self.low.max_finite,
            )
            what = "an input" if len(chosen) == 1 else f"{len(chosen)} inputs"
            samples = held_samples(f"{what} made to be hard", chosen)
            return Stressed(proof, samples, headroom)
        return Stressed(proof, why=why)

    def _ends(
        self,
        climb: Climb,
        given: Sequence[Feeds],
        seen: Mapping[float, Seen],
        effort: Effort,
        most: float,
    ) -> list[tuple[Feeds, float]]:
        """Return the inputs that climbs reach toward one or both ends of a value, and its magnitude there.

        Args:
            climb: leads toward the value.
            given: the samples.
            seen: by sign, where it is largest on them.
            effort: how far to go.
            most: the largest magnitude of the value that the result can store.
        """
        ranked = sorted(seen, key=lambda sign: seen[sign].magnitude, reverse=True)
        signs = ranked if effort.has_lesser else ranked[:1]
        # Other inputs may take other branches and turns than those of the flat model.
        more = [] if self.inner else [*self._anywhere(given[0], effort.starts - 1)]
        ends = []
        for sign in sorted(signs):
            start = climb.begun([given[seen[sign].sample], *more], sign)
            ends.append(self._climbed(climb, start, sign, effort, most))
        return ends

    def _climbed(
        self, climb: Climb, start: Feeds, sign: float, effort: Effort, most: float
    ) -> tuple[Feeds, float]:
        """Return the inputs that a climb reaches, which goes on as long as that brings much close to the end."""
        if effort.is_least:  # nothing to choose from, so that nothing is measured
            return climb.stepped(start, sign), 0.0
        inputs, reached = climb.climbed(start, sign, effort.steps)
        for _ in range(effort.rounds):
            if not most * _CLOSE <= reached <= most:
                break
            before = reached
            inputs, reached = climb.climbed(inputs, sign, effort.steps)
            if reached < before * _GAIN:
                break
        return inputs, reached

    def _anywhere(self, sample: Feeds, count: int) -> Iterator[Feeds]:
        """Yield random inputs within the ranges."""
        draw = np.random.default_rng(0)
        for _ in range(count):
            moved = dict(sample)
            for name, ends in self.ranges.items():
                array = sample[name]
                # The range of a mask is that of float32: any number between its ends would mask alike.
                is_mask = max(map(abs, ends)) >= self.low.overflow
                if isinstance(array, np.ndarray) and not is_mask:
                    drawn = draw.uniform(*ends, array.shape)
                    moved[name] = np.asarray(drawn, np.float32)
            yield moved

    def _reached(self, *, by_slopes: bool = False) -> list[str]:
        """Return the values that depend on inputs that may change, and are none of them.

        Args:
            by_slopes: only those that depend on them by floats: no gradient leads through sizes and ids.
        """
        graph = self.flat.ask(graph_of)
        names = graph.scopes[0].names
        moved = moved_values(graph, self.ranges, by_slopes=by_slopes)
        own = ((name, names.get(self.inner.get(name, name))) for name in self.names)
        return [name for name, value in own if value in moved]

    def _stored(self, seen: Mapping[str, list[Seen]]) -> dict[str, list[Seen]]:
        """Return what is seen of values, as the result stores them."""
        stored = dict[str, list[Seen]]()
        for name, ends in seen.items():
            factor = 2.0 ** -self.exponents.get(name, 0)
            stored[name] = [
                end._replace(magnitude=end.magnitude * factor) for end in ends
            ]
        return stored

    def _fitting(self, seen: Sequence[Seen]) -> dict[float, Seen]:
        """Return by sign where a value is largest on the samples, as far as it fits low precision.

        A value out of range on the samples is a mask that the result saturates, or was judged before.
        """
        largest = dict[float, Seen]()
        for now in seen:
            held = largest.get(now.sign)
            least = held.magnitude if held else 0.0
            if least < now.magnitude < self.low.overflow:
                largest[now.sign] = now
        return largest


def moved_values(
    graph: Graph, inputs: Iterable[str], *, by_slopes: bool = False
) -> set[int]:
    """Return the values of the main graph that depend on some inputs, and are none of them.

    Args:
        graph: the graph.
        inputs: names of inputs.
        by_slopes: only those that depend on them by floats: no gradient leads through sizes and ids.
    """
    scope = graph.scopes[0]
    given = {scope.names[name] for name in inputs if name in scope.names}
    moved = set(given)
    needs = graph.ask(wire).needs
    for node in graph.order:
        if node.scope or moved.isdisjoint(needs[node.index]):
            continue
        # A body may hold a slope of which nothing leaves it.
        is_any = bool(node.bodies) or not by_slopes
        moved.update(
            value
            for value in node.writes
            if is_any or may_be_float(graph.types[value])
        )
    return moved - given


def _magnitudes(seen: Mapping[str, Sequence[Seen]]) -> dict[str, float]:
    """Return the largest magnitude of each value."""
    return {name: max(end.magnitude for end in ends) for name, ends in seen.items()}
