"""Inputs that are made to be hard: toward overflow, a large error, or a tie, within the range of the samples.

Random inputs rarely show how large a value may become, because they rarely agree with the weights. The gradient of a
value's largest element says how they would.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from onnxamp._base.errors import OnnxAmpError
from onnxamp._facts.dtypes import FLOAT, Format, Range
from onnxamp._facts.providers import ANY
from onnxamp._gradients.writer import MIN_OPSET
from onnxamp._graph.bounds.bounds import Bounds
from onnxamp._graph.bounds.find import find_bounds
from onnxamp._graph.graph import graph_of
from onnxamp._model.exponents import exponents_between, stored_exponents
from onnxamp._model.model import Model
from onnxamp._model.protos import opset_imports
from onnxamp._numerics.unseen.ascent import Ascent, moved_values
from onnxamp._numerics.unseen.effort import Effort, ErrorEffort, operations_of
from onnxamp._numerics.unseen.errors_sought import Pair, Sought, largest_error, signals
from onnxamp._numerics.unseen.flattened import sized, without_functions
from onnxamp._numerics.unseen.larger import in_short
from onnxamp._numerics.unseen.rooms import rooms_of
from onnxamp._numerics.unseen.small_divisors import small_divisors
from onnxamp._numerics.unseen.stressed import Proof, Stressed
from onnxamp._numerics.unseen.ties import near_tie
from onnxamp._rewrite.passes.upgrade import plan_upgrade
from onnxamp._runtime.inputs.samples import Samples
from onnxamp._runtime.sessions.values import Feeds, check_inputs, shapes_of

Ranges: TypeAlias = tuple[tuple[str, Range], ...]
"""Names of inputs, each with its range."""

_SAMPLES: Final = 4
"""Most samples whose values are looked at, and from the best of which the ascent begins."""

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
    ) -> Stressed:
        """Return what is proven of a result, and inputs that are hard for what is not.

        Args:
            reference: the original.
            result: its conversion, whose low-precision values count, if it has any. The original itself before it is
                converted: all of its floats may become low.
            samples: the inputs that both ran on.
        """
        given = _given(reference, samples)
        # A proof in the range of the samples is one for all of them.
        every = (check_inputs(reference.proto, sample) for sample in samples)
        seen = _ranges(given if samples.made_up else every)
        stated = dict(self.stated)
        # Random numbers say nothing of the range that real ones have.
        assumed = stated if samples.made_up else {**seen, **stated}
        bounds = result.ask(graph_of).ask(
            find_bounds, self.low, tuple(sorted(assumed.items())), False, self.target
        )
        proof = _proof(bounds, assumed=sorted(assumed), stated=stated)
        is_converted = result is not reference
        values = bounds.at_risk if is_converted else bounds.floats
        rooms = rooms_of(bounds, values)
        movable = self._movable(seen)
        is_large = reference.stock.size > _BYTES
        is_done = proof.is_complete
        if not is_converted:
            is_done = all(map(bounds.is_safe, values))
        if is_done or not self.steps or not movable or is_large:
            return Stressed(proof, rooms=rooms)
        try:
            original = without_functions(reference)
            names = _names_of(bounds, original, values)
            model = _upgraded(original)
            if not moved_values(model.ask(graph_of), movable, by_slopes=True):
                return Stressed(proof, rooms=rooms)
            stored = (stored_exponents(one.proto) for one in (reference, result))
            exponents = exponents_between(*stored)
            ascent = Ascent(model, names, movable, given[0], self.low, exponents)
            stressed = ascent.climbed(given, self.steps, proof)
        except OnnxAmpError as error:
            return Stressed(proof, why=in_short(error), rooms=rooms)
        return stressed._replace(rooms=rooms_of(bounds, values, *ascent.largest))

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
        magnitudes = dict[str, float]()
        every = self.of(model, model, samples)
        for room in every.rooms:
            limit = self.low.overflow * 2.0 ** exponents.get(room.value, 0)
            fits = room.seen is not None and room.seen < limit
            if fits and (room.stressed or 0.0) >= limit:
                magnitudes[room.value] = room.found
        return magnitudes

    def hard(self, model: Model, samples: Samples) -> Samples | None:
        """Return inputs that are hard for a model that is not converted yet; None if there are none.

        Args:
            model: the original.
            samples: the inputs that it runs on.
        """
        if not self.steps or not samples.has(0):
            return None
        return self.of(model, model, samples).samples

    def far_off(self, samples: Samples, pair: Pair, enough: float) -> Sought | None:
        """Return the input with the largest error of a result that a search finds; None if there is no search.

        Args:
            samples: the inputs that both models ran on.
            pair: the original and the result.
            enough: the error that ends the search.
        """
        reference = pair.reference.model
        given = _given(reference, samples)
        ranges = self._movable(_ranges(given))
        # A recording may begin with silence, from which no search leads anywhere.
        given.sort(key=lambda one: -len(signals(one, ranges, self.low)))
        movable = signals(given[0], ranges, self.low)
        # Weights that do not stay in memory would be read in each run.
        if not movable or reference.stock.size > pair.reference.budget:
            return None
        effort = ErrorEffort.within(self.steps, operations_of(reference, given[0]))
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
            model = sized(_upgraded(without_functions(reference)), sample)
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
            effort = Effort.within(self.steps, operations_of(reference, given[0]))
            if not effort.has_lesser:
                return None
            model = sized(_upgraded(reference), given[0])
            return near_tie(model, movable, given[0], names, effort.steps)
        except OnnxAmpError:
            return None

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
    ranges = dict[str, Range]()
    infinite = set[str]()
    for feeds in samples:
        for name, array in feeds.items():
            if not isinstance(array, np.ndarray) or array.dtype != np.float32:
                continue
            if not np.isfinite(array).all():
                infinite.add(name)
            elif array.size:
                low, high = ranges.get(name, (np.inf, -np.inf))
                ranges[name] = (
                    min(low, float(array.min())),
                    max(high, float(array.max())),
                )
    return {name: ends for name, ends in ranges.items() if name not in infinite}


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


def _names_of(bounds: Bounds, reference: Model, values: Iterable[int]) -> list[str]:
    """Return the values of the original that a result computes as some of its values, and that are not proven."""
    graph = reference.ask(graph_of)
    floats = {
        value.name for value in graph.values if graph.types[value.index] == FLOAT
    }
    ending = f"_{bounds.low.suffix}"
    names = dict[str, None]()
    for value in values:
        if bounds.is_safe(value):
            continue
        name = bounds.graph.values[value].name
        for candidate in (name, name.removesuffix(ending)):
            if candidate in floats:
                names[candidate] = None
                break
    return list(names)
