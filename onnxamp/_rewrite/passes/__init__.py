"""The passes that prepare a model before anything is decided. :mod:`onnxamp._rewrite.prepare` has their order."""
