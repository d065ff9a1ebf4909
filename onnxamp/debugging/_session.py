"""Sessions that run models as those of ONNX Runtime do, and check the runs if a check is active."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from os import fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from onnxamp._amp import CastWatch, active_cast
from onnxamp._base.errors import ArgumentError, ArgumentTypeError, OnnxAmpError
from onnxamp._facts.dtypes import FORMATS
from onnxamp._job.api import convert_as
from onnxamp._model.model import (
    Model,
    ModelSource,
    find_data_files,
    load_model,
    parse_model,
)
from onnxamp._options.doors import door
from onnxamp._options.values import checked_names
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.engines import engine_on
from onnxamp._runtime.sessions.session import (
    cuda_available,
    make_session,
    run,
    short_provider,
)
from onnxamp._runtime.sessions.starting import optimizers_to_disable
from onnxamp._runtime.sessions.values import from_value
from onnxamp.debugging._checker import TensorChecker, next_check
from onnxamp.debugging._chosen import chosen_values
from onnxamp.debugging._operators import OperatorStats, active_stats, count_operators
from onnxamp.debugging._watch import Watcher, conclude

if TYPE_CHECKING:
    import onnxruntime as ort


@door
class InferenceSession:
    """Runs a model like ``onnxruntime.InferenceSession``, and checks the runs if a check is active.

    Under :func:`enable_tensor_checker`, each run is done twice: op by op, with every float checked and low precision
    emulated, and then as usual. The outputs are those of the second run and thus do not depend on the check. On the
    CPU, where ONNX Runtime computes float16 in float32, they may be fine although the check finds an overflow that
    would occur on a GPU. Under :func:`collect_operator_stats`, each run counts the nodes of the model. Otherwise, runs
    have no overhead.

    Graph optimizers of ONNX Runtime that are known to break the model, or to end the process, do not run.

    A session created within :func:`onnxamp.amp.auto_cast` runs the converted model. Without a CUDA device, low
    precision is then emulated, unless you pass options of your own.

    Args:
        path_or_bytes: a path, the bytes of a model file, a ModelProto with its weights loaded (do not change it while
            the session is in use), or an onnx-graphsurgeon Graph.
        sess_options, providers, provider_options: as for ONNX Runtime. By default, the session runs on CUDA if there is
            a device, with TF32 off, and on the CPU otherwise.

    Raises:
        ArgumentTypeError: the model has the wrong type.
        ModelError: the model cannot be read.
        RuntimeFailure: the model cannot be loaded. With your own options, ONNX Runtime's own exceptions.

    Example:
        >>> import onnxamp
        >>> session = onnxamp.InferenceSession("models/encoder.onnx")
        >>> outputs = session.run(["pooled"], onnxamp.random_samples("models/encoder.onnx")[0])
        >>> outputs[0].shape, outputs[0].dtype
        ((1, 64), dtype('float32'))
    """

    def __init__(
        self,
        path_or_bytes: ModelSource | bytes,
        sess_options: "ort.SessionOptions | None" = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Any] | None = None,
    ) -> None:
        cast = active_cast()
        source = _parsed(path_or_bytes)
        self._source: ModelProto | str = (
            source if cast is None else convert_as(source, cast)
        )
        self._cast_watch = CastWatch("session")
        self._lock = threading.Lock()
        if sess_options is None and providers is None and provider_options is None:
            on_cuda = cuda_available()
            emulated = (
                cast is not None
                and not on_cuda
                and isinstance(self._source, ModelProto)
            )
            ready = emulate(self._source) if emulated else self._source  # type: ignore[arg-type]
            self._session = make_session(ready, "cuda" if on_cuda else "cpu")
        else:
            self._session = _own_session(
                self._source, sess_options, providers, provider_options
            )

    @property
    def session(self) -> "ort.InferenceSession":
        """The underlying ``onnxruntime.InferenceSession``."""
        return self._session

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: "ort.RunOptions | None" = None,
    ) -> list[Any]:
        """Run the model.

        Args:
            output_names: the outputs to return; None or an empty list for all.
            input_feed: arrays by input name (lists of arrays for sequences; ``OrtValue`` for either).
            run_options: options of the run itself; checks ignore them.

        Returns:
            One array per output (a list of arrays for a sequence), in the order of ``output_names``.

        Raises:
            NumericsError: an active checker aborts because a value holds NaN or an unintended Inf.
            ArgumentError: the inputs do not fit the model.
            ArgumentTypeError: the names of outputs are no list, or the inputs no dict.
            RuntimeFailure: the model does not run.
            OutputError: records cannot be written.
        """
        self._cast_watch.check(self._has_low)
        check = next_check()
        if check is not None:
            self._check(*check, input_feed)
        stats = active_stats()
        if stats is not None:
            stats.add(self._operators)
        wanted = [] if output_names is None else output_names
        if isinstance(wanted, Iterator):
            wanted = list(wanted)
        checked_names("output_names", wanted)
        names = list(wanted) or [item.name for item in self._session.get_outputs()]
        outputs = run(self._session, _arrays(input_feed), names, run_options)
        return [outputs[name] for name in names]

    def get_inputs(self) -> "list[ort.NodeArg]":
        """Return name, type and shape of each input, as ONNX Runtime does."""
        return list(self._session.get_inputs())

    def get_outputs(self) -> "list[ort.NodeArg]":
        """Return name, type and shape of each output, as ONNX Runtime does."""
        return list(self._session.get_outputs())

    def get_providers(self) -> list[str]:
        """Return the execution providers in order of preference."""
        return list(self._session.get_providers())

    def _check(
        self, checker: TensorChecker, step: int, feeds: Mapping[str, Any]
    ) -> None:
        config = checker.config
        # Threads that share this object share the sessions of its watcher.
        with self._lock:
            chosen = chosen_values(self._watcher.session.model, config)
            watched = self._watcher.watch(
                step, _arrays(feeds), chosen, stop=config.aborts
            )
        conclude(checker, watched, chosen)

    @cached_property
    def _watcher(self) -> Watcher:
        on_cuda = self.get_providers()[0] == "CUDAExecutionProvider"
        engine = engine_on("cuda" if on_cuda else "cpu", emulates=True)
        return Watcher(engine.open(self._source))

    def _has_low(self) -> bool:
        return any(name in FORMATS for _, name in self._operators.calls)

    @cached_property
    def _operators(self) -> OperatorStats:
        return count_operators(self._source)


def _parsed(model: ModelSource | bytes) -> ModelProto | str:
    """Return the model, checked: a proto, or the path of a file whose weights ONNX Runtime reads itself."""
    if isinstance(model, (bytes, bytearray)):
        model, _ = parse_model(bytes(model), "path_or_bytes")
    opened = Model.of(model)
    find_data_files(opened.proto, opened.folder)
    return opened.proto if opened.path is None else fspath(opened.path)


def _own_session(
    source: ModelProto | str,
    sess_options: "ort.SessionOptions | None",
    providers: Sequence[Any] | None,
    provider_options: Sequence[Any] | None,
) -> "ort.InferenceSession":
    import onnxruntime as ort  # noqa: PLC0415

    if isinstance(source, ModelProto):
        try:
            data: bytes | str = source.SerializeToString()
        except ValueError as error:
            raise ArgumentError(
                "The model is larger than 2 GB: save it and pass its path."
            ) from error
    else:
        data = source
    disabled = _disabled(source, providers)
    return ort.InferenceSession(
        data,
        sess_options,
        providers,
        provider_options,
        disabled_optimizers=disabled,
    )


def _disabled(
    source: ModelProto | str, providers: Sequence[Any] | None
) -> list[str] | None:
    """Return the graph optimizers that would break the model, and may end the process; None if there are none."""
    first = next(iter(providers or ()), "CPUExecutionProvider")
    name = first if isinstance(first, str) else first[0]
    try:
        model = source if isinstance(source, ModelProto) else load_model(Path(source))
    except OnnxAmpError:  # ONNX Runtime says what is wrong
        return None
    return [*optimizers_to_disable(model, short_provider(name).lower())] or None


def _arrays(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Return feeds as arrays instead of ONNX Runtime values.

    Raises:
        ArgumentTypeError: they are not given by name.
    """
    if not isinstance(feeds, Mapping):
        raise ArgumentTypeError(
            f"input_feed must be a dict of arrays by name, not {type(feeds).__name__}."
        )
    arrays = dict(feeds)
    for name, feed in feeds.items():
        if hasattr(feed, "has_value") and hasattr(feed, "data_type"):
            arrays[name] = from_value(feed)
    return arrays
