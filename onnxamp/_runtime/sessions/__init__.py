"""Sessions of ONNX Runtime: devices, values, and how sessions start."""
