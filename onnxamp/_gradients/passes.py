"""The passes of one sample: the values of the forward pass, vectors of signs over its outputs, and costs of rounding.

A product with a large matrix goes back for all samples and vectors of signs at once. The gradient of the matrix is as
large as the matrix, and is never formed. Instead, the rounding errors of the matrix are multiplied by the rows, which
gives the error of the result. Column by column, the scalar product of that error with the result's gradient is the
effect of the errors in one column of the matrix. The many columns are independent of each other.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import inf, isnan
from typing import Final, NamedTuple

import numpy as np
from onnx import parser

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.records import record
from onnxamp._facts.dtypes import FLOAT, Format
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._gradients.backward import SUMMED
from onnxamp._gradients.quantizers import Floats, LowPass, shown_errors
from onnxamp._model.weights import SENTINEL
from onnxamp._runtime.piecewise.flow import DataflowGraph
from onnxamp._runtime.piecewise.pieces import Execution, Executor, start
from onnxamp._runtime.sessions.session import Provider, make_session, run
from onnxamp._runtime.sessions.values import Feeds

_GROUPS: Final = 8
"""Groups of outputs whose errors are measured separately. If there are more outputs, some share a group, and their sum
counts.
"""

_HOLDERS: Final = ("seq(", "optional(")
"""How the types of values that hold tensors begin."""

_TURNS: Final = np.array(
    [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]], np.float32
)
"""The signs of four elements, repeated, for each vector of signs of an output of few elements. These rows are
orthogonal, so that four vectors are exact for four elements."""

_MANY: Final = 256
"""Elements from which on one vector is enough."""

_COLUMNS: Final = 256
"""Columns from which on the sum over them hardly depends on the signs."""

_BLOCK: Final = 1 << 24
"""Elements of a matrix that are rounded at a time."""

_PRODUCT: Final = """<ir_version: 8, opset_import: ["": 18]>
product (float[n,k] x, float[k,m] w, float[r,m] dy) => (float[n,m] moved, float[r,k] dx) {{
    low = Cast <to = {elem}> (w) high = Cast <to = 1> (low) error = Sub (high, w)
    moved = MatMul (x, error) dx = Gemm <transB = 1> (dy, w)
}}"""


@record
class Rounded:
    """The effect of rounding a value.

    Attributes:
        largest: the largest magnitude of its elements, apart from sentinels such as those of attention masks; 0 for
            weights.
        costs: by group of outputs: the squared relative error that rounding this value alone causes; the last one is
            that of values that decide what is selected, and which branches are taken.
        summed: the same where its node sums up as the target does; empty where that makes no difference.
        read: by first output of a node that reads it, where several do: the same where it is rounded for that node.
    """

    largest: float
    costs: tuple[float, ...]
    summed: tuple[float, ...]
    read: Mapping[str, tuple[float, ...]]


@record
class Sensitivities:
    """The measurements of one sample.

    Attributes:
        values: by name of the value.
        spread: labels of nodes without a gradient rule, whose inputs were moved instead.
        shown: by group of outputs: the squared relative error of a pass in which all that a plan lowers is rounded;
            empty if nothing is rounded to integers.
    """

    values: Mapping[str, Rounded]
    spread: tuple[str, ...]
    shown: tuple[float, ...] = ()


class Seed(NamedTuple):
    """A vector of signs over the outputs of a group, and how many the group has."""

    group: int
    probes: int
    gradients: dict[str, Floats]


class Passes:
    """The passes of one sample; ``again`` counts how often the backward pass reads each value.

    Attributes:
        side: the forward pass, and the values that the backward pass needs.
        lowering: makes a second forward pass, in low precision.
        beside: this second pass; None if the model has no quantizers, or does not run in low precision.
        groups: outputs whose errors are kept apart. The last group holds what decides selections and branches.
        largest: the largest magnitudes of float values so far, without sentinels. They are negated for values that hold
            sentinels or NaN.
        shapes: the shapes of these values.
        seeds: the vectors of signs.
        waiting: by vector of signs: the gradients of values so far.
        gains: by result of a quantizer: the error of its result divided by the error of its input.
        costs: by value and kind of cost (see ``Backward.costs``): the costs by group so far.
        spread: labels of nodes without a gradient rule so far.
        shown: as in the result.
    """

    def __init__(
        self, runner: Executor, feeds: Feeds, again: Counter[str], lowering: LowPass
    ) -> None:
        flow = runner.flow
        ends = _ends(flow)
        decisive = _decisive(flow)
        names = (*flow.inputs, *flow.maker)
        seen = [name for name in names if flow.types.get(name) == FLOAT]
        self.side = start(runner, feeds, again + Counter([*ends, *decisive, *seen]))
        self.lowering = lowering
        self.beside = lowering.begin(feeds, (*ends, *decisive))
        self.groups = [ends[at::_GROUPS] for at in range(min(_GROUPS, len(ends)))]
        self.groups.append(decisive)
        self.largest = dict[str, float]()
        self.shapes = dict[str, tuple[int, ...]]()
        self.seeds = list[Seed]()
        self.waiting = list[dict[str, Floats]]()
        self.gains = dict[str, float]()
        self.costs = dict[str, dict[str, list[float]]]()
        self.spread = dict[str, None]()
        self.shown = tuple[float, ...]()
        self._see(seen)

    def forward(self, part: Sequence[int]) -> None:
        """Run a piece."""
        self.side.run(part)
        self._see(self.side.flow.outputs_of(part))
        if self.beside is None:
            return
        try:
            self.gains |= self.lowering.gains(part, self.side, self.beside)
        except RuntimeFailure:  # in low precision, the model does not run
            self.beside = None

    def _see(self, names: Iterable[str]) -> None:
        """Note the largest magnitudes and the shapes of values that have just been computed."""
        side = self.side
        for name in names:
            if side.flow.types.get(name) == FLOAT and name in side.values:
                sizes = np.abs(side.values[name].numpy())
                most = float(sizes.max(initial=0.0))
                if not most < SENTINEL:  # true of NaN as well
                    most = -float(sizes[sizes < SENTINEL].max(initial=0.0))
                self.largest[name] = most
                self.shapes[name] = sizes.shape
                side.used([name])

    def turn(self, random: np.random.Generator) -> None:
        """Draw the signs from which the backward pass begins."""
        self.seeds = list(_seeds(self.side, self.groups, random))
        self.waiting = [dict(seed.gradients) for seed in self.seeds]
        if self.beside is not None:
            self.shown = shown_errors(self.groups, self.side, self.beside)
            # This releases its values before the backward pass needs memory.
            self.beside = None

    def add(self, key: tuple[str, str], seed: Seed, cost: float) -> None:
        """Add to a cost of a value the share that a vector of signs shows."""
        name, what = key
        none = [0.0] * len(self.groups)
        row = self.costs.setdefault(name, {}).setdefault(what, none)
        row[seed.group] += cost / seed.probes

    def sensitivities(self) -> Sensitivities:
        """Return the measurements of the passes."""
        names = dict.fromkeys((*self.largest, *self.costs))
        return Sensitivities(
            {name: self._of(name) for name in names}, tuple(self.spread), self.shown
        )

    def _of(self, name: str) -> Rounded:
        largest = self.largest.get(name, 0.0)
        costs = dict[str, tuple[float, ...]]()
        for what, row in self.costs.get(name, {}).items():
            costs[what] = tuple(_known(cost, is_plain=largest > 0) for cost in row)
        return Rounded(
            largest=abs(largest),
            costs=costs.pop("", (0.0,) * len(self.groups)),
            summed=costs.pop(SUMMED, ()),
            read=costs,
        )


def _seeds(
    side: Execution, groups: Sequence[Sequence[str]], random: np.random.Generator
) -> Iterator[Seed]:
    """Yield signs over values, divided by their norms."""
    for number, group in enumerate(groups):
        known = (name for name in group if name in side.values)
        arrays = {name: np.asarray(side.output(name)) for name in known}
        arrays = {name: array for name, array in arrays.items() if array.size}
        if not arrays:
            continue
        sizes = [array.size for array in arrays.values()]
        few = max((size for size in sizes if size < _MANY), default=1)
        # One vector is exact for one element, and two are for two. Many average out which signs were drawn.
        turns = _TURNS[:few] if few <= 2 else _TURNS
        signs = {name: _signs(array, random) for name, array in arrays.items()}
        vectors = [_turned(signs, turn) for turn in turns]
        for gradients in vectors:
            yield Seed(number, len(vectors), gradients)


def _turned(signs: Mapping[str, Floats], turns: Floats) -> dict[str, Floats]:
    """Return signs multiplied by those of four elements, repeated."""
    return {
        name: np.asarray(one * np.resize(turns, one.shape))
        for name, one in signs.items()
    }


def _signs(array: Floats, random: np.random.Generator) -> Floats:
    """Return random signs over the norm of an array, or zero if that is not finite."""
    finite = np.isfinite(array) & (np.abs(array) < SENTINEL)
    numbers = np.where(finite, array, 0.0).astype(np.float64)
    norm = float(np.linalg.norm(numbers))
    signs = random.integers(0, 2, array.shape, np.int8) * 2 - 1
    return np.asarray(signs * finite / (norm or inf), np.float32)


def _ends(flow: DataflowGraph) -> list[str]:
    """Return the float outputs or, if there are none, the floats that they depend on; and those that sequences hold."""
    computed = [name for name in dict.fromkeys(flow.outputs) if name in flow.maker]
    floats = [name for name in computed if flow.types.get(name) == FLOAT]
    ends = floats or _floats_before(flow, computed)
    return list(dict.fromkeys((*ends, *_kept(flow))))


def _kept(flow: DataflowGraph) -> Iterator[str]:
    """Yield the floats that enter sequences and optional values, through which no gradient flows."""
    for node in flow.nodes:
        kinds = (flow.types.get(name) or "" for name in node.output)
        if any(kind.startswith(_HOLDERS) for kind in kinds):
            yield from _floats_among(flow, node.input)


def _floats_among(flow: DataflowGraph, names: Iterable[str]) -> Iterator[str]:
    """Yield those values that are floats, and that a node computes."""
    for name in names:
        if name in flow.maker and flow.types.get(name) == FLOAT:
            yield name


def _decisive(flow: DataflowGraph) -> list[str]:
    """Return the floats that decide selections and branches."""
    selections = op_facts().selections
    decisive = list[str]()
    for node in flow.nodes:
        if op_key(node) in selections:
            decisive += _floats_among(flow, node.input)
    conditions = [name for name, _ in flow.choices if name in flow.maker]
    decisive += _floats_before(flow, conditions)
    return list(dict.fromkeys(decisive))


def _floats_before(flow: DataflowGraph, names: Iterable[str]) -> list[str]:
    """Return the nearest floats that other values are computed from, and not only from their shapes."""
    floats = dict[str, None]()
    waiting = list(names)
    seen = set(names)
    while waiting:
        node = flow.maker[waiting.pop()]
        is_view = op_key(flow.nodes[node]) in op_facts().views
        for name in flow.reads[node]:
            if is_view and flow.types.get(name) == FLOAT:
                continue
            if flow.types.get(name) == FLOAT and name in flow.maker:
                floats[name] = None
            elif name in flow.maker and name not in seen:
                seen.add(name)
                waiting.append(name)
    return list(floats)


def _known(cost: float, *, is_plain: bool) -> float:
    """Return a cost. NaN exceeds all bounds, unless it may come from a sentinel that met no gradient."""
    if isnan(cost):
        return inf if is_plain else 0.0
    return cost


def matrix_readers(flow: DataflowGraph) -> set[int]:
    """Return the nodes that multiply by a large matrix of many columns, or gather its rows."""
    matrices = {
        name
        for name, tensor in flow.shell.weights.items()
        if len(tensor.dims) == 2 and tensor.dims[1] >= _COLUMNS
    } - flow.defaults
    readers = set[int]()
    for number, node in enumerate(flow.nodes):
        is_product = op_key(node) == "MatMul"
        if not is_product and (op_key(node) != "Gather" or attribute(node, "axis")):
            continue
        x, matrix = node.input if is_product else node.input[::-1]
        is_fed = x in flow.maker or (not is_product and x in flow.inputs)
        if matrix in matrices and is_fed and flow.types.get(node.output[0]) == FLOAT:
            readers.add(number)
    return readers


def stepped_back(
    matrix: Floats,
    xs: Sequence[Floats],
    dys: Sequence[Floats],
    low: Format,
    provider: Provider,
) -> tuple[list[Floats], list[Floats]]:
    """Go back through products with a matrix.

    Args:
        matrix: the matrix.
        xs: the arrays that it multiplies.
        dys: the gradients of the products.

    Returns:
        The change of each result when the matrix is rounded, and the gradients of ``xs``, all as rows.
    """
    model = parser.parse_model(_PRODUCT.format(elem=low.elem))
    session = make_session(model, provider, optimize=False, lean=True)
    depth, width = matrix.shape
    x = [array.reshape(-1, depth) for array in xs]
    dy = [array.reshape(-1, width) for array in dys]
    x_rows = np.concatenate(x)
    dy_rows = np.concatenate(dy)
    moved = np.zeros((len(x_rows), width), np.float32)
    dx = list[Floats]()
    height = max(1, _BLOCK // width)
    # In blocks of rows, a matrix of any size is neither read nor rounded as a whole.
    for first in range(0, depth, height):
        block = slice(first, first + height)
        feeds = {"x": x_rows[:, block], "w": matrix[block], "dy": dy_rows}
        results = run(session, feeds)
        moved += results["moved"]
        dx.append(results["dx"])
    return _parted(moved, x), _parted(np.hstack(dx), dy)


def _parted(rows: Floats, like: Sequence[Floats]) -> list[Floats]:
    """Return the rows of several arrays, apart."""
    return np.split(rows, np.cumsum([*map(len, like)])[:-1])
