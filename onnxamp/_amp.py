"""The mixed-precision functions of ``mindspore.amp`` and ``paddle.amp``, for ONNX models."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Final

from onnx import NodeProto

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, HazardWarning, warn
from onnxamp._base.public import active_within
from onnxamp._base.records import record
from onnxamp._base.words import shortened
from onnxamp._convert.plan import HazardRow, make_plan
from onnxamp._decide.verdicts import reason_text
from onnxamp._facts.dtypes import DtypeLike
from onnxamp._facts.ops import is_exact, op_facts, op_key
from onnxamp._job.api import conversion_and_result
from onnxamp._options.doors import autocast_types, door
from onnxamp._options.lists import (
    Preset,
    autocast_preset,
    get_white_list,
    literal_preset,
    ops_named,
    preset,
)
from onnxamp._options.options import Options
from onnxamp._options.values import Level, checked_flag, checked_names, checked_word
from onnxamp._report import as_sentence
from onnxamp._runtime.sessions.plugins import compute_capability
from onnxamp._runtime.sessions.session import cuda_available

_LEVELS: Final = ("O0", "O1", "O2", "O3")


@door
def auto_mixed_precision(
    network: Any,
    amp_level: str = "O0",
    dtype: DtypeLike = "float16",
    *,
    lists: str = "mindspore",
) -> Any:
    """Convert a model at a level, by MindSpore's lists and as literally as MindSpore does.

    The counterpart of ``mindspore.amp.auto_mixed_precision``. At O2, every op that is not black-listed becomes low
    precision, regardless of the cost of Casts. The black list contains BatchNormalization and LayerNormalization.
    Exporters often write a LayerNorm as several ops; these stay in float32 as hazards. Nodes that are known to break in
    low precision stay in float32 at all levels, and a warning names those that the level would lower.

    Args:
        network: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        amp_level: what to lower: "O0" nothing, "O1" white-listed ops (Relu, which changes no number, only where that
            saves Casts), "O2" all but black-listed ops, "O3" every op that has a low-precision kernel. For "auto", use
            :func:`onnxamp.convert_model`.
        dtype: the low-precision type, "float16" or "bfloat16"; also as a type of NumPy, ml_dtypes, ONNX or PyTorch.
        lists: the preset of white and black lists: "mindspore", "paddle", "default",
            "conservative" or "fast".

    Returns:
        The converted ModelProto, or a Graph for a Graph.

    Raises:
        ArgumentError: the level, the type or the preset is unknown (a ValueError).
        ArgumentTypeError: an argument has the wrong type, such as a network that is not a model (a TypeError).
        ModelError: the model cannot be read or is invalid.

    Warns:
        HazardWarning: nodes that the level would lower stay in float32.
        OptionWarning: white-listed ops stay in float32, because they have no kernel or schema in the type.

    Example:
        >>> import onnx
        >>> from onnxamp import amp
        >>> network = amp.auto_mixed_precision("models/classifier.onnx", "O2")
        >>> any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in network.graph.initializer)
        True
    """
    level = amp_level_of(amp_level, _LEVELS, "auto_mixed_precision")
    return _converted(network, literal_options(level, dtype, lists))


def literal_options(level: str, dtype: DtypeLike, lists: str = "mindspore") -> Options:
    """Return the options of :func:`auto_mixed_precision`, which training uses as well.

    Raises:
        As :class:`Options`.
    """
    keywords = {"dtype": dtype, "strict": True, "fold": False}
    return Options.of(level, {**keywords, "lists": literal_preset(lists)})


def _converted(network: Any, options: Options) -> Any:
    """Return the converted model, and warn of hazards."""
    converted, result = conversion_and_result(network, options)
    warn(named_hazards(make_plan(converted.analysis).hazards, options), HazardWarning)
    return result


def amp_level_of(level: object, known: Sequence[str], function: str) -> str:
    """Return the level of an AMP function, whose letter may be in either case.

    Raises:
        ArgumentError: the function does not support it.
    """
    name = level.upper() if isinstance(level, str) else ""
    if name not in known:
        raise ArgumentError(
            f"Unknown level {level!r}: {function} takes {', '.join(known)}."
        )
    return name


def named_hazards(hazards: Iterable[HazardRow], options: Options) -> Iterator[str]:
    """Yield a sentence per kind of hazard about the nodes that stay in float32 although the level would lower their
    ops.
    """
    if options.level == Level.O0:
        return
    kept: dict[str, list[HazardRow]] = {}
    named: set[str] = set()
    for row in hazards:
        if options.level == Level.O1:
            is_lowered = row.op in options.preset.white
        else:
            is_lowered = row.op not in options.black or options.level == Level.O3
        if is_lowered and not row.low and row.node not in named:
            kept.setdefault(row.reason, []).append(row)
            named.add(row.node)
    for reason, rows in kept.items():
        names = shortened([f"{row.node!r} ({row.op})" for row in rows], _NAMED)
        yield (
            f"These nodes stay in float32, because {options.dtype} would break the model there: {names}."
            f" {as_sentence(reason_text(reason, rows[0].detail))}"
        )


_NAMED: Final = 8
"""The number of nodes that a warning names; plans name all."""


@door
def custom_mixed_precision(
    network: Any,
    *,
    white_list: Iterable[str] | None = None,
    black_list: Iterable[str] | None = None,
    dtype: DtypeLike = "float16",
) -> Any:
    """Convert a model by one list of op types instead of a preset.

    The counterpart of ``mindspore.amp.custom_mixed_precision``. Lists contain ONNX op types, or their names in
    MindSpore and Paddle ("Conv2d", "Dense", "matmul_v2"). The name of a cell stands for all ops that exporters write
    for it: the Add of its bias, or the ops of a Gelu.

    Args:
        network: a ModelProto, a path, or an onnx-graphsurgeon Graph; it is never changed.
        white_list: these op types run in low precision, all others in float32, apart from exact ones (Reshape, Relu)
            between listed ones. Only kernels, schemas and hazards overrule the list. A list that contains all of
            :func:`get_white_list` does what :func:`auto_mixed_precision` does at "O1", and lowers its other entries.
        black_list: all other op types run in low precision.
        dtype: the low-precision type, "float16" or "bfloat16"; also as a type of NumPy, ml_dtypes, ONNX or PyTorch.

    Returns:
        The converted ModelProto, or a Graph for a Graph.

    Raises:
        ArgumentError: neither list or both lists are given, or a value is unknown (a ValueError).
        ArgumentTypeError: an argument has the wrong type, such as a string for a list (a TypeError).
        ModelError: the model cannot be read or is invalid.

    Warns:
        OptionWarning: a name is unknown, its ops cannot be recognized in the model or must stay in float32, or the
            black list lacks an entry of MindSpore's list.
        HazardWarning: nodes stay in float32 although the black list does not contain their ops.

    Example:
        >>> from onnxamp import amp
        >>> white_list = [*amp.get_white_list(), "Softmax"]
        >>> network = amp.custom_mixed_precision("models/classifier.onnx", white_list=white_list)
        >>> sum(node.op_type == "Cast" for node in network.graph.node) > 0
        True
    """
    if (white_list is None) == (black_list is None):
        given = "neither is" if white_list is None else "both are"
        raise ArgumentError(
            f"Pass exactly one of white_list and black_list; {given} given."
        )
    # O1 lowers what is listed, O2 what is not; strictly, because MindSpore does not weigh the cost of Casts.
    keywords = {"dtype": dtype, "strict": True, "fold": False}
    if white_list is not None:
        names = checked_names("white_list", white_list)
        options = Options.of("O1", keywords | _extended(names))
    else:
        lists = {"black_list": black_list, "lists": _NO_LISTS}
        options = Options.of("O2", keywords | lists)
        # MindSpore's function warns of these as well.
        theirs = preset("mindspore").black
        missing = [op for op in theirs if op not in options.user_black]
        warn(f"{op} is on MindSpore's black list, but not on yours." for op in missing)
    return _converted(network, options)


_NO_LISTS: Final = Preset("none", "", {}, {}, folds_batch_norm=False)


def _extended(names: Sequence[str]) -> dict[str, Any]:
    """Return the lists that a white list stands for: MindSpore's with further entries if it contains all of that."""
    usual = frozenset(get_white_list())
    if not usual.issubset(names):
        return {"white_list": names, "lists": _NO_LISTS}
    own = [name for name in names if name not in usual]
    ops = frozenset(chain.from_iterable(map(ops_named, own)))
    # An entry is no contradiction to MindSpore's black list, which this function does not use.
    lists = literal_preset("mindspore").without_black(ops)
    return {"white_list": own, "lists": lists}


@dataclass(slots=True, eq=False)
class _Cast:
    """A block of code with a precision.

    Attributes:
        options: those of sessions and networks that are created within it; None for float32.
        spelled: how a message names it.
        outer: the block around it.
        is_used: whether anything was created or run within it.
    """

    options: Options | None
    spelled: str
    outer: "_Cast | None"
    is_used: bool = False

    def use(self) -> None:
        """Note that something is created or run within this block and those around it."""
        block: _Cast | None = self
        while block is not None:
            block.is_used = True
            block = block.outer


_ACTIVE: Final[ContextVar[_Cast | None]] = ContextVar(
    "onnxamp auto_cast", default=None
)


@contextmanager
def _casting(options: Options | None, function: str, level: str) -> Iterator[None]:
    """Let sessions and networks that are created within the block have a precision; None means float32.

    Warns:
        OptionWarning: nothing was created or run in a block that asks for low precision.
    """
    spelled = f"{function}({level})"
    if options is not None:
        spelled = f"{function}({level + ', ' if level else ''}dtype={options.dtype!r})"
    block = _Cast(options, spelled, _ACTIVE.get())
    with active_within(_ACTIVE, block):
        yield
    if options is not None and not block.is_used:
        text = (
            f"Nothing was created or run within {spelled}, so it changed nothing. It applies to"
            " onnxamp.InferenceSession and build_train_network in this thread. It does not apply to sessions of"
            " onnxruntime: convert their models with auto_mixed_precision, or create onnxamp.InferenceSession instead."
        )
        warn([text])


@door
@contextmanager
def auto_cast(
    enable: bool = True,
    custom_white_list: Iterable[str] | None = None,
    custom_black_list: Iterable[str] | None = None,
    level: str = "O1",
    dtype: DtypeLike = "float16",
    use_promote: bool = True,
) -> Iterator[None]:
    """Set the precision of sessions and training networks that are created within the context.

    The counterpart of ``paddle.amp.auto_cast``. It applies to :class:`onnxamp.debugging.InferenceSession` (the model is
    converted; without a CUDA device, low precision is emulated) and to :func:`onnxamp.train.build_train_network`, whose
    ``level`` and ``dtype`` must then keep their defaults. Objects created earlier do not change: a warning names those
    that run within the context in another precision. Sessions that you create with ``onnxruntime`` itself are not
    affected, because onnxamp does not change other packages; neither are other threads and asyncio tasks.

    Args:
        enable: False turns an outer context off; in that case, only the level is checked among the other arguments.
        custom_white_list, custom_black_list: ops to add to Paddle's lists, by the names of ONNX, Paddle or MindSpore.
            Products of a value with itself count as squares; "linear" includes the Add of its bias.
        level: "O0" nothing; "OD" white-listed ops (convolutions and matrix products), with everything else in float32;
            "O1" these, unlisted ops that read only low precision, and exact ops (Reshape, Relu) where that saves Casts;
            "O2" all but black-listed ops and BatchNormalization. Case does not matter.
        dtype: the low-precision type, "float16" or "bfloat16"; also as a type of NumPy, ml_dtypes, ONNX or PyTorch.
        use_promote: at O2, whether an unlisted op may stay in float32 next to float32 values, where low
            precision would cost more Casts than it gains. False always lowers it.

    Raises:
        ArgumentError: a value is unknown, or an op is in both lists (a ValueError).
        ArgumentTypeError: an argument has the wrong type, such as a string for a list.

    Warns:
        OptionWarning: a session or network that was created outside runs within the context and keeps another
            precision, or nothing was created or run within the context.

    Example:
        >>> import onnxamp
        >>> feeds = onnxamp.random_samples("models/encoder.onnx")[0]
        >>> exact = onnxamp.InferenceSession("models/encoder.onnx").run(None, feeds)[0]
        >>> with onnxamp.amp.auto_cast(level="O2"):
        ...     rounded = onnxamp.InferenceSession("models/encoder.onnx").run(None, feeds)[0]
        >>> bool(0 < abs(rounded - exact).max() < 0.01)
        True
    """
    name = amp_level_of(level, ("O0", "OD", "O1", "O2"), "auto_cast")
    options = None
    if checked_flag("enable", enable):
        lists = replace(literal_preset("paddle"), follows=name == "O1")
        keywords = {
            "dtype": dtype,
            "white_list": custom_white_list,
            "black_list": custom_black_list,
            "lists": lists,
            "strict": not checked_flag("use_promote", use_promote),
            "fold": False,
        }
        options = Options.of("O1" if name == "OD" else name, keywords)
    if options is not None and name == "OD":
        options = replace(options, rule=_Only(options.white))
    with _casting(None if name == "O0" else options, "auto_cast", f"level={name!r}"):
        yield


@record
class _Only:
    """A rule for O1 that keeps exact ops in float32 unless they are white-listed or follow their consumers."""

    white: frozenset[str]

    def __call__(self, node: NodeProto) -> str | None:
        """Decide for a node."""
        key = op_key(node)
        is_free = key in self.white or key in op_facts().following
        return "high" if is_exact(node) and not is_free else None


@door
@contextmanager
def autocast(
    device_type: str = "cuda",
    dtype: DtypeLike | None = None,
    enabled: bool = True,
    cache_enabled: bool | None = None,  # noqa: ARG001
) -> Iterator[None]:
    """Set the precision of sessions and training networks that are created within the context, by PyTorch's lists.

    The counterpart of ``torch.amp.autocast``. It is :func:`auto_cast` at level "O1" with other lists: products,
    convolutions and recurrent layers are low, powers, exponentials, sums, softmaxes and normalizations of layers and
    groups stay in float32, and other ops are low if they read only low precision.

    Args:
        device_type: the device that the default of ``dtype`` is for. Sessions run where they would run otherwise.
        dtype: the low-precision type, "float16" or "bfloat16"; also as a type of NumPy, ml_dtypes, ONNX or PyTorch.
            None for PyTorch's default: bfloat16 for "cpu", and float16 for others.
        enabled: False turns an outer context off.
        cache_enabled: not needed, because a model is converted once.

    Raises:
        ArgumentError: PyTorch has no autocast for the device, or the type is unknown (a ValueError).
        ArgumentTypeError: an argument has the wrong type.

    Warns:
        OptionWarning: as :func:`auto_cast`.

    Example:
        >>> import onnxamp
        >>> feeds = onnxamp.random_samples("models/encoder.onnx")[0]
        >>> with onnxamp.amp.autocast("cuda", dtype="float16"):
        ...     session = onnxamp.InferenceSession("models/encoder.onnx")
        >>> session.run(None, feeds)[0].dtype
        dtype('float32')
    """
    defaults = autocast_types()
    # A device may have a number: "cuda:1".
    kind = (
        device_type.partition(":")[0] if isinstance(device_type, str) else device_type
    )
    default = defaults[checked_word("device_type", kind, [*defaults])]
    options = None
    if checked_flag("enabled", enabled):
        chosen = default if dtype is None else dtype
        lists = replace(autocast_preset(), follows=True)
        options = Options.of("O1", {"dtype": chosen, "lists": lists, "fold": False})
    with _casting(options, "autocast", ""):
        yield


def active_cast() -> Options | None:
    """Return the options for a session or network that is being created; None outside of :func:`auto_cast`."""
    block = _ACTIVE.get()
    if block is None:
        return None
    block.use()
    return block.options


class CastWatch:
    """Warns, once, if an object runs within a context that asks for another precision than it was created with.

    Args:
        what: what the object that is being created is, for the message.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        block = _ACTIVE.get()
        self._options = None if block is None else block.options
        self._origin = "" if block is None else block.spelled
        self._is_told = False

    def check(self, has_low: Callable[[], bool]) -> None:
        """Note a run of the object; ``has_low`` returns whether it computes in low precision.

        Warns:
            OptionWarning: the context does not apply to the object.
        """
        block = _ACTIVE.get()
        if block is None:
            return
        block.use()
        if self._is_told or block.options == self._options:
            return
        # Whoever chose a precision without a context, such as that of a converted model, is not surprised by it.
        if self._options is None and has_low():
            return
        self._is_told = True
        origin = f"was created outside of {block.spelled}, and stays in float32 there"
        if self._options is not None:
            origin = f"was created within {self._origin}, and keeps its precision within {block.spelled}"
        text = (
            f"This {self._what} {origin}: the context applies to what is created within it. Create the {self._what}"
            " there, or convert its model with auto_mixed_precision."
        )
        warn([text])


@door
def is_float16_supported(device: str | None = None) -> bool:
    """Return whether a device computes in float16. The counterpart of ``paddle.amp.is_float16_supported``.

    This asks the CUDA driver for the compute capability of the device, which must be 5.3 or higher, and ONNX Runtime
    whether it can run there. Its CPU provider computes float16 graphs in float32, so the answer for the CPU is False.

    Args:
        device: "cpu", "cuda" or "gpu" (the first one), "cuda:1" or "gpu:1", or an execution provider of ONNX Runtime;
            None for the device that sessions run on.

    Raises:
        ArgumentError: there is no such kind of device.
        ArgumentTypeError: ``device`` is not a string.

    Example:
        >>> from onnxamp import amp
        >>> amp.is_float16_supported("cpu")
        False
    """
    return _has_capability(device, (5, 3))


@door
def is_bfloat16_supported(device: str | None = None) -> bool:
    """Return whether a device computes in bfloat16. The counterpart of ``paddle.amp.is_bfloat16_supported``.

    This asks the CUDA driver for the compute capability of the device, which must be 8.0 or higher, and ONNX Runtime
    whether it can run there. Its CPU provider has hardly any bfloat16 kernels, so the answer for the CPU is False.

    Args:
        device: as for :func:`is_float16_supported`.

    Raises:
        ArgumentError: there is no such kind of device.
        ArgumentTypeError: ``device`` is not a string.

    Example:
        >>> from onnxamp import amp
        >>> amp.is_bfloat16_supported("cpu")
        False
    """
    return _has_capability(device, (8, 0))


_DEVICE: Final = re.compile(
    r"(?:(cuda|gpu)(?::(\d+))?|CUDAExecutionProvider|(cpu)|(CPUExecutionProvider))"
)


def _has_capability(device: str | None, needed: tuple[int, int]) -> bool:
    if device is not None and not isinstance(device, str):
        raise ArgumentTypeError(
            f"device must be a string such as 'gpu:0', not {type(device).__name__}."
        )
    match = _DEVICE.fullmatch("cuda" if device is None else device)
    if match is None:
        raise ArgumentError(
            f"Unknown device {device!r}: say 'cpu', 'cuda', 'gpu:0', or an execution provider."
        )
    is_cpu = match[3] or match[4]
    if is_cpu or not cuda_available():
        return False
    return compute_capability(int(match[2] or 0)) >= needed
