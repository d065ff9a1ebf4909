"""Split-K: a long product becomes shorter ones, side by side as a batch, whose results are added.

``x[..., M, K] @ w[K, N]`` is the sum of ``x[..., C, M, K / C] @ w[C, K / C, N]`` over C. The elements of a weight are
already in this order: if nothing else reads it, it gets other dimensions and stays in place. The product keeps its
name, and so does the result.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from onnx import NodeProto

from onnxamp._decide.kinds import product_splits
from onnxamp._decide.patterns.split_products import SUM, may_split
from onnxamp._facts.ops import attribute
from onnxamp._facts.providers import profile_of
from onnxamp._graph.constants import terms_of
from onnxamp._graph.editor import GraphEditor, set_attribute
from onnxamp._graph.graph import Graph
from onnxamp._graph.view import ABSENT, Node, Origin
from onnxamp._model.protos import copied
from onnxamp._options.options import Options
from onnxamp._rewrite import Draft, PassResult, Site

_AXES_ARE_INPUT: Final = 13
"""First opset at which the axes of a sum are an input."""


def apply(draft: Draft, options: Options) -> PassResult:
    """Split products that are too long; return the same draft if there are none.

    Complexity: linear in nodes.
    """
    if not may_split(options):
        return PassResult(draft)
    graph = draft.graph
    splits = product_splits(draft.graph, options)
    if not splits:
        return PassResult(draft)
    splitter = _Splitter(graph, splits, GraphEditor(graph))
    for index in splits:
        splitter.editor.replace(index, splitter.nodes(graph.nodes[index]))
    splitter.reshape()
    result = Draft(splitter.editor.finish(), graph.folder)
    return PassResult(result, (_note(graph, splits, options),))


def _note(graph: Graph, splits: Mapping[int, int], options: Options) -> str:
    """Return the sentence about the split products."""
    most = max(terms_of(graph.nodes[index], graph.shapes) or 0 for index in splits)
    profile = profile_of(options.target)
    assert profile is not None
    alone = len(splits) == 1
    what, sums = (
        ("1 product", "a sum") if alone else (f"{len(splits):,} products", "sums")
    )
    return (
        f"Split {what} of up to {most:,} terms into {sums} of shorter ones, since {profile.name} sums up float16 in"
        f" float16; --no-split-k keeps {'it' if alone else 'them'} in float32 instead."
    )


@dataclass(slots=True)
class _Splitter:
    """Splits the products of one graph."""

    graph: Graph
    found: Mapping[int, int]
    editor: GraphEditor
    turned: dict[int, tuple[int, ...]] = field(init=False)
    """Weight -> its new dimensions, where it is stored with them."""

    def __post_init__(self) -> None:
        weights = {self.graph.nodes[index].inputs[1] for index in self.found}
        self.turned = {
            value: dims for value in weights if (dims := self.stored(value))
        }

    def stored(self, value: int) -> tuple[int, ...]:
        """Return the dimensions that all readers of a weight want; none if they differ, or it is not a weight."""
        graph = self.graph
        held = self.graph.values[value]
        listed = graph.scopes[held.scope].inputs
        if (
            held.origin is not Origin.INITIALIZER
            or value in listed
            or graph.results[value]
        ):
            return ()
        wanted = {
            self.dims(graph.nodes[node]) if node in self.found and port == 1 else ()
            for node, port in graph.uses[value]
        }
        return wanted.pop() if len(wanted) == 1 else ()

    def dims(self, node: Node) -> tuple[int, ...]:
        """Return the dimensions of the second factor with its terms split."""
        parts = self.found[node.index]
        shape = self.graph.shapes[node.inputs[1]]
        assert shape is not None
        sizes = tuple(size or 0 for size in shape)
        if _is_turned(node):
            return (sizes[0], parts, sizes[1] // parts)
        if len(sizes) == 1:
            return (parts, sizes[0] // parts, 1)
        return (*sizes[:-2], parts, sizes[-2] // parts, sizes[-1])

    def reshape(self) -> None:
        """Give weights their new dimensions; their elements stay in place."""
        for value, dims in self.turned.items():
            held = self.graph.values[value]
            self.editor.weight(value).dims[:] = dims
            self.editor.undeclare(held.scope, [held.name])

    def nodes(self, node: Node) -> list[NodeProto]:
        """Return the nodes that replace a product."""
        site = Site(self.graph, node, self.editor)
        nodes = list[NodeProto]()
        proto = node.proto
        first = self.rows(site, nodes)
        second = self.weight(site, nodes)
        product = copied(proto)
        product.op_type = "MatMul"
        del product.attribute[:]
        product.input[:] = [first, second]
        product.output[:] = [site.fresh("partial")]
        has_bias = node.key == "Gemm" and node.input(2) != ABSENT
        total = site.fresh("product") if has_bias else proto.output[0]
        nodes += [product, self.total(site, product.output[0], total)]
        if has_bias:
            inputs = [total, proto.input[2]]
            name = site.fresh("bias")
            nodes.append(self.editor.make("Add", inputs, [proto.output[0]], name))
        return nodes

    def rows(self, site: Site, nodes: list[NodeProto]) -> str:
        """Return the first factor with its terms split. Dimensions before them are copied, known or not."""
        node = site.node
        parts = self.found[site.node.index]
        shape = site.shape_of(node.proto.input[0])
        terms = terms_of(node, self.graph.shapes)
        assert shape is not None
        assert terms is not None
        # In the shape of a Reshape, 0 copies the size of the input.
        before = [0] * (len(shape) - 1)
        size = terms // parts
        # With one row, the parts are in the order of a batch already.
        if len(shape) == 1 or shape[-2] == 1:
            return _reshaped(
                site,
                nodes,
                node.proto.input[0],
                [*before[:-1], parts, 1, size],
                "rows",
            )
        name = _reshaped(
            site, nodes, node.proto.input[0], [*before, parts, size], "terms"
        )
        last = len(shape)
        perm = [*range(last - 2), last - 1, last - 2, last]
        return _added(site, nodes, "Transpose", [name], "rows", perm=perm)

    def weight(self, site: Site, nodes: list[NodeProto]) -> str:
        """Return the second factor with its terms split."""
        node = site.node
        name = node.proto.input[1]
        if node.inputs[1] not in self.turned:
            name = _reshaped(site, nodes, name, self.dims(node), "weight")
        if not _is_turned(node):
            return name
        return _added(site, nodes, "Transpose", [name], "columns", perm=[1, 2, 0])

    def total(self, site: Site, partial: str, name: str) -> NodeProto:
        """Return the node that adds the results, and removes the dimensions of size 1 that come from vectors."""
        shapes = [self.graph.shapes[value] or () for value in site.node.inputs[:2]]
        rank = max(2, *map(len, shapes))
        axes = [
            rank - 2,
            *[rank - 1] * (len(shapes[0]) == 1),
            *[rank] * (len(shapes[1]) == 1),
        ]
        node = self.editor.make(
            SUM, [partial], [name], name=site.fresh("sum"), keepdims=0
        )
        if self.graph.book.opsets[""] >= _AXES_ARE_INPUT:
            node.input.append(self.editor.ints(axes, site.named("axes")))
        else:
            set_attribute(node, "axes", axes)
        return node


def _is_turned(node: Node) -> bool:
    return node.key == "Gemm" and bool(attribute(node.proto, "transB"))


def _reshaped(
    site: Site, nodes: list[NodeProto], name: str, dims: Iterable[int], what: str
) -> str:
    shape = site.editor.ints([*dims], site.named(f"{what}_shape"))
    return _added(site, nodes, "Reshape", [name, shape], what)


def _added(
    site: Site,
    nodes: list[NodeProto],
    op: str,
    inputs: list[str],
    what: str,
    **attributes: Any,
) -> str:
    """Add a node, and return the name of its output."""
    name = site.fresh(what)
    nodes.append(site.editor.make(op, inputs, [name], **attributes))
    return name
