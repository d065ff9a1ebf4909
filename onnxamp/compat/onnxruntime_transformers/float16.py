"""``onnxruntime.transformers.float16`` under its own name."""

from onnxamp.compat.onnxruntime_transformers import (
    DEFAULT_OP_BLOCK_LIST,
    convert_float_to_float16,
    convert_np_to_float16,
    convert_tensor_float_to_float16,
    float_to_float16_max_diff,
)

__all__ = [
    "DEFAULT_OP_BLOCK_LIST",
    "convert_float_to_float16",
    "convert_np_to_float16",
    "convert_tensor_float_to_float16",
    "float_to_float16_max_diff",
]
