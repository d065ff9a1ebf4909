"""All warnings that onnxamp issues when it deviates from a request.

OnnxAmpWarning (UserWarning) is the root of OptionWarning (an option matches nothing, cannot be followed, or breaks
something) and of HazardWarning (a level would lower nodes that are known to break; they stay float32).
"""

import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from onnxamp._errors import printable


class OnnxAmpWarning(UserWarning):
    """Base class of all warnings about conversions.

    Example:
        >>> import onnxamp, warnings
        >>> with warnings.catch_warnings(action="ignore", category=onnxamp.OnnxAmpWarning):
        ...     model16 = onnxamp.convert_model("models/encoder.onnx", white_list=["Sofmax"])
    """


class OptionWarning(OnnxAmpWarning):
    """An option matches nothing in the model, cannot be followed, or breaks something. ``plan.warnings`` holds the
    same sentences.

    Example:
        >>> import onnxamp, warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     model16 = onnxamp.convert_model("models/encoder.onnx", white_list=["Sofmax"])
        >>> print(caught[0].message)
        The op type 'Sofmax' in your lists does not occur in the model. Did you mean 'Softmax'?
    """


class HazardWarning(OnnxAmpWarning):
    """Nodes that a level of ``mindspore.amp`` would lower stay float32, because low precision is known to break them.

    Example:
        >>> import onnxamp, warnings
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     model16 = onnxamp.amp.auto_mixed_precision("models/encoder.onnx", "O2")
        >>> {item.category for item in caught} <= {onnxamp.HazardWarning}
        True
    """


for _category in (OnnxAmpWarning, OptionWarning, HazardWarning):
    _category.__module__ = "onnxamp"  # where users import them from

_PACKAGE: Final = str(Path(__file__).parent)


def warn(
    messages: Iterable[str], category: type[OnnxAmpWarning] = OptionWarning
) -> None:
    """Issue warnings that point at the line that called onnxamp."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(
        (_PACKAGE, _CONTEXTS)
    ):
        level, frame = level + 1, frame.f_back
    for message in messages:
        warnings.warn(printable(message), category, stacklevel=level)


_CONTEXTS: Final = str(Path(sys.modules["contextlib"].__file__ or "contextlib"))
"""The module that runs generator-based contexts, which is not the user's code."""
