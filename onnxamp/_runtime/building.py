"""Does TensorRT-RTX build an engine from a model? Asked in a process of its own; no GPU is needed.

Networks are strongly typed: the types in the file decide, and TensorRT refuses what they do not agree with.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, helper

from onnxamp._errors import RuntimeFailure
from onnxamp._model.model import Model
from onnxamp._model.protos import copied, opset_imports
from onnxamp._runtime.child import Child
from onnxamp._runtime.spill import save_spilled
from onnxamp._workers.folders import temporary_folder
from onnxamp._workers.signals import at_end
from onnxamp._workers.threads import Once

_SHAPE_LIKE: Final = 64
"""Elements up to which an integer input may be a shape, whose numbers TensorRT wants to know."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no engine is built: ``node`` is the label of the node that the builder names, "" if it names none."""

    node: str
    text: str


@dataclass(frozen=True, slots=True)
class Built:
    """What building showed: which builder was asked (``by``), its refusals, and the bytes of the engine."""

    by: str
    refusals: tuple[Refusal, ...]
    size: int


@dataclass(slots=True)
class EngineBuilder:
    """A process that builds engines."""

    _child: Child = field(default_factory=lambda: Child("onnxamp._runtime.build_server"))

    def build(
        self,
        model: ModelProto,
        feeds: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
    ) -> Built:
        """Build an engine.

        Args:
            model: the model; its nodes' names come back in refusals.
            feeds: inputs whose shapes the engine is for, where the model leaves them open.
            seconds: how long it may take.

        Raises:
            RuntimeFailure: TensorRT-RTX is not installed, or no process can be started.
        """
        if not can_build():
            message = "Engines are built with TensorRT-RTX, which is not installed: pip install 'onnxamp[tensorrt]'."
            raise RuntimeFailure(message)
        arrays = {
            name: np.asarray(feed)
            for name, feed in (feeds or {}).items()
            if not isinstance(feed, list)
        }
        question = {
            "shapes": {name: array.shape for name, array in arrays.items()},
            "values": {
                name: array.ravel().tolist()
                for name, array in arrays.items()
                if _may_be_shape(array)
            },
        }
        with temporary_folder() as folder:
            path = save_spilled(model, folder)
            try:
                answer = self._child.ask({"path": str(path), **question}, seconds=seconds)
            except OSError as error:
                raise RuntimeFailure(
                    f"No process can be started to build the engine: {error}."
                ) from error
        if answer is None:
            return Built(
                "TensorRT-RTX", (Refusal("", f"the process that builds it {self._child.ended}"),), 0
            )
        faults = tuple(Refusal(name, refusal(text)) for name, text in answer["faults"])
        return Built(answer["by"], faults, answer["bytes"])

    def end(self) -> None:
        """End the process, if there is one."""
        self._child.end()


def can_build() -> bool:
    """Whether TensorRT-RTX is installed."""
    return find_spec("tensorrt_rtx") is not None


def build_engine(model: Model, feeds: Mapping[str, Any] | None = None) -> Built:
    """Build an engine from a model; refusals name nodes as reports do, by label.

    A model that imports no opset of ai.onnx is built as ONNX Runtime reads it; TensorRT would assume an old one.

    Args:
        model: the model.
        feeds: inputs whose shapes the engine is for; needed where the model leaves shapes open.

    Raises:
        RuntimeFailure: TensorRT-RTX is not installed, or no process can be started.
    """
    _ = model.stock  # looks weights up that are in files
    proto = copied(model.proto)
    del proto.opset_import[:]
    proto.opset_import.extend(
        helper.make_opsetid(*entry) for entry in opset_imports(model.proto).items()
    )
    labels: dict[str, str] = {}
    for node in _every_node(proto):
        unique = f"node{len(labels)}."
        labels[unique] = node.name or next(filter(None, node.output), "")
        node.name = unique
    built = the_builder().build(proto, feeds)
    refusals = tuple(_named(found, labels) for found in built.refusals)
    return Built(built.by, refusals, built.size)


def _every_node(model: ModelProto) -> Iterator[NodeProto]:
    """Nodes of the graph, of its bodies, and of functions."""
    stack: list[GraphProto | Any] = [*model.functions, model.graph]
    while stack:
        for node in stack.pop().node:
            yield node
            stack += [
                graph for item in node.attribute for graph in (item.g, *item.graphs) if graph.node
            ]


def _named(found: Refusal, labels: Mapping[str, str]) -> Refusal:
    """A refusal with its node's label, and without made-up names in its text."""
    names = [name for name in (found.node, *_UNIQUE.findall(found.text)) if name in labels]
    text = _UNIQUE.sub(lambda match: labels.get(match[0], match[0]), found.text)
    return Refusal(labels[names[0]] if names else "", text)


_UNIQUE: Final = re.compile(r"node\d+\.")


def refusal(text: str) -> str:
    """What the builder says, without codes and places in its sources."""
    lines = [line for line in text.splitlines() if line.strip()] or ["it does not say why"]
    for line in lines:
        match = _ERROR.search(line)
        if match is not None and "Cuda Runtime" not in line:
            return match[1].rstrip(". ")
    return re.sub(r"^\[[^\]]*\] ", "", lines[0]).rstrip(". ")


_ERROR: Final = re.compile(r"Error Code \d+: [\w ]+ \((.*?)(?: In \w+ at \S+)?\)$")


def _may_be_shape(array: "np.ndarray[Any, Any]") -> bool:
    return array.dtype.kind in "iu" and array.size <= _SHAPE_LIKE


@Once
def the_builder() -> EngineBuilder:
    """The builder of this process: what one import costs serves all models."""
    builder = EngineBuilder()
    at_end(builder.end)
    return builder
