"""The types with which a target runs a node, by a kernel or through a function body: which parameters may be low."""

import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import onnx
import onnx.inliner
from onnx import NodeProto, helper

from onnxamp._base.errors import ModelError
from onnxamp._facts.dtypes import FLOAT_TENSORS, Format, elem_of, retyped
from onnxamp._facts.kernels import Binding, is_consistent, kernel_table
from onnxamp._facts.ops import op_facts, type_giver
from onnxamp._facts.providers import has_kernel_limits, kernel_failure, kernel_limit
from onnxamp._facts.signature import Signature, lookup
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import cpu_of, target_of, with_kernels
from onnxamp._graph.graph import Graph
from onnxamp._graph.types import bind_node, infer_types
from onnxamp._graph.view import Node, View
from onnxamp._model.protos import copied


class Typed(NamedTuple):
    """A node, its schema, and the types of its parameters, for queries to targets."""

    signature: Signature
    bound: Binding
    proto: NodeProto

    @classmethod
    def of(cls, node: Node, types: Sequence[str | None]) -> "Typed":
        """Return a node, whose schema must be known, with the types of its values."""
        assert node.signature is not None
        return cls(node.signature, bind_node(node, types), node.proto)

    def inputs(self) -> tuple[str | None, ...]:
        """Return the types of the inputs; None where they are absent or unknown."""
        return tuple(map(self._input, range(len(self.proto.input))))

    def _input(self, position: int) -> str | None:
        """Return the type of an input; None if it is absent or unknown."""
        port = self.signature.input(position)
        if port is None or not self.proto.input[position]:
            return None
        if port.type not in self.signature.params:
            return port.type
        return self.bound.get(self.signature.param(port, position))


def has_kernel(provider: str, op: Typed) -> bool:
    """Return whether a kernel of the provider takes the op with these types."""
    kernels = kernel_table(provider).get(op.signature.key, ())
    return any(kernel.takes(op.signature, op.bound) for kernel in kernels)


def deciding_form(target: str, node: Node) -> tuple[object, ...]:
    """Return the ports and attributes of a node, which affect where it runs in addition to its op and types.

    They matter only if kernels have limits, a function body may run, or an attribute sets a type; otherwise, return ().
    """
    proto = node.proto
    signature = node.signature
    if not (signature and signature.has_function) and not _counts(target, node.key):
        return ()
    present = (tuple(map(bool, names)) for names in (proto.input, proto.output))
    return (*present, *(item.SerializeToString() for item in proto.attribute))


@cache
def _counts(target: str, key: str) -> bool:
    devices = map(device_of, (target, cpu_of(target)))
    is_limited = any(has_kernel_limits(device, key) for device in devices)
    return is_limited or key in op_facts().dtype_attribute


def runs_on(provider: str, op: Typed) -> bool:
    """Return whether the provider runs the op with these types, by a kernel or through the op's function body."""
    signature = op.signature
    key = op.signature.key
    if (
        signature.declared
        or key in op_facts().kernel_free
        or key in op_facts().control_flow
    ):
        return True
    if fails(provider, op) is not None:
        return False
    if not target_of(provider).limits_types:
        if not signature.has_function or any(
            kernel_table(name).get(key) for name in with_kernels()
        ):
            return agrees(op)
    elif has_kernel(provider, op):
        return kernel_limit(device_of(provider), op.proto, op.bound) is None
    # Targets that build engines do not expand functions.
    if not signature.has_function or target_of(provider).builds:
        return False
    return _body_fits(provider, signature, op.inputs(), op.proto.SerializeToString())


def agrees(op: Typed) -> bool:
    """Return whether an op's types agree with each other: a kernel or the op's function body takes their mixture.

    A schema may admit mixtures that the function body, which defines the op, cannot compute, as it multiplies or adds
    values of different types.
    """
    if (
        len(FLOAT_TENSORS.intersection(op.bound.values())) < 2
        or not op.signature.has_function
    ):
        return True
    if any(has_kernel(name, op) for name in with_kernels()):
        return True
    return _body_fits("", op.signature, op.inputs(), op.proto.SerializeToString())


def fails(provider: str, op: Typed) -> str | None:
    """Return why the provider fails with these types, although a kernel or the function body takes them, or None."""
    is_expanded = target_of(provider).limits_types and not has_kernel(provider, op)
    if is_expanded and not op.signature.has_function:
        return None
    return kernel_failure(
        device_of(provider), op.proto, op.bound, expanded=is_expanded
    )


@cache
def _body_fits(
    provider: str,
    signature: Signature,
    types: tuple[str | None, ...],
    serialized: bytes,
) -> bool:
    """Return whether every node of the op's function body has consistent types, and runs on the provider, if given.

    Unknown cases count only against a provider. ONNX Runtime expands a fixed body only if none of its ops has changed
    between the body's opset and the model's (``OpSchema::ValidateReferencedOpsInFunction``).
    """
    node = NodeProto.FromString(serialized)
    if any(
        name and not elem_of(kind)
        for name, kind in zip(node.input, types, strict=True)
    ):
        return not provider
    view = _expanded(node, signature, types)
    # Where onnx cannot expand the op, it leaves the node, and asking about that again would never end.
    if view is None or (
        provider and any(inner.key == signature.key for inner in view.nodes)
    ):
        return not provider
    inferred = infer_types(view)
    for inner in view.nodes:
        if inner.signature is None:
            if provider:
                return False
            continue
        inputs = [inferred[value] for value in inner.inputs]
        typed = Typed.of(inner, inferred)
        if not is_consistent(inner.signature, typed.bound, inputs):
            return False
        if provider and (
            _changed_since(signature, inner) or not runs_on(provider, typed)
        ):
            return False
    return True


def _changed_since(signature: Signature, inner: Node) -> bool:
    """Return whether an op of a fixed function body has different versions at the model's opset and at the body's."""
    now = lookup("", inner.proto.op_type, signature.opset)
    if (
        signature.body not in signature.fixed_bodies
        or now is None
        or inner.signature is None
    ):
        return False
    return now.since != inner.signature.since


def _expanded(
    node: NodeProto, signature: Signature, types: Sequence[str | None]
) -> View | None:
    """Return the op's function body as a model; None if the body does not fit these types."""
    inputs = [
        helper.make_tensor_value_info(f"in{position}", elem_of(kind), None)
        for position, kind in enumerate(types)
        if kind is not None
    ]
    proto = copied(node)
    del proto.input[:]
    proto.input.extend(
        "" if kind is None else f"in{position}" for position, kind in enumerate(types)
    )
    graph = helper.make_graph(
        [proto],
        "body",
        inputs,
        [helper.make_empty_tensor_value_info(n) for n in node.output if n],
    )
    imports = [
        helper.make_opsetid(signature.domain, signature.body or signature.since)
    ]
    model = helper.make_model(graph, opset_imports=imports, ir_version=8)
    ops: list[Any] = [(signature.domain, signature.op_type)]
    try:
        body = onnx.inliner.inline_selected_functions(
            model, ops, inline_schema_functions=True
        )
        return Graph.of(body)
    except (RuntimeError, ModelError, onnx.checker.ValidationError):
        return None


class Freedom(NamedTuple):
    """The choices that the target's kernels leave for the type parameters of one node.

    Attributes:
        high: parameters that must stay in float32.
        implies: pairs (p, q): if p is low, q must be low.
        falls_back: the target has no float32 kernel, so the node runs on the CPU.
        only_low: the target has a kernel in low precision, but none in float32.
    """

    high: frozenset[str] = frozenset()
    implies: tuple[tuple[str, str], ...] = ()
    falls_back: bool = False
    only_low: bool = False


def freedom(target: str, op: Typed, params: Sequence[str], low: Format) -> Freedom:
    """Return which of a node's float32 parameters ``params`` may be low on the target.

    Try all 2^k assignments; k is at most 4 in practice. The legal ones are closed under element-wise minimum and
    maximum, which a test verifies for the tables, so pins and pairwise implications describe them exactly.
    """
    if not params:
        return Freedom()
    choices = {
        choice: op._replace(bound=_types(op, params, choice, low))
        for choice in itertools.product((False, True), repeat=len(params))
    }

    def legal(asked: Callable[[str, Typed], bool]) -> frozenset[tuple[bool, ...]]:
        return frozenset(
            choice for choice, typed in choices.items() if asked(target, typed)
        )

    able = legal(runs_on)
    all_high = (False,) * len(params)
    falls_back = all_high not in able and not target_of(target).builds
    is_given = op.signature.key in op_facts().dtype_attribute
    if cpu_of(target) != target and (
        not able or (is_given and not target_of(target).limits_types)
    ):
        # ONNX Runtime wraps float16 nodes without a CPU kernel in Casts, unless an attribute determines their type.
        # Scales of integers would be rounded without any benefit.
        has_scales = op.signature.key in op_facts().scales
        if low.is_wrapped and not is_given and not has_scales:
            return _described(
                params, legal(_may_be_wrapped) | {all_high}, falls_back=True
            )
        able = legal(_is_left)
    only_low = falls_back and any(any(choice) for choice in able)
    return _described(
        params, able | {all_high}, falls_back=falls_back, only_low=only_low
    )


def _may_be_wrapped(target: str, op: Typed) -> bool:
    """Return whether the CPU provider beside the target runs a float16 node, directly or in float32 between Casts."""
    is_failing = any(fails(place, op) for place in (target, cpu_of(target)))
    return not is_failing and agrees(op)


def _is_left(target: str, op: Typed) -> bool:
    """Return whether the target leaves a node to the CPU provider beside it, which runs it."""
    return fails(target, op) is None and runs_on(cpu_of(target), op)


def _described(
    params: Sequence[str],
    legal: frozenset[tuple[bool, ...]],
    *,
    falls_back: bool,
    only_low: bool = False,
) -> Freedom:
    """Return the pins and implications that describe the legal choices."""
    high = set[str]()
    implies = list[tuple[str, str]]()
    for i, param in enumerate(params):
        where_low = [choice for choice in legal if choice[i]]
        if not where_low:
            high.add(param)
            continue
        for j, other in enumerate(params):
            if i != j and all(choice[j] for choice in where_low):
                implies.append((param, other))
    return Freedom(frozenset(high), tuple(implies), falls_back, only_low)


def _types(
    op: Typed, params: Sequence[str], choice: Sequence[bool], low: Format
) -> Binding:
    """Return the types of a choice. Output 0 may have the type of an input if its dtype attribute is absent."""
    types = dict(op.bound)
    for param, is_low in zip(params, choice, strict=True):
        if is_low:
            types[param] = retyped(types[param], low)
    is_given = op.signature.key in op_facts().dtype_attribute
    giver = type_giver(op.proto) if is_given else None
    output = op.signature.output(0)
    read = None if giver is None else op.signature.input(giver)
    if giver is not None and output is not None and read is not None:
        given = types.get(op.signature.param(read, giver))
        if given is not None:
            types[op.signature.param(output, 0)] = given
    return types
