"""Casts that a fusion of ONNX Runtime would absorb."""

from collections.abc import Iterator
from typing import Final

from onnxamp._decide.kinds import ByExponents, Harm, Hazard, HazardKind
from onnxamp._decide.patterns.fusion_groups import absorbed_casts
from onnxamp._facts.dtypes import Format
from onnxamp._graph.graph import Graph


class _Fusions(HazardKind):
    value = "runtime fusion"
    title = "a Cast here would be absorbed by a fusion of the runtime"
    looks_at = ("core_of",)
    harm = Harm.CAST
    exponents = ByExponents.CURE
    ends_by_folding = True

    def find(self, graph: Graph, low: Format, /) -> Iterator[Hazard]:
        for value, mean in graph.ask(absorbed_casts, low).items():
            producer = graph.producer(value)
            # Computed in float32, it needs no Cast there.
            if producer is not None:
                why = (
                    f"ONNX Runtime would fuse a Cast in front of {mean!r} into the normalization, and fail to load the"
                    " model"
                )
                yield Hazard(producer.index, KIND, why)


KIND: Final = _Fusions()
