"""Sessions that show values inside a model, without changing a bit of its results.

Further outputs would prevent fusions, which add up in another order. So they are added behind ONNX Runtime's
optimisations: the nodes that run are those of an ordinary session.
"""

from collections.abc import Container
from pathlib import Path
from typing import TYPE_CHECKING

import onnx
from onnx import ModelProto

from onnxamp._runtime.session import Provider, make_session
from onnxamp._workers.folders import temporary_folder

if TYPE_CHECKING:
    import onnxruntime as ort


def expose(
    model: ModelProto, provider: Provider, names: Container[str]
) -> "tuple[ort.InferenceSession, tuple[str, ...]]":
    """A session that computes what :func:`make_session` of the model does, with values of its main graph as outputs.

    Args:
        model: a model whose weights are inputs, or small; it is not changed.
        provider: where it runs.
        names: the values to show.

    Returns:
        The session, and the names of the values that it shows beside the outputs of the model: those that fusions left.

    Raises:
        RuntimeFailure: ONNX Runtime cannot load the model.
    """
    with temporary_folder() as folder:
        path = Path(folder, "optimized.onnx")
        make_session(model, provider, optimized_to=path)
        optimized = onnx.load(path)
    given = {entry.name for entry in optimized.graph.output}
    shown = [
        name
        for node in optimized.graph.node
        for name in node.output
        if name in names and name not in given
    ]
    optimized.graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in shown)
    return make_session(optimized, provider, optimize=False), tuple(shown)
