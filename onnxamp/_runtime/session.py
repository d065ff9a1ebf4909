"""Sessions of ONNX Runtime that run where they are asked to, or fail with the reason.

ONNX Runtime silently falls back to the CPU if CUDA does not start; here that is an error. It is imported inside
functions, so that importing onnxamp stays fast.
"""

import io
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import cache
from os import PathLike, fspath
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, get_args

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.formats import is_text
from onnxamp._model.model import Model
from onnxamp._model.protos import has_external_data
from onnxamp._model.storage import data_files, folder_of, load_model
from onnxamp._model.threads import thread_limit
from onnxamp._runtime.device import device_present
from onnxamp._runtime.spill import is_large, save_spilled
from onnxamp._runtime.values import FOREIGN, Feed, from_value, is_foreign, to_value

if TYPE_CHECKING:
    import onnxruntime as ort

Provider: TypeAlias = Literal["cuda", "cpu"]
"""On the first CUDA device (with the CPU for ops that CUDA lacks), or on the CPU alone."""

_CUDA: Final = "CUDAExecutionProvider"
_CPU: Final = "CPUExecutionProvider"
EXACT: Final[Mapping[str, str]] = {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}
"""CUDA options for reproducible numbers. TF32 would round the float32 reference to 11 bits, as float16 does; an
exhaustive search would time convolution algorithms, and might choose another one in the next run."""


def cuda_available() -> bool:
    """Whether a session can run on CUDA here."""
    return cuda_trouble() is None


def choose_provider(wanted: Provider | None) -> Provider:
    """The wanted provider if it can be used here; for None, CUDA if it can be used, else the CPU.

    Raises:
        ArgumentError: there is no such provider.
        RuntimeFailure: CUDA is wanted, and cannot be used; it says why.
    """
    if wanted is None:
        return "cuda" if cuda_available() else "cpu"
    if wanted not in get_args(Provider):
        raise ArgumentError(f"Unknown provider {wanted!r}: choose one of {', '.join(get_args(Provider))}.")
    if wanted == "cuda" and not cuda_available():
        raise RuntimeFailure(f"CUDA cannot be used here: {cuda_trouble()}.")
    return wanted


@cache
def cuda_trouble() -> str | None:
    """Why no session can run on CUDA here, as a clause; None if one can. Tried once, and only with a device."""
    import onnxruntime as ort  # noqa: PLC0415

    if not device_present():
        return "there is no NVIDIA device, or its driver is not installed"
    if _CUDA not in ort.get_available_providers():
        return "the installed onnxruntime has no CUDA provider; install onnxruntime-gpu in its stead"
    missing = _preload(ort.preload_dlls) if hasattr(ort, "preload_dlls") else ""
    hint = f" ({missing})" if missing else ""
    try:
        session = _start(_trial().SerializeToString(), _session_options(), "cuda", EXACT)
        session.run(None, {"x": np.ones(1, np.float32)})
    except Exception as error:  # noqa: BLE001 - whatever went wrong, CUDA cannot be used
        return f"ONNX Runtime says: {_reason((str(error).splitlines() or [type(error).__name__])[0])}{hint}"
    if session.get_providers()[0] == _CUDA:
        return None
    return (
        f"ONNX Runtime cannot load its CUDA provider: pip install 'onnxruntime-gpu[cuda,cudnn]' brings libraries{hint}"
    )


def _preload(preload: Callable[..., None]) -> str:
    """Load the libraries of pip's nvidia packages, wherever on ``sys.path`` they are.

    Args:
        preload: ONNX Runtime's function, which searches only next to ONNX Runtime, and prints what it does not find.

    Returns:
        The first library that is missing, or "".
    """
    said = io.StringIO()
    folders = (path for entry in sys.path for path in sorted(Path(entry or ".", "nvidia").glob("*/lib")))
    for folder in (None, *folders):
        said.seek(0)
        said.truncate()
        with redirect_stdout(said), warnings.catch_warnings(action="ignore"):
            preload(directory=None if folder is None else str(folder.resolve()))
        if not said.getvalue():
            return ""
    return said.getvalue().splitlines()[0].strip()


_MOST_PLANNED: Final = 8192
"""Nodes up to which ONNX Runtime may plan memory in a session's first run. It halves the time of later runs, but takes
time quadratic in values: 3 seconds for 25,000 nodes, 20 for 50,000."""


def _trial() -> ModelProto:
    node = helper.make_node("Neg", ["x"], ["y"])
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph = helper.make_graph([node], "trial", ports[:1], ports[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=7)


def make_session(
    model: ModelProto | str | PathLike[str],
    provider: Provider = "cpu",
    *,
    optimize: bool = True,
    lean: bool = False,
    threads: int = 0,
    spin: bool = True,
    profile_to: str | PathLike[str] | None = None,
    record: bool = False,
    cuda_options: Mapping[str, str] | None = None,
    optimized_to: str | PathLike[str] | None = None,
) -> "ort.InferenceSession":
    """A session for a model. ONNX Runtime logs nothing; failures are raised.

    Args:
        model: a proto with its weights, or the path of a file. Protos over 2 GB, and those whose weights were left in
            the file, go through a temporary folder.
        provider: "cuda" or "cpu".
        optimize: run all graph optimisations of ONNX Runtime, or none.
        lean: keep no memory for later runs, and no copies of weights in a kernel's layout.
        threads: threads that one operator may use; 0 for ONNXAMP_THREADS (:mod:`onnxamp._model.threads`) or ONNX
            Runtime's own choice.
        spin: let threads busy-wait for the next operator: fastest, but at the cost of other processes.
        profile_to: prefix of the profile file to write; None for no profile.
        record: keep which provider runs each node, for :func:`assigned_nodes`.
        cuda_options: options of the CUDA provider, instead of :data:`EXACT` and deterministic kernels; {} for ONNX
            Runtime's defaults.

    Raises:
        ArgumentError: there is no such provider.
        ExternalDataError: weights of a proto are missing.
        RuntimeFailure: CUDA is wanted but cannot be used, or ONNX Runtime refuses the model.
    """
    choose_provider(provider)
    options = _session_options(optimize=optimize, lean=lean, threads=threads, profile_to=profile_to)
    if not optimize and isinstance(model, ModelProto) and len(model.graph.node) > _MOST_PLANNED:
        options.enable_mem_pattern = False
    options.use_deterministic_compute = provider == "cuda" and cuda_options is None
    if optimized_to is not None:
        options.optimized_model_filepath = fspath(optimized_to)
    if not spin:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if record:
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    name = f"model {model.graph.name!r}" if isinstance(model, ModelProto) else fspath(model)
    with _source(model) as source, session_failures(f"load {name} on {provider}", loaded=False):
        session = _start(source, options, provider, EXACT if cuda_options is None else cuda_options)
    if provider == "cuda" and session.get_providers()[0] != _CUDA:
        raise RuntimeFailure(f"ONNX Runtime loaded {name} on the CPU, although CUDA was asked for.")
    return session


def _session_options(
    *, optimize: bool = True, lean: bool = False, threads: int = 0, profile_to: str | PathLike[str] | None = None
) -> "ort.SessionOptions":
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4  # failures are raised; the runtime would print them as well
    options.intra_op_num_threads = threads or thread_limit()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    # Planning which values share memory takes ONNX Runtime 1.31 time quadratic in values of unknown shape.
    options.enable_mem_reuse = optimize
    if lean:
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.add_session_config_entry("session.disable_prepacking", "1")
    if profile_to is not None:
        options.enable_profiling = True
        options.profile_file_prefix = fspath(profile_to)
    return options


def assigned_nodes(session: "ort.InferenceSession") -> list[tuple[str, str, str]]:
    """(provider, op key, node name) of every node of a session made with ``record``, those of bodies included.

    They are those of the graph before fusions that depend on the provider: functions without a kernel are expanded, and
    Constants and the Casts that ONNX Runtime adds last are missing.
    """
    return [
        (
            short_provider(part.ep_name),
            node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}",
            node.name,
        )
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def short_provider(name: str) -> str:
    """``CUDA`` for ``CUDAExecutionProvider``."""
    return name.removesuffix("ExecutionProvider")


def stays_on_device(kind: str) -> bool:
    """Whether outputs of that type can stay in a device's memory: only tensors of numbers can."""
    return kind.startswith("tensor(") and kind != "tensor(string)"


def _start(
    source: bytes | str, options: "ort.SessionOptions", provider: Provider, cuda_options: Mapping[str, str]
) -> "ort.InferenceSession":
    import onnxruntime as ort  # noqa: PLC0415

    providers = [(_CUDA, dict(cuda_options)), (_CPU, {})] if provider == "cuda" else [(_CPU, {})]
    # Without enable_fallback=0 a failure would be printed, and the model would run on the CPU.
    return ort.InferenceSession(source, options, providers=providers, enable_fallback=0)


@contextmanager
def _source(model: ModelProto | str | PathLike[str]) -> Iterator[bytes | str]:
    """What ONNX Runtime loads: bytes, or the path of a file that exists as long as the context.

    Raises:
        ModelError: the model is not well formed, or its external data are not where they may be.
    """
    if not isinstance(model, ModelProto):
        data_files(load_model(Path(model)), folder_of(Path(model)))  # ONNX Runtime reads them by itself
        if is_text(Path(model)):
            model = Model.read(Path(model)).embedded()  # ONNX Runtime reads the binary form alone
    if not isinstance(model, ModelProto):
        yield fspath(model)
    elif not (is_large(model) or has_external_data(model)):
        yield model.SerializeToString()
    else:
        # The session may still map the file, which Windows cannot delete then.
        with TemporaryDirectory(prefix="onnxamp-", ignore_cleanup_errors=True) as folder:
            yield fspath(save_spilled(model, Path(folder)))


@contextmanager
def session_failures(action: str, *, loaded: bool = True) -> Iterator[None]:
    """Turn ONNX Runtime's exceptions, which have no common base, into one sentence."""
    try:
        yield
    except Exception as error:
        text = str(error).strip() or type(error).__name__
        raise RuntimeFailure(
            f"ONNX Runtime could not {action}: {_reason(text.splitlines()[0])}.", loaded=loaded
        ) from error


def _reason(text: str) -> str:
    """ONNX Runtime's message without error codes and places in its sources."""
    return _SOURCE.sub("", _CODE.sub("", text)).rstrip(". ")


_CODE: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_SOURCE: Final = re.compile(
    r"\S+\.(?:h|hpp|cuh|cc|cpp|cu):\d+ "  # the file and the line; behind them ...
    r"(?:.*? was false\. (?=\S)"  # ... the condition that was not met, where it is explained,
    r"|[\w:<>,&*~ ]+\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? "  # the signature of the function,
    r"|\w+ )"  # or its name
)


def run(
    session: "ort.InferenceSession", feeds: Mapping[str, Feed], outputs: Sequence[str] | None = None
) -> dict[str, Any]:
    """Run a session. Element types that NumPy lacks are ``ml_dtypes`` arrays.

    Args:
        session: made by :func:`make_session`.
        feeds: by input name: arrays for tensors, lists of arrays for sequences.
        outputs: names of the wanted outputs; None for all.

    Returns:
        By output name, in the order of ``outputs``: arrays, lists of arrays for sequences, None for empty optionals.

    Raises:
        RuntimeFailure: an input is missing or does not fit, or a node failed.
    """
    types = {item.name: item.type for item in session.get_outputs()}
    wanted = list(types if outputs is None else outputs)
    with session_failures(f"run the model ({', '.join(wanted[:3])}{', ...' if len(wanted) > 3 else ''})"):
        arrays = {name: np.asarray(feed) if isinstance(feed, np.generic) else feed for name, feed in feeds.items()}
        if not any(FOREIGN.search(types.get(name, "")) for name in wanted):
            ready = {name: to_value(feed) if is_foreign(feed) else feed for name, feed in arrays.items()}
            return dict(zip(wanted, session.run(wanted, ready), strict=True))
        kinds = {item.name: item.type for item in session.get_inputs()}
        values = {name: to_value(feed, kinds.get(name)) for name, feed in arrays.items()}
        return {name: from_value(value) for name, value in run_values(session, values, wanted).items()}


def run_values(
    session: "ort.InferenceSession", values: "Mapping[str, ort.OrtValue]", outputs: Sequence[str]
) -> "dict[str, ort.OrtValue]":
    """Run a session on ONNX Runtime's own values; on CUDA the results stay on the device.

    Raises:
        RuntimeFailure: an input is missing or does not fit, or a node failed.
    """
    with session_failures(f"run the model ({', '.join(outputs[:3])}{', ...' if len(outputs) > 3 else ''})"):
        if session.get_providers()[0] != _CUDA:
            results = session.run_with_ort_values(list(outputs), dict(values))
        else:
            kinds = {item.name: item.type for item in session.get_outputs()}
            binding = session.io_binding()
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            for name in outputs:
                binding.bind_output(name, "cuda" if stays_on_device(kinds.get(name, "")) else "cpu")
            session.run_with_iobinding(binding)
            results = binding.get_outputs()
        return dict(zip(outputs, results, strict=True))
