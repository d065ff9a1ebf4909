"""Gradients of ONNX models as ONNX, which measure how much each rounding changes the outputs.

Reverse mode over a graph, with one rule per op type.
The rules write only ops for which ONNX Runtime has kernels on CPU and CUDA.
"""
