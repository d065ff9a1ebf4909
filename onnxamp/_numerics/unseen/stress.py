"""Inputs that are made to be hard: steps of gradient ascent toward overflow, within the range of the samples.

Random inputs rarely show how large a value may become, because they rarely agree with the weights. The gradient of a
value's largest element says how they would. An ascent begins where one step brings most, of a sample and, for small
models, of some random inputs. Each step goes to the corner of the inputs' range that it points to; where
that brings nothing, the next step is half as long.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from onnx import helper

from onnxamp._base.errors import GradientError, OnnxAmpError
from onnxamp._facts.dtypes import FLOAT, Format, Range, may_be_float
from onnxamp._facts.providers import ANY
from onnxamp._gradients.writer import MIN_OPSET
from onnxamp._graph.bounds.bounds import Bounds
from onnxamp._graph.bounds.find import find_bounds
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.shapes import declared_dims
from onnxamp._graph.view import wire
from onnxamp._model.exponents import stored_exponents
from onnxamp._model.model import Model
from onnxamp._model.protos import copied, opset_imports
from onnxamp._numerics.unseen.climb import Climb, Seen, Watched
from onnxamp._numerics.unseen.effort import Effort, ErrorEffort, counted_work
from onnxamp._numerics.unseen.errors_sought import Pair, Sought, largest_error, signals
from onnxamp._numerics.unseen.flattened import (
    flattened,
    with_joined,
    without_functions,
)
from onnxamp._numerics.unseen.larger import in_short
from onnxamp._numerics.unseen.rooms import rooms_of
from onnxamp._numerics.unseen.small_divisors import small_divisors
from onnxamp._numerics.unseen.stressed import Headroom, Proof, Stressed
from onnxamp._numerics.unseen.ties import near_tie
from onnxamp._rewrite.passes.upgrade import plan_upgrade
from onnxamp._runtime.inputs.samples import Samples, held_samples
from onnxamp._runtime.sessions.values import Feeds, check_inputs, shapes_of

Ranges: TypeAlias = tuple[tuple[str, Range], ...]
"""Names of inputs, each with its range."""

_SAMPLES: Final = 4
"""Most samples whose values are looked at, and from the best of which the ascent begins."""

_TRIES: Final = 3
"""Values without a gradient that are passed over: what makes one hard to differentiate stands in the way of others."""

_CLOSE: Final = 0.25
"""Share of the range from which on an end counts as close to it: rounding may bring a result of others further."""

_GAIN: Final = 1.02
"""How much more a climb must bring that goes on close to the end of the range: an overflow may be near."""

_BYTES: Final = 512 << 20
"""Bytes of weights up to which a model is differentiated as a whole, in one session."""


class Stress(NamedTuple):
    """How results in a low-precision type are stressed.

    Attributes:
        low: the type.
        steps: steps of the ascent toward each value; 0 to only prove what holds for every input.
        stated: names of inputs, each with the range that the user states.
        target: what will run the result.
    """

    low: Format
    steps: int
    stated: Ranges = ()
    target: str = ANY

    def of(
        self,
        reference: Model,
        result: Model,
        samples: Samples,
        *,
        is_converted: bool = True,
    ) -> Stressed:
        """Return what is proven of a result, and inputs that are hard for what is not.

        Args:
            reference: the original.
            result: its conversion.
            samples: the inputs that both ran on.
            is_converted: whether only the values of the result that are low precision count, if any are; all floats
                may become low if not.
        """
        given = _given(reference, samples)
        # A proof in the range of the samples is one for all of them.
        every = (check_inputs(reference.proto, one) for one in samples)
        seen = _ranges(given if samples.made_up else every)
        stated = dict(self.stated)
        # Random numbers say nothing of the range that real ones have.
        assumed = stated if samples.made_up else {**seen, **stated}
        bounds = result.ask(graph_of).ask(
            find_bounds, self.low, tuple(sorted(assumed.items())), False, self.target
        )
        proof = _proof(bounds, assumed=sorted(assumed), stated=stated)
        values = bounds.at_risk if is_converted else bounds.floats
        rooms = rooms_of(bounds, values)
        movable = self._movable(seen)
        is_large = reference.stock.size > _BYTES
        # Of a model that is not converted yet, no value is low, and any may be.
        is_done = proof.is_complete
        if result is reference:
            is_done = all(map(bounds.is_safe, values))
        if is_done or not self.steps or not movable or is_large:
            return Stressed(proof, rooms=rooms)
        try:
            original = without_functions(reference)
            names = _names_of(bounds, original, values)
            model = _upgraded(original)
            if not _moved(model.ask(graph_of), movable, by_slopes=True):
                return Stressed(proof, rooms=rooms)
            exponents = _exponents_between(reference, result)
            ascent = _Ascent(model, names, movable, given[0], self.low, exponents)
            found = ascent.climbed(given, self.steps, proof)
        except OnnxAmpError as error:
            return Stressed(proof, why=in_short(error), rooms=rooms)
        return found._replace(rooms=rooms_of(bounds, values, *ascent.largest))

    def overflowing(
        self,
        model: Model,
        samples: Samples,
        exponents: Mapping[str, int] = MappingProxyType({}),
    ) -> dict[str, float]:
        """Return the values that leave the type's range on hard inputs, with their largest magnitudes there.

        Those that do so on the samples are left out.

        Args:
            model: the original.
            samples: the inputs that it runs on.
            exponents: those of values that its result stores as ``value * 2**-exponent``.
        """
        if not samples.has(0):
            return {}
        found = dict[str, float]()
        every = self.of(model, model, samples, is_converted=False)
        for room in every.rooms:
            limit = self.low.overflow * 2.0 ** exponents.get(room.value, 0)
            fits = room.seen is not None and room.seen < limit
            if fits and (room.stressed or 0.0) >= limit:
                found[room.value] = room.found
        return found

    def hard(self, model: Model, samples: Samples) -> Samples | None:
        """Return inputs that are hard for a model that is not converted yet; None if there are none.

        Args:
            model: the original.
            samples: the inputs that it runs on.
        """
        if not self.steps or not samples.has(0):
            return None
        return self.of(model, model, samples, is_converted=False).samples

    def far_off(self, samples: Samples, pair: Pair, enough: float) -> Sought | None:
        """Return the input with the largest error of a result that a search finds; None if there is no search.

        Args:
            samples: the inputs that both models ran on.
            pair: the original and the result.
            enough: the error that ends the search.
        """
        reference = pair.reference.model
        given = _given(reference, samples)
        movable = signals(given[0], self._movable(_ranges(given)), self.low)
        # Weights that do not stay in memory would be read in each run.
        if not movable or reference.stock.size > pair.reference.budget:
            return None
        effort = ErrorEffort.within(self.steps, _work(reference, given[0]))
        if not effort.inputs:
            return None
        try:
            return largest_error(
                pair,
                given,
                movable,
                effort.inputs,
                enough,
                then=self._on_small_divisors(reference, given[0], movable, effort),
            )
        except OnnxAmpError:  # the samples ran, so that other inputs are at fault
            return None

    def _on_small_divisors(
        self,
        reference: Model,
        sample: Feeds,
        ranges: Mapping[str, Range],
        effort: ErrorEffort,
    ) -> Iterator[Feeds]:
        """Yield inputs on which a divisor of the original is small."""
        if not effort.divisors:
            return
        try:
            model = _sized(_upgraded(without_functions(reference)), sample)
        except OnnxAmpError:
            return
        yield from small_divisors(model, ranges, sample, effort.steps, effort.divisors)

    def near_tie(
        self, reference: Model, samples: Samples, names: Sequence[str]
    ) -> Samples | None:
        """Return an input near a tie of a node that chooses; None if no gradient leads there.

        Args:
            reference: the original.
            samples: the inputs that it ran on.
            names: nodes that choose.
        """
        given = _given(reference, samples)
        movable = self._movable(_ranges(given))
        if not self.steps or not movable or reference.stock.size > _BYTES:
            return None
        try:
            model = _sized(_upgraded(reference), given[0])
            effort = Effort.within(self.steps, _work(model, given[0]))
            if not effort.has_lesser:
                return None
            tie = near_tie(model, movable, given[0], names, effort.steps)
        except OnnxAmpError:
            return None
        if tie is None:
            return None
        told = f"an input near a tie of {tie.node!r}"
        return held_samples(told, [tie.inputs])

    def _movable(self, seen: Mapping[str, Range]) -> dict[str, Range]:
        """Return the ranges of the inputs that may change: those that are stated, or else those of the samples."""
        stated = dict(self.stated)
        ranges = {name: stated.get(name, ends) for name, ends in seen.items()}
        return {name: ends for name, ends in ranges.items() if ends[0] < ends[1]}


def _given(reference: Model, samples: Samples) -> list[Feeds]:
    """Return the first samples, as far as their shapes are the same."""
    first = islice(samples, _SAMPLES)
    return _alike(check_inputs(reference.proto, one) for one in first)


def _upgraded(reference: Model) -> Model:
    """Return a model at an opset that gradients are written in."""
    if opset_imports(reference.proto)[""] >= MIN_OPSET:
        return reference
    newer = plan_upgrade(reference.ask(graph_of), MIN_OPSET).result
    return Model(newer.model, newer.folder)


def _alike(samples: Iterable[Feeds]) -> list[Feeds]:
    """Return the samples with the shapes of the first one: the model is differentiated for one size."""
    every = list(samples)
    first = shapes_of(every[0])
    return [feeds for feeds in every if shapes_of(feeds) == first]


def _ranges(samples: Iterable[Feeds]) -> dict[str, Range]:
    """Return the ranges of the float inputs on some samples, of those that are finite on all."""
    found = dict[str, Range]()
    infinite = set[str]()
    for feeds in samples:
        for name, array in feeds.items():
            if not isinstance(array, np.ndarray) or array.dtype != np.float32:
                continue
            if not np.isfinite(array).all():
                infinite.add(name)
            elif array.size:
                low, high = found.get(name, (np.inf, -np.inf))
                found[name] = (
                    min(low, float(array.min())),
                    max(high, float(array.max())),
                )
    return {name: ends for name, ends in found.items() if name not in infinite}


def _proof(
    bounds: Bounds, assumed: Sequence[str], stated: Mapping[str, Range]
) -> Proof:
    """Return how many values that are low precision no input brings out of range."""
    graph = bounds.graph
    low = bounds.low.tensor
    computed = [
        value
        for value in bounds.at_risk
        if graph.types[value] == low and graph.producer(value) is not None
    ]
    proven = sum(map(bounds.is_safe, computed))
    return Proof(
        values=len(computed),
        proven=proven,
        assumed=tuple(assumed),
        sampled=tuple(name for name in assumed if name not in stated),
    )


def _exponents_between(reference: Model, result: Model) -> dict[str, int]:
    """Return the exponents of values that a result stores as ``value * 2**-exponent`` of what the reference stores."""
    before = stored_exponents(reference.proto)
    after = stored_exponents(result.proto)
    names = before.keys() | after.keys()
    return {name: after.get(name, 0) - before.get(name, 0) for name in names}


def _names_of(bounds: Bounds, reference: Model, values: Iterable[int]) -> list[str]:
    """Return the values of the original that a result computes as some of its values, and that are not proven."""
    graph = reference.ask(graph_of)
    floats = {
        value.name for value in graph.values if graph.types[value.index] == FLOAT
    }
    ending = f"_{bounds.low.suffix}"
    found = dict[str, None]()
    for value in values:
        if bounds.is_safe(value):
            continue
        name = bounds.graph.values[value].name
        for candidate in (name, name.removesuffix(ending)):
            if candidate in floats:
                found[candidate] = None
                break
    return list(found)


class _Ascent:
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
        found = flattened(model, sample) if has_bodies else None
        self.inner: dict[str, str]
        """Value in a body -> the value of the flat model that holds what it is in all turns."""
        flat, self.inner = (model, {}) if found is None else with_joined(found)
        self.flat = _sized(flat, sample)
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
        effort = Effort.within(steps, _work(self.flat, given[0]))
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
            found = Headroom(
                value=name,
                seen=max(seen[name].values()).magnitude,
                stressed=self.largest[1][name],
                range=self.low.max_finite,
            )
            told = "an input" if len(chosen) == 1 else f"{len(chosen)} inputs"
            samples = held_samples(f"{told} made to be hard", chosen)
            return Stressed(proof, samples, found)
        return Stressed(proof, why=why)

    def _ends(
        self,
        climb: Climb,
        given: Sequence[Feeds],
        seen: Mapping[float, "Seen"],
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
        moved = _moved(graph, self.ranges, by_slopes=by_slopes)
        own = ((name, names.get(self.inner.get(name, name))) for name in self.names)
        return [name for name, value in own if value in moved]

    def _stored(self, seen: Mapping[str, list[Seen]]) -> dict[str, list[Seen]]:
        """Return what is seen of values, as the result stores them."""
        found = dict[str, list[Seen]]()
        for name, ends in seen.items():
            factor = 2.0 ** -self.exponents.get(name, 0)
            found[name] = [
                one._replace(magnitude=one.magnitude * factor) for one in ends
            ]
        return found

    def _fitting(self, seen: Sequence["Seen"]) -> dict[float, "Seen"]:
        """Return by sign where a value is largest on the samples, as far as it fits low precision.

        What is out of range on the samples is a mask that was saturated, or has been judged.
        """
        found = dict[float, Seen]()
        for now in seen:
            held = found.get(now.sign)
            least = held.magnitude if held else 0.0
            if least < now.magnitude < self.low.overflow:
                found[now.sign] = now
        return found


def _moved(
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
    needs = wire(graph).needs
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


def _work(model: Model, sample: Feeds) -> int:
    """Return the work of a run of a model, by counting."""
    shapes = ((name, tuple(shape)) for name, shape in shapes_of(sample).items())
    return model.ask(graph_of).ask(counted_work, tuple(shapes))


def _magnitudes(seen: Mapping[str, Sequence[Seen]]) -> dict[str, float]:
    """Return the largest magnitude of each value."""
    return {name: max(one.magnitude for one in ends) for name, ends in seen.items()}


def _sized(model: Model, sample: Feeds) -> Model:
    """Return a model whose inputs have the sizes of a sample, because some gradients depend on them."""
    shapes = shapes_of(sample)
    open_ones = {
        entry.name
        for entry in model.proto.graph.input
        if entry.type.HasField("tensor_type")
        and entry.name in shapes
        and declared_dims(entry.type) != tuple(shapes[entry.name])
    }
    if not open_ones:
        return model
    sized = copied(model.proto)
    for entry in sized.graph.input:
        if entry.name in open_ones:
            elem = entry.type.tensor_type.elem_type
            shape = shapes[entry.name]
            entry.CopyFrom(helper.make_tensor_value_info(entry.name, elem, shape))
    return Model(sized, model.folder)
