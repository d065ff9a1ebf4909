"""Findings about opening a model with ONNX Runtime's default options: known faults of its optimizers, and a trial."""

from collections.abc import Iterator, Sequence

from onnxamp._audit import Finding, finding
from onnxamp._facts.tables import device_of
from onnxamp._facts.targets import CPU, version_of
from onnxamp._graph.graph import Graph
from onnxamp._graph.targets.optimizers import optimizer_faults
from onnxamp._model.model import Model
from onnxamp._runtime.loading import OPENED, load_file


def broken_by_optimizers(graph: Graph, target: str) -> Iterator[Finding]:
    """Yield the nodes through which a graph optimizer may break the model, on the target or on the CPU."""
    providers = (device_of(target), CPU)
    for fault in optimizer_faults(graph, providers, version_of(target)):
        text = f"ONNX Runtime's {fault.optimizer} may break the model: {fault.because}"
        yield finding(
            fault.node, "warning", "engine", text, _without((fault.optimizer,))
        )


def opening_faults(model: Model) -> Iterator[Finding]:
    """Open the file of a model in another process, as a session on the CPU does by default, and yield what is wrong.

    Kernels that only the CPU lacks are no fault.
    """
    if model.path is None:
        return
    opened = load_file(
        model,
        None,
        in_text=model.in_text,
        whole=model.stock.size <= OPENED,
    )
    if opened.disabled:
        text = (
            f"a session of {opened.by} with default options fails, or ends the process"
        )
        yield finding("", "error", "engine", text, _without(opened.disabled))
    elif opened.fault:
        text = f"{opened.by} does not load it: {opened.fault}"
        yield finding("", "error", "engine", text)


def _without(optimizers: Sequence[str]) -> str:
    """Return how a user disables optimizers."""
    listed = ", ".join(map(repr, optimizers))
    return (
        f"Start sessions with disabled_optimizers=[{listed}], or convert the original again (onnxamp convert), which"
        " keeps clear of it."
    )
