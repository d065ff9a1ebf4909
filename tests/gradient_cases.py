"""Graphs of one op and a loss, for the tests of the gradient rules."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import onnx
import scipy.special
from numpy.typing import NDArray
from onnx import ModelProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.freedom import Typed, runs_on
from onnxamp._graph.types import bind, infer_types
from onnxamp._graph.view import ABSENT
from onnxamp.train import Gradients, add_gradients

OPSET = 21
"""The newest at which every op here has its CUDA kernel; see ``onnxamp._facts.kernels``."""

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Case:
    """A node and its inputs: floats are differentiated, integers and bools are constants, None is left out."""

    op: str
    inputs: tuple[Array | None, ...]
    attributes: Mapping[str, Any]
    outputs: int = 1
    opset: int = OPSET
    dynamic: bool = False
    fixed: tuple[int, ...] = ()
    """Inputs that are not differentiated although they are floats."""
    used: int = 0
    """How many outputs enter the loss; 0 for all."""
    constant: tuple[int, ...] = ()
    """Those of them that are initializers, in their own type."""

    def floats(self) -> dict[str, Array]:
        """Inputs to differentiate, by name."""
        return {f"x{i}": a for i, a in enumerate(self.inputs) if is_float(a) and i not in self.fixed}

    def feeds(self, dtype: type) -> dict[str, Array]:
        return {
            f"x{i}": a.astype(dtype) for i, a in enumerate(self.inputs) if is_float(a) and i not in self.constant
        } | {"weight": self.weight().astype(dtype)}

    def weight(self) -> Array:
        """Numbers that make a loss of the outputs: as many as any of them could need."""
        return np.random.default_rng(7).uniform(0.5, 1.5, 4096)

    def model(self, dtype: type = np.float32) -> ModelProto:
        elem = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        names = ["" if a is None else f"x{i}" for i, a in enumerate(self.inputs)]
        outs = [f"y{i}" for i in range(self.outputs)]
        nodes = [helper.make_node(self.op, names, outs, **self.attributes)]
        inputs, constants = [helper.make_tensor_value_info("weight", elem, [4096])], []
        for i, array in enumerate(self.inputs):
            if is_float(array) and i not in self.constant:
                shape = [f"d{i}_{k}" for k in range(array.ndim)] if self.dynamic else array.shape
                inputs.append(helper.make_tensor_value_info(f"x{i}", elem, shape))
            elif array is not None:
                constants.append(numpy_helper.from_array(array, f"x{i}"))
        nodes += loss_of(outs[: self.used or None])
        constants += [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("minus", [-1]), ("zero", [0]))]
        graph = helper.make_graph(nodes, self.op, inputs, [helper.make_tensor_value_info("loss", elem, [])], constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=10)
        onnx.checker.check_model(model)
        return model


def is_float(array: Array | None) -> bool:
    return array is not None and array.dtype.kind == "f"


def loss_of(outputs: list[str]) -> Iterator[onnx.NodeProto]:
    """The outputs' elements, weighted and summed."""
    nodes, sums = [], []
    for name in outputs:
        nodes += [
            helper.make_node("Reshape", [name, "minus"], [f"{name}_flat"]),
            helper.make_node("Shape", [f"{name}_flat"], [f"{name}_size"]),
            helper.make_node("Slice", ["weight", "zero", f"{name}_size"], [f"{name}_weight"]),
            helper.make_node("Mul", [f"{name}_flat", f"{name}_weight"], [f"{name}_weighted"]),
            helper.make_node("ReduceSum", [f"{name}_weighted"], [f"{name}_sum"], keepdims=0),
        ]
        sums.append(f"{name}_sum")
    return iter([*nodes, helper.make_node("Sum", sums, ["loss"])])


def one(op: str, *inputs: Any, outputs: int = 1, opset: int = OPSET, **rest: Any) -> Case:
    own = {name: rest.pop(name) for name in ("constant", "dynamic", "fixed", "used") if name in rest}
    arrays = tuple(None if a is None else np.asarray(a) for a in inputs)
    return Case(op, arrays, rest, outputs, opset, **own)


class Erf(OpRun):
    """onnx's own computes in float32."""

    def _run(self, x: Array) -> tuple[Array]:
        return (scipy.special.erf(x).astype(x.dtype),)


class Gelu(OpRun):
    """Likewise."""

    def _run(self, x: Array, approximate: str | None = None) -> tuple[Array]:
        if approximate == "tanh":
            return (x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
        return (x * scipy.special.ndtr(x),)


class ConvTranspose(OpRun):
    """onnx's own takes all channels for one group."""

    def _run(self, x: Array, w: Array, b: Array | None = None, **attributes: Any) -> tuple[Array]:
        rank, group = x.ndim - 2, attributes["group"] or 1
        strides, dilations, extra = (
            (attributes[k] or [d] * rank) for k, d in (("strides", 1), ("dilations", 1), ("output_padding", 0))
        )
        pads = attributes["pads"] or [0] * 2 * rank
        sizes = [
            (n - 1) * s + (k - 1) * d + 1
            for n, s, k, d in zip(x.shape[2:], strides, w.shape[2:], dilations, strict=True)
        ]
        full = np.zeros((x.shape[0], group, w.shape[1], *(n + e for n, e in zip(sizes, extra, strict=True))), x.dtype)
        x, w = (a.reshape(*lead, group, -1, *a.shape[tail:]) for a, lead, tail in ((x, x.shape[:1], 2), (w, (), 1)))
        for place in np.ndindex(*w.shape[3:]):
            window = tuple(
                slice(p * d, p * d + (n - 1) * s + 1, s)
                for p, d, n, s in zip(place, dilations, x.shape[3:], strides, strict=True)
            )
            full[(..., *window)] += np.einsum("bgc...,gco->bgo...", x, w[(..., *place)])
        cut = tuple(slice(a, n - z) for a, z, n in zip(pads[:rank], pads[rank:], full.shape[3:], strict=True))
        found = full.reshape(full.shape[0], -1, *full.shape[3:])[(..., *cut)]
        return (found if b is None else found + b.reshape(-1, *[1] * rank),)


def reference(model: ModelProto, feeds: Mapping[str, Array], names: list[str]) -> list[Array]:
    return ReferenceEvaluator(model, new_ops=[ConvTranspose, Erf, Gelu]).run(names, dict(feeds))


def central_difference(case: Case, gradients: Gradients, step: float = 1e-6) -> None:
    """Hold each gradient, in float64, to the loss's difference along a random direction."""
    model, feeds = case.model(np.float64), case.feeds(np.float64)
    names = list(gradients.outputs)
    found = dict(zip(names, reference(gradients.model, feeds, list(gradients.outputs.values())), strict=True))
    rng = np.random.default_rng(1)
    for name, array in case.floats().items():
        assert found[name].shape == array.shape, f"{name}: {found[name].shape} for {array.shape}"
        direction = rng.standard_normal(array.shape)
        ends = []
        for sign in (1, -1):
            moved = feeds | {name: feeds[name] + sign * step * direction}
            ends.append(float(np.reshape(reference(model, moved, ["loss"])[0], ())))
        wanted, got = (ends[0] - ends[1]) / (2 * step), float((found[name] * direction).sum())
        scale = float(np.sqrt((found[name] ** 2).sum() * (direction**2).sum())) + 1e-3
        assert abs(wanted - got) <= 1e-6 * scale, f"{case.op} {name}: {got} where the difference says {wanted}"


@cache
def gradients_of(case: Case, dtype: type = np.float32) -> Gradients:
    return add_gradients(case.model(dtype), "loss", case.floats())


def missing_kernels(model: ModelProto, provider: str) -> list[str]:
    """Nodes of the gradient model that the provider has no kernel for, at the types that they have."""
    view = Graph.of(model)
    types = infer_types(view)
    found = []
    for node in view.nodes:
        assert node.signature is not None
        bound = bind(node.signature, [None if v == ABSENT else types[v] for v in node.inputs])
        if not runs_on(provider, Typed(node.signature, bound, node.proto)):
            found.append(f"{node.key} {dict(bound)}")
    return found
