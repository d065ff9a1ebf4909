"""Times of nodes from a real profile of ONNX Runtime, instead of estimates.

On CUDA both the float32 model and the one with everything low are profiled, node by node. A CPU is no GPU, and computes
low precision in float32: there the profile of the float32 model says only how time is spread over the nodes, and what
low precision saves is in the proportion that is estimated for the device.
"""

from typing import Final

from onnx import ModelProto

from onnxamp._graph.graph import Graph
from onnxamp._graph.types import declared_type
from onnxamp._graph.view import View
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.observe import settle
from onnxamp._runtime.profile import node_times
from onnxamp._runtime.samples import Sample
from onnxamp._runtime.session import Provider
from onnxamp._runtime.switch import node_key
from onnxamp._runtime.values import as_typed
from onnxamp._tuning.job import Job
from onnxamp._tuning.units import Space

TIMES: Final = ("roofline", "measured")
"""Where times come from."""

_ALL: Final = 1 << 62
"""Bytes of weights that stay in the graph: all."""


def timed(job: Job, device: str) -> tuple[Space, str]:
    """The job's space with times of its first sample; and in words what they are.

    Raises:
        RuntimeFailure: the model does not run, or its kernels cannot be timed.
    """
    provider, sample = job.place.provider, check_inputs(job.prepared, job.samples[0])
    high = _times(job.prepared, sample, provider)
    if provider == "cuda":
        low, said = _times(job.converted(job.everything), sample, provider), "measured on CUDA, node by node"
    else:
        low = {}
        said = (
            "measured in float32 on the CPU, node by node; low precision is taken to save the part of them that"
            f" it is estimated to save on {device}"
        )
    found = {unit.key: (high[unit.key], low.get(unit.key)) for unit in job.space.units if unit.key in high}
    return job.space.retimed(found), said


def _times(model: ModelProto, sample: Sample, provider: Provider) -> dict[str, float]:
    """Seconds by the first value that a node makes."""
    if any(feed is None for feed in sample.values()):  # such inputs cannot be fed: they are made inside
        model = settle(model, None, sample, emulated=False, provider=provider, keep=_ALL)[0].model
    named = ModelProto()
    named.CopyFrom(model)
    view: View = Graph.of(named)
    for node in view.nodes:
        node.proto.name = node_key(node)
    kinds = {entry.name: declared_type(entry.type) for entry in named.graph.input}
    feeds = {name: as_typed(feed, kinds[name]) for name, feed in sample.items() if feed is not None}
    return node_times(named, feeds, provider, optimize=False)
