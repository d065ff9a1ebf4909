"""The functions of ``onnxconverter_common.float16``, ``auto_mixed_precision`` and ``auto_mixed_precision_model_path``.

The names, order and defaults of arguments are those of onnxconverter-common 1.16. To try onnxamp, change the import::

    from onnxamp.compat.onnxconverter_common import float16
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from onnx import ModelProto, TensorProto

from onnxamp._base.errors import ArgumentError, ArgumentTypeError, warn
from onnxamp._base.paths import as_path, made_folder
from onnxamp._base.public import export
from onnxamp._facts.tables import read_table
from onnxamp._graph.graph import graph_of
from onnxamp._job import Request, say_nothing
from onnxamp._job.in_memory import convert_in_memory, plan_in_memory
from onnxamp._job.pipeline import convert_to_file
from onnxamp._job.writing import Sink
from onnxamp._model.model import Model, ModelSource
from onnxamp._model.sources import unchanged_sources, watched_sources
from onnxamp._numerics.user_functions import Accept
from onnxamp._options.options import Options
from onnxamp._options.values import Level
from onnxamp._runtime.run import RunOptions
from onnxamp._runtime.sessions.session import Provider
from onnxamp._tuning.results import Search
from onnxamp.compat._convert import (
    Range,
    convert_all_but,
    tensor_to_float16,
    to_float16,
)

__all__ = [
    "DEFAULT_OP_BLOCK_LIST",
    "auto_convert_mixed_precision",
    "auto_convert_mixed_precision_model_path",
    "convert_float_to_float16",
    "convert_float_to_float16_model_path",
    "convert_np_to_float16",
    "convert_tensor_float_to_float16",
]

DEFAULT_OP_BLOCK_LIST: list[str] = read_table("blocked")["onnxconverter-common"]["ops"]
"""Op types that stay in float32 if no ``op_block_list`` is given, as in onnxconverter-common 1.16."""

Judge: TypeAlias = Callable[[list[Any], list[Any]], bool]
"""A function of the outputs of the original and of a candidate, in the model's order."""


@unchanged_sources()
def convert_float_to_float16(
    model: ModelSource,
    min_positive_val: float = 1e-7,
    max_finite_val: float = 1e4,
    keep_io_types: bool | Iterable[str] = False,
    disable_shape_infer: bool = False,
    op_block_list: Iterable[str] | None = None,
    node_block_list: Iterable[str] | None = None,
    check_fp16_ready: bool = True,
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
        check_fp16_ready: reject a model that already contains float16. Otherwise, only its float32 part is converted.

    Returns:
        The converted ModelProto, with all weights inside.

    Raises:
        ArgumentError: the model already contains float16, or a value is impossible. Others as
            :func:`onnxamp.convert_model`.

    Warns:
        HazardWarning: nodes stay in float32 although nothing blocks them.
        OptionWarning: a name matches nothing in the model.

    Example:
        >>> import onnx
        >>> from onnxamp.compat import onnxconverter_common as float16
        >>> model = onnx.load("models/classifier.onnx")
        >>> model16 = float16.convert_float_to_float16(model, keep_io_types=True, op_block_list=["Gemm"])
        >>> {item.data_type for item in model16.graph.initializer} == {onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16}
        True
    """
    del disable_shape_infer
    opened = Model.of(model)
    if check_fp16_ready and "tensor(float16)" in opened.ask(graph_of).types:
        raise ArgumentError(
            "The model holds float16 already: pass check_fp16_ready=False to convert the rest of it."
        )
    blocked = DEFAULT_OP_BLOCK_LIST if op_block_list is None else op_block_list
    return convert_all_but(
        opened,
        blocked,
        known=DEFAULT_OP_BLOCK_LIST,
        within=Range(min_positive_val, max_finite_val),
        keep_io_types=keep_io_types,
        keep_nodes=node_block_list,
    )


def convert_float_to_float16_model_path(
    model_path: str | PathLike[str],
    min_positive_val: float = 1e-7,
    max_finite_val: float = 1e4,
    keep_io_types: bool | Iterable[str] = False,
) -> ModelProto:
    """Convert a file of any size as :func:`convert_float_to_float16` does; :func:`onnxamp.convert_file` also writes the
    result.

    Raises:
        As :func:`convert_float_to_float16`.

    Example:
        >>> from onnxamp.compat.onnxconverter_common import convert_float_to_float16_model_path
        >>> convert_float_to_float16_model_path("models/classifier.onnx").graph.input[0].type.tensor_type.elem_type
        10
    """
    return convert_float_to_float16(
        as_path(model_path), min_positive_val, max_finite_val, keep_io_types
    )


def convert_np_to_float16(
    np_array: ArrayLike, min_positive_val: float = 1e-7, max_finite_val: float = 1e4
) -> NDArray[np.float16]:
    """Return numbers in float16, limited to a range; 0, infinities and NaN stay the same.

    Args:
        np_array: floats of any shape.
        min_positive_val, max_finite_val: the smallest and the largest magnitude.

    Returns:
        A float16 array of the same shape.

    Raises:
        ArgumentError: the range is empty.

    Warns:
        OptionWarning: numbers outside the range are moved to its nearer end.

    Example:
        >>> from onnxamp.compat.onnxconverter_common import convert_np_to_float16
        >>> convert_np_to_float16([0, 1e-3, -300], min_positive_val=1e-2, max_finite_val=256).tolist()
        [0.0, 0.01000213623046875, -256.0]
    """
    within = Range(min_positive_val, max_finite_val)
    numbers = np.asarray(np_array, np.float64)
    if moved := int(within.outside(np.abs(numbers)).sum()):
        count = "1 number is" if moved == 1 else f"{moved} numbers are"
        warn(
            [
                f"{count} outside [{min_positive_val:g}, {max_finite_val:g}] in magnitude, and limited to it."
            ]
        )
    return to_float16(numbers, within)


def convert_tensor_float_to_float16(
    tensor: TensorProto, min_positive_val: float = 1e-7, max_finite_val: float = 1e4
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
        >>> from onnxamp.compat.onnxconverter_common import convert_tensor_float_to_float16
        >>> tensor = numpy_helper.from_array(np.ones(2, np.float32))
        >>> numpy_helper.to_array(convert_tensor_float_to_float16(tensor)).dtype
        dtype('float16')
    """
    return tensor_to_float16(tensor, Range(min_positive_val, max_finite_val))


@unchanged_sources()
def auto_convert_mixed_precision(
    model: ModelSource,
    feed_dict: Mapping[str, Any],
    validate_fn: Judge | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    keep_io_types: bool | Iterable[str] = False,
) -> ModelProto:
    """Convert as much of a model to float16 as a function or tolerances accept.

    Errors are measured op by op, and the converted model is judged (:func:`onnxamp.tune_model`).

    Args:
        model: a ModelProto or a path; it is never changed.
        feed_dict: arrays by input.
        validate_fn: called with the lists of outputs of the original and of a candidate; returns True or False.
        rtol, atol: all outputs must be close in the sense of ``numpy.allclose``; if only one is given, the other is
            1e-5 or 1e-8, respectively. With ``validate_fn``, both must hold.
        keep_io_types: whether graph inputs and outputs stay in float32, or the names of those that do.

    Returns:
        The converted ModelProto.

    Raises:
        ArgumentError: neither a function nor tolerances are given, or they reject the original itself.
        RuntimeFailure: the model does not run. Others as :func:`onnxamp.tune_model`.

    Example:
        >>> import onnxamp
        >>> from onnxamp.compat.onnxconverter_common import auto_convert_mixed_precision
        >>> feeds = onnxamp.random_samples("models/classifier.onnx")[0]
        >>> model16 = auto_convert_mixed_precision("models/classifier.onnx", feeds, rtol=0.05, atol=0.05)
        >>> any(item.data_type == 10 for item in model16.graph.initializer)
        True
    """
    if validate_fn is None and rtol is None and atol is None:
        raise ArgumentError(
            "There is nothing to judge by: pass validate_fn, rtol or atol."
        )
    # The defaults of numpy.allclose.
    if rtol is not None or atol is not None:
        rtol = 1e-5 if rtol is None else rtol
        atol = 1e-8 if atol is None else atol
    opened = Model.of(model)
    judge = _judge(opened, validate_fn, rtol, atol)
    request = _accepted(opened, feed_dict, judge, keep_io_types, None)
    return convert_in_memory(request)[0].embedded()


@watched_sources()
def auto_convert_mixed_precision_model_path(
    source_model_path: str | PathLike[str],
    input_feed: Mapping[str, Any],
    target_model_path: str | PathLike[str],
    provider: Sequence[str],
    location: str | None = None,
    customized_validate_func: Judge | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    keep_io_types: bool | Iterable[str] = True,
    verbose: bool = False,
) -> None:
    """Convert a file to a file as :func:`auto_convert_mixed_precision` does.

    Args:
        source_model_path: the model.
        input_feed: arrays by input.
        target_model_path: the file to write.
        provider: execution providers of ONNX Runtime; with "CUDAExecutionProvider", candidates run on CUDA.
        location: has no effect: if a data file is needed, its name is that of the model followed by ".data".
        customized_validate_func: called with the lists of outputs; it replaces the tolerances.
        rtol, atol: tolerances of ``numpy.allclose``; 1e-3 and 1e-5 by default.
        keep_io_types: whether graph inputs and outputs stay in float32, or the names of those that do.
        verbose: has no effect, because nothing is printed.

    Raises:
        ArgumentTypeError: a path or the feed has the wrong type. ArgumentError: the path does not exist.
        OutputError: the target cannot be written. Others as :func:`auto_convert_mixed_precision`.

    Warns:
        OptionWarning: ``location`` or ``verbose`` is given; both have no effect.

    Example:
        >>> import tempfile, onnxamp
        >>> from onnxamp.compat.onnxconverter_common import auto_convert_mixed_precision_model_path as convert
        >>> feeds = onnxamp.random_samples("models/classifier.onnx")[0]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     convert("models/classifier.onnx", feeds, f"{folder}/low.onnx", ["CPUExecutionProvider"], rtol=0.05)
    """
    if not isinstance(source_model_path, (str, PathLike)):
        raise ArgumentTypeError(
            f"source_model_path must be a path, not {type(source_model_path).__name__}."
        )
    if not isinstance(input_feed, Mapping):
        raise ArgumentTypeError(
            f"input_feed must be a dict of arrays by input, not {type(input_feed).__name__}."
        )
    if not as_path(source_model_path).exists():
        raise ArgumentError(f"There is no file {str(source_model_path)!r}.")
    target = as_path(target_model_path)
    if location is not None and location != f"{target.name}.data":
        warn(
            [
                f"location={location!r} is ignored: a data file would be called {target.name + '.data'!r}."
            ]
        )
    if verbose:
        warn(["verbose=True has no effect: nothing is printed."])
    model = Model.of(as_path(source_model_path))
    if customized_validate_func is not None:
        rtol = atol = None
    else:
        rtol = 1e-3 if rtol is None else rtol
        atol = 1e-5 if atol is None else atol
    judge = _judge(model, customized_validate_func, rtol, atol)
    # ONNX Runtime takes a name, or a pair of a name and options, in place of each name.
    given = [provider] if isinstance(provider, str) else provider
    names = [one if isinstance(one, str) else one[0] for one in given]
    wanted: Provider = "cuda" if any("CUDA" in name for name in names) else "cpu"
    request = _accepted(model, input_feed, judge, keep_io_types, wanted)
    made_folder(target.parent)
    convert_to_file(request, Sink(target))


def _judge(
    model: Model, function: Judge | None, rtol: float | None, atol: float | None
) -> Accept:
    """Return a function that judges outputs by a function of lists, by tolerances, or by both."""
    names = [entry.name for entry in model.proto.graph.output]

    def accepts(reference: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
        one = [reference[name] for name in names]
        other = [result[name] for name in names]
        if function is not None and not function(one, other):
            return False
        if rtol is None or atol is None:
            return True
        return all(
            np.allclose(a, b, rtol, atol) for a, b in zip(one, other, strict=True)
        )

    return Accept(getattr(function, "__qualname__", "numpy.allclose"), accepts)


def _accepted(
    model: Model,
    feeds: Mapping[str, Any],
    judge: Accept,
    keep_io_types: bool | Iterable[str],
    provider: Provider | None,
) -> Request:
    """Return the accepted conversion that lowers the most; the relative error may reach 100 %.

    Raises:
        ArgumentError: not even the last candidate, which lowers nothing, is accepted.
    """
    # The judge alone decides, so the tolerance excludes nothing short of a wrong result.
    request = Request(
        model=model,
        asked=Options.of(Level.AUTO, {"keep_io_types": keep_io_types}),
        run=RunOptions(samples=dict(feeds), provider=provider),
        search=Search(tolerance=1.0, metric="rel-l2", accept=judge, allow_slower=True),
    )
    plan, tuned = plan_in_memory(request)
    if tuned is None or not tuned.held:
        raise ArgumentError(f"{judge.name!r} accepts no conversion.")
    return replace(request, plan=plan, warn=say_nothing)  # already warned


export(__name__, __all__)
