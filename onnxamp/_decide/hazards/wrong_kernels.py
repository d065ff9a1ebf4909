"""Kernels that are wrong on the target, or in its version of ONNX Runtime, from the target's ``wrong.toml``."""

from collections.abc import Set as AbstractSet
from typing import Final

from onnxamp._decide.kinds import Harm, Hazard, HazardKind
from onnxamp._facts.dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.wrong_kernels import wrong_kernels, wrong_ops


def wrong_kernel_hazards(graph: Graph, low: Format, target: str) -> list[Hazard]:
    """Return nodes that would run on a kernel that is wrong in low precision, in node order. Complexity: linear in
    nodes.
    """
    found = wrong_kernels(graph, low.name, target)
    return [Hazard(node.index, KIND, why) for node, why in found]


class _WrongKernels(HazardKind):
    value = "wrong kernel"
    title = "a kernel of that version of the runtime computes wrong results in low precision"
    harm = Harm.KERNEL

    def ops(self) -> AbstractSet[str]:
        return wrong_ops()

    def find_on(self, graph: Graph, low: Format, target: str, /) -> list[Hazard]:
        return wrong_kernel_hazards(graph, low, target)


KIND: Final = _WrongKernels()
