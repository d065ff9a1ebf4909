"""Inputs that are sought for the error of a result: a few runs of both models, within the range of the samples.

Random inputs all give about the same error, and large values hardly a larger one. Low precision loses the small
remainder of a subtraction: the contrast of an image that is nearly flat, the noise in a silent recording, the
difference of two rows that are nearly equal. Layers that measure a spread and divide by it amplify such a remainder,
and its error. No gradient leads there from a random input, where other errors outweigh this one, so the search needs
none. It begins with inputs of little contrast, and changes the best of them at random.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from onnxamp._facts.dtypes import Format, Range
from onnxamp._model.weights import SENTINEL
from onnxamp._numerics.unseen.changed_inputs import (
    CHANGES,
    FLATTENING,
    changed,
    nudged,
)
from onnxamp._runtime.engines import Outputs, Session
from onnxamp._runtime.sessions.values import Feeds

_STARTS: Final = 16
"""Inputs of little contrast from which the search begins: of ten networks that are wrong on such inputs, they show it
of eight, and 16 further inputs of all.
"""

_NOISE: Final = 0.1
"""Largest error of float32 itself, as a share of one that is too large: beyond, no precision computes the outputs."""

_NUDGES: Final = 4
"""How often last digits are changed to see this: a difference of two equal numbers may round as before."""

_Array: TypeAlias = NDArray[np.float64]
_Outputs: TypeAlias = Mapping[str, _Array]


class Sought(NamedTuple):
    """The input with the largest error that was found.

    Attributes:
        inputs: the input.
        error: its error, as a share of the outputs.
        runs: the number of inputs on which both models ran.
    """

    inputs: Feeds
    error: float
    runs: int


class Pair(NamedTuple):
    """A model and its conversion.

    Attributes:
        reference: the model.
        result: the conversion.
        judged: the outputs that count.
    """

    reference: Session
    result: Session
    judged: frozenset[str]

    def floats(self, feeds: Feeds) -> tuple[_Outputs, _Outputs]:
        """Return the outputs of both that count.

        Raises:
            RuntimeFailure: a model does not run.
        """
        return self.exact(feeds), self._judged(self.result.run(feeds))

    def exact(self, feeds: Feeds) -> _Outputs:
        """Return the outputs of the model that count; errors as :meth:`floats`."""
        return self._judged(self.reference.run(feeds))

    def _judged(self, outputs: Outputs) -> _Outputs:
        return {
            name: np.asarray(array, np.float64)
            for name, array in outputs.items()
            if name in self.judged and isinstance(array, np.ndarray)
        }


def signals(
    sample: Feeds, ranges: Mapping[str, Range], low: Format
) -> dict[str, Range]:
    """Return the ranges of the inputs that may hold any numbers in them: masks and flags hold two.

    The range of a mask may also be that of float32, and any number between its ends would mask alike.
    """
    return {
        name: ends
        for name, ends in ranges.items()
        if max(map(abs, ends)) < low.overflow and _is_signal(np.asarray(sample[name]))
    }


def _is_signal(array: NDArray[Any]) -> bool:
    """Return whether an input holds more than the two numbers of a mask or a flag, which must not hold others."""
    numbers = array.reshape(-1)
    is_end = (numbers == numbers.min()) | (numbers == numbers.max())
    return not is_end.all()


def largest_error(
    pair: Pair,
    samples: Sequence[Feeds],
    ranges: Mapping[str, Range],
    runs: int,
    enough: float,
    then: Iterable[Feeds] = (),
) -> Sought:
    """Return the input with the largest error that a search finds.

    An error counts beside the outputs there or those of the first sample, whichever are larger: outputs that nearly
    vanish have no digits to lose. Inputs do not count where last digits of float32 alone move the outputs.

    Args:
        pair: both models.
        samples: inputs of equal shapes, to begin with.
        ranges: the ranges of the inputs that may change.
        runs: how many inputs it may try.
        enough: the error that ends the search.
        then: further inputs to try if none is found.

    Raises:
        OnnxAmpError: a model does not run.
    """
    usual, low = pair.floats(samples[0])
    scales = {name: _norm(array) for name, array in usual.items()}
    trial = _Trial(pair, scales, enough)
    best = Sought(samples[0], _error(usual, low, scales), 1)
    draw = np.random.default_rng(0)
    while best.runs < runs and best.error < enough:
        is_start = best.runs < _STARTS
        origin = samples[best.runs % len(samples)] if is_start else best.inputs
        changes = FLATTENING if is_start else CHANGES
        best = trial.better(changed(origin, ranges, draw, changes), best)
    if best.error < enough:
        for inputs in then:
            best = trial.better(inputs, best)
    return best


class _Trial(NamedTuple):
    """What inputs are tried on.

    Attributes:
        pair: both models.
        scales: the norms of outputs on the first sample.
        enough: the error that ends the search.
    """

    pair: Pair
    scales: Mapping[str, float]
    enough: float

    def better(self, inputs: Feeds, best: Sought) -> Sought:
        """Return the better one of some inputs and the best so far."""
        outputs, low = self.pair.floats(inputs)
        error = _error(outputs, low, self.scales)
        if error >= self.enough and self._is_noise(inputs, outputs):
            error = 0.0
        runs = best.runs + 1
        if error > best.error:
            return Sought(inputs, error, runs)
        return best._replace(runs=runs)

    def _is_noise(self, inputs: Feeds, outputs: _Outputs) -> bool:
        """Return whether last digits of float32 alone move the outputs."""
        nudges = (nudged(inputs, seed) for seed in range(_NUDGES))
        noises = (
            _error(outputs, self.pair.exact(feeds), self.scales) for feeds in nudges
        )
        return any(noise > _NOISE * self.enough for noise in noises)


def _norm(array: _Array) -> float:
    """Return the root of the sum of squares of the numbers, without those of masks."""
    return float(np.linalg.norm(array[np.abs(array) < SENTINEL]))


def _error(
    outputs: _Outputs,
    low: _Outputs,
    scales: Mapping[str, float],
) -> float:
    """Return the largest error of an output, as a share of it; infinite where only low precision makes NaN or Inf."""
    return max(_errors(outputs, low, scales), default=0.0)


def _errors(
    outputs: _Outputs,
    low: _Outputs,
    scales: Mapping[str, float],
) -> Iterator[float]:
    for name, array in outputs.items():
        other = low[name]
        # Beside an output that is all zero on the sample, any number would be large.
        if other.shape != array.shape or not scales[name]:
            continue
        size = max(_norm(array), scales[name])
        usual = np.abs(array) < SENTINEL  # false of NaN
        off = float(np.linalg.norm(other[usual] - array[usual]))
        yield off / size if np.isfinite(off) else inf
