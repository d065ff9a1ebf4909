"""What the lists and the level demand of nodes: pins, and the variables that gain by low precision."""

from collections.abc import Mapping
from typing import NamedTuple

from onnxamp._decide.mincut import Question
from onnxamp._decide.pins.claims import Claims, Strength
from onnxamp._decide.pins.neighbors import exact_between_float32, followers
from onnxamp._decide.verdicts import Basis, Reason
from onnxamp._facts.dtypes import FLOAT16
from onnxamp._facts.ops import op_facts
from onnxamp._graph.view import Node
from onnxamp._options.values import Level


class _Demand(NamedTuple):
    """A demand on a node: whether it must be low, the reason, and the detail of the reason."""

    low: bool
    reason: Basis
    detail: str


def claim_lists(claims: Claims, freed: Mapping[int, frozenset[Basis]]) -> None:
    """Add the pins of the lists and, for all other ops, of the level. Complexity: linear in nodes.

    Args:
        claims: the claims so far, which settle who follows whom.
        freed: node -> reasons to ignore.
    """
    lists = _Lists(claims, freed)
    for index in claims.ports.of_node:
        lists.claim(claims.graph.nodes[index])


class _Lists:
    """The demands of lists and the level on single nodes.

    Attributes:
        by_user: nodes of the user's white list -> the entry.
        white: nodes of white lists.
        black: nodes of black lists that are not on the user's white list -> the entry.
        neutral: nodes that have no preference of their own.
        spared: nodes that it is cheaper to cast than to lower.
        lowers_all: whether the level lowers all that the target and the lists allow.
        followers: nodes on no list that are low because everything they read is, if the preset says so.
        stranded: exact ops between nodes without a low-precision kernel, which the level would otherwise lower.
    """

    def __init__(self, claims: Claims, freed: Mapping[int, frozenset[Basis]]) -> None:
        self.claims = claims
        self.freed = freed
        self.problem = claims.problem
        self.graph = claims.graph
        self.ports = claims.ports
        self.listed = claims.problem.listed
        options = claims.options
        self.level = options.level
        self.by_user = self.listed.white if self.level != Level.O0 else {}
        self.white = self.listed.white.keys() | self.listed.usual_white.keys()
        self.black = self._black()
        facts = op_facts()
        following = {node.index for node in self.graph.nodes_of(facts.following)}
        self.neutral = following | self.problem.folded | self.problem.constant_fed
        # A mean is smaller than what it averages: after float32 nodes, whose values may not fit, it is cheaper to cast.
        means = self.graph.nodes_of(options.trusted & facts.means)
        self.spared = {node.index for node in means}
        is_strict = options.strict and self.level == Level.O2
        self.lowers_all = self.level == Level.O3 or is_strict
        self.followers = frozenset[int]()
        if self.level == Level.O1 and options.preset.follows:
            self.followers = self._followers()
        self.stranded = frozenset[int]()
        # In float16 few ops lack a kernel, and most of those get one by an upgrade, for which exact ops speak.
        if is_strict and options.low is not FLOAT16:
            self.stranded = self._stranded()

    def claim(self, node: Node) -> None:
        """Add what is demanded of a node."""
        index = node.index
        claims = self.claims
        roots = self.ports.deciding(index)
        demand = self.demand(node)
        shares = self.problem.shares
        if index in self.graph.exact:
            claims.exact.update(roots)
        # A Cast with two variables changes no type.
        is_idle_cast = node.key == "Cast" and len(roots) == 2
        if index in self.by_user and not is_idle_cast:
            entry = self.by_user[index]
            claims.pin_node(Strength.ASKED, index, True, Reason.WHITE, entry)
        elif demand is None:
            gains = self.level == Level.O2 or index in self.white
            if gains and index not in self.neutral and index not in self.spared:
                claims.preferred.update(roots)
        elif not demand.low:
            is_own = index in self.listed.black
            strength = Strength.HIGH if is_own else Strength.DEFAULT
            claims.pin_node(strength, index, *demand)
        elif index in shares and demand.reason is Reason.WHITE:
            # Casts may cost more than its error is worth.
            kind, _ = shares[index]
            for root in roots:
                claims.worthy.setdefault(root, kind)
        else:
            claims.pin_node(Strength.LOW, index, *demand)

    def demand(self, node: Node) -> _Demand | None:
        """Return whether lists or the level lower a node, and why; None if they leave it to the cut."""
        index = node.index
        is_own = index in self.listed.white or index in self.listed.black
        if self.level == Level.AUTO and not is_own:
            return None
        if self.level == Level.O0:
            return _Demand(False, Reason.LEVEL, "O0 lowers nothing")
        is_freed = Reason.BLACK in self.freed.get(index, ())
        if index in self.black and not is_freed:
            black = _Demand(False, Reason.BLACK, self.black[index])
            return None if index in self.problem.folded else black
        if index in self.neutral:
            return None
        if index in self.white and index not in self.graph.exact:
            return _Demand(True, Reason.WHITE, node.key)
        return self.demand_of_level(index)

    def demand_of_level(self, index: int) -> _Demand | None:
        """Return what the level demands of a node that is on no list and does not follow its neighbors."""
        level = self.level
        if self.lowers_all and index not in self.stranded:
            return _Demand(True, Reason.LEVEL, f"{level} lowers every op it can")
        if level != Level.O1 or index in self.graph.exact:
            return None
        if index in self.followers:
            why = f"{level} lowers nodes that read only low precision"
            return _Demand(True, Reason.LEVEL, why)
        return _Demand(False, Reason.LEVEL, f"{level} lowers only white-listed ops")

    def _black(self) -> dict[int, str]:
        """Return the nodes of black lists; presets ignore nodes bounded by integers."""
        ignored = self.listed.white.keys() | self.problem.bounded
        usual = self.listed.usual_black.items()
        entries = {node: entry for node, entry in usual if node not in ignored}
        return entries | dict(self.listed.black)

    def _followers(self) -> frozenset[int]:
        """Return the nodes on no list that are low because everything they read is."""
        pinned = self.claims.pinned
        strongest = (Strength.HARD, Strength.KEPT, Strength.HIGH)
        high = set[Question]().union(*(pinned[strength] for strength in strongest))
        forced = pinned[Strength.FORCED].keys()
        low = set[int]()
        for index in self.ports.of_node:
            roots = self.ports.deciding(index)
            if index in self.black:
                high.update(roots)
            if index in self.white or not forced.isdisjoint(roots):
                low.add(index)
        return followers(self.graph, self.ports, high, low)

    def _stranded(self) -> frozenset[int]:
        """Return the exact ops between nodes without a low-precision kernel."""
        pinned = self.claims.pinned
        by_user = map(self.ports.deciding, self.by_user)
        settled = set(pinned[Strength.FORCED]).union(*by_user)
        return exact_between_float32(
            self.graph, self.ports, pinned[Strength.HARD].keys(), settled
        )
