"""``onnxconverter_common.auto_mixed_precision_model_path`` under its own name."""

from onnxamp.compat.onnxconverter_common import auto_convert_mixed_precision_model_path

__all__ = ["auto_convert_mixed_precision_model_path"]
