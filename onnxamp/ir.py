"""A pass for the pipelines of onnx-ir (``pip install "onnxamp[ir]"``).

Example:
    >>> import onnx_ir
    >>> from onnxamp.ir import MixedPrecisionPass
    >>> model = onnx_ir.load("models/encoder.onnx")
    >>> result = MixedPrecisionPass("O2", dtype="float16")(model)
    >>> result.modified
    True
"""

from typing import Unpack

from onnx import ModelProto

from onnxamp._base.optional import require
from onnxamp._job.api import convert_model
from onnxamp._options.options import OptionKeywords
from onnxamp._options.values import LevelName

require("onnx_ir", "onnxamp.ir needs onnx-ir", "ir")
import onnx_ir as ir  # noqa: E402 - missing packages are reported by name

__all__ = ["MixedPrecisionPass"]


class MixedPrecisionPass(ir.passes.FunctionalPass):
    """Convert a model to mixed precision, as :func:`onnxamp.convert_model` does.

    The pass returns a new model and does not change the given one.

    Args:
        level: as for :func:`onnxamp.convert_model`.
        options: the keyword arguments of :func:`onnxamp.convert_model`.

    Raises:
        As :func:`onnxamp.convert_model`, when the pass runs.
    """

    def __init__(
        self, level: LevelName = "O2", **options: Unpack[OptionKeywords]
    ) -> None:
        super().__init__()
        self.level = level
        self.options = options

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Return the converted model, and whether it differs from the given one."""
        proto = _with_weights(model)
        converted = convert_model(proto, self.level, **self.options)
        return ir.passes.PassResult(ir.from_proto(converted), converted != proto)


def _with_weights(model: ir.Model) -> ModelProto:
    """Return the model as a proto, with its weights loaded from files."""
    proto = ir.to_proto(model)
    for tensor in proto.graph.initializer:
        value = model.graph.initializers[tensor.name].const_value
        if isinstance(value, ir.ExternalTensor):
            tensor.CopyFrom(ir.to_proto(ir.Tensor(value.numpy(), name=tensor.name)))
    return proto
