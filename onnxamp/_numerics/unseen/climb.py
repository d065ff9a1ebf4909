"""Steps of gradient ascent within the ranges of inputs, toward the largest element of a value."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from onnxamp._facts.dtypes import Range
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.graph import Graph, graph_of
from onnxamp._graph.wiring import leading_to
from onnxamp._model.model import Model
from onnxamp._numerics.unseen.body_ranges import with_body_ranges
from onnxamp._runtime.sessions.session import make_session, run
from onnxamp._runtime.sessions.shell import take_weights
from onnxamp._runtime.sessions.values import Feed, Feeds

if TYPE_CHECKING:
    import onnxruntime as ort


class Seen(NamedTuple):
    """The largest magnitude of a value's elements of one sign on a sample, and the number of the sample."""

    magnitude: float
    sample: int
    sign: float


class Watched(NamedTuple):
    """A model that returns the largest and the least element of some values.

    Attributes:
        session: the model.
        weights: its large weights, which it reads as inputs.
        outputs: by name of a value of the main graph: the outputs with these elements.
        inner: by name of a value in bodies, several of which may use it: the outputs with its largest magnitudes over
            all turns.
    """

    session: "ort.InferenceSession"
    weights: Feeds
    outputs: Mapping[str, tuple[str, str]]
    inner: Mapping[str, list[str]]

    @classmethod
    def of(cls, model: Model, names: Sequence[str]) -> "Watched":
        """Return a model that is ready to run."""
        graph = model.ask(graph_of)
        within = defaultdict[str, list[str]](list)
        if not set(names) <= graph.scopes[0].names.keys():
            proto, inner_ranges = with_body_ranges(graph)
            for output, inside in inner_ranges.items():
                within[graph.values[inside].name].append(output)
            graph = Graph.of(proto, model.folder)
        editor = GraphEditor(graph)
        outputs = dict[str, tuple[str, str]]()
        for name in names:
            value = graph.scopes[0].names.get(name)
            if value is None:
                continue
            most, least = (_fresh(editor, name, end) for end in ("most", "least"))
            outputs[name] = most, least
            # There are hundreds of them, and the helpers of onnx take longer than all runs.
            nodes = (
                NodeProto(op_type="ReduceMax", input=[name], output=[most]),
                NodeProto(op_type="ReduceMin", input=[name], output=[least]),
            )
            # So near to what makes it, they need no more memory than the model, and little more time.
            editor.insert_after(graph.values[value].producer, *nodes)
        proto = editor.finish()
        for ends in outputs.values():
            proto.graph.output.extend(ValueInfoProto(name=end) for end in ends)
        inner = {
            name: within[name]
            for name in names
            if name not in outputs and name in within
        }
        ranges = chain.from_iterable(inner.values())
        proto.graph.output.extend(ValueInfoProto(name=output) for output in ranges)
        shell = take_weights(proto, model.folder, keep=0)
        session = make_session(shell.fed(), optimize=False)
        return cls(session, shell.arrays(), outputs, inner)

    def largest(self, given: Sequence[Feeds]) -> dict[str, list[Seen]]:
        """Return what inputs show of each value: its largest elements of either sign.

        Only the magnitude is known of values in bodies, which may be that of either.
        """
        seen: dict[str, list[Seen]] = {
            name: [] for name in (*self.outputs, *self.inner)
        }
        every = [end for ends in self.outputs.values() for end in ends]
        every += chain.from_iterable(self.inner.values())
        for number, feeds in enumerate(given):
            results = run(self.session, {**feeds, **self.weights}, every)
            for name, (most, least) in self.outputs.items():
                seen[name].append(Seen(results[most].item(), number, 1.0))
                seen[name].append(Seen(-results[least].item(), number, -1.0))
            for name, magnitudes in self.inner.items():
                magnitude = max(float(results[output].item()) for output in magnitudes)
                seen[name] += [Seen(magnitude, number, sign) for sign in (1.0, -1.0)]
        return seen


class Climb(NamedTuple):
    """A model with the gradient of a value's largest element with respect to inputs.

    Attributes:
        session: the model.
        weights: its large weights, which it reads as inputs.
        factor: the input that is 1 for the largest element, and -1 for the least one.
        largest: the output with that element.
        slopes: by name of the input: the output with its gradient.
        ranges: the ranges of these inputs.
    """

    session: "ort.InferenceSession"
    weights: Feeds
    factor: str
    largest: str
    slopes: Mapping[str, str]
    ranges: Mapping[str, Range]

    @classmethod
    def toward(cls, model: Model, ranges: Mapping[str, Range], name: str) -> "Climb":
        """Return the model for a value.

        Args:
            model: the model that computes the value.
            ranges: the ranges of the inputs that may change.
            name: the value.

        Raises:
            GradientError: an op between the inputs and the value has no gradient.
        """
        watched, largest, factor = _with_largest(model, name)
        # No rule looks at a large weight.
        shell = take_weights(watched.proto, watched.folder, keep=0)
        graph = model.ask(graph_of)
        names = graph.scopes[0].names
        _, needed = leading_to(graph, [names[name]])
        wanted = [entry for entry in ranges if names[entry] in needed]
        from onnxamp._gradients.walk import differentiate  # noqa: PLC0415 - its rules take a tenth of a second to load

        gradients = differentiate(shell.model, largest, wanted)
        return cls(
            # It runs a few times only, which takes less time than optimizing it.
            session=make_session(
                shell._replace(model=gradients.model).fed(), optimize=False
            ),
            weights=shell.arrays(),
            factor=factor,
            largest=largest,
            slopes=gradients.outputs,
            ranges=ranges,
        )

    def begun(self, starts: Sequence[Feeds], sign: float) -> Feeds:
        """Return the inputs from which to climb: those that one step from the best of the starts reaches."""
        if len(starts) == 1:
            return starts[0]
        ends = [self.climbed(start, sign, 1) for start in starts]
        return max(ends, key=itemgetter(1))[0]

    def stepped(self, start: Feeds, sign: float) -> Feeds:
        """Return the inputs that one step reaches, whatever the value is there."""
        outputs = list(self.slopes.values())
        results = run(self.session, {**start, **self._fed(sign)}, outputs)
        slopes = {name: results[output] for name, output in self.slopes.items()}
        return self._moved(start, slopes, 1.0)

    def climbed(self, start: Feeds, sign: float, steps: int) -> tuple[Feeds, float]:
        """Return the inputs that so many steps reach, and the magnitude of the value there."""
        outputs = [self.largest, *self.slopes.values()]
        turned = self._fed(sign)
        best, largest = start, -inf
        inputs, length = start, 1.0
        slopes = dict[str, NDArray[Any]]()
        for _ in range(steps + 1):
            results = run(self.session, {**inputs, **turned}, outputs)
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

    def _fed(self, sign: float) -> dict[str, Feed]:
        """Return what is fed beside a sample: weights, and the sign of which elements are to become large."""
        return {**self.weights, self.factor: np.array(sign, np.float32)}

    def toward_zero(self, start: Feeds, steps: int) -> Feeds:
        """Return the inputs that so many steps of Newton's method reach toward the zero of a value that is negative;
        the given ones if no step leads nearer.
        """
        turned = self._fed(1.0)
        outputs = [self.largest, *self.slopes.values()]
        best, largest = start, -inf
        inputs = start
        for _ in range(steps + 1):
            results = run(self.session, {**inputs, **turned}, outputs)
            reached = float(results[self.largest])
            if reached > largest:
                best, largest = inputs, reached
            slopes = {name: results[output] for name, output in self.slopes.items()}
            # What a step through the whole range would gain if the value were linear.
            gain = sum(self._gain(name, slope) for name, slope in slopes.items())
            if not 0 < gain < inf:
                break
            inputs = self._moved(inputs, slopes, min(1.0, -reached / gain))
        return best

    def _gain(self, name: str, slope: NDArray[Any]) -> float:
        """Return what a step through the whole range of an input gains, to first order."""
        low, high = self.ranges[name]
        return float(np.abs(slope).sum(dtype=np.float64)) * (high - low)

    def _moved(
        self, inputs: Feeds, slopes: Mapping[str, NDArray[Any]], length: float
    ) -> Feeds:
        """Return inputs a step further up, within their ranges."""
        moved = dict(inputs)
        for name, slope in slopes.items():
            low, high = self.ranges[name]
            # The range of a mask is that of float32, which is too wide for float32 itself.
            direction = np.sign(slope, dtype=np.float64)
            further = moved[name] + length * (high - low) * direction
            moved[name] = np.clip(further, low, high).astype(np.float32)
        return moved


def _with_largest(model: Model, name: str) -> tuple[Model, str, str]:
    """Return a model that also returns the largest element of a value, times an input that may be 1 or -1.

    Returns:
        The model, the name of this output, and that of the input.
    """
    graph = model.ask(graph_of)
    editor = GraphEditor(graph)
    factor, signed, largest = (
        _fresh(editor, name, what) for what in ("sign", "signed", "largest")
    )
    nodes = (
        editor.make("Mul", [name, factor], [signed], ""),
        editor.make("ReduceMax", [signed], [largest], "", keepdims=0),
    )
    editor.insert(0, graph.scopes[0].nodes.stop, *nodes)
    proto = editor.finish()
    proto.graph.input.append(_number(factor))
    proto.graph.output.append(_number(largest))
    return Model(proto, model.folder), largest, factor


def _number(name: str) -> ValueInfoProto:
    """Return the declaration of a float without axes."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, ())


def _fresh(editor: GraphEditor, name: str, what: str) -> str:
    return editor.names.fresh(f"{name}/{what}")
