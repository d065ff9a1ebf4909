"""A session of ONNX Runtime whose runs can be looked into."""

import threading
import warnings
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnx import ModelProto

from onnxamp._api import convert_model
from onnxamp._autocast import active_cast
from onnxamp._errors import ArgumentError, ArgumentTypeError, NumericsError
from onnxamp._model.model import Model
from onnxamp._model.storage import data_files, parse_model
from onnxamp._numerics.check import OpFilter
from onnxamp._runtime.emulate import emulate
from onnxamp._runtime.session import cuda_available, make_session, run
from onnxamp._runtime.values import from_value
from onnxamp.debugging._checker import TensorChecker, active_checker
from onnxamp.debugging._modes import DebugMode, TensorCheckerConfig
from onnxamp.debugging._operators import OperatorStats, active_stats, count_operators
from onnxamp.debugging._records import StepCheck, ValueRecord, counted, dump_path, write_dump
from onnxamp.debugging._tensors import NumericsWarning
from onnxamp.debugging._watch import Looked, Watcher

if TYPE_CHECKING:
    import onnxruntime as ort


class InferenceSession:
    """Runs a model as ``onnxruntime.InferenceSession`` does, and looks into the runs where that is switched on.

    With nothing switched on it adds nothing to a run. Under :func:`enable_tensor_checker` each run is done twice: op by
    op, with every float measured and low values emulated (:mod:`onnxamp._runtime.emulate`), and then as always. The
    outputs are those of the second, so that they are the same whether runs are checked or not: on the CPU, where ONNX
    Runtime computes float16 in float32, they may be fine although the check finds what overflows on a GPU. Under
    :func:`collect_operator_stats` the model's nodes are counted with each run. Made within :func:`onnxamp.auto_cast`,
    it runs the model converted; without a CUDA device, and options of your own, low precision is then emulated.

    Args:
        path_or_bytes: the path of a model file, the bytes of one, or a proto with its weights loaded, which
            must not be changed while the session is in use.
        sess_options, providers, provider_options: as ONNX Runtime takes them. Where none is given, the session is on
            CUDA if there is a device, with TF32 off, else on the CPU.

    Raises:
        ModelError: the model cannot be read. RuntimeFailure: it does not load. With options of your own, whatever
        ONNX Runtime raises.
    """

    def __init__(
        self,
        path_or_bytes: ModelProto | bytes | str | PathLike[str],
        sess_options: "ort.SessionOptions | None" = None,
        providers: Sequence[Any] | None = None,
        provider_options: Sequence[Any] | None = None,
    ) -> None:
        cast, source = active_cast(), _parsed(path_or_bytes)
        self._source: ModelProto | str = source if cast is None else convert_model(source, **cast.wishes())
        self._lock = threading.Lock()
        self._watcher: Watcher | None = None
        self._counted: OperatorStats | None = None
        if sess_options is None and providers is None and provider_options is None:
            on_cuda = cuda_available()
            emulated = cast is not None and not on_cuda and isinstance(self._source, ModelProto)
            ready = emulate(self._source) if emulated else self._source  # type: ignore[arg-type]
            self._session = make_session(ready, "cuda" if on_cuda else "cpu")
        else:
            self._session = _own_session(self._source, sess_options, providers, provider_options)

    @property
    def session(self) -> "ort.InferenceSession":
        """ONNX Runtime's own, for all that is not here."""
        return self._session

    def run(
        self,
        output_names: Sequence[str] | None,
        input_feed: Mapping[str, Any],
        run_options: "ort.RunOptions | None" = None,
    ) -> list[Any]:
        """Run the model.

        Args:
            output_names: which outputs; None or nothing for all.
            input_feed: arrays (lists of arrays, ``OrtValue``) by input.
            run_options: for the run itself; checks ignore them.

        Returns:
            One array (for sequences: a list of arrays) per output, in the order asked for.

        Raises:
            NumericsError: a checker is on, its mode aborts, and a value holds NaN or Inf that is no intention.
            ArgumentError: inputs do not fit the model. RuntimeFailure: it does not run.
            OutputError: records cannot be written.
        """
        checker = active_checker()
        if checker is not None and (step := checker.config.next_step()) is not None:
            self._check(checker, step, input_feed)
        stats = active_stats()
        if stats is not None:
            stats.add(self._operators())
        if run_options is not None:
            return list(self._session.run(output_names or None, dict(input_feed), run_options))
        names = list(output_names or ()) or [item.name for item in self._session.get_outputs()]
        found = run(self._session, _arrays(input_feed), names)
        return [found[name] for name in names]

    def get_inputs(self) -> "list[ort.NodeArg]":
        """What ONNX Runtime says of the inputs: name, type and shape of each."""
        return list(self._session.get_inputs())

    def get_outputs(self) -> "list[ort.NodeArg]":
        """What ONNX Runtime says of the outputs."""
        return list(self._session.get_outputs())

    def get_providers(self) -> list[str]:
        """Execution providers, the preferred one first."""
        return list(self._session.get_providers())

    def _check(self, checker: TensorChecker, step: int, feeds: Mapping[str, Any]) -> None:
        config = checker.config
        ops = OpFilter(frozenset(config.checked_op_list or ()), frozenset(config.skipped_op_list or ()))
        aborts = config.debug_mode is DebugMode.CHECK_NAN_INF_AND_ABORT
        with self._lock:  # sessions of pieces are shared by the threads that share this object
            looked = self._watched().look(step, _arrays(feeds), ops, stop=aborts)
        records = _kept(looked, ops, config.debug_mode)
        file = None
        if config.folder is not None:
            file = dump_path(config.folder, step)
            write_dump(file, records)
        checker.steps.append(StepCheck(step, records, file))
        bad = looked.first_bad(ops)
        if bad is not None and aborts:
            story = looked.story(bad, config.stack_height_limit)
            text = f"Run {step}: there is NaN or Inf in {bad}. {story}".rstrip()
            raise NumericsError(text, bad.tensor, bad.node, bad.op)
        _warn(config, step, records, file)

    def _watched(self) -> Watcher:
        if self._watcher is None:
            opened = Model.of(self._source)
            on_cuda = self.get_providers()[0] == "CUDAExecutionProvider"
            self._watcher = Watcher(opened.proto, opened.folder, "cuda" if on_cuda else "cpu")
        return self._watcher

    def _operators(self) -> OperatorStats:
        if self._counted is None:
            self._counted = count_operators(self._source)
        return self._counted


def _kept(looked: Looked, ops: OpFilter, mode: DebugMode) -> tuple[ValueRecord, ...]:
    """What a mode records."""
    if mode is DebugMode.CHECK_NAN_INF_AND_ABORT:
        bad = looked.first_bad(ops)
        return () if bad is None else (bad,)
    return tuple(row for row in looked.records.values() if ops.takes(row.op) and row.concerns(mode))


def _warn(config: TensorCheckerConfig, step: int, records: Sequence[ValueRecord], file: Path | None) -> None:
    """Tell, in one warning, of what was found in a run that goes on."""
    where = "" if file is None else f" All are in {str(file)!r}."
    bad = [row for row in records if row.is_bad]
    if bad:
        text = f"Run {step}: there is NaN or Inf in {counted(bad)}; the first is {bad[0]}.{where}"
        warnings.warn(text, NumericsWarning, stacklevel=4)
    wide = [row for row in records if row.fp16] if config.debug_mode is DebugMode.CHECK_ALL_FOR_OVERFLOW else []
    if wide:
        text = f"Run {step}: {counted(wide)} beyond float16; the first ({wide[0].fp16}) is {wide[0]}.{where}"
        warnings.warn(text, NumericsWarning, stacklevel=4)


def _parsed(model: ModelProto | bytes | str | PathLike[str]) -> ModelProto | str:
    if isinstance(model, (ModelProto, str, PathLike)):
        opened = Model.of(model)
        data_files(opened.proto, opened.folder)  # ONNX Runtime reads them by itself
        return model if isinstance(model, ModelProto) else fspath(model)
    if not isinstance(model, (bytes, bytearray)):
        raise ArgumentTypeError(f"A model is a path, bytes or a ModelProto, not {type(model).__name__}.")
    found = parse_model(bytes(model), "What was given")
    data_files(found, None)
    return found


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
            raise ArgumentError("The model is larger than 2 GB: save it, and give its path.") from error
    else:
        data = source
    return ort.InferenceSession(data, sess_options, providers, provider_options)


def _arrays(feeds: Mapping[str, Any]) -> dict[str, Any]:
    """Feeds without what belongs to ONNX Runtime."""
    return {
        name: from_value(feed) if hasattr(feed, "has_value") and hasattr(feed, "data_type") else feed
        for name, feed in feeds.items()
    }
