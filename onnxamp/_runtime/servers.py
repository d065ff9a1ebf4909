"""The processes that build engines for :mod:`onnxamp._runtime.building`, and load models for
:mod:`onnxamp._runtime.loading`.

This module imports little, so that they start early.
"""

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxamp._base.signals import ignore_terminal


def serve_builds() -> None:
    """Answer whether TensorRT-RTX builds engines from models."""
    answer_with(_building)


def serve_loads() -> None:
    """Answer whether ONNX Runtime loads files, and whether it survives running them."""
    answer_with(_loading)


def _building() -> Callable[..., dict[str, Any]]:
    import tensorrt_rtx as trt  # noqa: PLC0415

    class Log(trt.ILogger):  # type: ignore[misc]
        """Collects the errors that the builder logs."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR):
                self.errors.append(text)

    log = Log()  # TensorRT keeps the first one for as long as the process lives

    def build(
        path: str,
        shapes: Mapping[str, Sequence[int]],
        values: Mapping[str, Sequence[int]],
    ) -> Any:
        log.errors.clear()
        answer = {"by": f"TensorRT-RTX {trt.__version__}"}
        return answer | _build(trt, log, path, shapes, values)

    return build


def _build(
    trt: Any,
    log: Any,
    path: str,
    shapes: Mapping[str, Sequence[int]],
    values: Mapping[str, Sequence[int]],
) -> dict[str, Any]:
    """Build an engine for any RTX GPU; ``faults`` are refusals, each with the name of its node, if that is known.

    Args:
        trt: the module.
        log: the logger that collects errors.
        path: the model, with its types.
        shapes: input -> the shape to build for, if the model leaves it open.
        values: input -> its numbers, if they are a shape.
    """
    builder = trt.Builder(log)
    network = builder.create_network(
        1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    )
    parser = trt.OnnxParser(network, log)
    if not parser.parse(Path(path).read_bytes(), path):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        return {
            "faults": [(error.node_name(), error.desc()) for error in errors],
            "bytes": 0,
        }
    config = builder.create_builder_config()
    profile = builder.create_optimization_profile()
    inputs = [network.get_input(index) for index in range(network.num_inputs)]
    for tensor in inputs:
        if tensor.is_shape_tensor and tensor.name in values:
            profile.set_shape_input(tensor.name, *[values[tensor.name]] * 3)
        elif -1 in tuple(tensor.shape) and tensor.name in shapes:
            profile.set_shape(tensor.name, *[shapes[tensor.name]] * 3)
    if any(tensor.is_shape_tensor or -1 in tuple(tensor.shape) for tensor in inputs):
        config.add_optimization_profile(profile)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        return {
            "faults": [("", text) for text in log.errors] or [("", "")],
            "bytes": 0,
        }
    return {"faults": [], "bytes": engine.nbytes}


def _loading() -> Callable[..., dict[str, Any]]:
    import onnxruntime as ort  # noqa: PLC0415

    def load(path: str, feeds: str = "", **how: Any) -> dict[str, Any]:
        if feeds:
            _run(path, feeds, **how)
            return {"fault": ""}
        stage, fault = _fault(path, **how)
        return {
            "by": f"ONNX Runtime {ort.__version__}",
            "stage": stage,
            "fault": fault,
        }

    return load


def _fault(
    path: str,
    providers: Sequence[tuple[str, dict[str, str]]] | None,
    libraries: Sequence[str],
    optimize: bool,
    disabled: Sequence[str],
) -> tuple[str, str]:
    """Return the last stage that ONNX Runtime reaches with a file, and the first line of its error, "" without one.

    Stages are "graph", in which the graph is resolved, and "session", in which it is optimized and gets its kernels;
    "kernel" says that one is missing.

    Args:
        path: the file.
        providers: those of the session, each with its options; None to resolve the graph alone.
        libraries: shared libraries with the kernels of custom ops.
        optimize: run the graph optimizers that sessions run by default.
        disabled: optimizers that do not run.
    """
    import onnxruntime as ort  # noqa: PLC0415
    from onnxruntime.capi import onnxruntime_pybind11_state as state  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimize:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    stage = "graph"
    try:
        for library in libraries:
            options.register_custom_ops_library(library)
        session = state.InferenceSession(options, path, True, False)
        if providers is not None:
            stage = "session"
            names, settings = zip(*providers, strict=True)
            session.initialize_session(list(names), list(settings), {*disabled})
    except Exception as error:  # noqa: BLE001 - its exceptions have no common base
        kind = type(error).__name__
        if stage == "session" and kind == "NotImplemented":
            stage = "kernel"
        return stage, (str(error).strip() or kind).splitlines()[0]
    return stage, ""


def _run(
    path: str, feeds: str, names: Sequence[str], libraries: Sequence[str]
) -> None:
    """Run a model on the CPU, as it is.

    Args:
        path: its file.
        feeds: the file of its inputs, in NumPy's format.
        names: their names.
        libraries: shared libraries with the kernels of custom ops.
    """
    import numpy as np  # noqa: PLC0415
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    for library in libraries:
        options.register_custom_ops_library(library)
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    with np.load(feeds) as arrays:
        session.run(None, dict(zip(names, arrays.values(), strict=True)))


def answer_with(answering: Callable[[], Callable[..., dict[str, Any]]]) -> None:
    """Answer one question after the other until there are no more: lines of JSON.

    An answer is what the function returns, or else its error under "fault".

    Args:
        answering: imports the engine, and returns the function that answers a question, given as keywords.
    """
    ignore_terminal()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # output of libraries is no answer
        answer = answering()
        for question in sys.stdin:
            try:
                reply = answer(**json.loads(question))
            except Exception as error:  # noqa: BLE001 - engines may raise anything
                reply = {"fault": str(error) or type(error).__name__}
            answers.write(json.dumps(reply) + "\n")
            answers.flush()
