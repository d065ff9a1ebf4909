"""ONNX models as protos and files. Everything that reads, checks or writes a model goes through this room.

From the bottom up:

* :mod:`~onnxamp._model.protos` walks and copies a bare ModelProto, and takes large weights out of a serialized one and
  puts them in. :mod:`~onnxamp._model.sources` finds the data of tensors, and notices when files change that were read.
  :mod:`~onnxamp._model.weights` reads weights and converts them to low precision;
  :mod:`~onnxamp._model.constant_stats` measures them.
* :mod:`~onnxamp._model.wellformed` refuses models that contradict the form of ONNX models (their tensors in
  :mod:`~onnxamp._model.wellformed_tensors`, their functions in :mod:`~onnxamp._model.wellformed_functions`);
  :mod:`~onnxamp._model.repair` repairs some. :mod:`~onnxamp._model.staging` makes files appear whole or not at all.
* :mod:`~onnxamp._model.model` reads model files with these, names files that are no models, and holds a model that was
  read and checked once, with the answers that analyses gave about it.
* :mod:`~onnxamp._model.blobs` converts weights, at once or while they stream to files.
  :mod:`~onnxamp._model.data_files` shares that among workers, and knows whose data files are whose.
  :mod:`~onnxamp._model.saving` writes models with both.

The room knows op schemas (:mod:`onnxamp._facts.tables`), but no graph analysis: :mod:`onnxamp._graph` builds on it.
"""
