"""Sizes of random inputs with which a model runs, if it does not run with the usual ones."""

from collections.abc import Callable
from contextlib import suppress
from itertools import islice
from typing import Final

from onnxamp._base.errors import ArgumentError, OnnxAmpError, RuntimeFailure
from onnxamp._graph.determined import is_consistent
from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.draws import Draw
from onnxamp._runtime.piecewise.memory import free_bytes, peak_bytes
from onnxamp._runtime.sessions.values import check_inputs

_TRIES: Final = 64
"""The most sizes that are tried. A limit in seconds would find other sizes on another machine."""

_MOST_BYTES: Final = 2 << 30
"""Bytes that the values of a model may take while sizes are only tried."""


def suited(draw: Draw, reference: Session) -> Draw:
    """Return the draw if the model runs with its sizes, or else a draw with the first other sizes with which it runs.

    The model runs only if some sizes are open, and the reference keeps its outputs. The draw stays as it is if the
    model does not load, if inputs cannot be random, or if it runs with none of the first 64 sizes.

    Raises:
        ArgumentError: a size is given for an unknown dimension, or an impossible one.
    """

    def run(one: Draw) -> None:
        reference.run_sample(0, check_inputs(reference.model.proto, one.make(0)))

    if not draw.maker().has_open:
        return draw
    try:
        run(draw)
    except RuntimeFailure as error:
        suiting = other_sizes(draw, run) if error.loaded else draw
        # The failed runs may have drawn random numbers, which no run of a result does.
        reference.restart()
        return suiting
    except (ArgumentError, MemoryError):  # reading the sample reports this
        pass
    return draw


def other_sizes(draw: Draw, run: Callable[[Draw], object]) -> Draw:
    """Return a draw with the first sizes with which ``run`` does not fail. Without such sizes, return this draw and
    what was tried.

    Sizes with which the values take too much memory are skipped; sizes that contradict an op do not run.
    """
    tried = []
    for other in islice(draw.others(), _TRIES):
        graph = other.maker().graph
        shapes = other.maker().shapes()
        if peak_bytes(graph, shapes) > min(_MOST_BYTES, free_bytes() // 2):
            continue
        # Contradictory sizes are known from the graph, which saves a session and a run.
        if is_consistent(graph, shapes):
            with suppress(OnnxAmpError, MemoryError):
                run(other)
                return other
        tried.append(other.sizes)
    return draw._replace(tried=tuple(tried))
