"""Starting sessions of ONNX Runtime, and saying in one sentence why one does not start.

ONNX Runtime is imported inside functions, so that importing onnxamp stays fast.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final, NamedTuple, TypeAlias

from onnx import ModelProto, TensorProto, helper, numpy_helper

from onnxamp._base.errors import (
    ArgumentError,
    ArgumentTypeError,
    OnnxAmpError,
    RuntimeFailure,
)
from onnxamp._base.optional import require_runtime
from onnxamp._base.paths import as_path, is_remote, reason_of
from onnxamp._base.public import active_within
from onnxamp._base.temporary import temporary_folder
from onnxamp._base.threads import thread_limit
from onnxamp._facts.signature import DECLARED, CustomOpsLike, declared_ops
from onnxamp._graph.targets.optimizers import faulty_optimizers
from onnxamp._model.model import Model, find_data_files
from onnxamp._model.protos import (
    copied,
    copy_without,
    has_external_data,
    small_model,
    stored_bytes,
    tensors_of,
)
from onnxamp._model.sources import confirm_sources, external_tensor
from onnxamp._model.weights import embed

if TYPE_CHECKING:
    import onnxruntime as ort

ModelFile: TypeAlias = Model | ModelProto | str | PathLike[str]
"""A model in memory, the path of its file, or a model that was read."""

LibrariesLike: TypeAlias = str | PathLike[str] | Iterable[str | PathLike[str]]
"""The path of a shared library, or several."""

_LIBRARIES: Final[ContextVar[tuple[str, ...]]] = ContextVar(
    "onnxamp custom op libraries", default=()
)


@contextmanager
def custom_ops(
    declared: CustomOpsLike | None = None, *, library: LibrariesLike = ()
) -> Iterator[None]:
    """Declare custom ops, or load their kernels, within a ``with`` block.

    Args:
        declared: the types of ops: a TOML file, a :class:`CustomOp`, a dict of its attributes, or a list of these.
            Ops that are not declared stay in float32.
        library: shared libraries with their kernels, built for ONNX Runtime (``RegisterCustomOps``). All sessions in
            the block register them, including those of worker processes. Their code runs in these processes as soon as
            they are named, so only name libraries that you trust.

    Raises:
        ArgumentError: a declaration is wrong, or a library cannot be loaded.
        ArgumentTypeError: an argument has the wrong type.

    Example:
        >>> import onnxamp
        >>> norm = {"domain": "com.example", "type": "Norm", "inputs": ["T"], "outputs": ["T"],
        ...         "types": {"T": ["float", "float16"]}}
        >>> with onnxamp.custom_ops(norm):
        ...     plan = onnxamp.plan_model("models/encoder.onnx")
    """
    with (
        declared_ops(declared),
        active_within(_LIBRARIES, (*_LIBRARIES.get(), *_checked(library))),
    ):
        yield


def active_libraries() -> tuple[str, ...]:
    """Return the libraries that sessions register here, for another process."""
    return _LIBRARIES.get()


class Surroundings(NamedTuple):
    """The custom ops that are registered in a block of code, for another process."""

    declared: Mapping[Any, Any]
    libraries: tuple[str, ...]

    @classmethod
    def here(cls) -> "Surroundings":
        """Return those of the current block."""
        return cls(dict(DECLARED.get()), _LIBRARIES.get())

    def enter(self) -> None:
        """Register them in this process."""
        DECLARED.set(self.declared)
        _LIBRARIES.set(self.libraries)


def _checked(library: LibrariesLike) -> tuple[str, ...]:
    listed = [library] if isinstance(library, (str, PathLike)) else library
    if not isinstance(listed, Iterable):
        raise ArgumentTypeError(
            f"library must be a path or a list of paths, not {type(library).__name__}."
        )
    paths = [as_path(path).absolute() for path in listed]
    for path in paths:
        if not path.is_file():
            raise ArgumentError(f"There is no library {str(path)!r}.")
        _load(path)
    return tuple(dict.fromkeys(map(str, paths)))


def _load(path: Path) -> None:
    """Check before anything runs that ONNX Runtime can load a library."""
    require_runtime()
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    options.log_severity_level = 4
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:
        raise ArgumentError(
            f"ONNX Runtime cannot load custom ops from {str(path)!r}: {reason_of(error)}."
        ) from error


_ALIGNMENT: Final = 4096
"""Page size: ONNX Runtime can map tensors that start at a page."""

_KEEP_BELOW: Final = 1024
"""Bytes below which tensors (shapes, axes) stay in the graph, where graph optimizers see them."""

_WEIGHTS: Final = "weights.bin"
"""Name of the file with the weights."""

_LIMIT: Final = 2**31 - 2**24
"""Bytes of weights in one message, which must be smaller than 2 GiB; the rest is for nodes."""


def unfolded(path: Path) -> ModelProto:
    """Return the model of a file, with weights that are found without its folder.

    Raises:
        ModelError: as :meth:`~onnxamp._model.model.Model.read`. ExternalDataError: weights are outside the allowed
            folder.
    """
    opened = Model.read(path)
    _ = opened.stock  # looks them up
    return opened.proto


def is_large(model: ModelProto) -> bool:
    """Return whether the model cannot be one message, because its weights exceed 2 GB or are not loaded.

    Complexity: linear in the model's initializers; no data are touched.
    """
    tensors = model.graph.initializer
    if any(tensor.data_location == TensorProto.EXTERNAL for tensor in tensors):
        return True
    return sum(map(stored_bytes, tensors)) > _LIMIT


def save_spilled(model: ModelProto, folder: Path) -> Path:
    """Write the model into an empty folder, one weight at a time, and return the path of the graph's file.

    Args:
        model: it is not changed. Only initializers of its main graph are moved out.
        folder: an existing folder.

    Raises:
        ExternalDataError: a weight is in a data file.
    """
    shell = copy_without(model, "initializer")
    for tensor in tensors_of(shell):  # those of nodes and bodies
        embed(tensor, None)
    with (folder / _WEIGHTS).open("wb") as file:
        for tensor in model.graph.initializer:
            _spill(tensor, shell.graph.initializer.add(), file)
    path = folder / "model.onnx"
    path.write_bytes(shell.SerializeToString())
    return path


def _spill(source: TensorProto, target: TensorProto, file: BinaryIO) -> None:
    if source.data_location == TensorProto.EXTERNAL:
        source = copied(source)
        embed(source, None)
    if source.data_type == TensorProto.STRING or stored_bytes(source) < _KEEP_BELOW:
        target.CopyFrom(source)
        return
    raw = source.raw_data if source.HasField("raw_data") else _raw(source)
    file.write(b"\0" * (-file.tell() % _ALIGNMENT))
    target.name = source.name
    target.data_type = source.data_type
    target.dims.extend(source.dims)
    target.MergeFrom(external_tensor(_WEIGHTS, file.tell(), len(raw)))
    file.write(raw)


def _raw(tensor: TensorProto) -> bytes:
    return numpy_helper.from_array(numpy_helper.to_array(tensor)).raw_data


def session_options(
    *,
    optimize: bool = True,
    lean: bool = False,
    threads: int = 0,
    profile_to: str | PathLike[str] | None = None,
    exact_integers: bool = False,
) -> "ort.SessionOptions":
    """Options that log nothing, as :func:`~onnxamp._runtime.sessions.session.make_session` describes them."""
    require_runtime()
    import onnxruntime as ort  # noqa: PLC0415

    options = ort.SessionOptions()
    # Failures are raised; ONNX Runtime would print them as well.
    options.log_severity_level = 4
    options.intra_op_num_threads = threads or thread_limit()
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = (
        level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    )
    if not optimize:
        # Of the nodes that are ready, the one that is written first runs first, so that a reader right after its value
        # releases it. By default, nodes that nothing reads run last.
        options.execution_order = ort.ExecutionOrder.PRIORITY_BASED
        # Such sessions take turns. Threads that wait for the next run of one would take the cores from another.
        options.add_session_config_entry("session.force_spinning_stop", "1")
    # Planning which values share memory takes ONNX Runtime 1.31 time quadratic in values of unknown shape.
    options.enable_mem_reuse = optimize
    if lean:
        options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if exact_integers:
        options.add_session_config_entry("session.x64quantprecision", "1")
    for path in _LIBRARIES.get():
        options.register_custom_ops_library(path)
    if profile_to is not None:
        options.enable_profiling = True
        options.profile_file_prefix = fspath(profile_to)
    return options


def trial() -> ModelProto:
    """Return a model of one node, to test whether a provider works."""
    node = helper.make_node("Neg", ["x"], ["y"])
    ports = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"
    ]
    return small_model([node], ports[:1], ports[1:])


def start_session(
    source: bytes | str,
    options: "ort.SessionOptions",
    providers: Sequence[tuple[str, dict[str, str]]] | None = None,
    disabled: Collection[str] = (),
) -> "ort.InferenceSession":
    """Return a session on these providers; None for those that the options name. It never falls back to others.

    Args:
        source: the model.
        options: the options.
        providers: the providers, each with its options.
        disabled: graph optimizers that do not run.
    """
    import onnxruntime as ort  # noqa: PLC0415

    # Without enable_fallback=0 a failure would be printed, and the model would run on the CPU.
    return ort.InferenceSession(
        source,
        options,
        providers=providers,
        enable_fallback=0,
        disabled_optimizers=[*disabled] or None,
    )


def optimizers_to_disable(model: ModelProto, provider: str) -> tuple[str, ...]:
    """Return the graph optimizers of the installed ONNX Runtime that would break a model, and may end the process; and
    those of :func:`without_optimizers`.

    Args:
        model: the model; the data of its weights do not matter.
        provider: the provider of the session, possibly with a hint after a colon.
    """
    import onnxruntime as ort  # noqa: PLC0415

    known = faulty_optimizers(model, provider.partition(":")[0], ort.__version__)
    return tuple(dict.fromkeys((*known, *_DISABLED.get())))


_DISABLED: Final[ContextVar[tuple[str, ...]]] = ContextVar(
    "graph optimizers that do not run", default=()
)


def without_optimizers(names: Iterable[str]) -> AbstractContextManager[object]:
    """Start sessions in a ``with`` block without some graph optimizers, which are known to break the model."""
    return active_within(_DISABLED, (*_DISABLED.get(), *names))


def disabled_sentence(optimizers: Sequence[str], does: str) -> str:
    """Return which graph optimizers a user has to disable before a session does something; "" if there are none."""
    if not optimizers:
        return ""
    those = "this optimizer is" if len(optimizers) == 1 else "these optimizers are"
    listed = ", ".join(map(repr, optimizers))
    return (
        f"ONNX Runtime {does} only if {those} disabled, and may end the process otherwise:"
        f" InferenceSession(..., disabled_optimizers=[{listed}])."
    )


@contextmanager
def source_of(model: ModelFile) -> Iterator[tuple[bytes | str, ModelProto]]:
    """Yield a model in the form that ONNX Runtime loads: bytes, or the path of a file that exists within the block.

    The second item is the proto; the data of its weights may be missing. A model that was read is loaded from its file
    as it is, without reading it again.

    Raises:
        ModelError: the model is not well formed, or its external data are not where they may be.
        SourceChangedError: ONNX Runtime may have read other files than onnxamp.
    """
    given = model if isinstance(model, ModelProto) else _loaded_whole(model)
    if isinstance(given, Model):
        # ONNX Runtime itself reads the data files.
        find_data_files(given.proto, given.folder)
        confirm_sources()
        yield fspath(given.label), given.proto
        confirm_sources()
    elif not (is_large(given) or has_external_data(given)):
        yield given.SerializeToString(), given
    else:
        # The session may still map the file, which Windows cannot delete then.
        with temporary_folder() as folder:
            yield fspath(save_spilled(given, folder)), given


def _loaded_whole(source: Model | str | PathLike[str]) -> Model | ModelProto:
    """Return a model whose file ONNX Runtime can read, or a proto of it."""
    if not isinstance(source, Model):
        source = Model.read(as_path(source))
    if source.path is None:
        return source.given or source.embedded()
    if is_remote(source.path):
        _ = source.stock  # looks up its weights: ONNX Runtime reads local files only
        return source.proto
    # ONNX Runtime reads the binary form only.
    return source.embedded() if source.in_text else source


@contextmanager
def session_failures(action: str, *, loaded: bool = True) -> Iterator[None]:
    """Turn ONNX Runtime's exceptions, which have no common base, into one sentence."""
    try:
        yield
    except OnnxAmpError:
        raise  # it is a sentence
    except Exception as error:
        raise failed(action, error, loaded=loaded) from error


def failed(action: str, error: Exception, *, loaded: bool = True) -> RuntimeFailure:
    """Return ONNX Runtime's error in one sentence."""
    text = str(error) or type(error).__name__
    hint = _UNKNOWN_OP[1] if _UNKNOWN_OP[0] in text else ""
    return RuntimeFailure(
        f"ONNX Runtime could not {action}: {reason(text)}.{hint}", loaded=loaded
    )


_UNKNOWN_OP: Final = (
    "is not a registered function/op",
    " If it is a custom op, --custom-ops-library (onnxamp.custom_ops) brings its kernels.",
)
"""ONNX Runtime's message about an unknown op, and advice."""


def reason(text: str) -> str:
    """Return the first message of ONNX Runtime or an engine, in one line, without error codes and places in their
    sources.
    """
    parts: list[str] = []
    for line in _LOADING.sub("", _CODE.sub("", text.strip())).splitlines():
        node = _NODE.search(line)
        part = f"{node[1]} {node[2]!r}:" if node else _FRAME.sub("", line).strip()
        if not part:
            continue
        parts.append(part)
        # A line with this ending introduces the next one, which names the fault.
        if not part.endswith((":", "for the following indices")):
            break
    return _SOURCE.sub("", " ".join(parts)).rstrip(".: ")


_FRAME: Final = re.compile(
    r"(?:Check '.*' failed at|Exception from) \S+:\d+:$|^FrontEnd API failed with \w+:$"
    r"|^Model wasn't fully converted\. .*:$|^-- \S+ with a message:$"
)
"""OpenVINO's place of an error, which the message follows."""
_NODE: Final = re.compile(r"While validating ONNX node '<Node\((\w+)\): (.*?)>'")
_CODE: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ")
_LOADING: Final = re.compile(r"^Load model from .*? failed: ?")
"""Text that the caller adds."""
_SOURCE: Final = re.compile(
    r"\S+\.(?:h|hpp|cuh|cc|cpp|cu):\d+ "  # the file and the line, followed by ...
    r"(?:.*? was false\. (?=\S)"  # ... the condition that was not met, where it is explained,
    r"|[\w:<>,&*~ ]+\((?:[^()]|\([^()]*\))*\)(?: const)?(?: \[with [^\]]*\])? "  # the signature of the function,
    r"|\w+ )"  # or its name
)
