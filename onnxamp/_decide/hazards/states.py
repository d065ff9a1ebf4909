"""State that a loop adds to, or multiplies, in every iteration: counters, running sums, phases, growth.

A counter in float16 stops at 2,048, because 2,048 + 1 rounds to 2,048, and a loop that waits for 3,000 never ends. Sums
lose what they add, and products leave the range. Samples with few iterations do not show that.
"""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import Effect, Fault, Hazard, HazardKind, counts_exactly
from onnxamp._facts.dtypes import Format, holds_float
from onnxamp._facts.ops import op_facts
from onnxamp._graph.graph import Graph
from onnxamp._graph.loops.accumulation import accumulated_states
from onnxamp._graph.numbers.known import is_rounded
from onnxamp._graph.view import ABSENT


class _States(HazardKind):
    value = "accumulated state"
    title = "state that accumulates from one iteration to the next"
    looks_at = ("cumulative", "repeats")
    fault = Fault(
        Effect.MISCOUNTS,
        "accumulates state in LOW: {detail}",
        ", so that its rounding errors add up",
    )

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        for (index, value), why in graph.ask(accumulated_states, low).ports.items():
            node = graph.nodes[index]
            # Counters of an integer type are exact.
            carries = node.writes if value == ABSENT else (value,)
            if any(holds_float(graph.types[carry]) for carry in carries):
                claims = counts_exactly(graph, node, value)
                yield Hazard(index, KIND, why, value=value, unless=claims)
        for node in graph.nodes_of(op_facts().cumulative):
            why = "multiplies all elements up to each one"
            yield Hazard(node.index, KIND, why, unless=counts_exactly(graph, node))

    def loses(self, graph: Graph, weight: int, low: Format, /) -> bool:
        return is_rounded(graph, weight, low)


KIND: Final = _States()
