"""Emulation of targets that accumulate float16 in float16, in addition to the rounding of
:mod:`onnxamp._runtime.emulate`.

An accumulator adds the terms of a product one by one and rounds after each. Doing the same here would take one step per
term, so its error is estimated and added instead. With K terms t, their sum y and q = sum(t^2), a rounded random walk
that ends in y is off by

    e = r sqrt(K / 3 + K q / (6 y^2)),

where r is the error of rounding y once: the residual of y serves as r, so no random numbers are needed. An error of
only a few roundings would be lost when the sum is rounded, because rounding moves the sum in the same direction. So the
residual of y + 9 r replaces r there: it is as large, zero where r is zero, and hardly depends on it. q is the same op
on squared inputs. Terms below half a step of a large sum are lost, so that a sum of positive terms stops near

    s = 2^p q / y, with p digits: 2^11 in float16.

A bias is added after the sum.

It costs about a second run of the op if that is long. ``tests/runtime/test_accumulate.py`` compares it with an
accumulator that is simulated step by step.

Several accumulators with L terms each, whose sums are added in a tree, are off by

    e = r sqrt(2 + L^2 / (3 K) + (L / 2 + log2(K / L)) q / y^2).

The sum inside a mean or a norm is rounded before the division or the root, so that it overflows as on the target. Ops
that compute a result in several steps of float16, as normalizations and activations, are off by a multiple of r. If the
formula of an activation is known, each of its steps is rounded (:meth:`_Writer.step`).
"""

from collections.abc import Sequence
from math import e, log, log2, prod, sqrt
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import NodeProto, TensorProto, helper

from onnxamp._facts.dtypes import FLOAT16
from onnxamp._facts.formulas import compute
from onnxamp._facts.ops import attribute, op_facts, op_key
from onnxamp._facts.providers import Profile
from onnxamp._graph.constants import summed_terms, terms_of
from onnxamp._graph.editor import GraphEditor
from onnxamp._graph.shapes import Shape
from onnxamp._graph.view import Node

EXACT: Final = "onnxamp.exact"
"""Metadata key for the name of the float32 result of an accumulated value."""

_INSIDE: Final = 3.25
"""The contribution to the square of an error by products and sums in vectors of four, in squares of that of rounding
once: K products and K / 4 sums of 2, 3 and 4 terms, over K.
"""

_SHORT: Final = 64
"""Terms up to which q is assumed to be y^2, its average: computing the squares would cost too much."""

_LONG: Final = 768
"""Terms up to which those that a large sum loses matter less than its rounding, even if all are positive."""

_TERMS: Final = 4096
"""Terms of the sums for which a profile's ``growth`` states the error."""

_TEETH: Final = 8
"""The residual of y + 9 r, as a function of r, is a sawtooth with this many teeth."""

_NORMAL: Final = 2.0**-14
"""The smallest normal number of float16."""

_SIGNED: Final = frozenset(
    {"ReduceSum", "ReduceMean", "GlobalAveragePool", "AveragePool"}
)
"""Sums of terms of either sign."""

_EXACT_STEPS: Final = frozenset({"Neg", "abs", "sign", "max"})
"""Steps of formulas that round nothing."""

_WHERE: Final = 9
"""Opset that introduced Where; for older models nothing is added."""


class Accumulator(NamedTuple):
    """Adds the error of float16 accumulators to float32 results.

    ``shapes``, by value of the original graph, give the number of terms per element.
    """

    profile: Profile
    editor: GraphEditor
    shapes: Sequence[Shape | None]

    def nodes(self, node: Node, written: NodeProto, raw: str) -> list[NodeProto]:
        """Return the nodes that turn a float32 result into that of the target, which is the output of the last node.

        There are none if the result is off by one rounding at most, or if the size of a sum is unknown.

        Args:
            node: in the original graph.
            written: the same with float32 inputs.
            raw: its float32 result.
        """
        writer = _Writer(self.editor, raw, [])
        if self.editor.view.book.opsets.get("", 1) < _WHERE:
            return writer.nodes
        key = op_key(written)
        product = self.profile.products.get(key)
        total = self.profile.sums.get(key)
        if product is not None:
            if product.accumulator == "float16" and len(written.input) > 1:
                self._product(writer, node, written, raw)
        elif total is not None and total.accumulator == "float16":
            self._sum(writer, node, written, raw)
        elif (
            key in self.profile.roundings
            and len(node.inputs) == 1
            and key in self.profile.formulas
        ):
            compute(self.profile.formulas[key], written.input[0], writer.step)
        elif key in self.profile.roundings:
            writer.off(
                raw,
                raw,
                writer.number(sqrt(self.profile.roundings[key] ** 2 - 1)),
                raw,
                little=True,
            )
        if writer.nodes:
            writer.nodes[-1].metadata_props.add(key=EXACT, value=raw)
        return writer.nodes

    def _product(
        self, writer: "_Writer", node: Node, written: NodeProto, raw: str
    ) -> None:
        terms = terms_of(node, self.shapes)
        if terms is None:
            return
        fact = self.profile.product(written, terms)
        size = terms * (fact.growth / _GROWTH) ** 2
        inside = _INSIDE if fact is self.profile.dots.get(node.key) else 0
        bias = self._bias(writer, node, written)
        if terms == 1 and bias is None:
            return
        alone = raw if bias is None else writer("Sub", raw, bias)
        kept = alone
        if terms <= _SHORT:
            # The sum is rounded before the bias is added.
            before = 0 if bias is None else 1
            grown = writer.number(
                sqrt(before + inside + (size / 2 if terms > 1 else 0))
            )
        else:
            ratio = writer("Div", _of_squares(writer, written), writer.square(alone))
            grown = writer(
                "Sqrt",
                writer(
                    "Add",
                    writer("Mul", ratio, writer.number(size / 6)),
                    writer.number(size / 3 + inside),
                ),
            )
        if terms > _LONG:
            left = writer("Mul", ratio, writer.number(2.0**_DIGITS))
            lost = writer("Div", writer.number(-1 / 7), writer("Mul", left, left))
            share = writer(
                "Min",
                writer(
                    "Max", writer("Add", lost, writer.number(1)), writer.number(0.75)
                ),
                left,
            )
            kept = writer("Mul", alone, share)
        product = writer.off(alone, kept, grown, alone, little=terms <= _SHORT)
        if bias is not None:
            writer("Add", product, bias)

    def _bias(self, writer: "_Writer", node: Node, written: NodeProto) -> str | None:
        """Return the bias that the op adds after the sum, in a shape that broadcasts."""
        if (
            len(written.input) < 3
            or not written.input[2]
            or node.key not in op_facts().biased
        ):
            return None
        if node.key == "Gemm":
            beta = attribute(written, "beta")
            return writer(
                "Mul", written.input[2], writer.number(1 if beta is None else beta)
            )
        rank = len(self.shapes[node.inputs[1]] or ())
        shape = np.array([1, -1] + [1] * (rank - 2))
        return writer(
            "Reshape",
            written.input[2],
            self.editor.ints(shape, f"{writer.stem}/shape"),
        )

    def _sum(
        self, writer: "_Writer", node: Node, written: NodeProto, raw: str
    ) -> None:
        fact = self.profile.sums[node.key]
        terms = summed_terms(node, self.shapes)
        kept = self._total(writer, written, raw) if fact.overflows else raw
        if not terms or terms < 2:
            return
        results = prod(size or 1 for size in self.shapes[node.outputs[0]] or ())
        alone = fact.split and (terms < fact.split or results >= fact.results)
        if alone or fact.order == "sequential":
            grown = writer.number(sqrt(terms / (4 if node.key == "CumSum" else 2)))
            writer.off(raw, kept, grown, kept, little=terms <= _SHORT)
            return
        each = max(1.0, 2 * (fact.growth**2 - 8) * terms / _TERMS)
        grown = writer.number(1 + each**2 / (3 * terms))
        if node.key in _SIGNED:
            ratio = writer("Div", _of_squares(writer, written), writer.square(raw))
            factor = (each / 2 + log2(terms / each)) / (
                1 if node.key == "ReduceSum" else terms
            )
            grown = writer("Add", writer("Mul", ratio, writer.number(factor)), grown)
        writer.off(raw, kept, writer("Sqrt", grown), kept, little=True)

    def _total(self, writer: "_Writer", node: NodeProto, raw: str) -> str:
        key = op_key(node)
        if key == "ReduceL2":
            return writer("Sqrt", writer.rounded(writer("Mul", raw, raw)))
        if key == "ReduceLogSumExp":
            return writer("Log", writer.rounded(writer("Exp", raw)))
        if key == "AveragePool":
            count = writer.number(prod(attribute(node, "kernel_shape")))
        else:
            sizes = (
                writer("Cast", writer("Size", name), to=TensorProto.FLOAT)
                for name in (node.input[0], raw)
            )
            count = writer("Div", *sizes)
        return writer("Div", writer.rounded(writer("Mul", raw, count)), count)


_DIGITS: Final = 11
"""Digits of float16."""

_GROWTH: Final = sqrt(_TERMS / 2)
"""``growth`` of one accumulator, as :mod:`onnxamp._facts.providers` defines it; several grow less."""


def _of_squares(writer: "_Writer", node: NodeProto) -> str:
    """Return the op on squared inputs, without a bias."""
    same = NodeProto()
    same.CopyFrom(node)
    same.name = ""
    del same.input[:], same.output[:]
    is_product = node.op_type not in _SIGNED
    same.input.extend(
        writer("Mul", name, name) for name in node.input[: 2 if is_product else 1]
    )
    same.input.extend(() if is_product else node.input[1:])
    if node.op_type == "Gemm":
        for item in same.attribute:
            if item.name in ("alpha", "beta"):
                item.f **= 2
        same.input.append(writer.number(0))
    return writer.append(same)


class _Writer(NamedTuple):
    """Collects nodes; calling it returns the name of a node's output."""

    editor: GraphEditor
    stem: str
    nodes: list[NodeProto]

    def __call__(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        return self.append(helper.make_node(op_type, list(inputs), [], **attributes))

    def append(self, node: NodeProto) -> str:
        node.output.append(self.editor.names.fresh(f"{self.stem}/{node.op_type}"))
        self.nodes.append(node)
        return node.output[0]

    def number(self, value: float) -> str:
        """Return a scalar constant."""
        return self.editor.constant(np.float32(value), f"{self.stem}/number")

    def low_number(self, value: float) -> str:
        """Return a scalar constant as float16 holds it."""
        return self.number(float(np.float16(value)))

    def step(self, kind: str, operands: Sequence[str | float]) -> str:
        """Return a rounded step of a formula. Exponentials are powers of two, and logarithms those of two."""
        first, *others = (
            self.low_number(operand) if isinstance(operand, float) else operand
            for operand in operands
        )
        if kind == "exp":
            power = self.rounded(self("Mul", first, self.low_number(log2(e))))
            natural = self("Mul", power, self.number(log(2)))
            return self.rounded(self("Exp", natural))
        if kind == "log":
            natural = self("Log", first)
            digits = self.rounded(self("Mul", natural, self.number(log2(e))))
            return self.rounded(self("Mul", digits, self.low_number(log(2))))
        if kind in _EXACT_STEPS:
            return self(kind.capitalize(), first, *others)
        return self.rounded(self(kind, first, *others))

    def off(
        self, raw: str, kept: str, grown: str, otherwise: str, *, little: bool = False
    ) -> str:
        """Return ``kept``, off by the error of rounding ``raw`` times a number; ``otherwise`` where there is none.

        ``little`` is for numbers of a few: the error is one that does not vanish when the result is rounded.
        """
        error = self.residual(raw)
        if little:
            error = self.residual(
                self("Add", raw, self("Mul", error, self.number(_TEETH + 1)))
            )
        moved = self("Add", kept, self("Mul", error, grown))
        # Where the result is zero, infinite or NaN, there is no estimate.
        return self("Where", self("IsNaN", moved), otherwise, moved)

    def square(self, name: str) -> str:
        """Return the square of a sum, but at least that of the smallest normal number, below which a residual is
        meaningless.
        """
        return self("Max", self("Mul", name, name), self.number(_NORMAL**2))

    def residual(self, name: str) -> str:
        """Return the error of rounding a value once."""
        return self("Sub", self.rounded(name), name)

    def rounded(self, name: str) -> str:
        return self("Cast", self("Cast", name, to=FLOAT16.elem), to=TensorProto.FLOAT)
