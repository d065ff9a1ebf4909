"""LayerNormalization and RMSNormalization, written out.

The standard ops want a gain of the normalised shape; where the form has none that suits, it is all ones, and what
stands behind stays there. A form that computes in float32 between Casts, in a model that is low, is the op in the low
type: by its definition it computes in float32 inside, rounds, and then applies gain and bias.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import isclose, prod
from typing import Final

from onnx import TensorProto, helper

from onnxamp._dtypes import ELEM_NUMBERS, FLOAT, LOW_TYPES
from onnxamp._graph.view import Node
from onnxamp._patterns.forms import Kind
from onnxamp._patterns.match import Reading
from onnxamp._rewrite.fold.folds import Fold, Found, NewWeight

_ONES: Final = 1 << 16
"""Elements up to which a gain of ones is made."""


def norm(reading: Reading, kind: Kind, found: Found) -> Fold | None:
    """The normalisation that the form is, with gain and bias; None where it is none."""
    count = len(found.axes)
    epsilon = reading.number(found.values["epsilon"])
    if found.axes != tuple(range(-count, 0)) or epsilon is None or epsilon < 0 or not _is_mean(reading, found):
        return None
    found = _narrowed(reading, found)
    dims = _normalised(reading, found)
    given = {name: found.values[name] for name in ("gain", "bias") if name in found.values}
    weights = {name: _suiting(reading, found, value, dims) for name, value in given.items()}
    if None in weights.values():
        return None
    for _ in range(2):
        found = _with_next(reading, found, dims, weights, has_bias=kind.op == "LayerNormalization")
    gain = weights["gain"] if "gain" in weights else _ones(reading, found, dims)
    if gain is None:
        return None
    bias = weights.get("bias")
    inputs = (found.values["x"], gain) if bias is None else (found.values["x"], gain, bias)
    attributes = {"axis": -count, "epsilon": epsilon}
    return Fold(kind.name, kind.op, kind.opset, found.nodes, found.last, inputs, attributes)


def _is_mean(reading: Reading, found: Found) -> bool:
    """Whether sums are divided by what they sum up."""
    shape = reading.graph.shapes[found.values["x"]]
    wanted = {name: reading.number(found.values[name]) for name in ("count", "share") if name in found.values}
    if not wanted:
        return True
    sizes = [] if shape is None else [shape[axis] for axis in found.axes]
    if not sizes or None in sizes:
        return False
    total = prod(size or 0 for size in sizes)
    parts = {"count": total, "share": 1 / max(total, 1)}
    return all(value is not None and isclose(value, parts[name], rel_tol=1e-6) for name, value in wanted.items())


def _narrowed(reading: Reading, found: Found) -> Found:
    """The form with the Casts around it, where both are from and to one low type and nobody else reads between."""
    view = reading.graph
    before, (between, _, behind) = view.producer(found.values["x"]), _reader(reading, found)
    if before is None or behind is None or not before.key == behind.key == "Cast":
        return found
    low = reading.graph.types[before.inputs[0]]
    if low != reading.graph.types[behind.outputs[0]] or low not in {kind.tensor for kind in LOW_TYPES.values()}:
        return found
    if {"gain", "bias"} & found.values.keys():  # applied before the result is rounded
        return found
    values = {**found.values, "x": before.inputs[0]}
    return replace(found, nodes=found.nodes | between | {behind.index}, values=values, last=behind.index)


def _normalised(reading: Reading, found: Found) -> tuple[int | None, ...]:
    """The shape over which is normalised, as far as it is known."""
    shape, count = reading.graph.shapes[found.values["x"]], len(found.axes)
    return (None,) * count if shape is None else tuple(shape[-count:])


def _with_next(
    reading: Reading,
    found: Found,
    dims: Sequence[int | None],
    weights: dict[str, int | NewWeight | None],
    *,
    has_bias: bool,
) -> Found:
    """Take in the multiplication by the gain, or the addition of the bias, that stands behind."""
    nodes, value, node = _reader(reading, found)
    name = {"Mul": "gain", "Add": "bias" if has_bias else ""}.get(node.key if node else "", "")
    if node is None or not name or name in weights or (name == "gain" and "bias" in weights):
        return found
    other = node.inputs[1] if node.inputs[0] == value else node.inputs[0]
    weight = _suiting(reading, found, other, dims)
    if weight is None:
        return found
    weights[name] = weight
    return replace(found, nodes=found.nodes | nodes | {node.index}, last=node.index)


def _reader(reading: Reading, found: Found) -> tuple[set[int], int, Node | None]:
    """The node that alone reads the result, what it reads of it, and the nodes between that pass it on."""
    between, value = set[int](), reading.graph.nodes[found.last].outputs[0]
    node = reading.only_reader(value)
    while node is not None and reading.is_passing(node):
        between.add(node.index)
        value = node.outputs[0]
        node = reading.only_reader(value)
    return between, value, node


def _suiting(reading: Reading, found: Found, value: int, dims: Sequence[int | None]) -> int | NewWeight | None:
    """The constant as a weight of the normalised shape; None where it is not constant or has another one.

    A length of one axis that is not known is what the constant says, unless that is 1: anything would meet that.
    """
    value = reading.passed_on(value)
    tensor, shape = reading.tensors.get(value), reading.graph.shapes[found.values["x"]]
    if tensor is None or tensor.data_type != _elem(reading, found):
        return None
    sizes, rank = list(tensor.dims), len(dims) if shape is None else len(shape)
    if len(sizes) > rank:
        return None
    while len(sizes) > len(dims) and sizes[0] == 1:
        del sizes[0]
    if len(sizes) != len(dims) or any(dim not in (None, size) for dim, size in zip(dims, sizes, strict=True)):
        return None
    if None in dims and (len(dims) > 1 or sizes == [1]):
        return None
    if sizes == list(tensor.dims):
        return value
    return NewWeight(f"{reading.graph.values[value].name}_flat", partial(_flat, tensor, sizes))


def _flat(tensor: TensorProto, sizes: Sequence[int]) -> TensorProto:
    made = TensorProto()
    made.CopyFrom(tensor)
    del made.dims[:]
    made.dims.extend(sizes)
    return made


def _ones(reading: Reading, found: Found, dims: Sequence[int | None]) -> NewWeight | None:
    sizes = [dim for dim in dims if dim is not None]
    if len(sizes) < len(dims) or not 0 < prod(sizes) <= _ONES:
        return None
    ones = partial(helper.make_tensor, "", _elem(reading, found), sizes, [1.0] * prod(sizes))
    return NewWeight(f"{reading.graph.nodes[found.last].proto.output[0]}_ones", ones)


def _elem(reading: Reading, found: Found) -> int:
    name = reading.graph.types[found.values["x"]] or FLOAT
    return ELEM_NUMBERS[name.removeprefix("tensor(").removesuffix(")")]
