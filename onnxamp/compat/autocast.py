"""The functions of ``modelopt.onnx.autocast``.

The names, order and defaults of arguments are those of ModelOpt 0.47. To try onnxamp, change the import::

    from onnxamp.compat.autocast import convert_to_mixed_precision
"""

import re
from collections.abc import Iterable, Mapping
from math import isinf
from os import PathLike
from typing import Final, Literal, Protocol

import numpy as np
from onnx import ModelProto, NodeProto

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, warn
from onnxamp._base.paths import as_path
from onnxamp._base.public import export
from onnxamp._facts.dtypes import low_type
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.protos import opset_imports
from onnxamp._model.sources import unchanged_sources
from onnxamp._options.values import checked_names, compiled
from onnxamp._runtime.inputs.samples import load_samples
from onnxamp._runtime.sessions.session import Provider
from onnxamp.compat._convert import convert_all_but

__all__ = [
    "DEFAULT_DATA_MAX",
    "DEFAULT_INIT_MAX",
    "convert_to_f16",
    "convert_to_mixed_precision",
]

DEFAULT_DATA_MAX: Final = 512
"""The default limit of the magnitude of values that low-precision nodes read or write."""

DEFAULT_INIT_MAX: Final = float(np.finfo(np.float16).max)
"""The default limit of the magnitude of constants that low-precision nodes read: 65504."""


class NodeRule(Protocol):
    """A rule of ModelOpt's ``NodeRuleBase``, or any object with such a method."""

    def check(self, node: NodeProto) -> bool:
        """Return whether the node stays in float32."""


@unchanged_sources()
def convert_to_mixed_precision(
    onnx_path: str | PathLike[str],
    low_precision_type: str = "fp16",
    nodes_to_exclude: Iterable[str] | None = None,
    op_types_to_exclude: Iterable[str] | None = None,
    nodes_to_include: Iterable[str] | None = None,
    op_types_to_include: Iterable[str] | None = None,
    data_max: float | None = DEFAULT_DATA_MAX,
    init_max: float | None = DEFAULT_INIT_MAX,
    keep_io_types: bool | Iterable[str] = False,
    calibration_data: str | PathLike[str] | None = None,
    custom_rule: NodeRule | None = None,
    init_conversion_max_bytes: int | None = None,
    providers: Iterable[str] = ("cpu",),
    trt_plugins: Iterable[str] | None = (),
    trt_plugins_precision: Iterable[str] | None = (),
    max_depth_of_reduction: int | None = None,
    opset: int | None = None,
    use_standalone_type_inference: bool = False,
) -> ModelProto:
    """Convert a model to low precision, except nodes that are excluded, have large values, or are known to break.

    Args:
        onnx_path: the model file.
        low_precision_type: "fp16" or "bf16".
        nodes_to_exclude: regular expressions: nodes whose name starts with a match stay in float32.
        op_types_to_exclude: op types to keep in float32, in any domain.
        nodes_to_include: regular expressions: nodes whose name starts with a match are lowered regardless, unless the
            target has no kernel for that.
        op_types_to_include: op types to lower regardless.
        data_max: nodes that read or write a float beyond this magnitude stay in float32; None or infinity for no limit.
        init_max: nodes that read a constant with an element beyond this magnitude stay in float32; None for no limit.
        keep_io_types: whether graph inputs and outputs stay in float32, or the names of those that do.
        calibration_data: the inputs for ``data_max``: an npz file, a folder of npz files, or Polygraphy's JSON. None
            for random ones.
        custom_rule: an object whose ``check(node)`` is True for nodes that stay in float32.
        init_conversion_max_bytes: must be None: weights are converted in the file, regardless of their size.
        providers: where the model runs: on CUDA for "cuda:0" or "cuda", otherwise on the CPU. TensorRT is not run.
        trt_plugins: must be empty: TensorRT plugins are not loaded; declare their ops with :func:`onnxamp.custom_ops`.
        trt_plugins_precision: must be empty, for the same reason.
        max_depth_of_reduction: must be None: onnxamp judges reductions by the values that they sum (hazard "large
            reduction").
        opset: upgrade the model to this opset first; None for its own, or 13 if that is older.
        use_standalone_type_inference: has no effect, because types always follow from schemas.

    Returns:
        The converted ModelProto, with all weights inside.

    Raises:
        ArgumentError: a value is impossible or not supported.
        RuntimeFailure: ``data_max`` is set, and the model does not run. Others as :func:`onnxamp.convert_model`.

    Warns:
        HazardWarning: nodes stay in float32 although nothing excludes them.
        OptionWarning: a name matches nothing in the model, or a provider or opset cannot be used.

    Example:
        >>> from onnxamp.compat.autocast import convert_to_mixed_precision
        >>> model16 = convert_to_mixed_precision("models/classifier.onnx", op_types_to_exclude=["Gemm"])
        >>> model16.graph.input[0].type.tensor_type.elem_type
        10
    """
    del use_standalone_type_inference
    _refuse_plugins(trt_plugins, trt_plugins_precision)
    if init_conversion_max_bytes is not None:
        raise ArgumentError(
            "init_conversion_max_bytes is not supported: weights of any size are converted in the file."
        )
    if max_depth_of_reduction is not None:
        raise ArgumentError(
            "max_depth_of_reduction is not supported: keep reductions by op type (op_types_to_exclude) or by name."
        )
    model = Model.of(as_path(onnx_path))
    include = _patterns(nodes_to_include)
    exclude = _patterns(nodes_to_exclude)
    low_types = frozenset(checked_names("op_types_to_include", op_types_to_include))

    def rule(node: NodeProto) -> str | None:
        # ModelOpt matches at the start of a name only, and inclusion wins.
        if node.op_type in low_types:
            return "low"
        if any(pattern.match(node.name) for pattern in include):
            return "low"
        if any(pattern.match(node.name) for pattern in exclude):
            return "high"
        is_kept = custom_rule is not None and custom_rule.check(node)
        return "high" if is_kept else None

    return convert_all_but(
        model,
        op_types_to_exclude or (),
        dtype=_dtype(low_precision_type),
        keep_io_types=keep_io_types,
        samples=None if calibration_data is None else load_samples(calibration_data),
        provider=_provider(providers),
        data_max=None if data_max is None or isinf(data_max) else data_max,
        init_max=None if init_max is None or isinf(init_max) else init_max,
        opset=_opset(model, opset),
        rule=rule,
    )


@unchanged_sources()
def convert_to_f16(
    model: ModelSource,
    low_precision_type: str = "fp16",
    keep_io_types: bool | Iterable[str] = True,
    op_block_list: Iterable[str] = (),
    tensor_block_dict: Mapping[str, object] | None = None,
    trt_plugins: Iterable[str] | None = (),
    use_standalone_type_inference: bool = False,
    opset: int | None = None,
) -> ModelProto:
    """Convert a model to low precision, except listed op types and nodes that are known to break. Nothing runs.

    Args:
        model: a ModelProto or a path; it is never changed.
        low_precision_type: "fp16" or "bf16".
        keep_io_types: whether graph inputs and outputs stay in float32, or the names of those that do.
        op_block_list: op types to keep in float32, in any domain.
        tensor_block_dict: must be empty: schemas determine which inputs can be low.
        trt_plugins: must be empty: TensorRT plugins are not loaded.
        use_standalone_type_inference: has no effect, because types always follow from schemas.
        opset: upgrade the model to this opset first; None for its own, or 13 if that is older.

    Returns:
        The converted ModelProto, with all weights inside.

    Raises:
        ArgumentError: a value is impossible or not supported. Others as :func:`onnxamp.convert_model`.

    Warns:
        HazardWarning: nodes stay in float32 although nothing blocks them.
        OptionWarning: a name matches nothing in the model, or the opset cannot be used.

    Example:
        >>> from onnxamp.compat.autocast import convert_to_f16
        >>> model16 = convert_to_f16("models/classifier.onnx", op_block_list=["Gemm"])
        >>> model16.graph.input[0].type.tensor_type.elem_type
        1
    """
    del use_standalone_type_inference
    _refuse_plugins(trt_plugins)
    if tensor_block_dict:
        raise ArgumentError(
            "tensor_block_dict is not supported: which inputs can be low follows from schemas."
        )
    opened = Model.of(model)
    return convert_all_but(
        opened,
        op_block_list,
        dtype=_dtype(low_precision_type),
        keep_io_types=keep_io_types,
        opset=_opset(opened, opset),
    )


def _dtype(name: str) -> str:
    """Return the low-precision type that ModelOpt calls "fp16" or "bf16".

    Raises:
        ArgumentError: the name is neither.
    """
    if name not in ("fp16", "bf16"):
        raise ArgumentError(
            f"low_precision_type must be 'fp16' or 'bf16', not {name!r}."
        )
    return low_type(name).name


def _patterns(patterns: Iterable[str] | None) -> tuple[re.Pattern[str], ...]:
    if isinstance(patterns, str):
        raise ArgumentTypeError("Patterns of names must be a list, not a string.")
    return compiled("a pattern of node names", patterns or ())


def _provider(providers: Iterable[str]) -> Provider:
    """Return the provider that runs the model, and warn of providers that are not used."""
    given = [providers] if isinstance(providers, str) else providers
    named = [name.partition(":")[0] for name in given]
    warn(
        f"The provider {name!r} is not used."
        for name in named
        if name not in ("cpu", "cuda")
    )
    return "cuda" if "cuda" in named else "cpu"


def _refuse_plugins(*given: Iterable[str] | None) -> None:
    if any(given):
        raise ArgumentError(
            "Plugins of TensorRT are not loaded: declare the types of their ops in a block of onnxamp.custom_ops, and"
            " pass data_max=None unless it has a library that runs them."
        )


def _opset(model: Model, wanted: int | None) -> int | Literal["keep"]:
    """Return the opset to upgrade to; "keep" for the model's own."""
    own = opset_imports(model.proto)[""]
    if wanted is None:
        return _OLDEST if own < _OLDEST else "keep"
    if wanted < own:
        warn(
            [
                f"opset={wanted} is ignored: the model's opset is {own}, and onnxamp does not downgrade models."
            ]
        )
        return "keep"
    return wanted


_OLDEST: Final = 13
"""ModelOpt's default lowest opset for float16, which is also the first opset with bfloat16."""


export(__name__, __all__)
