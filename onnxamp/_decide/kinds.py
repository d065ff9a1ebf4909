"""The interface of a hazard, and the only way to ask about hazards.

A module of :mod:`onnxamp._decide.hazards` is one hazard: a subclass of :class:`HazardKind` and its only object,
``KIND``. Code outside that folder names no hazard. It asks the functions of this module, or all :func:`kinds`.
"""

import pkgutil
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import replace
from enum import Enum, IntEnum
from functools import cache
from importlib import import_module
from itertools import chain
from math import inf
from typing import Any, ClassVar, Final, NamedTuple

from numpy.typing import NDArray

from onnxamp._base.records import record
from onnxamp._decide import hazards
from onnxamp._facts.dtypes import FLOAT_TENSORS, Format
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph, inlined
from onnxamp._graph.numbers.known import known_numbers
from onnxamp._graph.view import ABSENT, Node
from onnxamp._options.options import Options


class Harm(Enum):
    """The harm that low precision does at a node."""

    RESULT = "its results"
    CAST = "only a Cast after it, which can be shielded where the node stays low"
    FUSION = "only a fusion of the runtime, without which the results are right"
    KERNEL = "its results, through the fault of a kernel of the target"


class ByExponents(Enum):
    """The help of exponents (``--rescale``) against a hazard."""

    NOTHING = (
        "its nodes stay in float32, so that no exponent needs to suit their values"
    )
    CURE = "they may bring its values into range, so that its nodes want to be low"
    SETTLE = "the same, and a value that no exponent brings into range is reported"


class Effect(IntEnum):
    """The damage that a hazard does to a node that is already low precision.

    Audits report the effects in this order, because readers mend the first one of a node: numbers that are wrong for
    every input come before those that are wrong for large models or rare inputs.
    """

    SPOILS_MASK = 1
    LEAVES_RANGE = 2
    LOSES_EPSILON = 3
    MISCOUNTS = 4
    SCALES_SUMS = 5
    GROWS = 6
    ROUNDS_AWAY = 7


class Fault(NamedTuple):
    """The text that audits show for a low-precision node with a hazard.

    Attributes:
        effect: what happens, which orders the reports.
        text: the fault; LOW stands for the type, ``{detail}`` for the detail of the hazard.
        limit: the text after it: ``{end}`` is the largest number of the type, ``{integers}`` its last exact integer.
        needs_constant: whether there is no fault unless a constant of the node shows it, see
            :meth:`HazardKind.is_shown_by`.
        is_enough: whether later effects at the same node are not reported, because they follow from this one.
    """

    effect: Effect
    text: str
    limit: str = ""
    needs_constant: bool = False
    is_enough: bool = False


class KnownNodes(NamedTuple):
    """Nodes about which facts are known that static rules do not see.

    Attributes:
        scaled: nodes whose values a loss scale keeps in range.
        fitting: nodes whose sums were measured and fit float16.
        ranged: nodes whose results were measured on samples that the user gives.
    """

    scaled: AbstractSet[int]
    fitting: AbstractSet[int]
    ranged: AbstractSet[int]


class HazardKind:
    """A kind of hazard. Modules override the fields and methods in which their hazard differs.

    Attributes:
        value: its name in plans, like that of a :class:`Reason`.
        title: the reason in plain words, as a clause about a node.
        harm: what low precision harms.
        exponents: what exponents can do about it.
        looks_at: flags and columns of ``_data/ops.toml`` at whose ops it begins; none if a constant of any op shows it.
        is_measurable: whether samples show it, so that level "auto" measures it instead.
        ends_by_folding: whether it keeps nodes of a decomposed op in float32, but not the single op that replaces them.
        fault: what audits say of low-precision nodes; None if only the audit's own rules find them.
        why_low: why a node is low whose error has a price, see :meth:`prices`.
        why_high: why such a node is float32.
    """

    value: ClassVar[str]
    title: ClassVar[str]
    harm: ClassVar[Harm] = Harm.RESULT
    exponents: ClassVar[ByExponents] = ByExponents.NOTHING
    looks_at: ClassVar[tuple[str, ...]] = ()
    is_measurable: ClassVar[bool] = False
    ends_by_folding: ClassVar[bool] = False
    fault: ClassVar[Fault | None] = None
    why_low: ClassVar[str] = ""
    why_high: ClassVar[str] = ""

    # -- where it is ---------------------------------------------------------------------------------------------

    def find(self, _graph: Graph, _low: Format, /) -> Iterable["Hazard"]:
        """Return the hazards of a graph in a format, on any target."""
        return ()

    def find_on(
        self, _graph: Graph, _low: Format, _target: str, /
    ) -> Iterable["Hazard"]:
        """Return the hazards of a graph in a format that a target adds."""
        return ()

    def find_asked(self, _graph: Graph, _options: Options, /) -> Iterable["Hazard"]:
        """Return the hazards that exist only because the user's options ask for them."""
        return ()

    def find_in_low(self, graph: Graph, low: Format, /) -> Iterable["Hazard"]:
        """Return the hazards of a model that was converted before, which is shown as float32."""
        return self.find(graph, low)

    def ops(self) -> AbstractSet[str]:
        """Return the op types at which it begins."""
        facts = op_facts()
        return frozenset().union(*(getattr(facts, name) for name in self.looks_at))

    def breaks_always(self, _op: str, _low: Format, _target: str, /) -> bool:
        """Return whether each node of an op has the hazard on a target, whatever it reads."""
        return False

    # -- what overrules it, and what it overrules -----------------------------------------------------------------

    def spared(self, _known: KnownNodes, /) -> AbstractSet[int]:
        """Return the nodes that the hazard spares, because of known facts about them."""
        return frozenset()

    def loses(self, _graph: Graph, _weight: int, _low: Format, /) -> bool:
        """Return whether a weight, stored low, loses the numbers that the hazard is about."""
        return False

    def prices(
        self, _graph: Graph, _low: Format, _target: str, /
    ) -> Mapping[int, float]:
        """Return nodes that lose digits by the hazard, but too few to keep them in float32.

        The map holds their squared error as a share of the error from which on they stay in float32.
        """
        return {}

    # -- how it is cured ------------------------------------------------------------------------------------------

    def splits(self, _graph: Graph, _options: Options, /) -> Mapping[int, int]:
        """Return products that are free of the hazard in parts: node -> the number of parts."""
        return {}

    def low_numbers(
        self, _graph: Graph, _low: Format, /
    ) -> Iterable[tuple[int, NDArray[Any]]]:
        """Return weights that must not become 0 when they are stored low, with their numbers."""
        return ()

    # -- what audits show -----------------------------------------------------------------------------------------

    def is_shown_by(self, _number: float, _low: Format, /) -> bool:
        """Return whether a constant of a low-precision node shows the hazard."""
        return False

    def lost_scales(self, _graph: Graph, _low: Format, /) -> Mapping[int, str]:
        """Return nodes whose scales of quantized numbers the hazard is about -> what low precision loses of them."""
        return {}


class Claim(NamedTuple):
    """A statement about a value's elements that may be provable for every input.

    ``most`` and ``least`` are the largest and the smallest magnitude. ``is_exact``: low precision holds each of them as
    it is, such as integers that are small enough. ``instead``: other claims that do as well if all of them are true.
    """

    value: int
    most: float = inf
    least: float = 0.0
    is_exact: bool = False
    instead: "tuple[Claim, ...]" = ()


@record
class Hazard:
    """A node that static analysis expects to break, or to lose values, in low precision.

    ``rare``: it shows only on inputs that samples may lack, unlike others with its reason. ``value``: the input or
    output of the node that must not be rounded; ABSENT where that is true of all. ``unless``: there is no hazard if
    all of these claims are true of every input; without claims, nothing disproves it.
    """

    node: int
    reason: HazardKind
    detail: str
    rare: bool = False
    value: int = ABSENT
    unless: tuple[Claim, ...] = ()


@cache
def kinds() -> tuple[HazardKind, ...]:
    """Return the kinds of hazards, one for each module of their folder, in the order of the modules' names."""
    modules = pkgutil.iter_modules(hazards.__path__, f"{hazards.__name__}.")
    return tuple(import_module(module.name).KIND for module in modules)


def find_hazards(graph: Graph, low: Format) -> list[Hazard]:
    """Return all hazards of a graph, in node order: at most one for each node, reason and value.

    Of those that are alike, a rare one wins. Those of a node are in the order of their names: the first explains it.
    """
    hazards_of_all = [hazard for kind in kinds() for hazard in kind.find(graph, low)]
    hazards_of_all += _across_calls(
        graph, low, {(one.node, one.reason) for one in hazards_of_all}
    )
    ranked = sorted(hazards_of_all, key=lambda hazard: hazard.rare, reverse=True)
    # Of several entries with one key, a dict keeps the last: reversed, that is the first one found, a rare one if any.
    unique = dict[tuple[int, HazardKind, int], Hazard]()
    for hazard in reversed(ranked):
        key = hazard.node, hazard.reason, hazard.value
        unique[key] = _jointly(hazard, unique.get(key))
    return sorted(
        unique.values(), key=lambda hazard: (hazard.node, hazard.reason.value)
    )


def _across_calls(
    graph: Graph, low: Format, known: AbstractSet[tuple[int, HazardKind]]
) -> Iterator[Hazard]:
    """Yield further hazards of nodes beside functions that stay calls: those that the functions' bodies show."""
    whole = inlined(graph)
    if whole is graph or whole.model.functions:  # some body cannot be followed
        return
    nodes = {node.first_output: node for node in graph.nodes}
    values = graph.scopes[0].names
    for hazard in whole.ask(find_hazards, low):
        inner = whole.nodes[hazard.node]
        node = nodes.get(inner.first_output)
        if (
            node is None
            or node.key != inner.key
            or (node.index, hazard.reason) in known
        ):
            continue
        claims = list[Claim]()
        for claim in hazard.unless:
            value = values.get(whole.values[claim.value].name, ABSENT)
            claims.append(claim._replace(value=value, instead=()))
        # Nothing can be proven of values inside of a body: this graph does not have them.
        is_open = any(claim.value == ABSENT for claim in claims)
        yield replace(
            hazard,
            node=node.index,
            value=ABSENT,
            unless=() if is_open else tuple(claims),
        )


def _jointly(hazard: Hazard, other: Hazard | None) -> Hazard:
    """Return a hazard that is disproved only where another one of the same node is as well."""
    if other is None or other.unless == hazard.unless:
        return hazard
    is_either_fact = not hazard.unless or not other.unless
    claims = (*hazard.unless, *other.unless)
    # So many are hardly ever proven, and joining them again and again would take quadratic time.
    is_open = is_either_fact or len(claims) > _MOST_CLAIMS
    return replace(hazard, unless=() if is_open else claims)


_MOST_CLAIMS: Final = 256
"""Claims on which a hazard may depend."""


def in_range(graph: Graph, node: Node, low: Format) -> tuple[Claim, ...]:
    """Return the claims that no float that a node reads or writes leaves the range of low precision.

    There are none for nodes with bodies.
    """
    return tuple(Claim(value, low.max_finite) for value in _floats(graph, node))


def large_enough(
    graph: Graph, node: Node, least: float, value: int = ABSENT
) -> tuple[Claim, ...]:
    """Return the claims that no float that a node reads or writes, or one of them, is of smaller magnitude."""
    values = _floats(graph, node) if value == ABSENT else [value]
    return tuple(Claim(one, least=least) for one in values)


def counts_exactly(graph: Graph, node: Node, value: int = ABSENT) -> tuple[Claim, ...]:
    """Return the claims that low precision holds as they are all floats that a node reads or writes, or one of them."""
    values = _floats(graph, node) if value == ABSENT else [value]
    return tuple(Claim(one, is_exact=True) for one in values)


def exact_reads(graph: Graph, node: Node) -> tuple[Claim, ...]:
    """Return the claims that low precision holds all floats that a node reads as they are."""
    read = set(node.reads)
    return tuple(claim for claim in counts_exactly(graph, node) if claim.value in read)


def _floats(graph: Graph, node: Node) -> list[int]:
    """Return the floats that a node reads or writes; none for nodes with bodies, which also read what they capture."""
    if node.bodies:
        return []
    values = dict.fromkeys((*node.reads, *node.writes))
    return [value for value in values if graph.types[value] in FLOAT_TENSORS]


def hazards_on(graph: Graph, low: Format, target: str) -> list[Hazard]:
    """Return the hazards of a graph on a target, in node order, those of its arithmetic before those of its kernels."""
    unsorted = chain.from_iterable(
        kind.find_on(graph, low, target) for kind in kinds()
    )
    return sorted(
        unsorted, key=lambda hazard: (hazard.reason.harm is Harm.KERNEL, hazard.node)
    )


def hazards_for(graph: Graph, low: Format, target: str) -> list[Hazard]:
    """Return the hazards of a graph, and then those on a target."""
    return [*graph.ask(find_hazards, low), *graph.ask(hazards_on, low, target)]


def breaks_always(op: str, low: Format, target: str) -> bool:
    """Return whether each node of an op has a hazard on a target, whatever it reads."""
    return any(kind.breaks_always(op, low, target) for kind in kinds())


def asked_hazards(graph: Graph, options: Options) -> list[Hazard]:
    """Return the hazards that the user's options ask for."""
    asked = (kind.find_asked(graph, options) for kind in kinds())
    return list(chain.from_iterable(asked))


def product_splits(graph: Graph, options: Options) -> dict[int, int]:
    """Return products that are free of hazards in parts: node -> the number of parts."""
    splits = dict[int, int]()
    for kind in kinds():
        splits.update(kind.splits(graph, options))
    return splits


def computing(
    graph: Graph,
    value: int,
    reader: Node,
    kind: HazardKind,
    *,
    rare: bool = False,
    unless: tuple[Claim, ...] = (),
) -> Iterator[Hazard]:
    """Yield the nodes that compute a constant for a node that a hazard is about; none if a tensor stores it.

    Nodes that make a constant in either precision at no cost are left out: they follow their readers anyway. If the
    claims ``unless`` clear the reader, they clear these nodes too.
    """
    known = graph.ask(known_numbers)
    why = f"computes a number for {reader.label!r}"
    for origin in known.origins(value):
        maker = graph.producer(origin)
        if maker is not None and maker.key not in op_facts().representable:
            at = origin if maker.bodies else ABSENT
            yield Hazard(maker.index, kind, why, rare, at, unless)
