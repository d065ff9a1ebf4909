"""Findings about stored numbers: damaged weights, and scales that low precision cannot hold."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto

from onnxamp._audit import Finding, ScaleAtRisk, finding
from onnxamp._base.errors import ModelError
from onnxamp._base.words import count
from onnxamp._decide.kinds import kinds
from onnxamp._facts.dtypes import (
    FLOAT16,
    FORMATS,
    LOW_ELEMS,
    Format,
    readable_types,
    tensor_type,
)
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.numbers.scales import magnitudes
from onnxamp._graph.quantized import quantized_nodes
from onnxamp._graph.raised import RaisedGraph
from onnxamp._graph.view import ABSENT
from onnxamp._model.protos import stored_bytes, tensors_of
from onnxamp._model.weights import blocks_of, read_array

_MANY_SUBNORMAL: Final = 0.01
"""Share of subnormal elements above which a note is worthwhile."""
_MANY: Final = 1000
"""Tensors with fewer elements are too small for shares to be meaningful."""


class Contents(NamedTuple):
    """Counts of a float tensor's elements; zeros and subnormals are counted in low precision only."""

    elements: int
    nan: int
    infinite: int
    zero: int = 0
    subnormal: int = 0


def weight_types(model: ModelProto) -> dict[str, int]:
    """Return element type ("float32", "int64", ...) -> bytes of weights and Constants, wherever they are stored."""
    sizes: Counter[str] = Counter()
    for tensor in tensors_of(model):
        sizes[readable_types(tensor_type(tensor.data_type))] += stored_bytes(tensor)
    return dict(sizes.most_common())


def weight_findings(model: ModelProto, base_dir: Path | None) -> list[Finding]:
    """Return findings on NaN and infinities in weights, lost digits of low-precision weights, and unreadable weights.

    Complexity: one pass over the weights, in blocks.
    """
    findings: list[Finding] = []
    lows: dict[Format, dict[str, Contents]] = {low: {} for low in FORMATS.values()}
    unread: list[tuple[str, str]] = []
    for tensor in tensors_of(model):
        low = LOW_ELEMS.get(tensor.data_type)
        if low is None and tensor.data_type != TensorProto.FLOAT:
            continue
        try:
            array = read_array(tensor, base_dir)
        except ModelError as error:
            unread.append((tensor.name, str(error)))
            continue
        contents = _float_contents(array) if low is None else _low_contents(array, low)
        type_name = readable_types(tensor_type(tensor.data_type))
        findings += _not_finite(tensor.name, type_name, contents)
        if low is not None:
            lows[low][tensor.name] = contents
    return [*_unread(unread), *findings, *_lost_digits(lows)]


def _float_contents(array: NDArray[np.float32]) -> Contents:
    """Count the elements that are not finite; most blocks have none, and need one pass."""
    nan = infinite = 0
    for block in blocks_of(array):
        if not np.isfinite(block).all():
            nan += int(np.isnan(block).sum())
            infinite += int(np.isinf(block).sum())
    return Contents(array.size, nan, infinite)


def _low_contents(array: NDArray[Any], low: Format) -> Contents:
    """Count elements by their bits: sign, exponent, mantissa."""
    mantissa = (1 << low.mantissa) - 1
    numbers = low.patterns.type((1 << 8 * low.bytes - 1) - 1)  # all bits but the sign
    # IEEE 754: all ones in the exponent mean infinity, or NaN with a mantissa; all zeros mean zero or subnormal.
    exponent = numbers ^ mantissa
    nan = infinite = zero = subnormal = 0
    for block in blocks_of(array):
        magnitude = block.view(low.patterns) & numbers
        infinite += int(np.count_nonzero(magnitude == exponent))
        nan += int(np.count_nonzero(magnitude > exponent))
        zeros = int(np.count_nonzero(magnitude == 0))
        zero += zeros
        subnormal += int(np.count_nonzero(magnitude <= mantissa)) - zeros
    return Contents(array.size, nan, infinite, zero, subnormal)


def _unread(failures: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """Yield one finding for all weights that cannot be read; in most cases, the whole data file is missing."""
    for name, why in failures[:1]:
        more = ""
        if len(failures) > 1:
            more = f" The same is true of {count(len(failures) - 1, 'more weight')}."
        action = "Hazards are not checked, because they depend on the weights."
        yield finding(name, "error", "weight", why + more, action)


def _not_finite(name: str, type_name: str, contents: Contents) -> Iterator[Finding]:
    """Yield findings on NaN, which is never intended, and on infinities, which may belong to masks of few numbers."""
    if contents.nan:
        text = f"NaN among {type_name} weights: every op that reads them returns NaN"
        action = "The weights are broken: check where they come from."
        yield finding(name, "warning", "weight", text, action)
    # Infinities alone, or in a small tensor, are intended: masks hold few numbers.
    is_partly = 0 < contents.infinite < contents.elements
    if is_partly and contents.elements >= _MANY:
        text = f"infinities among {type_name} weights"
        action = "Harmless in a mask. Elsewhere, a conversion overflowed: convert the original again (onnxamp convert)."
        yield finding(name, "note", "weight", text, action)


def _lost_digits(lows: Mapping[Format, Mapping[str, Contents]]) -> Iterator[Finding]:
    """Yield how many low-precision weights are subnormal, and the tensor that has the most."""
    for low, tensors in lows.items():
        total = sum(contents.elements for contents in tensors.values())
        subnormal = sum(contents.subnormal for contents in tensors.values())
        zero = sum(contents.zero for contents in tensors.values())
        if total < _MANY or subnormal < _MANY_SUBNORMAL * total:
            continue
        worst = max(tensors, key=lambda name: tensors[name].subnormal)
        text = (
            f"{100 * subnormal / total:.1f} % of the {low.name} weights are subnormal, with fewer digits, and"
            f" {100 * zero / total:.1f} % are zero; most subnormal ones are in {worst!r}"
        )
        action = ""
        if low is FLOAT16:
            action = "bfloat16 represents such numbers with all its digits (--dtype bfloat16)."
        yield finding("", "note", "weight", text, action)


_SCALE: Final = 1
"""Position of the scale among the inputs of nodes that quantize or dequantize."""


def scales_at_risk(
    graph: Graph, view_in: Callable[[Format], RaisedGraph]
) -> Iterator[ScaleAtRisk]:
    """Yield scales that leave the range of a low type of the model, are subnormal there, or move their grid.

    For a model without low precision, yield those that float16 cannot hold. Complexity: linear in nodes and scales.

    Args:
        graph: the model.
        view_in: returns the graph with its values of a low type raised to float32, as :func:`raised` does.
    """
    facts = op_facts()
    nodes = graph.nodes_of(facts.quantize | facts.dequantize | facts.scales.keys())
    if not nodes:
        return
    present = set(graph.types)
    lows = [low for low in FORMATS.values() if low.tensor in present] or [FLOAT16]
    quantized = graph.ask(quantized_nodes)
    for low in lows:
        view = view_in(low)
        lost = dict[int, str]()
        for kind in kinds():
            lost |= kind.lost_scales(view, low)
        for node in nodes:
            ports = facts.scales.get(node.key, (_SCALE,))
            scales = [node.input(port) for port in ports]
            read = [value for value in scales if value != ABSENT]
            losses = (_subnormal(view, value, low) for value in read)
            if why := lost.get(node.index) or next(filter(None, losses), ""):
                yield ScaleAtRisk(
                    node=node.label,
                    op=node.key,
                    type=quantized[node.index].type if node.index in quantized else "",
                    stored=readable_types(graph.types[read[0]]),
                    low=low.name,
                    why=why,
                )


def _subnormal(graph: Graph, scale: int, low: Format) -> str:
    """Return a clause on how many of a node's scales lose digits in low precision; "" if none does."""
    known = magnitudes(graph, scale)
    if known is None:
        return ""
    small = known[(known > 0) & (known < low.smallest_normal)]
    if not small.size:
        return ""
    if known.size == 1:
        return f"a scale of {small.min():.6g} is subnormal in {low.name}"
    of = f"{small.size:,} of {known.size:,} scales"
    return f"{of} are subnormal in {low.name}, down to {small.min():.6g}"
