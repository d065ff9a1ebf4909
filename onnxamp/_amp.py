"""Mixed precision as ``mindspore.amp`` and ``paddle.amp`` offer it, for ONNX models."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

from onnxamp._api import convert_as
from onnxamp._context import active_within
from onnxamp._errors import ArgumentError
from onnxamp._options.lists import Preset
from onnxamp._options.options import Level, Options


def auto_mixed_precision(model: Any, amp_level: str = "O0", dtype: str = "float16") -> Any:
    """Convert a model at a level, with all other options at their defaults.

    The counterpart of ``mindspore.amp.auto_mixed_precision``.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        amp_level: what to lower: "O0" nothing, "O1" white-listed ops, "O2" all but black-listed ops, "O3" every op that
            has a low-precision kernel. For "auto", use :func:`onnxamp.convert_model`.
        dtype: the low-precision type, "float16" or "bfloat16".

    Returns:
        The converted ModelProto, or a Graph for a Graph.

    Raises:
        ArgumentError: an argument has an unknown value, or the level is "auto".
        ArgumentTypeError: an argument has the wrong type.
        ModelError: the model cannot be read or is invalid.

    Example:
        >>> import onnx, onnxamp
        >>> model16 = onnxamp.amp.auto_mixed_precision("models/encoder.onnx", "O2")
        >>> any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in model16.graph.initializer)
        True
    """
    return convert_as(model, Options.of(amp_level, {"dtype": dtype}))


def custom_mixed_precision(
    model: Any,
    *,
    white_list: Iterable[str] | None = None,
    black_list: Iterable[str] | None = None,
    dtype: str = "float16",
) -> Any:
    """Convert a model by one list of op types in place of the presets.

    The counterpart of ``mindspore.amp.custom_mixed_precision``.

    Args:
        model: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        white_list: only these op types run in low precision (level O1 with this list).
        black_list: all other op types run in low precision (level O2, strictly).
        dtype: the low-precision type, "float16" or "bfloat16".

    Returns:
        The converted ModelProto, or a Graph for a Graph.

    Raises:
        ArgumentError: neither list is given, or both are, or a value is unknown.
        ArgumentTypeError: an argument has the wrong type.
        ModelError: the model cannot be read or is invalid.

    Example:
        >>> import onnxamp
        >>> model16 = onnxamp.amp.custom_mixed_precision("models/encoder.onnx", white_list=["MatMul"])
        >>> sum(node.op_type == "Cast" for node in model16.graph.node) > 0
        True
    """
    if (white_list is None) == (black_list is None):
        given = "neither is" if white_list is None else "both are"
        raise ArgumentError(f"Pass exactly one of white_list and black_list; {given} given.")
    level, strict = ("O1", False) if white_list is not None else ("O2", True)
    nothing = Preset("none", "", {}, {}, folds_batch_norm=False)
    lists = {"white_list": white_list, "black_list": black_list, "lists": nothing}
    return convert_as(model, Options.of(level, {"dtype": dtype, "strict": strict, **lists}))


_ACTIVE: Final[ContextVar[Options | None]] = ContextVar("onnxamp auto_cast", default=None)


@contextmanager
def auto_cast(
    enable: bool = True,
    custom_white_list: Iterable[str] | None = None,
    custom_black_list: Iterable[str] | None = None,
    level: str = "O1",
    dtype: str = "float16",
    use_promote: bool = True,
) -> Iterator[None]:
    """Set the precision of sessions and training networks that are created within the context.

    The counterpart of ``paddle.amp.auto_cast``. It applies to :class:`onnxamp.debugging.InferenceSession` (the model is
    converted; without a CUDA device, low precision is emulated) and to :func:`onnxamp.train.build_train_network`, whose
    ``level`` and ``dtype`` must then keep their defaults. Objects created earlier do not change, and other threads and
    asyncio tasks are not affected.

    Args:
        enable: False switches an outer context off.
        custom_white_list, custom_black_list: op types to add to Paddle's lists.
        level: "O0", "O1" or "O2".
        dtype: the low-precision type, "float16" or "bfloat16".
        use_promote: must be True. Paddle promotes mixed inputs of an op; here no op ever gets inputs of mixed types.

    Raises:
        ArgumentError: a value is unknown, or an op is in both lists.

    Example:
        >>> import onnxamp
        >>> feeds = onnxamp.random_samples("models/encoder.onnx")[0]
        >>> exact = onnxamp.InferenceSession("models/encoder.onnx").run(None, feeds)[0]
        >>> with onnxamp.amp.auto_cast(level="O2"):
        ...     rounded = onnxamp.InferenceSession("models/encoder.onnx").run(None, feeds)[0]
        >>> bool(0 < abs(rounded - exact).max() < 0.01)
        True
    """
    if level not in ("O0", "O1", "O2"):
        raise ArgumentError(f"Unknown level {level!r}: auto_cast knows O0, O1 and O2.")
    if not use_promote:
        raise ArgumentError("use_promote=False is not supported: no op ever gets inputs of mixed types. Leave it True.")
    lists = {"white_list": custom_white_list, "black_list": custom_black_list, "lists": "paddle"}
    options = Options.of(level, {"dtype": dtype, **lists})
    with active_within(_ACTIVE, options if enable and level != Level.O0 else None):
        yield


def active_cast() -> Options | None:
    """The options that the innermost :func:`auto_cast` sets; None outside of one."""
    return _ACTIVE.get()
