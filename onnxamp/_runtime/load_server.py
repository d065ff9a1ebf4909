"""The process in which :mod:`onnxamp._runtime.loading` lets ONNX Runtime load models."""

from collections.abc import Callable, Sequence
from typing import Any

from onnxamp._runtime.answering import answer_with


def serve() -> None:
    """Answer whether ONNX Runtime loads files."""
    answer_with(_loading)


def _loading() -> Callable[..., dict[str, Any]]:
    import onnxruntime as ort  # noqa: PLC0415

    return lambda path, providers: {
        "by": f"ONNX Runtime {ort.__version__}",
        "fault": _fault(path, providers),
    }


def _fault(path: str, providers: Sequence[tuple[str, dict[str, str]]] | None) -> str:
    """The first line of what ONNX Runtime says where it does not load a file; "" where it does."""
    import onnxruntime as ort  # noqa: PLC0415
    from onnxruntime.capi import onnxruntime_pybind11_state as state  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_prepacking", "1")
    try:
        session = state.InferenceSession(options, path, True, False)  # resolves the graph
        if providers is not None:
            names, settings = zip(*providers, strict=True)
            session.initialize_session(list(names), list(settings), set())
    except Exception as error:  # noqa: BLE001 - its exceptions have no common base
        return (str(error).strip() or type(error).__name__).splitlines()[0]
    return ""
