"""Kernels that are wrong on the target, or in its version of ONNX Runtime, from the target's ``wrong.toml``."""

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Final

from onnxamp._decide.kinds import Harm, Hazard, HazardKind
from onnxamp._facts.dtypes import Format
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.wrong_kernels import wrong_kernels, wrong_ops


class _WrongKernels(HazardKind):
    value = "wrong kernel"
    title = "a kernel of that version of the runtime computes wrong results in low precision"
    harm = Harm.KERNEL

    def ops(self) -> AbstractSet[str]:
        return wrong_ops()

    def find_on(self, graph: Graph, low: Format, target: str, /) -> Iterator[Hazard]:
        for node, why in wrong_kernels(graph, low.name, target):
            yield Hazard(node.index, KIND, why)


KIND: Final = _WrongKernels()
