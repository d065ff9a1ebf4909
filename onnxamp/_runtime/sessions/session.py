"""Sessions of ONNX Runtime that run on the requested provider, or fail with the reason.

ONNX Runtime silently falls back to the CPU if CUDA does not start; here that is an error. It is imported inside
functions, so that importing onnxamp stays fast.
"""

import io
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    RuntimeFailure,
    suggestion,
)
from onnxamp._base.optional import require_runtime
from onnxamp._base.threads import Once
from onnxamp._facts.providers import BUILT_IN, is_plugin
from onnxamp._model.model import Model
from onnxamp._runtime.sessions.plugins import (
    device_present,
    engine_called,
    plugin_called,
    plugins,
    split_hint,
)
from onnxamp._runtime.sessions.starting import (
    ModelFile,
    failed,
    optimizers_to_disable,
    reason,
    session_failures,
    session_options,
    source_of,
    start_session,
    trial,
)
from onnxamp._runtime.sessions.values import (
    FOREIGN,
    Feeds,
    as_typed,
    from_value,
    is_foreign,
    to_value,
)
from onnxamp._runtime.sessions.versions import runtime_package

if TYPE_CHECKING:
    import onnxruntime as ort


Provider: TypeAlias = str
"""The place of sessions: "cuda", the first CUDA device; "cpu"; or a plugin provider
(:mod:`onnxamp._runtime.sessions.plugins`), "webgpu" or the name of its package, with a hint after a colon where it
takes one ("openvino:bf16"). Nodes without a kernel on the device run on the CPU."""

ProviderOptions: TypeAlias = list[tuple[str, dict[str, str]]]
"""ONNX Runtime's providers by name, each with its options."""

_CUDA: Final = "CUDAExecutionProvider"
_CPU: Final = "CPUExecutionProvider"
_OTHER_GPUS: Final = (
    "DmlExecutionProvider",
    "ROCMExecutionProvider",
    "MIGraphXExecutionProvider",
)
"""Providers of GPU packages on which onnxamp runs no models."""
EXACT: Final[Mapping[str, str]] = {
    "use_tf32": "0",
    "cudnn_conv_algo_search": "HEURISTIC",
}
"""CUDA options for reproducible numbers. TF32 would round the float32 reference to 11 bits, as float16 does; an
exhaustive search would time convolution algorithms, and might choose another one in the next run."""


def cuda_available() -> bool:
    """Return whether a session can run on CUDA here."""
    return cuda_trouble() is None


def choose_provider(wanted: Provider | None) -> Provider:
    """Return the wanted provider if it can be used here; for None, CUDA if it can be used, else the CPU.

    Raises:
        ArgumentError: there is no such provider.
        ArgumentTypeError: it is not a string.
        RuntimeFailure: the provider cannot be used; the message says why.
        MissingPackageError: ONNX Runtime is not installed.
    """
    require_runtime()
    if wanted is None:
        return "cuda" if cuda_available() else "cpu"
    if not isinstance(wanted, str):
        raise ArgumentTypeError(
            f"provider must be a string such as 'cpu', not {type(wanted).__name__}."
        )
    if wanted not in BUILT_IN:
        if plugin_called(split_hint(wanted)[0]) is None:
            known = ", ".join((*BUILT_IN, *plugins()))
            raise ArgumentError(
                f"Unknown provider {wanted!r}: choose one of {known}, or the package of a plugin provider of ONNX"
                f" Runtime, such as onnxruntime-ep-webgpu.{suggestion((*BUILT_IN, *plugins()), wanted)}"
            )
        engine_called(wanted)
    if wanted == "cuda" and not cuda_available():
        raise RuntimeFailure(
            f"CUDA cannot be used here: {cuda_trouble()}. --provider cpu runs models on the CPU."
        )
    return wanted


@Once
def cuda_trouble() -> str | None:
    """Return why no session can run on CUDA here, as a clause; None if one can. Tried once, and only with a device."""
    import onnxruntime as ort  # noqa: PLC0415

    if not device_present():
        return "there is no NVIDIA device, or its driver is not installed"
    if _CUDA not in ort.get_available_providers():
        return "the installed onnxruntime has no CUDA provider; install onnxruntime-gpu instead"
    missing = _preload(ort.preload_dlls) if hasattr(ort, "preload_dlls") else ""
    hint = f" ({missing})" if missing else ""
    try:
        session = start_session(
            trial().SerializeToString(),
            session_options(),
            provider_options("cuda", EXACT),
        )
        session.run(None, {"x": np.ones(1, np.float32)})
    except Exception as error:  # noqa: BLE001 - whatever went wrong, CUDA cannot be used
        return f"ONNX Runtime says: {reason(str(error) or type(error).__name__)}{hint}"
    if session.get_providers()[0] == _CUDA:
        return None
    return (
        "ONNX Runtime cannot load its CUDA provider: pip install 'onnxruntime-gpu[cuda,cudnn]'"
        f" installs its libraries{hint}"
    )


def idle_gpu() -> str | None:
    """Return a sentence about an installed GPU package whose GPU no session can use here; None if there is none."""
    import onnxruntime as ort  # noqa: PLC0415 - costs 0.1 s

    offered = ort.get_available_providers()
    others = [name for name in _OTHER_GPUS if name in offered]
    if _CUDA not in offered and not others:
        return None
    if cuda_available():
        return None
    trouble = "found no GPU"
    if device_present():
        trouble = "cannot use its GPU (--provider cuda says why)"
    elif others:
        trouble = f"has a GPU provider that onnxamp does not use ({others[0]})"
    return f"{runtime_package()} {trouble}, so models ran on the CPU."


def _preload(preload: Callable[..., None]) -> str:
    """Load the libraries of pip's nvidia packages, wherever on ``sys.path`` they are.

    Args:
        preload: ONNX Runtime's function, which only searches next to ONNX Runtime and prints what is missing.

    Returns:
        The first library that is missing, or "".
    """
    folders: list[Path | None] = [None]  # ONNX Runtime's own search comes first
    for entry in sys.path:
        folders += sorted(Path(entry or ".", "nvidia").glob("*/lib"))
    for folder in folders:
        said = io.StringIO()
        with redirect_stdout(said), warnings.catch_warnings(action="ignore"):
            preload(directory=None if folder is None else str(folder.resolve()))
        if not said.getvalue():
            return ""
    return said.getvalue().splitlines()[0].strip()


_MOST_PLANNED: Final = 8192
"""Nodes up to which ONNX Runtime may plan memory in a session's first run. It halves the time of later runs, but takes
time quadratic in values: 3 seconds for 25,000 nodes, 20 for 50,000."""


def make_session(
    model: ModelFile,
    provider: Provider = "cpu",
    *,
    optimize: bool = True,
    lean: bool = False,
    threads: int = 0,
    profile_to: str | PathLike[str] | None = None,
    record: bool = False,
    cuda_options: Mapping[str, str] | None = None,
    optimized_to: str | PathLike[str] | None = None,
    exact_integers: bool = False,
) -> "ort.InferenceSession":
    """Return a session for a model. ONNX Runtime logs nothing; failures are raised.

    Graph optimizers that are known to break the model, or to end the process, do not run.

    Args:
        model: a proto with its weights, the path of a file, or a model that was read. Protos over 2 GB, and those
            whose weights were left in the file, go through a temporary folder.
        provider: "cuda", "cpu", or a plugin provider.
        optimize: run all graph optimizations of ONNX Runtime, or none.
        lean: keep no memory for later runs, and no copies of weights in a kernel's layout.
        threads: threads for one operator, or for the engine if it has such an option; 0 for ONNXAMP_THREADS
            (:mod:`onnxamp._base.executor`) or ONNX Runtime's own choice.
        profile_to: prefix of the profile file to write; None for no profile.
        record: keep which provider runs each node, for :func:`assigned_nodes`; plugin providers always do.
        cuda_options: options of the CUDA provider, instead of :data:`EXACT` and deterministic kernels; {} for ONNX
            Runtime's defaults.
        exact_integers: compute exact int8 products on CPUs where they would saturate; only with ``optimize``.

    Raises:
        ArgumentError: there is no such provider.
        ExternalDataError: weights of a proto are missing.
        RuntimeFailure: the provider cannot be used, or ONNX Runtime refuses the model.
    """
    choose_provider(provider)
    options = session_options(
        optimize=optimize,
        lean=lean,
        threads=threads,
        profile_to=profile_to,
        exact_integers=exact_integers,
    )
    count = len(model.graph.node) if isinstance(model, ModelProto) else 0
    if not optimize and count > _MOST_PLANNED:
        options.enable_mem_pattern = False
    options.use_deterministic_compute = provider == "cuda" and cuda_options is None
    if optimized_to is not None:
        options.optimized_model_filepath = fspath(optimized_to)
    if record or is_plugin(provider):
        options.add_session_config_entry(
            "session.record_ep_graph_assignment_info", "1"
        )
    name = _name_of(model)
    wanted = _CUDA
    providers: ProviderOptions | None = provider_options(
        provider, EXACT if cuda_options is None else cuda_options
    )
    if is_plugin(provider):
        engine = engine_called(provider)
        options.add_provider_for_devices(
            list(engine.devices), engine.settings(options.intra_op_num_threads)
        )
        providers = None
        wanted = engine.provider
    with (
        source_of(model) as (source, proto),
        session_failures(f"load {name} on {provider}", loaded=False),
    ):
        disabled = optimizers_to_disable(proto, provider) if optimize else ()
        session = start_session(source, options, providers, disabled)
    if provider != "cpu" and session.get_providers()[0] != wanted:
        raise RuntimeFailure(
            f"ONNX Runtime loaded {name} on the CPU, although {provider} was requested."
        )
    return session


def _name_of(model: ModelFile) -> str:
    """Return what messages call a model."""
    if isinstance(model, Model):
        model = model.proto if model.path is None else model.path
    if isinstance(model, ModelProto):
        return f"model {model.graph.name!r}"
    return fspath(model)


def provider_options(
    provider: Provider, cuda_options: Mapping[str, str] = EXACT
) -> ProviderOptions:
    """Return the providers of a session on CUDA or the CPU, each with its options."""
    if provider == "cuda":
        return [(_CUDA, dict(cuda_options)), (_CPU, {})]
    return [(_CPU, {})]


def assigned_nodes(session: "ort.InferenceSession") -> list[tuple[str, str, str]]:
    """Return (provider, op key, node name) for every node of a session made with ``record``, including bodies.

    They are those of the graph before fusions that depend on the provider: functions without a kernel are expanded, and
    Constants and the Casts that ONNX Runtime adds last are missing.
    """
    nodes = []
    for part in session.get_provider_graph_assignment_info():
        provider = short_provider(part.ep_name)
        for node in part.get_nodes():
            is_standard = node.domain in ("", "ai.onnx")
            key = node.op_type if is_standard else f"{node.domain}::{node.op_type}"
            nodes.append((provider, key, node.name))
    return nodes


def short_provider(name: str) -> str:
    """Return a provider's name in reports: "CUDA" for "CUDAExecutionProvider"."""
    return name.removesuffix("ExecutionProvider").upper()


def stays_on_device(kind: str) -> bool:
    """Return whether outputs of that type can stay in device memory, as only tensors of numbers can."""
    return kind.startswith("tensor(") and kind != "tensor(string)"


def run(
    session: "ort.InferenceSession",
    feeds: Feeds,
    outputs: Sequence[str] | None = None,
    options: "ort.RunOptions | None" = None,
) -> dict[str, Any]:
    """Run a session. Element types that NumPy lacks are ``ml_dtypes`` arrays.

    Args:
        session: made by :func:`make_session`.
        feeds: by input name: arrays for tensors, lists of arrays for sequences.
        outputs: names of the wanted outputs; None for all.
        options: options of the run itself.

    Returns:
        By output name, in the order of ``outputs``: arrays, lists for sequences, dicts for maps, None for optionals
        that are empty.

    Raises:
        RuntimeFailure: an input is missing or does not fit, or a node failed.
    """
    types = {item.name: item.type for item in session.get_outputs()}
    wanted = list(types if outputs is None else outputs)
    with _run_failures(wanted):
        arrays = {
            name: np.asarray(feed) if isinstance(feed, np.generic) else feed
            for name, feed in feeds.items()
        }
        if not any(FOREIGN.search(types.get(name, "")) for name in wanted):
            ready = {
                name: to_value(feed) if is_foreign(feed) else feed
                for name, feed in arrays.items()
            }
            results = session.run(wanted, ready, options)
            return dict(zip(wanted, results, strict=True))
        kinds = {item.name: item.type for item in session.get_inputs()}
        values = {
            name: to_value(feed, kinds.get(name)) for name, feed in arrays.items()
        }
        return {
            name: from_value(value)
            for name, value in run_values(session, values, wanted, options).items()
        }


def run_values(
    session: "ort.InferenceSession",
    values: "Mapping[str, ort.OrtValue]",
    outputs: Sequence[str],
    options: "ort.RunOptions | None" = None,
) -> "dict[str, ort.OrtValue]":
    """Run a session on ONNX Runtime's own values, with options; on CUDA the results stay on the device.

    Raises:
        RuntimeFailure: an input is missing or does not fit, or a node failed.
    """
    with _run_failures(outputs):
        wanted = list(dict.fromkeys(outputs))  # a binding returns each but once
        if session.get_providers()[0] != _CUDA:
            results = session.run_with_ort_values(wanted, dict(values), options)
        else:
            binding = _bound(session, values, wanted)
            session.run_with_iobinding(binding, options)
            results = binding.get_outputs()
        return dict(zip(wanted, results, strict=True))


def _run_failures(outputs: Sequence[str]) -> "AbstractContextManager[None]":
    """Return the context of a run that has to return these outputs."""
    more = ", ..." if len(outputs) > 3 else ""
    return session_failures(f"run the model ({', '.join(outputs[:3])}{more})")


def _bound(
    session: "ort.InferenceSession",
    inputs: "Mapping[str, ort.OrtValue]",
    outputs: Iterable[str],
) -> Any:
    """Return a binding of inputs, and of outputs that a run allocates: on the device if they can stay there."""
    device = "cuda" if session.get_providers()[0] == _CUDA else "cpu"
    kinds = {item.name: item.type for item in session.get_outputs()}
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name in outputs:
        stays = stays_on_device(kinds.get(name, ""))
        binding.bind_output(name, device if stays else "cpu")
    return binding


def bind(
    session: "ort.InferenceSession", feeds: Feeds, graph: int | None = None
) -> Callable[[], None]:
    """Return a function that runs the session on these inputs and returns when the device is done.

    Inputs are copied to the device once, here. Outputs go into buffers that a first run, also here, allocates. On CPU
    the arrays are used in place.

    Args:
        feeds: by input name: arrays or lists of arrays, floats of any width.
        graph: number of the CUDA graph that the second run records and later ones replay, for sessions made with
            ``enable_cuda_graph``. None for ordinary runs.

    Raises:
        RuntimeFailure: an input does not fit, the first run fails, or a CUDA graph cannot be recorded.
    """
    kinds = {item.name: item.type for item in session.get_inputs()}
    held = {
        name: to_value(as_typed(feed, kinds[name]), kinds[name])
        for name, feed in feeds.items()
        if name in kinds
    }
    types = {item.name: item.type for item in session.get_outputs()}
    with session_failures(_BOUND):
        binding = _bound(session, held, types)
        # This run only allocates outputs, and is not to be recorded.
        session.run_with_iobinding(binding, _options(None if graph is None else -1))
    if graph is not None and not all(map(stays_on_device, types.values())):
        raise RuntimeFailure("A CUDA graph needs outputs that are tensors of numbers.")
    if not all(kind.startswith("tensor(") for kind in types.values()):
        return _repeated(session, binding, None, held)
    buffers = dict(zip(types, binding.get_outputs(), strict=True))
    run = bind_values(session, held, buffers, graph)
    if graph is not None:
        run()
    return run


def bind_values(
    session: "ort.InferenceSession",
    inputs: "Mapping[str, ort.OrtValue]",
    outputs: "Mapping[str, ort.OrtValue]",
    graph: int | None = None,
) -> Callable[[], None]:
    """Return a function that runs the session from buffers into buffers and returns when the device is done.

    Args:
        inputs, outputs: by name, in the session's memory; outputs must not share buffers with inputs.
        graph: as for :func:`bind`, but the first call records, after warm-up runs.

    Raises:
        RuntimeFailure: a buffer does not fit; when called, a node failed, or a CUDA graph cannot be recorded.
    """
    with session_failures("bind the model's inputs and outputs"):
        binding = _bound(session, inputs, ())
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, value)
    return _repeated(session, binding, _options(graph), (inputs, outputs))


_BOUND: Final = "run the model with its inputs and outputs bound"


def _repeated(
    session: "ort.InferenceSession", binding: Any, options: Any, held: Any
) -> Callable[[], None]:
    """Return a function that runs a session again; it keeps the memory that is bound."""

    def run(_held: Any = held) -> None:
        try:  # which costs no time unless something fails
            session.run_with_iobinding(binding, options)
        except Exception as error:
            raise failed(_BOUND, error) from error

    return run


def empty_value(like: NDArray[Any], provider: Provider) -> "ort.OrtValue":
    """Return a buffer for arrays of this shape and dtype, on the device where the provider leaves its results."""
    import onnxruntime as ort  # noqa: PLC0415

    memory = "cuda" if provider == "cuda" else "cpu"
    return ort.OrtValue.ortvalue_from_shape_and_type(like.shape, like.dtype, memory, 0)


def _options(graph: int | None) -> Any:
    """Return the run options with the number of a CUDA graph, -1 for none; None for ordinary runs."""
    if graph is None:
        return None
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.RunOptions()
    options.add_run_config_entry("gpu_graph_id", str(graph))
    return options
