"""Types of the keyword arguments that public functions share: the fields of Options except the level."""

from collections.abc import Iterable
from typing import Literal, TypedDict

from onnxamp._dtypes import DtypeLike
from onnxamp._ops.custom import CustomOpsLike
from onnxamp._options.checks import OpsetWord
from onnxamp._options.levels import Rescaling
from onnxamp._options.lists import PresetName
from onnxamp._options.options import Rounding, Rule


class OptionKeywords(TypedDict, total=False):
    """Keyword arguments of :func:`onnxamp.convert_model` and of all functions that convert."""

    dtype: DtypeLike
    lists: PresetName
    white_list: Iterable[str] | None
    black_list: Iterable[str] | None
    keep_high: Iterable[str]
    force_low: Iterable[str]
    keep_nodes: Iterable[str]
    low_weights: str | Iterable[str]
    weights_only: bool
    init_max: float | None
    data_max: float | None
    keep_io_types: bool | Iterable[str]
    target: str
    strict: bool
    hazards: bool
    freeze_defaults: bool | None
    from_dtype: DtypeLike | Literal["auto"] | None
    custom_ops: CustomOpsLike | None
    keep_functions: bool
    opset: int | OpsetWord
    fold: bool | None
    folded: Iterable[str]
    rescale: bool | None
    rescaling: Rescaling | None
    split_k: bool
    rounding: Rounding
    unsound: Iterable[str]
    rule: Rule | None
    strict_options: bool
