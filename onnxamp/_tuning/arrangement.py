"""Products as matrices: the weight of a node as matrices, and the rows of samples that they are multiplied by.

``rows_of(...) @ arranged(...).matrices(weight)`` are elements of the node's product, for each group of channels or each
direction, for any op. ``_data/ops.toml`` says which inputs these are (:class:`onnxamp._facts.ops.Product`).
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray
from onnx import NodeProto, TensorProto

from onnxamp._convert.analysis import Analysis
from onnxamp._facts.dtypes import FLOAT
from onnxamp._facts.ops import Product, attribute, op_facts
from onnxamp._graph.constants import constant_tensors
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import Node

Floats = NDArray[np.float32]


class Arrangement(NamedTuple):
    """The arrangement of a stored weight as G matrices of K rows and N columns.

    It is transposed by ``turn``, reshaped to ``split``, and transposed by ``perm``: groups are first, columns last.
    """

    turn: tuple[int, ...]
    split: tuple[int, ...]
    perm: tuple[int, ...]

    @property
    def _placed(self) -> tuple[int, ...]:
        return tuple(self.split[axis] for axis in self.perm)

    @property
    def groups(self) -> int:
        """G: how many matrices there are."""
        return self._placed[0]

    @property
    def depth(self) -> int:
        """K: how many products each sum has."""
        return prod(self._placed[1:-1])

    def matrices(self, weight: Floats) -> Floats:
        """Return the weight as G matrices."""
        placed = weight.transpose(self.turn).reshape(self.split).transpose(self.perm)
        return np.ascontiguousarray(
            placed.reshape(placed.shape[0], self.depth, placed.shape[-1])
        )

    def stored(self, matrices: Floats, shape: Sequence[int]) -> Floats:
        """Return the weight of a shape whose matrices these are."""
        turned = tuple(shape[axis] for axis in self.turn)
        split = (
            matrices.reshape(self._placed)
            .transpose(np.argsort(self.perm))
            .reshape(turned)
        )
        return np.ascontiguousarray(split.transpose(np.argsort(self.turn)))


def arranged(
    node: NodeProto, product: Product, shape: Sequence[int], turn: Sequence[int]
) -> Arrangement | None:
    """Return the arrangement of a weight of this shape, which reaches the node transposed by ``turn``; None if it has
    none.
    """
    given = tuple(shape[axis] for axis in turn)
    if not prod(given) or not product.applies(node):
        return None
    split = _split(node, product, given)
    return None if split is None else Arrangement(tuple(turn), *split)


def _split(
    node: NodeProto, product: Product, shape: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return the reshaping of a weight, followed by a transposition."""
    if product.form == "matrix":
        # A batch of matrices, as of the parts of a long product, is one of groups.
        batch = prod(shape[:-2])
        if len(shape) < 2 or (batch != 1 and (len(shape) > 3 or node.attribute)):
            return None
        is_turned = _flag(node, product.turned) != product.is_left
        perm = (0, 2, 1) if is_turned else (0, 1, 2)
        return (batch, *shape[-2:]), perm
    if product.form in ("gates", "states"):
        return (shape, (0, 2, 1)) if len(shape) == 3 else None
    if len(shape) < 3:
        return None
    groups = _group(node)
    size = shape[0] // groups
    if product.form == "windows":
        return (groups, size, prod(shape[1:])), (0, 2, 1)
    return (groups, size, shape[1], prod(shape[2:])), (0, 1, 3, 2)


def rows_of(
    node: NodeProto,
    product: Product,
    shape: Sequence[int],
    value: Floats,
    most: int,
    seed: int = 0,
) -> Floats | None:
    """Return the rows that a node multiplies a weight by.

    Args:
        node: the node.
        product: which of its products.
        shape: of the weight as the node reads it.
        value: the input, or the output of a step, as ``product`` says.
        most: the largest number of rows; beyond it, rows are chosen at random.
        seed: seed of that choice.

    Returns:
        By group or direction, rows of K numbers; None if there is none.
    """
    rows = _Rows(node, product, shape, value, most, seed).found()
    return rows if rows.size else None


class _Rows(NamedTuple):
    """What a node multiplies a weight by."""

    node: NodeProto
    product: Product
    shape: Sequence[int]
    value: Floats
    most: int
    seed: int

    def found(self) -> Floats:
        """Return the rows by the form of the product."""
        match self.product.form:
            case "matrix":
                return self._of_matrix()
            case "windows":
                return self._of_windows()
            case "spread":
                return self._of_spread()
            case "states":
                return self._of_states()
        rows = self.value.reshape(-1, self.value.shape[-1])
        return self._same(rows, self.shape[0])

    def _chosen(self, count: int) -> NDArray[np.int64]:
        """Return the selected rows in order."""
        if count <= self.most:
            return np.arange(count)
        random = np.random.default_rng(self.seed)
        return np.sort(random.choice(count, self.most, replace=False))

    def _same(self, rows: Floats, matrices: int) -> Floats:
        """Return the rows that all matrices meet."""
        chosen = rows[self._chosen(len(rows))]
        return np.broadcast_to(chosen, (matrices, *chosen.shape))

    def _of_matrix(self) -> Floats:
        value = self.value
        product = self.product
        is_turned = _flag(self.node, product.rows_turned) != product.is_left
        placed = value.swapaxes(-1, -2) if is_turned and value.ndim > 1 else value
        batch = prod(self.shape[:-2])
        depth = placed.shape[-1]
        if batch == 1 or placed.ndim < 3 or placed.shape[-3] == 1:
            return self._same(placed.reshape(-1, depth), batch)
        groups = np.moveaxis(placed, -3, 0).reshape(batch, -1, depth)
        return groups[:, self._chosen(groups.shape[1])]

    def _of_states(self) -> Floats:
        value = self.value
        if attribute(self.node, "layout"):  # the batch comes first
            value = value.transpose(1, 2, 0, 3)
        direction = (attribute(self.node, "direction") or b"forward").decode()
        states = []
        for number in range(self.shape[0]):
            is_backwards = direction == "reverse" or number
            steps = value[1:, number] if is_backwards else value[:-1, number]
            rows = steps.reshape(-1, self.shape[-1])
            states.append(rows[self._chosen(len(rows))])
        return np.stack(states)

    def _of_windows(self) -> Floats:
        frame = _Frame.of(self.node, self.shape[2:])
        sizes = self.value.shape[2:]
        pads = frame.pads
        if frame.auto.startswith("SAME"):
            pads = []
            axes = zip(sizes, frame.strides, frame.reach, strict=True)
            for size, stride, reach in axes:
                # There is one window for each stride that begins in the input. Windows that reach beyond it are padded.
                windows = -(-size // stride)
                covered = (windows - 1) * stride + reach
                pads.append(frame.halves(max(covered - size, 0)))
        return self._picked(self.value, frame, pads, frame.strides)

    def _of_spread(self) -> Floats:
        """Return the rows of a ConvTranspose: a convolution of what has zeros between its elements, with the kernel
        mirrored.
        """
        value = self.value
        frame = _Frame.of(self.node, self.shape[2:])
        sizes = value.shape[2:]
        strides = frame.strides
        more = attribute(self.node, "output_padding") or [0] * len(sizes)
        spans = [
            stride * (size - 1) + 1
            for size, stride in zip(sizes, strides, strict=True)
        ]
        wide = np.zeros((*value.shape[:2], *spans), np.float32)
        spread = (slice(None, None, stride) for stride in strides)
        wide[(slice(None), slice(None), *spread)] = value
        pads = frame.pads
        wanted = attribute(self.node, "output_shape")
        if frame.auto.startswith("SAME") and not wanted:
            wanted = [
                size * stride for size, stride in zip(sizes, strides, strict=True)
            ]
        if wanted:
            pads = [
                frame.halves(span + reach - 1 + extra - want)
                for span, reach, extra, want in zip(
                    spans, frame.reach, more, wanted[-len(sizes) :], strict=True
                )
            ]
        around = [
            (reach - 1 - first, reach - 1 - last + extra)
            for (first, last), reach, extra in zip(
                pads, frame.reach, more, strict=True
            )
        ]
        return self._picked(wide, frame, around, [1] * len(sizes), is_mirrored=True)

    def _picked(
        self,
        value: Floats,
        frame: "_Frame",
        pads: Sequence[tuple[int, int]],
        strides: Sequence[int],
        *,
        is_mirrored: bool = False,
    ) -> Floats:
        """Return windows of a padded value as rows, by group."""
        first = (slice(None), slice(None))
        axes = len(pads)
        # Negative pads cut elements off.
        cut = (slice(max(-low, 0), None if high >= 0 else high) for low, high in pads)
        added = ((max(low, 0), max(high, 0)) for low, high in pads)
        inner = value[(*first, *cut)]
        padded = np.pad(inner, [(0, 0), (0, 0), *added])
        view = sliding_window_view(padded, frame.reach, tuple(range(2, 2 + axes)))
        steps = (slice(None, None, step) for step in (*strides, *frame.dilations))
        view = view[(*first, *steps)]
        if is_mirrored:
            view = view[
                first + (slice(None),) * axes + (slice(None, None, -1),) * axes
            ]
        places = (view.shape[0], *view.shape[2 : 2 + axes])
        batch, *spots = np.unravel_index(self._chosen(prod(places)), places)
        chosen: Any = (batch, slice(None), *spots)
        rows = view[chosen]
        groups = _group(self.node)
        depth = prod(rows.shape[1:]) // groups
        windows: Floats = rows.reshape(len(rows), groups, depth).transpose(1, 0, 2)
        return windows


class _Frame(NamedTuple):
    """The attributes of a convolution; ``reach`` is the kernel with its dilations."""

    strides: list[int]
    dilations: list[int]
    pads: list[tuple[int, int]]
    reach: list[int]
    auto: str

    @classmethod
    def of(cls, node: NodeProto, kernel: Sequence[int]) -> "_Frame":
        axes = len(kernel)
        strides = list(attribute(node, "strides") or [1] * axes)
        dilations = list(attribute(node, "dilations") or [1] * axes)
        auto = str((attribute(node, "auto_pad") or b"NOTSET").decode())
        given = attribute(node, "pads") if auto == "NOTSET" else None
        pads = list(given or [0] * (2 * axes))
        reach = [
            dilation * (size - 1) + 1
            for dilation, size in zip(dilations, kernel, strict=True)
        ]
        pairs = list(zip(pads[:axes], pads[axes:], strict=True))
        return cls(strides, dilations, pairs, reach, auto)

    def halves(self, count: int) -> tuple[int, int]:
        """Split padding into the part before and the part after; an odd element goes after for "SAME_UPPER"."""
        less = count // 2
        pads = less, count - less
        return pads if self.auto == "SAME_UPPER" else pads[::-1]


def _group(node: NodeProto) -> int:
    return attribute(node, "group") or 1


def _flag(node: NodeProto, name: str | None) -> bool:
    return name is not None and bool(attribute(node, name))


class Reader(NamedTuple):
    """A node that multiplies rows by a weight; ``rows`` is the value that these are in."""

    node: Node
    product: Product
    rows: str
    shape: tuple[int, ...]
    """Of the weight as the node reads it."""
    arrangement: Arrangement


class ProductWeight(NamedTuple):
    """A weight of products alone, whose readers see it as the same matrices."""

    value: int
    tensor: TensorProto
    readers: tuple[Reader, ...]

    @property
    def arrangement(self) -> Arrangement:
        """Its matrices, which are the same for all readers."""
        return self.readers[0].arrangement


def product_weights(analysis: Analysis) -> tuple[list[ProductWeight], list[str]]:
    """Return weights that become low precision and could be rounded with compensation, and the names of those that
    cannot be, though a product reads them.

    These are also read by other nodes, or as other matrices, or in a body, or the rows are constants as well.
    Complexity: linear in the uses of weights.
    """
    graph = analysis.graph
    weights = list[ProductWeight]()
    others = list[str]()
    tensors = graph.ask(constant_tensors)
    copied = {copy.value for copy in analysis.edits.copies}
    for value in sorted(_lowered(analysis)):
        tensor = tensors.get(value)
        if tensor is None or tensor.data_type != TensorProto.FLOAT:
            continue
        if len(tensor.dims) < 2:
            continue
        dims = tuple(tensor.dims)
        only_low = value in copied
        every = list(_readers(analysis, value, dims, only_low=only_low))
        readers = tuple(reader for reader in every if reader is not None)
        is_only = len(readers) == len(every) and not graph.results[value]
        if is_only and len({reader.arrangement for reader in readers}) == 1:
            weights.append(ProductWeight(value, tensor, readers))
        elif readers:
            others.append(graph.values[value].name)
    return weights, others


def _lowered(analysis: Analysis) -> AbstractSet[int]:
    """Return the constants that are stored in low precision."""
    graph = analysis.graph
    edits = analysis.edits
    nodes = (graph.nodes[index] for index in edits.attributes)
    constants = {node.outputs[0] for node in nodes if node.key == "Constant"}
    copies = {copy.value for copy in edits.copies if copy.low}
    return edits.weights | constants | copies


def _readers(
    analysis: Analysis, value: int, shape: tuple[int, ...], *, only_low: bool
) -> Iterator[Reader | None]:
    """Return the readers of a weight, also through Transposes; None for readers that are not products of the main
    graph.

    Args:
        only_low: leave out those that read a float32 copy of it.
    """
    graph = analysis.graph
    start = tuple(range(len(shape)))
    waiting = [
        (node, port, start)
        for node, port in graph.uses[value]
        if not only_low
        or analysis.decision.is_low(analysis.ports.consumed[node][port])
    ]
    while waiting:
        index, port, turn = waiting.pop()
        node = graph.nodes[index]
        is_passed = op_facts().passes_on.get(node.key) == "always"
        is_moved = (is_passed or node.key == "Transpose") and node.scope == 0
        if is_moved and not graph.results[node.outputs[0]]:
            axes = start if is_passed else attribute(node.proto, "perm") or start[::-1]
            turned = tuple(turn[axis] for axis in axes)
            waiting += [(*use, turned) for use in graph.uses[node.outputs[0]]]
            continue
        yield _read(graph, node, port, shape, turn)


def _read(
    graph: Graph, node: Node, port: int, shape: tuple[int, ...], turn: tuple[int, ...]
) -> Reader | None:
    """Return a node as a reader of a weight at an input."""
    if node.scope:
        return None
    for product in op_facts().products.get(node.key, ()):
        if product.weight != port:
            continue
        rows = node.outputs[product.steps or 0]
        if product.rows is not None:
            rows = node.input(product.rows)
        is_float = graph.types[rows] == FLOAT
        way = arranged(node.proto, product, shape, turn)
        if way is not None and is_float and not graph.constants.is_constant(rows):
            seen = tuple(shape[axis] for axis in turn)
            return Reader(node, product, graph.values[rows].name, seen, way)
    return None
