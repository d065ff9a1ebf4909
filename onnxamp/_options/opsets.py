"""What the option for the opset takes."""

from typing import Literal, get_args

import onnx
from onnx.defs import onnx_opset_version

from onnxamp._errors import ArgumentError, ArgumentTypeError

OpsetWord = Literal["auto", "keep"]


def check_opset(opset: object) -> int | OpsetWord:
    """``opset`` if it is one of the two words or may be a number of an opset.

    Raises:
        ArgumentError: it is another word, or there is no such opset.
        ArgumentTypeError: it is neither a string nor an integer.
    """
    if isinstance(opset, bool) or not isinstance(opset, (int, str)):
        raise ArgumentTypeError(f"opset must be 'auto', 'keep' or an integer, not {type(opset).__name__}.")
    if isinstance(opset, str) and opset not in get_args(OpsetWord):
        raise ArgumentError(f"opset must be 'auto', 'keep' or a number, not {opset!r}.")
    newest = onnx_opset_version()
    if isinstance(opset, int) and opset < 1:
        raise ArgumentError(f"There is no opset {opset}: opsets start at 1.")
    if isinstance(opset, int) and opset > newest:
        raise ArgumentError(f"The installed onnx {onnx.__version__} knows opsets up to {newest}: {opset} is too new.")
    return opset  # type: ignore[return-value] # a string is one of the words
