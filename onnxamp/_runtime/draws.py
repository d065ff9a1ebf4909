"""How many made-up samples a verdict takes: where errors are draws, as many as show what the error of an output is."""

from collections.abc import Iterator, Mapping
from math import ceil, prod
from typing import Final

from onnxamp._dtypes import FLOAT_ELEMS
from onnxamp._graph.graph import graph_of
from onnxamp._model.model import Model
from onnxamp._ops.profiles import sums_low
from onnxamp._runtime.random_inputs import input_maker
from onnxamp._runtime.sizes import BATCH

NUMBERS: Final = 64
"""Numbers that show what the error of an output is. The root mean square of fewer, n, is less than about the cube root
of n / 64 of that in one case of twenty, as chi-square says for n from 3 on.
"""

LEAST, MOST = 4, 16
"""Samples where float16 is summed up in float16: the error that one of them shows is a draw."""


def usual_count(model: Model, *engines: str | None, dims: Mapping[str, int] | None = None) -> int:
    """How many made-up samples a verdict takes where nobody says.

    One; where an engine (a target or provider) sums up float16 in float16, as many as hold :data:`NUMBERS` numbers of
    the smallest float output whose size is known, from :data:`LEAST` to :data:`MOST`.

    Raises:
        ArgumentError: ``dims`` names an unknown dimension or gives an impossible size.
    """
    if not sums_low(*engines):
        return 1
    return min(MOST, max(LEAST, ceil(NUMBERS / min(_sizes(model, dims), default=NUMBERS))))


def _sizes(model: Model, dims: Mapping[str, int] | None) -> Iterator[int]:
    """Numbers of each float output on a made-up sample, where shapes tell; an unknown leading size is a batch."""
    graph = model.ask(graph_of)
    shapes = graph.shapes_at(input_maker(graph, dims).sizes)
    for entry in graph.model.graph.output:
        shape = shapes[graph.scopes[0].names[entry.name]]
        if entry.type.tensor_type.elem_type in FLOAT_ELEMS and shape is not None and None not in shape[1:]:
            size = prod(BATCH if size is None else size for size in shape)
            if size:
                yield size
