"""Places the nodes of a model on a target: which provider has a kernel for them, and what falling back costs.

ONNX Runtime tries, in this order: a kernel of the target's provider, a kernel of the CPU provider, the function body of
the op. A float16 node without any of these runs in float32 on the CPU, between Casts; a bfloat16 node does not load.
TensorRT builds all nodes or none.
"""

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from functools import cache
from itertools import chain
from typing import Final, NamedTuple

from onnxamp._audit import Finding, finding
from onnxamp._audit.faults import Sized, element_bytes
from onnxamp._convert.estimate import constant_nodes
from onnxamp._facts.dtypes import BFLOAT16, FLOAT, FLOAT16, FORMATS, readable_types
from onnxamp._facts.kernels import Kernel, carries, kernel_table
from onnxamp._facts.ops import op_facts
from onnxamp._facts.providers import computes_low, kernel_limit
from onnxamp._facts.signature import Signature
from onnxamp._facts.tables import device_of, target_table
from onnxamp._facts.targets import CPU, cpu_of, target_of, version_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.shapes import Shape, elements
from onnxamp._graph.targets.freedom import (
    Typed,
    deciding_form,
    fails,
    has_kernel,
    runs_on,
)
from onnxamp._graph.types import bind_node
from onnxamp._graph.view import ABSENT, Node, Origin, View


def home(target: str) -> str:
    """Return the name of the target's provider in reports."""
    return device_of(target).upper()


def advice(target: str, typing: "NodeTyping", refused: str | None) -> str:
    """Return how to bring a node back to the target's provider."""
    if refused is not None:
        return "It falls back in every precision: if that costs too much, export the model differently."
    if device_of(target) == CPU:
        return "Keep it in float32 (--keep-fp32 NAME): that saves the Casts."
    rows = typing.kernels(target)
    since = typing.signature.since
    raised = in_float32(typing.bound)
    if any(kernel.takes(typing.signature, raised) for kernel in rows):
        return f"Keep it in float32 (--keep-fp32 NAME): {home(target)} has a kernel for that."
    older = (kernel for kernel in rows if kernel.since < since)
    if any(_admits(kernel.types, typing.bound) for kernel in older):
        return f"{home(target)} has a kernel for older versions of the op: export with opset {since - 1} or lower."
    return "The op falls back in every precision: replace it if that costs too much."


def cure(target: str, typing: "NodeTyping") -> str:
    """Return the advice about a node without a kernel."""
    signature = typing.signature
    raised = in_float32(typing.bound)
    rows = list(chain.from_iterable(map(typing.kernels, _providers(target))))
    if any(row.takes(signature, raised) for row in rows):
        is_wide = any(BFLOAT16.tensor in kind for kind in typing.bound.values())
        return f"Keep it in float32 (--keep-fp32 NAME){' or use float16' if is_wide else ''}."
    later = (row for row in rows if row.since > signature.since)
    if newer := [row.since for row in later if _admits(row.types, typing.bound)]:
        return f"Upgrade the model: kernels start at opset {min(newer)}."
    return "Replace the op, or register your own kernels for it."


def _providers(target: str) -> tuple[str, ...]:
    """Return the providers that ONNX Runtime searches for a kernel, in order."""
    return tuple(dict.fromkeys((target, cpu_of(target))))


def in_float32(bound: Mapping[str, str]) -> dict[str, str]:
    """Return the types of parameters, with float32 in place of low precision."""
    types = dict(bound)
    for low in FORMATS.values():
        for param, kind in types.items():
            types[param] = kind.replace(low.tensor, FLOAT)
    return types


def _admits(allowed: Mapping[str, frozenset[str]], bound: Mapping[str, str]) -> bool:
    return all(
        bound[name] in types for name, types in allowed.items() if name in bound
    )


_FEW: Final = 100
"""The largest number of elements of a constant that may be on the host or on the device."""

_STAYING: Final = frozenset(
    f"tensor({name})"
    for name in (
        "float16",
        "bfloat16",
        "float8e4m3fn",
        "float8e4m3fnuz",
        "float8e5m2",
        "float8e5m2fnuz",
    )
)
"""Input types that keep a node on the target, because the CPU has few kernels for them."""


@cache
def memory_table(target: str, which: str) -> Mapping[str, frozenset[int]]:
    """Return op key -> positions of its "inputs" or "outputs" that the target's kernels expect in host memory."""
    table = target_table(target, "memory").get(which, {})
    return {op: frozenset(ports) for op, ports in table.items()}


def host_nodes(
    graph: Graph, shapes: Sequence[Shape | None], providers: Sequence[str], target: str
) -> set[int]:
    """Return the nodes that run on the CPU because their inputs are there, so that no data moves for them.

    Args:
        graph: the model.
        shapes: by value index.
        providers: by node, the provider that would run it if only kernels counted.
        target: "cuda" or "cpu".

    Complexity: linear in nodes and ports.
    """
    on_host = set[int]()  # values
    nodes = set[int]()
    readers = set[int]()  # nodes that read these values
    for node in graph.order:
        index = node.index
        provider = providers[node.index]
        is_reader = index in readers
        is_home = provider == target.upper()
        if not is_home and not (is_reader and provider == "CPU"):
            continue
        values: Sequence[int] = node.outputs
        if is_reader and _prefers_host(graph, shapes, node, target, on_host):
            nodes.add(index)
        elif is_home:
            ports = memory_table(target, "outputs").get(node.key, frozenset())
            values = [
                value for port, value in enumerate(node.outputs) if port in ports
            ]
        on_host.update(values)
        for value in values:
            readers.update(
                _reader(graph, index, user) for user, _ in graph.uses[value]
            )
    return nodes


def _prefers_host(
    graph: Graph,
    shapes: Sequence[Shape | None],
    node: Node,
    target: str,
    on_host: AbstractSet[int],
) -> bool:
    """Return whether all inputs of the node are on the host, other than because its kernel expects them there."""
    wanted = memory_table(target, "inputs").get(node.key, frozenset())
    for port, value in enumerate(node.inputs):
        if value == ABSENT or graph.types[value] in _STAYING:
            return False
        is_own = graph.values[value].scope == node.scope
        is_input = is_own and graph.values[value].origin is Origin.INPUT
        if is_input or _is_small(graph, shapes, value):
            continue  # these may be on either side
        if port in wanted or not (is_own and value in on_host):
            return False
    return True


def _is_small(view: View, shapes: Sequence[Shape | None], value: int) -> bool:
    """Return whether a value is a constant, or the default of an input, with few elements."""
    shape = shapes[value]
    constant = view.producer(value, "Constant")
    is_stored = view.values[value].is_stored or constant is not None
    return is_stored and shape is not None and elements(shape) <= _FEW


def _reader(view: View, maker: int, user: int) -> int:
    """Return the node in the maker's own graph that reads its value: the user, or the node around the user."""
    while view.nodes[user].scope != view.nodes[maker].scope:
        user = view.scopes[view.nodes[user].scope].owner
    return user


NONE: Final = "none"
"""Provider of a node that no provider can run."""


class Placement(NamedTuple):
    """Where nodes of one kind run, and the finding about it (none if ``text`` is empty)."""

    provider: str
    severity: str = ""
    kind: str = ""
    text: str = ""
    action: str = ""


def _unbuilt(text: str, action: str) -> Placement:
    return Placement(NONE, "error", "kernel", text, action)


def place_nodes(
    graph: Graph,
    shapes: Sequence[Shape | None],
    volumes: Sized,
    target: str,
    broken: set[str],
) -> tuple[Sequence[str], Sequence[Finding]]:
    """Return the provider of every node on a target, and the findings.

    Args:
        graph: the model.
        shapes: by value index, if they are known for all inputs.
        volumes: shapes for estimates.
        target: where the model will run: "cuda", a version of it, or "any" (providers are unknown).
        broken: labels of nodes whose types are wrong; there are no findings about their kernels.

    Complexity: linear in nodes and ports; one look-up in the kernel tables per distinct typing.
    """
    if not target_of(target).limits_types:
        findings = [*_unhonored(graph, target), *_unknown_ops(graph)]
        return [""] * len(graph.nodes), findings
    placements = _by_kernels(graph, target)
    by_kernel = [placement.provider for placement in placements]
    shaping = host_nodes(graph, shapes, by_kernel, device_of(target))
    folded = graph.ask(constant_nodes)
    providers = []
    findings = _unknown_ops(graph)
    copied = set[int]()
    for node, placement in zip(graph.nodes, placements, strict=True):
        provider, severity, kind, text, action = placement
        falls_back = kind == "fallback"
        on_host = node.index in shaping
        # ONNX Runtime computes constants once, on the CPU, while it loads the model.
        is_once = falls_back and not on_host and node.index in folded
        if on_host:
            provider = "CPU"
        elif is_once:
            provider = ""
        providers.append(provider)
        is_free = is_once or (falls_back and on_host)
        if not text or is_free or node.label in broken:
            continue
        findings.append(finding(node, severity, kind, text, action))
        if falls_back:
            copied.add(node.index)
    if cpu_of(target) != target:
        findings += _summary(graph, volumes, copied, len(shaping))
    return providers, findings


class NodeTyping(NamedTuple):
    """A node that represents all nodes of its kind and types.

    Attributes:
        signature: the signature of its op.
        bound: type parameter -> type.
        flowing: the types of its inputs and outputs.
        wrapped: whether it reads float16: without a kernel, it then runs in float32 between Casts.
    """

    node: Node
    signature: Signature
    bound: Mapping[str, str]
    flowing: frozenset[str]
    wrapped: bool

    @property
    def precision(self) -> str:
        """The element types at the node, floats first: "float16" or "float16 with int64"."""
        names = {readable_types(name) for name in self.flowing}
        ordered = sorted(names, key=lambda name: ("float" not in name, name))
        return " with ".join(ordered) or "no types known"

    def kernels(self, target: str) -> Sequence[Kernel]:
        """Return the kernels of a target for the op, of any version and types."""
        return kernel_table(target).get(self.node.key, ())

    def typed(self, bound: Mapping[str, str]) -> Typed:
        """Return the node with these types, in the form that queries to targets take."""
        return Typed(self.signature, bound, self.node.proto)

    def runs_on(self, target: str, bound: Mapping[str, str]) -> bool:
        """Return whether a target runs the op with these types."""
        return runs_on(target, self.typed(bound))


def distinct_typings(
    graph: Graph, target: str
) -> tuple[list[object], dict[object, NodeTyping]]:
    """Return the typing of each node as a key (None where kernels do not matter), and a node for every key."""
    keys = list[object]()
    examples = dict[object, NodeTyping]()
    for node in graph.nodes:
        if (
            node.signature is None
            or graph.scopes[node.scope].opaque
            or node.key in op_facts().kernel_free
        ):
            keys.append(None)
            continue
        bound = bind_node(node, graph.types)
        wrapped = any(graph.types[value] == FLOAT16.tensor for value in node.inputs)
        types = tuple(sorted(bound.items()))
        form = deciding_form(target, node)
        keys.append((node.key, id(node.signature), types, form, wrapped))
        if keys[-1] not in examples:
            kinds = (graph.types[value] for value in (*node.reads, *node.writes))
            flowing = frozenset(kind for kind in kinds if kind is not None)
            examples[keys[-1]] = NodeTyping(
                node, node.signature, bound, flowing, wrapped
            )
    return keys, examples


def _by_kernels(graph: Graph, target: str) -> list[Placement]:
    """Return where each node would run if only kernels counted."""
    keys, examples = distinct_typings(graph, target)
    known = {key: place(target, example) for key, example in examples.items()}
    return [Placement("") if key is None else known[key] for key in keys]


def _unhonored(graph: Graph, target: str) -> list[Finding]:
    """Return the finding that the target runs float32 nodes in float16, if there are any."""
    if not computes_low(target) or FLOAT not in graph.types:
        return []
    text = f"{target} computes in float16 regardless of types, so float32 protects no value"
    action = "If a value does not fit, onnxamp convert --rescale makes it fit."
    return [finding("", "note", "hazard", text, action)]


def _unknown_ops(graph: Graph) -> list[Finding]:
    """Return findings for nodes without a schema, which cannot be checked."""
    text = "no schema is known for this op: its types, kernels and hazards are not checked"
    action = "Declare its types (--custom-ops FILE). If it is not a custom op, check its spelling and the opset imports."
    return [
        finding(node, "note", "schema", text, action)
        for node in graph.nodes
        if node.signature is None and not graph.scopes[node.scope].opaque
    ]


def place(target: str, typing: NodeTyping) -> Placement:  # noqa: PLR0911
    """Return where nodes of this typing run; ``wrapped`` ones in float32 between Casts if no kernel takes float16."""
    if typing.node.key in op_facts().control_flow:
        return _control_flow(target, typing)
    if target_of(target).builds:
        return _in_engine(target, typing)
    node, signature, bound, _, wrapped = typing
    version = f", ONNX Runtime {version_of(target)}" if version_of(target) else ""
    at = f"op version {signature.since}, {typing.precision}{version}"
    refused = None
    if not fails(target, typing.typed(bound)):
        refused = kernel_limit(device_of(target), node.proto, bound)
    for provider in _providers(target if refused is None else cpu_of(target)):
        failing = fails(provider, typing.typed(bound))
        if failing is not None:
            text = (
                f"its kernel on {home(provider)} fails when it runs ({failing}; {at})"
            )
            return Placement(
                home(provider), "error", "kernel", text, cure(target, typing)
            )
        if has_kernel(provider, typing.typed(bound)):
            if provider == target:
                return Placement(home(provider))
            return _left(target, typing, at, refused)
    has_body = signature.has_function and any(
        typing.runs_on(provider, bound) for provider in _providers(target)
    )
    if has_body or signature.declared:
        return Placement(home(target))
    # ONNX Runtime inserts Casts around float16 nodes without a kernel, and around no others.
    raised = {
        param: kind.replace(FLOAT16.tensor, FLOAT) for param, kind in bound.items()
    }
    if wrapped and has_kernel(cpu_of(target), typing.typed(raised)):
        return _between_casts(target, typing._replace(bound=raised), at, refused)
    if signature.has_function:
        text = f"no kernel ({at}), and possibly none for a node of its function body"
        action = "Load the model to find out, or keep the op in float32."
        return Placement("", "warning", "kernel", text, action)
    where = " or ".join(map(home, _providers(target)))
    text = f"no kernel ({at}) on {where}: the model will not load, or will fail when it runs"
    return _unbuilt(text, cure(target, typing))


def _left(target: str, typing: NodeTyping, at: str, refused: str | None) -> Placement:
    """Return the CPU as the place of nodes whose types its kernel takes unchanged."""
    text = f"no kernel on {home(target)} ({at}): runs on the CPU, with its data copied there and back"
    if refused is not None:
        text = f"{home(target)} leaves it to the CPU ({refused}): its data is copied there and back"
    return Placement(
        "CPU", "warning", "fallback", text, advice(target, typing, refused)
    )


def _between_casts(
    target: str, typing: NodeTyping, at: str, refused: str | None
) -> Placement:
    """Return the CPU as the place of nodes that run there in float32, between Casts."""
    text = f"no float16 kernel ({at}): runs in float32 on the CPU, between Casts, with its data copied there and back"
    if refused is not None:
        text = f"{home(target)} leaves it to the CPU ({refused}), where it runs in float32, between Casts and copies"
    if device_of(target) == CPU:
        text = f"no float16 kernel ({at}): runs in float32, between Casts"
    return Placement(
        "CPU", "warning", "fallback", text, advice(target, typing, refused)
    )


def _in_engine(target: str, typing: NodeTyping) -> Placement:
    """Return whether a builder takes the node; it builds all nodes or none."""
    signature = typing.signature
    bound = typing.bound
    raised = in_float32(typing.bound)
    if signature.declared or typing.runs_on(target, bound):
        return Placement(home(target))
    refused = kernel_limit(target, typing.node.proto, bound)
    because = f" ({refused})" if refused else ""
    text = f"the builder refuses it with these types ({typing.precision}){because}: no engine will be built"
    if raised != bound and typing.runs_on(target, raised):
        return _unbuilt(
            text, f"Keep it in float32 (--keep-fp32 NAME), or convert for {target}."
        )
    if not any(row.covers(signature.since) for row in typing.kernels(target)):
        text = f"the builder accepts it in no precision (op version {signature.since}): no engine will be built"
    return _unbuilt(text, "Replace the op, or load a plugin that has it.")


def _control_flow(target: str, typing: NodeTyping) -> Placement:
    """Return where control flow runs: where its kernel is. The nodes of its subgraphs run where theirs are."""
    node = typing.node
    signature = typing.signature
    for low in FORMATS.values():
        held = (name for name in typing.flowing if low.tensor in name)
        if not all(carries(target, node.key, signature, name) for name in held):
            text = f"no kernel of opset {signature.since} passes {low.name} values on: the model will not load"
            return _unbuilt(
                text, "Keep the values that it passes on in float32, or use float16."
            )
    for provider in _providers(target):
        if any(kernel.covers(signature.since) for kernel in typing.kernels(provider)):
            return Placement(home(provider))
    return Placement("")


def _summary(
    graph: Graph, volumes: Sized, copied: set[int], shaping: int
) -> Iterator[Finding]:
    """Yield the total cost of all fallbacks, and a note that shape arithmetic on the CPU costs nothing."""
    if copied:
        crossing = set[int]()
        for node in copied:
            crossing.update(_crossing(graph, graph.nodes[node], copied))
        moved = unsized = 0
        for value in crossing:
            number = volumes.elements(value)
            unsized += number is None
            moved += (number or 0) * element_bytes(graph.types[value])
        tensors = "1 tensor" if len(crossing) == 1 else f"{len(crossing)} tensors"
        nodes = "1 node falls" if len(copied) == 1 else f"{len(copied)} nodes fall"
        volume = f"about {moved / 1e6:.1f} MB" if moved >= 1e5 else "less than 0.1 MB"
        left = f", {unsized} of unknown size" if unsized else ""
        cost = f"{volume} ({tensors}{left}) are copied to or from the host in every run{volumes.told}"
        if not crossing:
            whose = "its" if len(copied) == 1 else "their"
            cost = f"{whose} inputs and outputs are on the host anyway"
        text = f"{nodes} back to the CPU: {cost}"
        yield finding("", "warning", "fallback", text)
    if shaping:
        nodes = "1 node computes" if shaping == 1 else f"{shaping} nodes compute"
        text = f"{nodes} shapes on the CPU, as ONNX Runtime intends, at almost no cost"
        yield finding("", "note", "fallback", text)


def _crossing(view: View, node: Node, copied: set[int]) -> Iterator[int]:
    """Yield the node's values that a node of the target produces or reads. Graph inputs and weights are on the host."""
    for value in node.inputs:
        producer = view.producer(value)
        if producer is None or producer.key == "Constant":
            continue
        if producer.index not in copied:
            yield value
    for value in node.outputs:
        if any(reader.index not in copied for reader, _ in view.consumers(value)):
            yield value
