"""Inputs that are made to be hard: steps of gradient ascent, within the range of the samples, toward overflow.

Random inputs rarely show how large a value may become, because they rarely agree with the weights. The gradient of a
value's largest element says how they would. Each step goes to the corner of the inputs' range that it points to; where
that brings nothing, the next step is half as long.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import islice, product
from math import inf
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from onnxamp._base.errors import GradientError, OnnxAmpError
from onnxamp._bounds.bounds import Bounds, find_bounds
from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._gradients.writer import MIN_OPSET
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import graph_of
from onnxamp._model.model import Model
from onnxamp._model.protos import copied
from onnxamp._numerics.larger import in_short
from onnxamp._numerics.stressed import Headroom, Proof, Stressed
from onnxamp._options.values import Range
from onnxamp._rewrite.upgrade import plan_upgrade
from onnxamp._runtime.samples import Samples
from onnxamp._runtime.session import make_session, run
from onnxamp._runtime.values import Feeds, check_inputs

if TYPE_CHECKING:
    import onnxruntime as ort

    from onnxamp._gradients.walk import Gradients

Ranges: TypeAlias = tuple[tuple[str, Range], ...]
"""Names of inputs, each with its range."""

_SAMPLES: Final = 4
"""Samples whose values are looked at, and from the best of which the ascent begins."""

_TRIES: Final = 3
"""Values without a gradient that are passed over: what makes one hard to differentiate stands in the way of others."""

_BYTES: Final = 512 << 20
"""Bytes of weights up to which a model is differentiated as a whole, in one session."""


class Stress(NamedTuple):
    """How results in a low-precision type are stressed.

    Attributes:
        low: the type.
        steps: steps of the ascent toward each value; 0 to only prove what holds for every input.
        stated: names of inputs, each with the range that the user states.
    """

    low: Format
    steps: int
    stated: Ranges = ()

    def of(self, reference: Model, result: Model, samples: Samples) -> Stressed:
        """Return what is proven of a result, and inputs that are hard for what is not.

        Args:
            reference: the original.
            result: its conversion.
            samples: the inputs that both ran on.
        """
        given = _alike(
            check_inputs(reference.proto, one) for one in islice(samples, _SAMPLES)
        )
        seen = _ranges(given)
        stated = dict(self.stated)
        # Random numbers say nothing of the range that real ones have.
        assumed = stated if samples.made_up else {**seen, **stated}
        bounds = result.ask(graph_of).ask(
            find_bounds, self.low, tuple(sorted(assumed.items()))
        )
        proof = _proof(bounds, assumed=sorted(assumed))
        ranges = {name: stated.get(name, ends) for name, ends in seen.items()}
        movable = {name: ends for name, ends in ranges.items() if ends[0] < ends[1]}
        is_large = reference.stock.size > _BYTES
        if proof.is_complete or not self.steps or not movable or is_large:
            return Stressed(proof)
        names = _names_of(bounds, reference)
        try:
            ascent = _Ascent(reference, names, movable, given[0], self.low)
            return ascent.climbed(given, self.steps, proof)
        except OnnxAmpError as error:
            return Stressed(proof, why=in_short(error))


def _alike(samples: Iterable[Feeds]) -> list[Feeds]:
    """Return the samples with the shapes of the first one: the model is differentiated for one size."""
    every = list(samples)
    first = _shapes(every[0])
    return [feeds for feeds in every if _shapes(feeds) == first]


def _shapes(feeds: Feeds) -> dict[str, tuple[int, ...]]:
    return {
        name: array.shape
        for name, array in feeds.items()
        if isinstance(array, np.ndarray)
    }


def _ranges(samples: Sequence[Feeds]) -> dict[str, Range]:
    """Return the ranges of the float inputs on some samples."""
    found = dict[str, Range]()
    for feeds in samples:
        for name, array in feeds.items():
            if not isinstance(array, np.ndarray) or array.dtype != np.float32:
                continue
            if array.size and np.isfinite(array).all():
                low, high = found.get(name, (np.inf, -np.inf))
                found[name] = (
                    min(low, float(array.min())),
                    max(high, float(array.max())),
                )
    return found


def _proof(bounds: Bounds, assumed: Sequence[str]) -> Proof:
    """Return how many values that are low precision no input brings out of range."""
    graph = bounds.graph
    low = bounds.low.tensor
    computed = [
        value
        for value in bounds.at_risk
        if graph.types[value] == low and graph.producer(value) is not None
    ]
    proven = sum(map(bounds.is_safe, computed))
    return Proof(values=len(computed), proven=proven, assumed=tuple(assumed))


def _names_of(bounds: Bounds, reference: Model) -> list[str]:
    """Return the values of the original that a result computes in low precision and that are not proven."""
    graph = reference.ask(graph_of)
    scope = graph.scopes[0]
    ending = f"_{bounds.low.suffix}"
    found = dict[str, None]()
    for value in bounds.at_risk:
        if bounds.is_safe(value):
            continue
        name = bounds.graph.values[value].name
        for candidate in (name, name.removesuffix(ending)):
            index = scope.names.get(candidate)
            if index is not None and graph.types[index] == FLOAT:
                found[candidate] = None
                break
    return list(found)


class _Ascent:
    """Drives values of a model up.

    Attributes:
        model: the model, with the sizes of the samples, at an opset that gradients are written in.
        names: the values.
        ranges: the ranges of the inputs that may change.
        low: the low-precision type.
    """

    def __init__(
        self,
        reference: Model,
        names: Sequence[str],
        ranges: Mapping[str, Range],
        sample: Feeds,
        low: Format,
    ) -> None:
        newer = plan_upgrade(reference.ask(graph_of), MIN_OPSET).result
        self.model = Model(_sized(newer.model, sample), newer.folder)
        self.names = names
        self.ranges = ranges
        self.low = low

    def climbed(self, given: Sequence[Feeds], steps: int, proof: Proof) -> Stressed:
        """Return the hardest inputs that so many steps find, toward both ends of the value with the least headroom.

        Other values tend to grow with it.
        """
        names = self._reached()
        seen = self._seen(names, given) if names else {}
        ranked = sorted(seen, key=lambda name: max(seen[name].values()), reverse=True)
        why = ""
        for name in ranked[:_TRIES]:
            try:
                climb = _Climb.toward(self, name)
            except GradientError:  # it speaks of training
                why = why or f"an op before {name!r} has no gradient"
                continue
            starts = {
                sign: given[seen[name][sign].sample] for sign in sorted(seen[name])
            }
            ends = [
                climb.climbed(start, sign, steps) for sign, start in starts.items()
            ]
            found = Headroom(
                value=name,
                seen=max(seen[name].values()).magnitude,
                stressed=max(reached for _, reached in ends),
                range=self.low.max_finite,
            )
            told = "an input" if len(ends) == 1 else f"{len(ends)} inputs"
            readers = [partial(_itself, inputs) for inputs, _ in ends]
            return Stressed(proof, Samples(f"{told} made to be hard", readers), found)
        return Stressed(proof, why=why)

    def _reached(self) -> list[str]:
        """Return the values that depend on inputs that may change, and are none of them."""
        graph = self.model.ask(graph_of)
        scope = graph.scopes[0]
        changed = {scope.names[name] for name in self.ranges if name in scope.names}
        inputs = set(changed)
        for node in graph.order:
            if not changed.isdisjoint(node.reads):
                changed.update(node.writes)
        reached = (scope.names.get(name) for name in self.names)
        return [
            graph.values[value].name
            for value in reached
            if value in changed and value not in inputs
        ]

    def _seen(
        self, names: Sequence[str], given: Sequence[Feeds]
    ) -> dict[str, dict[float, "_Seen"]]:
        """Return what the samples show of each value, by sign: its elements of that sign with the largest magnitude."""
        model, outputs, factor = _with_largest(self.model, names)
        session = make_session(model, lean=True)
        found = dict[str, dict[float, _Seen]]()
        for number, sign in product(range(len(given)), (1.0, -1.0)):
            feeds = {**given[number], factor: np.array(sign, np.float32)}
            results = run(session, feeds, list(outputs.values()))
            for name, output in outputs.items():
                now = _Seen(float(results[output]), number)
                held = found.get(name, {}).get(sign, _Seen(0.0, 0))
                # What is out of range on the samples is a mask that was saturated, or has been judged.
                if held.magnitude < now.magnitude < self.low.overflow:
                    found.setdefault(name, {})[sign] = now
        return found


class _Seen(NamedTuple):
    """The largest magnitude of a value's elements of one sign, and the sample that shows it."""

    magnitude: float
    sample: int


class _Climb(NamedTuple):
    """A model with the gradient of a value's largest element with respect to inputs.

    Attributes:
        session: the model.
        factor: the input that is 1 for the largest element, and -1 for the least one.
        largest: the output with that element.
        slopes: by name of the input: the output with its gradient.
        ranges: the ranges of these inputs.
    """

    session: "ort.InferenceSession"
    factor: str
    largest: str
    slopes: Mapping[str, str]
    ranges: Mapping[str, Range]

    @classmethod
    def toward(cls, ascent: _Ascent, name: str) -> "_Climb":
        """Return the model for a value.

        Raises:
            GradientError: an op between the inputs and the value has no gradient.
        """
        model, outputs, factor = _with_largest(ascent.model, [name])
        gradients = _gradients(model, outputs[name], ascent.ranges)
        return cls(
            session=make_session(gradients.model, lean=True),
            factor=factor,
            largest=outputs[name],
            slopes=gradients.outputs,
            ranges=ascent.ranges,
        )

    def climbed(self, start: Feeds, sign: float, steps: int) -> tuple[Feeds, float]:
        """Return the inputs that so many steps reach, and the magnitude of the value there."""
        outputs = [self.largest, *self.slopes.values()]
        best, largest = start, -inf
        inputs, length = start, 1.0
        slopes = dict[str, NDArray[Any]]()
        for _ in range(steps + 1):
            feeds = {**inputs, self.factor: np.array(sign, np.float32)}
            results = run(self.session, feeds, outputs)
            reached = float(results[self.largest])
            if reached > largest:
                best, largest = inputs, reached
                slopes = {
                    name: results[output] for name, output in self.slopes.items()
                }
            else:
                length /= 2
            inputs = self._moved(best, slopes, length)
        return best, largest

    def _moved(
        self, inputs: Feeds, slopes: Mapping[str, NDArray[Any]], length: float
    ) -> Feeds:
        """Return inputs a step further up, within their ranges."""
        moved = dict(inputs)
        for name, slope in slopes.items():
            low, high = self.ranges[name]
            # The range of a mask is that of float32. What is beyond is clipped.
            with np.errstate(over="ignore"):
                further = moved[name] + length * (high - low) * np.sign(slope)
            moved[name] = np.clip(further, low, high).astype(np.float32)
        return moved


def _with_largest(
    model: Model, names: Sequence[str]
) -> tuple[Model, dict[str, str], str]:
    """Return a model that also returns the largest element of some values, times an input that may be 1 or -1.

    Returns:
        The model, the names of these outputs by value, and the name of the input.
    """
    graph = model.ask(graph_of)
    editor = GraphEditor(graph)
    factor = editor.names.fresh("sign")
    outputs = dict[str, str]()
    end = graph.scopes[0].nodes.stop
    for name in names:
        signed = editor.names.fresh(f"{name}/signed")
        outputs[name] = editor.names.fresh(f"{name}/largest")
        nodes = (
            editor.make("Mul", [name, factor], [signed], ""),
            editor.make("ReduceMax", [signed], [outputs[name]], "", keepdims=0),
        )
        editor.insert(0, end, *nodes)
    made = editor.finish()
    number = partial(
        helper.make_tensor_value_info, elem_type=TensorProto.FLOAT, shape=()
    )
    made.graph.input.append(number(factor))
    made.graph.output.extend(map(number, outputs.values()))
    return Model(made, model.folder), outputs, factor


def _gradients(model: Model, loss: str, inputs: Iterable[str]) -> "Gradients":
    """Return a model with the gradients of a value with respect to those inputs that it depends on.

    Raises:
        GradientError: there are none.
    """
    graph = model.ask(graph_of)
    scope = graph.scopes[0]
    needed = {scope.names[loss]}
    for node in reversed(graph.order):
        if not needed.isdisjoint(node.writes):
            needed.update(node.reads)
    wanted = [name for name in inputs if scope.names[name] in needed]
    from onnxamp._gradients.walk import differentiate  # noqa: PLC0415 - its rules take a tenth of a second to load

    return differentiate(model.embedded(), loss, wanted)


def _sized(model: ModelProto, sample: Feeds) -> ModelProto:
    """Return a model whose inputs have the sizes of a sample, because some gradients depend on them."""
    sized = copied(model)
    for entry in sized.graph.input:
        array = sample.get(entry.name)
        if isinstance(array, np.ndarray) and entry.type.HasField("tensor_type"):
            elem = entry.type.tensor_type.elem_type
            entry.CopyFrom(
                helper.make_tensor_value_info(entry.name, elem, array.shape)
            )
    return sized


def _itself(feeds: Feeds) -> Feeds:
    return feeds
