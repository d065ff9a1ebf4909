"""Training of ONNX models: a step is one ordinary ONNX graph, which ONNX Runtime runs."""
