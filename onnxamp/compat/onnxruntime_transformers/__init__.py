"""The functions of ``onnxruntime.transformers.float16``.

The names, order and defaults of arguments are those of ONNX Runtime 1.31. To try onnxamp, change the import::

    from onnxamp.compat.onnxruntime_transformers.float16 import convert_float_to_float16
"""

from collections.abc import Iterable, Mapping
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray
from onnx import ModelProto, TensorProto

from onnxamp._base.errors import ArgumentError
from onnxamp._base.public import export
from onnxamp._facts.tables import read_table
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources
from onnxamp.compat._convert import (
    Range,
    convert_all_but,
    largest_change,
    tensor_to_float16,
    to_float16,
)

__all__ = [
    "DEFAULT_OP_BLOCK_LIST",
    "convert_float_to_float16",
    "convert_np_to_float16",
    "convert_tensor_float_to_float16",
    "float_to_float16_max_diff",
]

DEFAULT_OP_BLOCK_LIST: list[str] = read_table("blocked")["onnxruntime"]["ops"]
"""Op types that stay in float32 if no ``op_block_list`` is given, as in ONNX Runtime 1.31."""

_LEAST: Final = 5.96e-08
_MOST: Final = 65504.0
"""ONNX Runtime's limits: the smallest and the largest positive number of float16."""


@unchanged_sources()
def convert_float_to_float16(
    model: ModelSource,
    min_positive_val: float = 5.96e-08,
    max_finite_val: float = 65504.0,
    keep_io_types: bool | Iterable[str] = False,
    disable_shape_infer: bool = False,
    op_block_list: Iterable[str] | None = None,
    node_block_list: Iterable[str] | None = None,
    force_fp16_initializers: bool = False,
    force_fp16_inputs: Mapping[str, Iterable[int]] | None = None,
    use_bfloat16_as_blocked_nodes_dtype: bool = False,
) -> ModelProto:
    """Convert a model to float16, except blocked ops and nodes, and nodes that float16 is known to break.

    Args:
        model: a ModelProto or a path; it is never changed.
        min_positive_val, max_finite_val: the range of magnitudes that weights are limited to if they become float16,
            except 0, infinities and NaN.
        keep_io_types: whether graph inputs and outputs stay in float32, or the names of those that do.
        disable_shape_infer: has no effect, because types follow from schemas, and shapes are not needed.
        op_block_list: op types to keep in float32, in any domain; None for :data:`DEFAULT_OP_BLOCK_LIST`.
        node_block_list: names of nodes to keep in float32.
        force_fp16_initializers: store all weights in float16; nodes in float32 get them through Casts.
        force_fp16_inputs: must be empty: schemas determine which inputs can be float16.
        use_bfloat16_as_blocked_nodes_dtype: must be False: a model has one low-precision type here.

    Returns:
        The converted ModelProto, with all weights inside.

    Raises:
        ArgumentError: a value is impossible or not supported. Others as :func:`onnxamp.convert_model`.

    Warns:
        HazardWarning: nodes stay in float32 although nothing blocks them.
        OptionWarning: a name matches nothing in the model.

    Example:
        >>> import onnx
        >>> from onnxamp.compat.onnxruntime_transformers import convert_float_to_float16
        >>> model16 = convert_float_to_float16("models/classifier.onnx", keep_io_types=["logits"])
        >>> model16.graph.input[0].type.tensor_type.elem_type, model16.graph.output[0].type.tensor_type.elem_type
        (10, 1)
    """
    del disable_shape_infer
    if min_positive_val < _LEAST or max_finite_val > _MOST:
        raise ArgumentError(
            f"min_positive_val must be at least {_LEAST}, and max_finite_val at most {_MOST}."
        )
    if force_fp16_inputs:
        raise ArgumentError(
            "force_fp16_inputs is not supported: which inputs can be float16 follows from schemas."
        )
    if use_bfloat16_as_blocked_nodes_dtype:
        raise ArgumentError(
            "use_bfloat16_as_blocked_nodes_dtype is not supported: blocked nodes stay in float32. For bfloat16 throughout,"
            " call onnxamp.convert_model(model, dtype='bfloat16')."
        )
    blocked = DEFAULT_OP_BLOCK_LIST if op_block_list is None else op_block_list
    return convert_all_but(
        Model.of(model),
        blocked,
        known=DEFAULT_OP_BLOCK_LIST,
        within=Range(min_positive_val, max_finite_val),
        keep_io_types=keep_io_types,
        keep_nodes=node_block_list,
        low_weights=".*" if force_fp16_initializers else (),
    )


def convert_np_to_float16(
    np_array: ArrayLike,
    min_positive_val: float = 5.96e-08,
    max_finite_val: float = 65504.0,
) -> NDArray[np.float16]:
    """Return numbers in float16, limited to a range; 0, infinities and NaN stay the same.

    Args:
        np_array: floats of any shape.
        min_positive_val, max_finite_val: the smallest and the largest magnitude.

    Returns:
        A float16 array of the same shape.

    Raises:
        ArgumentError: the range is empty.

    Example:
        >>> from onnxamp.compat.onnxruntime_transformers import convert_np_to_float16
        >>> convert_np_to_float16([1e6, -0.5]).tolist()
        [65504.0, -0.5]
    """
    return to_float16(np_array, Range(min_positive_val, max_finite_val))


def convert_tensor_float_to_float16(
    tensor: TensorProto,
    min_positive_val: float = 5.96e-08,
    max_finite_val: float = 65504.0,
) -> TensorProto:
    """Convert a float32 tensor to float16 in place, limited to a range; other tensors do not change.

    Args:
        tensor: the tensor, which changes.
        min_positive_val, max_finite_val: as for :func:`convert_np_to_float16`.

    Returns:
        The same tensor.

    Raises:
        ArgumentTypeError: ``tensor`` is not a tensor. ArgumentError: the range is empty, or the data is in another
            file.

    Example:
        >>> import numpy as np
        >>> from onnx import numpy_helper
        >>> from onnxamp.compat.onnxruntime_transformers import convert_tensor_float_to_float16
        >>> tensor = numpy_helper.from_array(np.ones(2, np.float32))
        >>> numpy_helper.to_array(convert_tensor_float_to_float16(tensor)).dtype
        dtype('float16')
    """
    return tensor_to_float16(tensor, Range(min_positive_val, max_finite_val))


def float_to_float16_max_diff(
    tensor: TensorProto,
    min_positive_val: float = 5.96e-08,
    max_finite_val: float = 65504.0,
) -> float:
    """Return the largest absolute difference that float16 makes to an element of a float32 tensor.

    Args:
        tensor: the tensor; it does not change.
        min_positive_val, max_finite_val: as for :func:`convert_np_to_float16`.

    Raises:
        ArgumentTypeError: ``tensor`` is not a tensor. ArgumentError: it is not float32, its data is in another file, or
            the range is empty.

    Example:
        >>> import numpy as np
        >>> from onnx import numpy_helper
        >>> from onnxamp.compat.onnxruntime_transformers import float_to_float16_max_diff
        >>> float_to_float16_max_diff(numpy_helper.from_array(np.float32([1, 2049])))
        1.0
    """
    return largest_change(tensor, Range(min_positive_val, max_finite_val))


export(__name__, __all__)
