"""Emulation of targets that sum up float16 in float16, beside the float32 sums of :mod:`onnxamp._runtime.emulate`.

One accumulator takes the terms of a product one after the other, and rounds each time. To do the same here would take a
step per term, so its error is estimated instead, and added. With K terms t, their sum y and q = sum(t^2), a rounded
random walk that ends in y is off by

    e = r sqrt(K / 3 + K q / (6 y^2)),

where r is the error of rounding y once: the residual of y serves as r, so no random numbers are needed. q is the same
op on squared inputs. Terms below half a step of a large sum are lost, so that a sum of positive terms stops near

    s = 2^p sqrt(q / K), with p digits: 2^11 in float16.

It costs about a second run of the op if that is long. ``tests/runtime/test_accumulate.py`` holds it against an
accumulator that is simulated step by step.

Sums that a mean or a norm divides or takes the root of later are rounded before that, so that they overflow as there.
"""

from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, Final

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, helper, numpy_helper

from onnxamp._dtypes import FLOAT16
from onnxamp._graph.names import NewNames
from onnxamp._ops.facts import attribute, op_key
from onnxamp._ops.profiles import Profile

EXACT: Final = "onnxamp.exact"
"""Key of the metadata that name the float32 result behind an accumulated value."""

_SHORT: Final = 64
"""Terms up to which q is taken to be y^2, as it is on average: the squares would cost more than they tell."""

_LONG: Final = 256
"""Terms up to which none is lost in a sum: it has at most that many times the size of one."""

_WHERE: Final = 9
"""Opset that introduced Where; for older models nothing is added."""


@dataclass(frozen=True, slots=True)
class Accumulator:
    """Appends to graphs what float16 accumulators make of float32 results."""

    profile: Profile
    names: NewNames
    opset: int

    def applies(self, node: NodeProto) -> bool:
        """Whether the target accumulates the op in float16, so that :meth:`add` has something to do."""
        if self.opset < _WHERE:
            return False
        key = op_key(node)
        product, total = self.profile.products.get(key), self.profile.sums.get(key)
        if product is not None and product.accumulator == "float16":
            return len(node.input) > 1
        return total is not None and total.overflows

    def add(self, graph: GraphProto, node: NodeProto, raw: str, terms: int | None) -> str:
        """Append what becomes of the float32 result ``raw`` of a node; returns its name.

        Args:
            graph: where the node is, as its last one.
            node: with float32 inputs.
            terms: how many products an element sums up; None if that is unknown, and then nothing is added.
        """
        key = op_key(node)
        made = _Writer(graph, self.names, raw)
        if key in self.profile.products:
            if terms is None:
                return raw
            result = self._product(made, node, raw, terms, self.profile.products[key].growth)
        else:
            result = self._total(made, node, raw)
        graph.node[-1].metadata_props.add(key=EXACT, value=raw)
        return result

    def _product(self, made: "_Writer", node: NodeProto, raw: str, terms: int, growth: float) -> str:
        size = terms * (growth / _GROWTH) ** 2
        residual, kept = made("Sub", raw, made.rounded(raw)), raw
        if terms <= _SHORT:
            grown = made.number(sqrt(size / 2))
        else:
            squares = _of_squares(made, node)
            ratio = made("Div", squares, made("Mul", raw, raw))
            grown = made("Sqrt", made("Add", made("Mul", ratio, made.number(size / 6)), made.number(size / 3)))
        if terms > _LONG:
            most = made("Sqrt", made("Mul", squares, made.number(4.0**_DIGITS / terms)))
            share = made("Div", raw, most)
            lost = made("Mul", made("Mul", share, share), made.number(-1 / 16))
            kept = made("Mul", raw, made("Max", made("Add", lost, made.number(1)), made.number(0.75)))
            kept = made("Max", made("Min", kept, most), made("Neg", most))
        found = made("Add", kept, made("Mul", residual, grown))
        # Where the sum is zero, infinite or NaN, there is no estimate.
        is_number = made("Less", made("Abs", found), made.number(float(np.finfo(np.float32).max)))
        return made("Where", is_number, found, raw)

    def _total(self, made: "_Writer", node: NodeProto, raw: str) -> str:
        key = op_key(node)
        if key == "ReduceL2":
            return made("Sqrt", made.rounded(made("Mul", raw, raw)))
        if key == "ReduceLogSumExp":
            return made("Log", made.rounded(made("Exp", raw)))
        if key == "AveragePool":
            count = made.number(prod(attribute(node, "kernel_shape")))
        else:
            sizes = (made("Cast", made("Size", name), to=TensorProto.FLOAT) for name in (node.input[0], raw))
            count = made("Div", *sizes)
        return made("Div", made.rounded(made("Mul", raw, count)), count)


_DIGITS: Final = 11
"""Digits of float16."""

_GROWTH: Final = sqrt(4096 / 2)
"""``growth`` of one accumulator, as :mod:`onnxamp._ops.profiles` defines it; several grow less."""


def _of_squares(made: "_Writer", node: NodeProto) -> str:
    """The op on squared inputs, without a bias."""
    same = NodeProto()
    same.CopyFrom(node)
    same.name = ""
    del same.input[:], same.output[:]
    same.input.extend(made("Mul", name, name) for name in node.input[:2])
    if node.op_type == "Gemm":
        for item in same.attribute:
            if item.name in ("alpha", "beta"):
                item.f **= 2
        same.input.append(made.number(0))
    return made.append(same)


@dataclass(slots=True)
class _Writer:
    """Appends nodes to a graph; calling it returns the name of a node's output."""

    graph: GraphProto
    names: NewNames
    stem: str

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        return self.append(helper.make_node(op_type, list(inputs), [], **attributes))

    def append(self, node: NodeProto) -> str:
        node.output.append(self.names.fresh(f"{self.stem}/{node.op_type}"))
        self.graph.node.append(node)
        return node.output[0]

    def number(self, value: float) -> str:
        """A scalar constant."""
        return self("Constant", value=numpy_helper.from_array(np.array(value, np.float32)))

    def rounded(self, name: str) -> str:
        return self("Cast", self("Cast", name, to=FLOAT16.elem), to=TensorProto.FLOAT)
