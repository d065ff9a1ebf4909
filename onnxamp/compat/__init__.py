"""The functions of other converters, with their names and arguments, so that changing an import tries onnxamp.

==================================  ================================================================================
``onnxconverter_common``            ``onnxconverter_common.float16`` and its ``auto_mixed_precision``
``onnxruntime_transformers``        ``onnxruntime.transformers.float16``
``autocast``                        ``modelopt.onnx.autocast``
==================================  ================================================================================

Each function lowers the same nodes as the other tool, except nodes that low precision is known to break and nodes for
which the target has no low-precision kernel. These stay in float32, and a ``HazardWarning`` names the former. Models
are never changed.
"""

from onnxamp.compat import autocast, onnxconverter_common, onnxruntime_transformers

__all__ = ["autocast", "onnxconverter_common", "onnxruntime_transformers"]
