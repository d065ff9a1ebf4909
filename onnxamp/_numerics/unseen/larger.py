"""Random inputs of larger sizes than the usual ones, and of none, for models with open dimensions.

Sums over a dynamic axis, counters and positions grow with the size, so a small sample says nothing about a large one.
The larger sample is the largest that the model accepts within a budget of work and memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Final, NamedTuple

import numpy as np

from onnxamp._base.errors import OnnxAmpError
from onnxamp._base.threads import beside
from onnxamp._graph.determined import is_consistent, loop_trips
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape
from onnxamp._graph.work import work_of
from onnxamp._numerics.unseen.excursions import Excursion, NotRun
from onnxamp._runtime.engines import Session
from onnxamp._runtime.inputs.draws import Draw
from onnxamp._runtime.inputs.random_inputs import InputMaker
from onnxamp._runtime.inputs.samples import drawn
from onnxamp._runtime.loading import the_loader
from onnxamp._runtime.piecewise.memory import free_bytes, peak_bytes
from onnxamp._runtime.sessions.values import check_inputs
from onnxamp._runtime.sizes import listed

_FACTORS: Final = (
    (256, 2048),
    (256, 256),
    (256, 32),
    (64, 64),
    (64, 4),
    (16, 16),
    (16, 2),
    (4, 4),
    (4, 1),
    (2, 1),
    (1, 2),
)
"""Factors for the sizes of dimensions, the largest first: for those of 8, and for leading ones, which are 1. With 2,048
terms, a sum of squares of six each exceeds float16, and integers end to be exact there.
"""

_FLOPS: Final = 1 << 28
_ELEMENTS: Final = 1 << 23
"""Work of the model that takes less than a tenth of a second on one core. A limit in seconds would depend on the
machine.
"""

_MORE: Final = 3
_MOST_FLOPS: Final = 1 << 32
_MOST_ELEMENTS: Final = 1 << 27
"""A model whose usual inputs take more work may take so many times as much, up to these bounds: it takes longer to
convert as well."""

_FAR: Final = 16
"""Times the budget from which on work that grows with the inputs is too much, although some of it may not grow."""

_LONGEST: Final = 120
"""Characters of a reason in a report."""

_BYTES: Final = 256 << 20
"""Bytes that the values of the model may take."""

_EMPTY_BYTES: Final = 64 << 20
"""Bytes of weights up to which an empty batch runs: loading them again would take longer than it is worth."""


def larger_draw(draw: Draw, reference: Session) -> Excursion | NotRun | None:
    """Return larger inputs on which a model runs, or why there are none; None if no dimension is open.

    Args:
        draw: the source of the usual inputs.
        reference: the model.
    """
    maker = draw.maker()
    named = maker.named
    fixed = _fixed_sizes(maker)
    usual = {
        name: max(maker.sizes[name], 1) for name in named.plain if name not in fixed
    }
    if not usual:
        return None
    budget = _Budget.of(maker)
    why = "they take too much work or memory"
    tried = [usual]
    for inner, leading in _FACTORS:
        sizes = {
            name: size * (leading if name in named.batches else inner)
            for name, size in usual.items()
        }
        growth = prod(sizes.values()) // prod(usual.values())
        if sizes in tried or budget.is_far(growth):
            continue
        tried.append(sizes)
        try:
            larger = maker.sized({**draw.sizes, **sizes})
            shapes = larger.shapes()
            if not budget.takes(larger.graph, shapes):
                continue
            if not is_consistent(larger.graph, shapes):
                why = "the model does not take them"
                continue
            session = _ran(reference, larger, draw.seed)
        except (OnnxAmpError, MemoryError) as error:
            why = in_short(error) or "they take too much memory"
            continue
        samples = drawn(Draw.by(larger, draw.seed, sizes), larger.turns)
        return Excursion(listed(sizes), samples, session)
    return NotRun(f"sizes beyond {listed(usual)}", why)


def empty_draw(draw: Draw, reference: Session) -> Callable[[], Excursion | None]:
    """Begin to try inputs with empty batches in another process, and return what waits for them.

    The inputs are None if no batch is open, or the model makes no empty outputs of them. Some kernels of ONNX Runtime
    divide by the number of elements, which ends the process: GatherND's did in 1.30.

    Args:
        draw: the source of the usual inputs.
        reference: the model.
    """
    maker = draw.maker()
    sizes = dict.fromkeys(sorted(maker.named.batches - _fixed_sizes(maker)), 0)
    if not sizes or reference.model.stock.size > _EMPTY_BYTES:
        return lambda: None
    try:
        empty = Draw.by(maker.sized({**draw.sizes, **sizes}), draw.seed, sizes)
        feeds = check_inputs(reference.model.proto, empty.make(0))
    except (OnnxAmpError, MemoryError, ValueError):
        return lambda: None
    survives = beside(partial(the_loader().runs, reference.model, feeds))
    return partial(_empty_inputs, empty, reference, survives)


def _empty_inputs(
    draw: Draw, reference: Session, survives: Callable[[], bool]
) -> Excursion | None:
    """Return the inputs of a draw with empty batches; None if the model makes no empty outputs of them."""
    maker = draw.maker()
    try:
        if not survives():
            return None
        session = _ran(reference, maker, draw.seed)
    except (OnnxAmpError, MemoryError, ValueError):
        return None
    # What nothing makes numbers of, as a recurrent op without steps, leaves them undefined.
    every = chain.from_iterable(
        kept.values() for kept in session.outputs.kept.values()
    )
    if not session.outputs.kept or any(np.size(output) for output in every):
        return None
    return Excursion(listed(draw.sizes), drawn(draw, maker.turns), session)


def _fixed_sizes(maker: InputMaker) -> frozenset[str]:
    """Return the dimensions whose sizes the user states, inputs count, or the model forces."""
    named = maker.named
    forced = maker.determined.forced if maker.determined is not None else frozenset()
    return frozenset({*maker.dims, *named.counted, *named.totals, *forced})


def in_short(error: BaseException) -> str:
    """Return what ONNX Runtime's kernel says of an error, without what surrounds it, or the beginning of the error."""
    text = " ".join(str(error).rpartition("Status Message: ")[2].split())
    return text[:_LONGEST].rstrip(". ") + ("…" if len(text) > _LONGEST else "")


def apart(reference: Session) -> Session:
    """Return a session of the model for inputs of other sizes, which keeps its outputs by itself."""
    # Emulated sums depend on their lengths; all else that is prepared suits any sizes.
    is_bound = reference.engine.arithmetic is not None
    return reference.anew({}) if is_bound else reference.alone()


def _ran(reference: Session, maker: InputMaker, seed: int) -> Session:
    """Return the model after it ran on the inputs of every turn.

    Raises:
        OnnxAmpError: it does not run.
    """
    session = apart(reference)
    draw = Draw.by(maker, seed, {})
    for number in range(maker.turns):
        feeds = check_inputs(session.model.proto, draw.make(number))
        session.run_sample(number, feeds)
    return session


class _Budget(NamedTuple):
    """The work that a larger sample may take.

    Attributes:
        usual: that of the usual sample: floating-point operations, and elements that nodes read and write.
        most: that of a larger one.
    """

    usual: tuple[int, int]
    most: tuple[int, int]

    @classmethod
    def of(cls, maker: InputMaker) -> "_Budget":
        """Return the budget for a model."""
        usual = work_of_run(maker.graph, maker.shapes())
        flops, moved = (_MORE * work for work in usual)
        most = (
            max(_FLOPS, min(flops, _MOST_FLOPS)),
            max(_ELEMENTS, min(moved, _MOST_ELEMENTS)),
        )
        return cls(usual, most)

    def is_far(self, growth: int) -> bool:
        """Return whether so many times the inputs clearly take too much, before any shape is inferred."""
        pairs = zip(self.usual, self.most, strict=True)
        return any(work * growth > _FAR * most for work, most in pairs)

    def takes(self, graph: Graph, shapes: Sequence[Shape | None]) -> bool:
        """Return whether a run with these shapes stays within the budget."""
        work = work_of_run(graph, shapes)
        if any(one > most for one, most in zip(work, self.most, strict=True)):
            return False
        return peak_bytes(graph, shapes) <= min(_BYTES, free_bytes() // 4)


def work_of_run(graph: Graph, shapes: Sequence[Shape | None]) -> tuple[int, int]:
    """Return the operations of a run, and the elements that its nodes read and write. Complexity: linear in nodes."""
    trips = graph.ask(loop_trips)
    flops = moved = 0
    for node in graph.nodes:
        work = work_of(node, shapes, trips[node.scope])
        flops += work.flops
        moved += work.elements
    return flops, moved
