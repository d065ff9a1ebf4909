"""What a minimal graph is, and how to write one down in a few lines."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, ValueInfoProto, helper, numpy_helper, parser

Values = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]
"""Draws one input of the given shape."""
Feeds = dict[str, Any]
"""Model inputs by name: an array, or a list of arrays for a sequence."""

FREE_DIM = 3
"""What a dimension without a value (``N``) is set to."""


@dataclass(frozen=True)
class Case:
    """One minimal graph of the field notes, and what to expect of it."""

    name: str
    row: int
    """The row of the field notes."""
    build: Callable[[], ModelProto]
    feeds: Callable[[np.random.Generator], Feeds]
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Extra keywords of ``convert_model``."""
    loads: bool = True
    """Whether ONNX Runtime's CPU provider loads the original."""
    tolerance: float | None = None
    """Allowed relative L2 error; infinite where the output is random."""
    loose_integers: bool = False
    """Integer outputs may differ, because they are ranks or rounded values of continuous inputs."""

    def inputs(self) -> Feeds:
        """The same inputs at every call."""
        return self.feeds(np.random.default_rng(zlib.crc32(self.name.encode())))


def normal(scale: float = 1.0, shift: float = 0.0) -> Values:
    return lambda rng, shape: (rng.standard_normal(shape) * scale + shift).astype(np.float32)


def around(magnitude: float) -> Values:
    """Values of both signs with magnitudes near ``magnitude``."""
    return lambda rng, shape: (magnitude * rng.uniform(0.8, 1.2, shape) * rng.choice([-1, 1], shape)).astype(np.float32)


def positive(low: float = 0.5, high: float = 2.0) -> Values:
    return lambda rng, shape: rng.uniform(low, high, shape).astype(np.float32)


def integers(low: int, high: int, dtype: type = np.int64) -> Values:
    return lambda rng, shape: rng.integers(low, high, shape).astype(dtype)


def fixed(*values: float, dtype: type = np.float32) -> Values:
    return lambda _rng, shape: np.asarray(values, dtype).reshape(shape)


def parse(text: str, opset: int = 17, ir: int = 8, domains: Mapping[str, int] = MappingProxyType({})) -> ModelProto:
    """The model written in ONNX text syntax: a graph, then functions."""
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in {"": opset, **domains}.items())
    return parser.parse_model(f"<ir_version: {ir}, opset_import: [{imports}]>\ng {text}")


def add_weights(model: ModelProto, weights: Mapping[str, np.ndarray | tuple[int, ...]]) -> ModelProto:
    """Append initializers: arrays as they are, shapes filled with small random numbers."""
    rng = np.random.default_rng(0)
    for name, value in weights.items():
        array = value
        if not isinstance(value, np.ndarray):
            array = (rng.standard_normal(value) / max(1, value[0]) ** 0.5).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def shape_of(info: ValueInfoProto) -> tuple[int, ...]:
    dims = info.type.tensor_type.shape.dim
    return tuple(dim.dim_value if dim.HasField("dim_value") else FREE_DIM for dim in dims)


def default_values(elem: int) -> Values:
    if elem == TensorProto.BOOL:
        return lambda rng, shape: rng.integers(0, 2, shape).astype(bool)
    dtype = helper.tensor_dtype_to_np_dtype(elem)
    if np.issubdtype(dtype, np.integer):
        return integers(0, 4, dtype)
    return lambda rng, shape: rng.standard_normal(shape).astype(dtype)


def draw(model: ModelProto, rng: np.random.Generator, values: Mapping[str, Any]) -> Feeds:
    """One value per required input, by ``values`` where it names the input."""
    initializers = {tensor.name for tensor in model.graph.initializer}
    feeds: Feeds = {}
    for info in model.graph.input:
        value = values.get(info.name)
        if callable(value):
            feeds[info.name] = value(rng, shape_of(info))
        elif value is not None:
            feeds[info.name] = value
        elif info.name not in initializers:
            feeds[info.name] = default_values(info.type.tensor_type.elem_type)(rng, shape_of(info))
    return feeds


def graph(
    name: str,
    row: int,
    text: str,
    *,
    opset: int = 17,
    ir: int | None = None,
    domains: Mapping[str, int] = MappingProxyType({}),
    weights: Mapping[str, np.ndarray | tuple[int, ...]] = MappingProxyType({}),
    edit: Callable[[ModelProto], object] | None = None,
    feeds: Mapping[str, Any] = MappingProxyType({}),
    **expectations: Any,
) -> Case:
    """A case whose graph is written in text; ``edit`` adds what the text syntax cannot say."""
    ir = ir or (10 if opset > 20 else 8)

    def build() -> ModelProto:
        model = add_weights(parse(text, opset, ir, domains), weights)
        if edit is not None:
            edit(model)
        return model

    return Case(name, row, build, lambda rng: draw(build(), rng, feeds), **expectations)


def case(
    row: int, feeds: Mapping[str, Any] = MappingProxyType({}), **expectations: Any
) -> Callable[[Callable[[], ModelProto]], Case]:
    """Make a function that builds a model into a case of the same name."""

    def decorate(build: Callable[[], ModelProto]) -> Case:
        return Case(build.__name__, row, build, lambda rng: draw(build(), rng, feeds), **expectations)

    return decorate


def at_opsets(*opsets: int, **arguments: Any) -> tuple[Case, ...]:
    """The same graph at several opsets: many bfloat16 kernels exist at the newest only."""
    name = arguments.pop("name")
    return tuple(graph(f"{name}_opset{opset}", opset=opset, **arguments) for opset in opsets)
