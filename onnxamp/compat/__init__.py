"""The functions of other converters, with their names and arguments, so that changing an import tries onnxamp.

==================================  ================================================================================
``onnxconverter_common``            ``onnxconverter_common.float16`` and its ``auto_mixed_precision``
``onnxruntime_transformers``        ``onnxruntime.transformers.float16``
``autocast``                        ``modelopt.onnx.autocast``
==================================  ================================================================================

Each lowers what the other tool would, but for nodes that low precision is known to break, or that the target has no
low-precision kernel for: these stay float32, and a ``HazardWarning`` names the former. Models are never changed.
"""

from onnxamp.compat import autocast, onnxconverter_common, onnxruntime_transformers

__all__ = ["autocast", "onnxconverter_common", "onnxruntime_transformers"]
