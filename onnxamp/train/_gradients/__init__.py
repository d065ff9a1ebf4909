"""Gradients of ONNX models as ONNX: reverse mode over a graph, with one rule per op type.

The rules write only ops for which ONNX Runtime has kernels on CPU and CUDA.
"""

from onnxamp.train._gradients.walk import Gradients, add_gradients, differentiate

__all__ = ["Gradients", "add_gradients", "differentiate"]
