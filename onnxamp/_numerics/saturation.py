"""The effect of saturating int8 products of ONNX Runtime's CPU provider on the outputs of a model.

x86 CPUs without VNNI multiply uint8 by int8 numbers with VPMADDUBSW, which adds two products in int16 and saturates:
255 * 127 twice is 64,770, but the largest int16 is 32,767. ONNX Runtime's kernels accept that for speed. With the
session option ``session.x64quantprecision``, ONNX Runtime stores int8 weights as uint8 on such CPUs, and its products
are exact.

Nothing here lists CPUs or ops. ONNX Runtime computes one such product to show whether it saturates, and the outputs of
a model with and without the option show what that costs.
"""

from functools import cache
from typing import Final, NamedTuple

import numpy as np
from onnx import ModelProto, TensorProto, helper

from onnxamp._base.errors import OnnxAmpError
from onnxamp._model.protos import small_model, tensors_of
from onnxamp._numerics.differences.compare import worst_rel_l2
from onnxamp._runtime.engines import Engine, Outputs
from onnxamp._runtime.sessions.session import make_session
from onnxamp._runtime.sessions.starting import ModelFile
from onnxamp._runtime.sessions.values import Feeds

_NOTICED: Final = 1e-3
"""Relative L2 error below which a sum in another order, rather than saturation, may explain a difference."""

_TERMS: Final = 64
"""Terms of the product that shows saturation; kernels take at most 64 at a time."""


class Saturation(NamedTuple):
    """The effect of saturation on the outputs of a model.

    Attributes:
        error: the largest relative L2 error of the outputs of a default session.
        compared: the same error of the outputs in a report; None if the report compares none.
    """

    error: float
    compared: float | None

    def note(self, name: str) -> str:
        """Return a note for a report about a model."""
        note = (
            "On this CPU, which lacks VNNI, int8 products saturate in ONNX Runtime's default sessions: outputs of"
            f" {name} are off by {100 * self.error:.2g} %."
        )
        if self.compared is not None:
            is_included = self.compared > self.error / 2
            note += f" The errors above {'contain' if is_included else 'do not contain'} that."
        return f"{note} Set the session option session.x64quantprecision to '1', or quantize with reduce_range=True."


def may_saturate(engine: Engine, model: ModelProto) -> bool:
    """Return whether int8 products of a model may saturate on an engine."""
    return engine.provider == "cpu" and _has_int8(model) and _products_saturate()


def _has_int8(model: ModelProto) -> bool:
    return any(tensor.data_type == TensorProto.INT8 for tensor in tensors_of(model))


@cache
def _products_saturate() -> bool:
    """Return whether ONNX Runtime's CPU provider saturates a product of uint8 and int8 numbers on this machine."""
    weight = np.full((_TERMS, 16), np.iinfo(np.int8).max, np.int8)
    numbers = np.full((1, _TERMS), np.iinfo(np.uint8).max, np.uint8)
    node = helper.make_node("MatMulInteger", ["x", "w"], ["y"])
    model = small_model(
        [node],
        [
            helper.make_tensor_value_info("x", TensorProto.UINT8, numbers.shape),
            helper.make_tensor_value_info("w", TensorProto.INT8, weight.shape),
        ],
        [helper.make_tensor_value_info("y", TensorProto.INT32, [1, 16])],
    )
    (product,) = make_session(model).run(None, {"x": numbers, "w": weight})
    exact = numbers.astype(np.int32) @ weight.astype(np.int32)
    return not np.array_equal(product, exact)


def saturation_of(
    engine: Engine,
    source: ModelFile,
    feeds: Feeds,
    compared: Outputs | None = None,
) -> Saturation | None:
    """Measure the effect of saturation on the outputs of a model in a default session.

    Args:
        engine: where the model runs.
        source: the model, for which :func:`may_saturate`.
        feeds: its inputs.
        compared: its outputs for these inputs as a report compares them, if it does.

    Returns:
        None if nothing saturates, or the model does not run in such a session.
    """
    try:
        exact = engine.run(make_session(source, exact_integers=True), feeds)
        usual = engine.run(make_session(source), feeds)
    except OnnxAmpError:
        return None
    error = worst_rel_l2(exact, usual)
    if not error > _NOTICED:
        return None
    shown = None if compared is None else worst_rel_l2(exact, compared)
    return Saturation(error, shown)
