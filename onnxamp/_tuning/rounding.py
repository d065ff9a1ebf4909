"""Low-precision weights rounded with compensation on samples of a model's inputs (``--rounding compensated``).

The float32 model runs on the samples piece by piece. The inputs of its products are stored as rows, in passes that fit
a budget, until the corresponding weights are rounded.

A weight ``W`` of K rows that rows ``X`` of samples are multiplied by is rounded so that ``|X (W - Q)|`` is small, row
after row: what rounding one row of ``W`` adds to the product is taken from the rows that are not rounded yet (optimal
brain surgeon; Frantar et al. 2022, arXiv 2210.17323). Here the grid is that of a float type, so nothing is scaled, and
zeros stay zero.

Unseen rows differ from the samples. So ``X^T X`` is damped by a multiple of the identity, which keeps ``Q`` near ``W``.
Held-out rows choose the multiple, and decide whether ``Q`` is better at all.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod, sqrt
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray
from onnx import helper

from onnxamp._base.executor import Memory
from onnxamp._base.optional import require
from onnxamp._base.records import record
from onnxamp._convert.analysis import Analysis
from onnxamp._convert.compensation import RoundedWeights
from onnxamp._facts.dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._model.blobs import Bits, Chosen
from onnxamp._model.model import Model
from onnxamp._model.weights import (
    ConversionCounts,
    Scratch,
    lower,
    read_array,
    rounded,
)
from onnxamp._options.options import Options
from onnxamp._runtime import BUDGET
from onnxamp._runtime.engines import Engine, choose_engine
from onnxamp._runtime.fingerprints import SentModel
from onnxamp._runtime.loop import (
    LoadedSample,
    Opened,
    Probe,
    observe_all,
    one_by_one,
    remembered,
)
from onnxamp._runtime.piecewise.parts import ancestors
from onnxamp._runtime.piecewise.pieces import Executor, observed_values
from onnxamp._runtime.run import Run
from onnxamp._runtime.sessions.values import Feeds, check_inputs, from_value
from onnxamp._tuning.arrangement import ProductWeight, product_weights, rows_of

if TYPE_CHECKING:
    import onnxruntime as ort

_LOG: Final = logging.getLogger("onnxamp")
_WIDEST: Final = 16384
"""Rows of a weight beyond which it is rounded to nearest, because the matrices take several times the square of it."""
_ROWS: Final = 3
"""Rows that are kept for each row of a weight ..."""
_LEAST_ROWS: Final = 2048
"""... and at least."""
_WORK_PER_SECOND: Final = 5e10
"""Multiplications in a second of rounding (AMD EPYC, two cores)."""
_IN_MEMORY: Final = 8 << 20
"""Bytes from which on a rounded weight goes to a file without a name."""

Floats: TypeAlias = NDArray[np.float32]
Key: TypeAlias = tuple[Any, ...]
Found: TypeAlias = tuple[Chosen, tuple[float, float, float]]
"""The bits of a weight, and norms: of its product's error before and after, and of the product."""


def rounder_of(options: Options, run: Run) -> "WeightRounder | None":
    """Return the weight rounder that the options of a conversion ask for; None to round all to nearest."""
    return WeightRounder(run) if options.may_compensate else None


def rounding_seconds(weights: Iterable[ProductWeight]) -> float:
    """Estimate how long rounding weights with compensation takes on two cores, from measurements on BERT-base and
    ResNet-50.
    """
    work = 0.0
    for weight in weights:
        size = prod(weight.tensor.dims)
        depth = weight.arrangement.depth
        if 0 < depth <= _WIDEST:
            matrices = weight.arrangement.groups
            rows = max(_LEAST_ROWS, _ROWS * depth)
            work += depth * (matrices * depth * (depth + rows) + 2.0 * size)
    return work / _WORK_PER_SECOND


@dataclass(slots=True)
class WeightRounder:
    """Rounds the weights of conversions of one model on the same samples, and reuses results in later conversions.

    Attributes:
        run: the samples, and where the float32 model runs on them.
        budget: bytes of rows that are held at once.
    """

    run: Run
    budget: int = 2 * BUDGET
    _found: dict[Key, Found | None] = field(default_factory=dict)
    """The rounded form of each weight so far; None for a weight that is best rounded to nearest."""

    def __call__(self, analysis: Analysis) -> RoundedWeights:
        """Return the weights of a conversion that are better rounded otherwise than to nearest.

        Raises:
            RuntimeFailure: the model does not run. ArgumentError: a sample does not fit it.
        """
        low = analysis.options.low
        graph = analysis.graph
        weights, others = product_weights(analysis)
        narrow = [weight for weight in weights if weight.arrangement.depth <= _WIDEST]
        keys = {weight.value: _key(weight, graph, low) for weight in narrow}
        missing = [one for one in narrow if keys[one.value] not in self._found]
        progress = self.run.progress("rounding weights")
        for done, (weight, rows) in enumerate(self._collected(graph, missing), 1):
            self._found[keys[weight.value]] = _round_weight(weight, graph, rows, low)
            progress(done, len(missing))
        for weight in missing:  # weights that no sample reaches
            self._found.setdefault(keys[weight.value], None)
        chosen = dict[int, Chosen]()
        norms = list[tuple[float, float, float]]()
        for value, key in keys.items():
            result = self._found[key]
            if result is not None:
                chosen[value] = result[0]
                norms.append(result[1])
        # Errors are relative to the product, whose norm may be zero.
        before = _mean([old / signal for old, _, signal in norms if signal])
        after = _mean([new / signal for _, new, signal in norms if signal])
        count = len(weights) + len(others)
        text = "%d of %d weights are rounded with compensation"
        _LOG.info(text, len(chosen), count)
        return RoundedWeights(
            chosen=chosen,
            weights=count,
            wide=len(weights) - len(narrow),
            before=before,
            after=after,
            samples=self.run.samples.description,
            made_up=self.run.samples.made_up,
        )

    def _collected(
        self, graph: Graph, weights: Sequence[ProductWeight]
    ) -> Iterator[tuple[ProductWeight, Floats]]:
        """Yield each weight that samples reach with the rows that it is multiplied by."""
        model = Model(graph.model, graph.folder)
        waiting = list(weights)
        memory = dict[str, Any]()
        run = replace(self.run, workers=None)  # the rows would have to travel
        while waiting:
            count = len(run.samples)
            room = max(self.budget // count, 1)
            probe = _RowsProbe(
                SentModel.of(model),
                choose_engine(run.provider).reference,
                waiting,
                room,
                count,
            )
            failed = "The inputs of weights cannot be measured"
            parts = defaultdict[int, list[Floats]](list)
            taken = set[int]()
            for sample in observe_all(
                run, probe, memory=memory, crashed="", failed=failed, model=model
            ):
                taken = sample.taken
                for value, rows in sample.parts.items():
                    parts[value] += rows
            for weight in waiting:
                if weight.value in parts:
                    yield weight, np.concatenate(parts.pop(weight.value), axis=1)
            waiting = [weight for weight in waiting if weight.value not in taken]


_MEASURED: Final = "float32 model of rounded weights"
"""The key of the model in the memory of a process."""


class _SampleRows(NamedTuple):
    """Rows by weight, for each sample and reader, and the weights of this pass over all samples."""

    parts: dict[int, list[Floats]]
    taken: set[int]


@record
class _RowsProbe(Probe[_SampleRows]):
    """Collecting the rows of as many weights as fit, which the first sample decides."""

    model: SentModel
    engine: Engine
    waiting: Sequence[ProductWeight]
    room: int
    samples: int

    def open(self, memory: Memory) -> Opened[_SampleRows]:
        """As :meth:`Probe.open`."""
        session = remembered(
            memory, _MEASURED, "", lambda: self.engine.open(self.model.opened())
        )
        taken: set[int] | None = None

        def measure(item: LoadedSample) -> _SampleRows:
            nonlocal taken
            feeds = check_inputs(session.model.proto, item.sample)
            rows = self._rows_of(session.prepare(feeds), feeds, item.number, taken)
            taken = rows.taken
            return rows

        return Opened(session.prepare_sample, one_by_one(measure))

    def _rows_of(
        self, executor: Executor, feeds: Feeds, number: int, taken: set[int] | None
    ) -> _SampleRows:
        """Run a sample as far as the weights need, and return their rows."""
        flow = executor.flow
        readers = dict[str, list[tuple[ProductWeight, int]]]()
        for weight in self.waiting:
            if taken is None or weight.value in taken:
                for at, reader in enumerate(weight.readers):
                    readers.setdefault(reader.rows, []).append((weight, at))
        known = {*flow.inputs, *flow.defaults, *flow.maker}
        wanted = [name for name in readers if name in known]
        size = 0
        parts = dict[int, list[Floats]]()
        begun = set[int]()
        nodes = ancestors(flow, wanted, set())
        for name, value in observed_values(executor, feeds, wanted, nodes):
            for weight, at in readers[name]:
                if weight.value in begun or size <= self.room or taken is not None:
                    begun.add(weight.value)
                    rows = self._rows(weight, at, value, number)
                    if rows is not None:
                        parts.setdefault(weight.value, []).append(rows)
                        size += rows.nbytes
        if taken is None:
            everything = {weight.value for weight in self.waiting}
            taken = begun if size > self.room else everything
        return _SampleRows(parts, taken)

    def _rows(
        self, weight: ProductWeight, at: int, held: "ort.OrtValue", number: int
    ) -> Floats | None:
        """Return rows that a reader multiplies a weight by; None if they are of no use."""
        reader = weight.readers[at]
        value = np.asarray(from_value(held), np.float32)
        depth = weight.arrangement.depth
        shares = self.samples * len(weight.readers)
        most = -(-max(_LEAST_ROWS, _ROWS * depth) // shares)
        rows = rows_of(
            node=reader.node.proto,
            product=reader.product,
            shape=reader.shape,
            value=value,
            most=most,
            seed=number,
        )
        return rows if rows is not None and np.isfinite(rows).all() else None


def _round_weight(
    weight: ProductWeight, graph: Graph, rows: Floats, low: Format
) -> Found | None:
    """Return the weight rounded with compensation on these rows; None to round it to nearest."""
    array = read_array(weight.tensor, graph.folder)
    result = compensate(weight.arrangement.matrices(array), rows, low)
    if result is None:
        return None
    stored = weight.arrangement.stored(result.weight, array.shape).reshape(-1)
    bits, counts = lower(stored, low, low.max_finite, Scratch(stored.size))
    # The numbers are low precision already, so that losses are those against the original weight.
    lost = int(np.count_nonzero((stored == 0) & (array.reshape(-1) != 0)))
    counts = ConversionCounts(counts.elements, 0, lost, counts.subnormal)
    norms = (result.nearest, result.compensated, result.signal)
    return Chosen(_kept(bits), counts), norms


def _kept(bits: Bits) -> Bits:
    """Return the same bits, in a file if they are many."""
    if bits.nbytes < _IN_MEMORY:
        return bits
    with TemporaryFile(prefix="onnxamp-") as file:
        # The map keeps the file open.
        mapped = np.memmap(file, bits.dtype, "w+", shape=bits.shape)
        mapped[:] = bits
    return mapped


def _key(weight: ProductWeight, graph: Graph, low: Format) -> Key:
    """Return the inputs that determine a rounded weight of one model on the same samples."""
    readers = tuple((reader.node.label, reader.rows) for reader in weight.readers)
    data = np.ascontiguousarray(read_array(weight.tensor, graph.folder)).reshape(-1)
    return (
        graph.values[weight.value].name,
        low.name,
        weight.arrangement,
        readers,
        crc32(data.data.cast("B")),
    )


def _mean(ratios: Sequence[float]) -> float:
    """Return the root of the mean of squares."""
    return sqrt(sum(ratio**2 for ratio in ratios) / len(ratios)) if ratios else 0.0


DAMPING: Final = (0.01, 0.1, 1.0)
"""Multiples of the mean of the diagonal of X^T X that are tried in turn, ..."""
_ENOUGH: Final = 1 / 2
"""... until the error on rows held out is this much of that of rounding to nearest."""
_HELD_OUT: Final = 4
"""One in this many rows is held out to judge."""
_FEWEST: Final = 8
"""Rows below which none is held out: the strongest damping has to do."""
_BLOCK: Final = 64
"""Rows of a weight that are rounded before their error is added to the rest."""
_WIDTH: Final = 1024
"""Columns that are rounded together: few enough to stay in the processor's cache."""


class CompensatedWeight(NamedTuple):
    """A rounded weight, and the norms of its product's errors on all rows: rounded to nearest, and with compensation.

    ``signal`` is the norm of the product itself.
    """

    weight: Floats
    nearest: float
    compensated: float
    signal: float


def compensate(weight: Floats, rows: Floats, low: Format) -> CompensatedWeight | None:
    """Round a weight with compensation; None if all rows together, or those held out, gain nothing.

    Args:
        weight: G matrices of K rows and N columns.
        rows: G matrices of any number of rows and K columns, which these are multiplied by.
        low: the type to round to.

    Complexity: G (K^3 + K^2 (rows + N)) for each multiple of :data:`DAMPING`.
    """
    nearest = rounded(weight, low, low.max_finite)
    is_within = np.abs(nearest).max(initial=0.0) < low.max_finite
    if not is_within or not np.isfinite(weight).all() or not rows.any():
        return None
    count = rows.shape[1]
    first = count - (count // _HELD_OUT if count >= _FEWEST else 0)
    result = _best(weight, nearest, rows[:, :first], rows[:, first:], low)
    if result is None:
        return None
    before = error_norm(rows, weight, nearest)
    after = error_norm(rows, weight, result)
    if after >= before:  # with few rows, only those held out may gain
        return None
    signal = error_norm(rows, weight, np.zeros_like(weight))
    return CompensatedWeight(result, before, after, signal)


def _best(
    weight: Floats, nearest: Floats, rows: Floats, others: Floats, low: Format
) -> Floats | None:
    """Return the weight rounded on some rows with the damping that is best on others; None if that is rounding to
    nearest.

    Without held-out rows, the strongest damping is used.
    """
    gram = _gram(rows)
    is_judged = others.shape[1] > 0
    judges = others if is_judged else rows
    before = least = error_norm(judges, weight, nearest)
    best = None
    for damping in DAMPING if is_judged else DAMPING[-1:]:
        result = _rounded(weight, gram, damping, low)
        error = error_norm(judges, weight, result)
        if error < least and np.abs(result).max(initial=0.0) < low.max_finite:
            best = result
            least = error
        if least <= _ENOUGH * before:
            break
    return best


def error_norm(rows: Floats, weight: Floats, other: Floats) -> float:
    """Return the norm of the difference of two products."""
    starts = range(0, weight.shape[2], _WIDTH)
    columns = [slice(first, first + _WIDTH) for first in starts]
    squares = 0.0
    for part in columns:
        difference = rows @ (weight[:, :, part] - other[:, :, part])
        squares += np.square(difference, dtype=np.float64).sum()
    return sqrt(squares)


def _gram(rows: Floats) -> Floats:
    """Return X^T X of each group, with a mean diagonal of 1."""
    squares = np.square(rows, dtype=np.float64).sum((1, 2))
    means = np.sqrt(squares / rows.shape[2])
    divisors = np.where(means > 0, means, 1.0)[:, None, None]
    scaled = (rows / divisors).astype(np.float32)
    return scaled.swapaxes(1, 2) @ scaled


def _rounded(weight: Floats, gram: Floats, damping: float, low: Format) -> Floats:
    """Return the weight rounded row by row, those first that count most."""
    squares = np.diagonal(gram, axis1=1, axis2=2)
    order = np.argsort(-squares, axis=1, kind="stable")
    # Groups have orders of their own, since their inputs differ.
    factors = np.stack(
        [
            _factor(group[np.ix_(rank, rank)], damping)
            for group, rank in zip(gram, order, strict=True)
        ]
    )
    # Rows that the inputs excite most come first, while many rows are left that can take up their errors.
    placed = np.take_along_axis(weight, order[:, :, None], axis=1)
    for first in range(0, placed.shape[2], _WIDTH):
        _round_columns(placed[:, :, first : first + _WIDTH], factors, low)
    result = np.empty_like(placed)
    np.put_along_axis(result, order[:, :, None], placed, axis=1)
    return result


def _factor(gram: Floats, damping: float) -> Floats:
    """Return the upper U with ``U^T U`` the inverse of the damped matrix, and rows divided by their diagonal
    elements.
    """
    require("scipy", "Compensated rounding needs scipy", "measure")
    from scipy.linalg import lapack  # noqa: PLC0415 - importing it costs memory, and most conversions do not need it

    # Its Cholesky factor is that of an upper R: gram = R R^T.
    backwards = np.asfortranarray(gram[::-1, ::-1])
    backwards[np.diag_indices(len(gram))] += damping
    lower, _ = lapack.spotrf(backwards, lower=1, overwrite_a=1)
    inverse, _ = lapack.strtri(lower, lower=1, overwrite_c=1)
    upper = inverse[::-1, ::-1]
    return np.triu(upper / np.diagonal(upper)[:, None])


def _round_columns(weight: Floats, factors: Floats, low: Format) -> None:
    """Round some columns in place."""
    kept = weight != 0
    size = weight.shape[1]
    kind = helper.tensor_dtype_to_np_dtype(low.elem)
    for first in range(0, size, _BLOCK):
        stop = min(first + _BLOCK, size)
        # Within the block, errors are passed on row by row; to the rows after it, with one product at its end.
        block = weight[:, first:stop].copy()
        errors = np.empty_like(block)
        for row in range(stop - first):
            exact = block[:, row]
            near = exact.astype(kind).astype(np.float32) * kept[:, first + row]
            errors[:, row] = exact - near
            weight[:, first + row] = near
            block[:, row + 1 :] -= (
                factors[:, first + row, first + row + 1 : stop, None]
                * errors[:, row, None, :]
            )
        passed_on = factors[:, first:stop, stop:].swapaxes(1, 2)
        weight[:, stop:] -= passed_on @ errors
