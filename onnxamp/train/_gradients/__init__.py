"""Gradients of ONNX models, written as ONNX: reverse mode over a graph, one rule for each op type.

:func:`add_gradients` is the door. The rules (:mod:`onnxamp.train._gradients.table`) write only ops that ONNX Runtime
has kernels for on CPU and on CUDA.
"""

from onnxamp.train._gradients.walk import Gradients, add_gradients

__all__ = ["Gradients", "add_gradients"]
