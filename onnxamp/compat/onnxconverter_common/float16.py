"""``onnxconverter_common.float16`` under its own name."""

from onnxamp.compat.onnxconverter_common import (
    DEFAULT_OP_BLOCK_LIST,
    convert_float_to_float16,
    convert_float_to_float16_model_path,
    convert_np_to_float16,
    convert_tensor_float_to_float16,
)

__all__ = [
    "DEFAULT_OP_BLOCK_LIST",
    "convert_float_to_float16",
    "convert_float_to_float16_model_path",
    "convert_np_to_float16",
    "convert_tensor_float_to_float16",
]
