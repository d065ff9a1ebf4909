"""``auto_cast`` as in Paddle: a precision for all sessions and training networks that are made within a context.

What is on is kept in a context variable: other threads, and other tasks of asyncio, have their own.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final

from onnxamp._errors import ArgumentError
from onnxamp._options.options import Level, Options


@dataclass(frozen=True, slots=True)
class CastPolicy:
    """What :func:`auto_cast` was told."""

    level: str
    dtype: str
    white_list: tuple[str, ...]
    black_list: tuple[str, ...]

    def wishes(self) -> dict[str, Any]:
        """Arguments of convert_model."""
        return {
            "level": self.level, "dtype": self.dtype, "white_list": self.white_list, "black_list": self.black_list,
            "lists": "paddle",
        }  # fmt: skip


_ACTIVE: Final[ContextVar[CastPolicy | None]] = ContextVar("onnxamp auto cast", default=None)


@contextmanager
def auto_cast(
    enable: bool = True,
    custom_white_list: Iterable[str] | None = None,
    custom_black_list: Iterable[str] | None = None,
    level: str = "O1",
    dtype: str = "float16",
    use_promote: bool = True,
) -> Iterator[None]:
    """Give what is made within the context a precision, as ``paddle.amp.auto_cast``.

    It holds for :class:`onnxamp.debugging.InferenceSession` (the model is converted; without a CUDA device, low
    precision is emulated) and for :func:`onnxamp.train.build_train_network`, whose ``level`` and ``dtype`` are then
    left at their defaults. What was made before stays as it is.

    Args:
        enable: False switches an outer context off.
        custom_white_list, custom_black_list: op types, added to Paddle's lists.
        level: "O0", "O1" or "O2".
        dtype: "float16" or "bfloat16".
        use_promote: must be True: where Paddle promotes the inputs of an op that meet in two types, here each value has
            its precision by the cut, and no op meets two.

    Raises:
        ArgumentError: a value is not known, or an op is in both lists.
    """
    if level not in ("O0", "O1", "O2"):
        raise ArgumentError(f"Unknown level {level!r}: auto_cast knows O0, O1 and O2.")
    if not use_promote:
        raise ArgumentError("use_promote=False has no meaning here: the cut leaves no op whose inputs differ in type.")
    white, black = tuple(custom_white_list or ()), tuple(custom_black_list or ())
    policy = CastPolicy(level, dtype, white, black)
    wishes = policy.wishes()
    Options.of(wishes.pop("level"), wishes)
    token = _ACTIVE.set(policy if enable and level != Level.O0 else None)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def active_cast() -> CastPolicy | None:
    """What :func:`auto_cast` says here; None outside of it."""
    return _ACTIVE.get()
