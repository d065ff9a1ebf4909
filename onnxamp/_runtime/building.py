"""Ask TensorRT-RTX, in a separate process and without a GPU, whether it builds an engine from a model.

Networks are strongly typed: the types in the file decide, and TensorRT rejects types that do not agree.
"""

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import numpy as np
from onnx import ModelProto, helper

from onnxamp._base.errors import RuntimeFailure
from onnxamp._base.signals import at_end
from onnxamp._base.temporary import temporary_folder
from onnxamp._base.threads import Once
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes, copied, opset_imports
from onnxamp._runtime.child import Child
from onnxamp._runtime.sessions.starting import save_spilled

_SHAPE_LIKE: Final = 64
"""Elements up to which an integer input may be a shape, whose numbers TensorRT needs."""


class Refusal(NamedTuple):
    """Why no engine is built: ``node`` is the label of the node that the builder names, "" if it names none."""

    node: str
    text: str


class Built(NamedTuple):
    """The result of a build: the builder (``by``), its refusals, and the bytes of the engine."""

    by: str
    refusals: tuple[Refusal, ...]
    size: int


class EngineBuilder(Child):
    """A process that builds engines."""

    def __init__(self) -> None:
        super().__init__("onnxamp._runtime.servers", "serve_builds")

    def build(
        self,
        model: ModelProto,
        feeds: Mapping[str, Any] | None = None,
        *,
        seconds: float | None = None,
    ) -> Built:
        """Build an engine.

        Args:
            model: the model; refusals contain the names of its nodes.
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
                if array.dtype.kind in "iu" and array.size <= _SHAPE_LIKE
            },
        }
        with temporary_folder() as folder:
            path = save_spilled(model, folder)
            try:
                answer = self.ask({"path": str(path), **question}, seconds=seconds)
            except OSError as error:
                raise RuntimeFailure(
                    f"No process can be started to build the engine: {error}."
                ) from error
        if answer is None:
            answer = {"fault": f"the process that builds it {self.ended}"}
        if "fault" in answer:
            return Built("TensorRT-RTX", (Refusal("", answer["fault"]),), 0)
        faults = tuple(Refusal(name, refusal(text)) for name, text in answer["faults"])
        return Built(answer["by"], faults, answer["bytes"])


def can_build() -> bool:
    """Return whether TensorRT-RTX is installed."""
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
    within = (node for function in proto.functions for node in function.node)
    for node in all_nodes([*proto.graph.node, *within]):
        unique = f"node{len(labels)}."
        labels[unique] = node.name or next(filter(None, node.output), "")
        node.name = unique
    built = the_builder().build(proto, feeds)
    refusals = tuple(_named(refused, labels) for refused in built.refusals)
    return Built(built.by, refusals, built.size)


def _named(refused: Refusal, labels: Mapping[str, str]) -> Refusal:
    """Return a refusal with its node's label, and without invented names in its text."""
    names = [
        name
        for name in (refused.node, *_UNIQUE.findall(refused.text))
        if name in labels
    ]
    text = _UNIQUE.sub(lambda match: labels.get(match[0], match[0]), refused.text)
    return Refusal(labels[names[0]] if names else "", text)


_UNIQUE: Final = re.compile(r"node\d+\.")


def refusal(text: str) -> str:
    """Return the builder's message, without codes and places in its sources."""
    lines = [line for line in text.splitlines() if line.strip()] or [
        "it does not say why"
    ]
    for line in lines:
        match = _ERROR.search(line)
        if match is not None and "Cuda Runtime" not in line:
            return match[1].rstrip(". ")
    return re.sub(r"^\[[^\]]*\] ", "", lines[0]).rstrip(". ")


_ERROR: Final = re.compile(r"Error Code \d+: [\w ]+ \((.*?)(?: In \w+ at \S+)?\)$")


@Once
def the_builder() -> EngineBuilder:
    """Return the builder of this process, which imports TensorRT once for all models."""
    builder = EngineBuilder()
    at_end(builder.end)
    return builder
