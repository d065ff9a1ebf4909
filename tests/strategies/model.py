"""From a grown graph to a model file: outputs, functions, declarations, and how untidy files are."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from onnx import AttributeProto, FunctionProto, ModelProto, NodeProto, ValueInfoProto, helper

from .bodies import control_flow
from .builder import FLOAT, Builder
from .products import dequantized_product, transposed_product
from .table import CONTROL_FLOW, opsets_of, schemas

DOMAIN = "local"
UNARY = ("Relu", "Tanh", "Sigmoid", "Neg", "Softmax", "Abs", "Identity")
BINARY = ("Add", "Mul", "Max", "Sub")
RETYPED = 23
"""First opset at which the output of DequantizeLinear may have another type than its scale."""


@dataclass(frozen=True)
class Generated:
    """A random model, the numbers of its inputs, and whether its outputs are known to follow them continuously."""

    model: ModelProto
    feeds: dict[str, Any]
    smooth: bool
    tidy: bool
    """Whether onnx's checker ought to like it."""


def random_model(rng: Random, focus: str = "", size: int = 6) -> Generated:
    """A valid model of about ``size`` random nodes and, where ``focus`` names an op, one of that op among them."""
    usable = opsets_of(focus) if focus else opsets_of("SequenceMap")
    loaded = [version for version in usable if version <= 26]  # what ONNX Runtime 1.31 loads
    opset = rng.choice(loaded if loaded and rng.random() < 0.9 else usable)
    builder = Builder(rng, opset)
    before = rng.randint(0, size // 2)
    builder.grow(builder.main, before)
    if focus in CONTROL_FLOW:
        control_flow(builder, builder.main, focus)
    elif focus:
        builder.node(builder.main, focus)
    functions = _functions(builder) if opset >= 13 and builder.chance(0.15) else []
    builder.grow(builder.main, size - before)
    return _finish(builder, functions)


def model_of_products(rng: Random, size: int = 4) -> Generated:
    """A valid model with products that ONNX Runtime's graph optimizers take up, among random nodes."""
    builder = Builder(rng, rng.choice((11, 13, 17, 20, 21, 23, 24)))
    builder.grow(builder.main, rng.randint(0, size))
    for _ in range(rng.randint(1, 3)):
        transposed_product(builder)
    if builder.opset >= RETYPED and builder.chance(0.5):
        dequantized_product(builder)
    builder.grow(builder.main, rng.randint(0, size))
    return _finish(builder, [])


def _functions(builder: Builder) -> list[FunctionProto]:
    """Two model-local functions, one of which calls the other, and a call of it.

    The numbers that they multiply by are attributes, which calls give, refer to their own, or leave to defaults.
    """
    rng = builder.rng
    imports = [helper.make_opsetid("", builder.opset), helper.make_opsetid(DOMAIN, 1)]
    constant = refer(helper.make_node("Constant", [], ["k"]), "value_float", "factor")
    inner = helper.make_function(
        DOMAIN, "Inner", ["a", "b"], ["y"],
        [constant, helper.make_node("Mul", ["a", "k"], ["m"]), helper.make_node(rng.choice(BINARY), ["m", "b"], ["y"])],
        imports, attribute_protos=[helper.make_attribute("factor", 0.5)],
    )  # fmt: skip
    call = helper.make_node("Inner", ["u", "a"], ["w"], domain=DOMAIN)
    again = helper.make_node("Inner", ["w", "u"], ["y"], domain=DOMAIN)
    calls = [rng.choice((one, refer(one, "factor", "outer"))) for one in (call, again)]
    own = rng.choice(({"attributes": ["outer"]}, {"attribute_protos": [helper.make_attribute("outer", 0.25)]}))
    nodes = [helper.make_node(rng.choice(UNARY), ["a"], ["u"]), *calls]
    outer = helper.make_function(DOMAIN, "Outer", ["a"], ["y"], nodes, imports, **own)
    for _ in range(rng.randint(1, 2)):
        source = builder.shaped(builder.main, FLOAT, (2, 3))
        proto = helper.make_node("Outer", [source.name], [builder.name()], domain=DOMAIN)
        if builder.chance(0.3):
            proto.attribute.append(helper.make_attribute("outer", 2.0))
        builder.add(builder.main, proto, [source.type])
    return [inner, outer]


def refer(node: NodeProto, name: str, attribute: str) -> NodeProto:
    """A copy of a node of a function with an attribute that refers to one of the function."""
    result = NodeProto()
    result.CopyFrom(node)
    result.attribute.add(name=name, type=AttributeProto.FLOAT, ref_attr_name=attribute)
    return result


def _finish(builder: Builder, functions: list[FunctionProto]) -> Generated:
    rng, main = builder.rng, builder.main
    if not main.nodes:
        builder.node(main, "Relu")
    outputs = _outputs(builder)
    names = rng.choice(("unique",) * 6 + ("empty",) * 3 + ("same",))
    for index, node in enumerate(main.nodes):
        node.name = {"unique": f"n{index}", "empty": "", "same": "n"}[names]
    produced = {name for node in main.nodes for name in node.output}
    values = {value.name: value for value in main.values}
    hidden = [value for name, value in values.items() if name in produced and value.kind]
    declared = [helper.make_value_info(v.name, v.type) for v in hidden if builder.chance(0.3)]
    tidy = True
    crashes = any(node.op_type in ("EyeLike", "RegexFullMatch") for node in _all_nodes(main.nodes))  # onnx, unsorted
    if builder.chance(0.05) and not crashes:
        tidy = False
        rng.shuffle(main.nodes)
    graph = helper.make_graph(main.nodes, "random", main.inputs, outputs, main.initializers, value_info=declared)
    if builder.chance(0.1):
        graph.input.extend(_overridable(builder))
    imports = [helper.make_opsetid("", builder.opset)]
    if functions:
        imports.append(helper.make_opsetid(DOMAIN, 1))
    implied = max(row[2] for row in helper.VERSION_TABLE if row[1] <= _ir(builder.opset))
    if builder.chance(0.2) and builder.opset == implied:
        imports, tidy = imports[1:] or [helper.make_opsetid("com.microsoft", 1)], False
    if builder.chance(0.4):
        _symbols(graph.input)
    model = helper.make_model(graph, opset_imports=imports, functions=functions, ir_version=_ir(builder.opset))
    model.producer_name, model.doc_string = "generator", "a random model"
    helper.set_model_props(model, {"key": "value"})
    main.nodes[0].doc_string = "the first node"
    return Generated(model, builder.feeds, tidy and not builder.jumps, tidy)


def _ir(opset: int) -> int:
    """The oldest IR version that goes with an opset, but new enough for functions."""
    return 8 if opset < 19 else 9 if opset < 21 else 10 if opset < 23 else 11


def _outputs(builder: Builder) -> list[ValueInfoProto]:
    """What nobody reads, some of the rest, and now and then an input or an initializer."""
    rng, main = builder.rng, builder.main
    produced = {name for node in main.nodes for name in node.output}
    read = _names_read(main.nodes)
    mine = [value for value in main.values if value.name in produced]
    ends = [value for value in mine if value.name not in read or builder.chance(0.1)] or mine[-1:]
    sources = [value for value in main.values if value.name not in produced]
    if sources and builder.chance(0.15):
        ends.append(rng.choice(sources))
    rng.shuffle(ends)
    found = [value for value in {value.name: value for value in ends}.values() if value.shape is not None]
    return [helper.make_value_info(value.name, value.type) for value in found]


def _all_nodes(nodes: Iterable[NodeProto]) -> Iterator[NodeProto]:
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack += [inner for attribute in node.attribute for inner in attribute.g.node]


def _names_read(nodes: Iterable[NodeProto]) -> set[str]:
    everything = list(_all_nodes(nodes))
    found = {name for node in everything for name in node.input}
    return found | {info.name for node in everything for item in node.attribute for info in item.g.output}


def _overridable(builder: Builder) -> list[ValueInfoProto]:
    """Initializers that callers may override."""
    values = {value.name: value for value in builder.main.values}
    chosen = [tensor.name for tensor in builder.main.initializers if builder.chance(0.5)]
    return [helper.make_value_info(name, values[name].type) for name in chosen if values[name].kind == FLOAT]


def _symbols(inputs: Iterable[ValueInfoProto]) -> None:
    """Make the sizes of the inputs unknown to all but the caller."""
    for info in inputs:
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            dim.dim_param = f"{info.name}.{axis}"


__all__ = ["Generated", "random_model", "schemas"]
