"""The process in which :mod:`onnxamp._runtime.loading` lets ONNX Runtime load models.

It imports nothing else, to be there soon.
"""

import json
import os
import signal
import sys
from collections.abc import Sequence


def serve() -> None:
    """Answer one question after the other until there are no more: lines of JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what ends
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)  # what libraries print is no answer
        import onnxruntime as ort  # noqa: PLC0415

        for question in sys.stdin:
            fault = _fault(**json.loads(question))
            answers.write(json.dumps({"by": f"ONNX Runtime {ort.__version__}", "fault": fault}) + "\n")
            answers.flush()


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
