"""What onnxamp found, for people and for programs."""
