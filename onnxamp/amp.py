"""The two entry points of mindspore.amp, for ONNX models."""

from collections.abc import Iterable
from typing import Any

from onnxamp._api import convert_as
from onnxamp._errors import ArgumentError
from onnxamp._options.lists import Preset
from onnxamp._options.options import Options

__all__ = ["auto_mixed_precision", "custom_mixed_precision"]


def auto_mixed_precision(model: Any, amp_level: str = "O0", dtype: str = "float16") -> Any:
    """Convert a model at a level with all other settings at their defaults, as ``mindspore.amp.auto_mixed_precision``.

    Args, returns and errors as :func:`onnxamp.convert_model`.
    """
    return convert_as(model, Options.of(amp_level, {"dtype": dtype}))


def custom_mixed_precision(
    model: Any,
    *,
    white_list: Iterable[str] | None = None,
    black_list: Iterable[str] | None = None,
    dtype: str = "float16",
) -> Any:
    """Convert by one list alone, which replaces the presets, as ``mindspore.amp.custom_mixed_precision``.

    Args:
        white_list: only these op types become low (level O1 with this list).
        black_list: all op types but these become low (level O2, strictly).

    Raises:
        ArgumentError: none or both of the lists are given. Others as :func:`onnxamp.convert_model`.
    """
    if (white_list is None) == (black_list is None):
        given = "neither is" if white_list is None else "both are"
        raise ArgumentError(f"Pass exactly one of white_list and black_list; {given} given.")
    level, strict = ("O1", False) if white_list is not None else ("O2", True)
    nothing = Preset("none", "", {}, {}, folds_batch_norm=False)
    lists = {"white_list": white_list, "black_list": black_list, "lists": nothing}
    return convert_as(model, Options.of(level, {"dtype": dtype, "strict": strict, **lists}))
