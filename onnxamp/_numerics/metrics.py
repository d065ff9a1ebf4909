"""Measures of how far a result is from its reference: their definitions, names, and limits."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, log10, nan, sqrt
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import numpy as np
from onnx import TensorProto, parser

from onnxamp._dtypes import FLOAT, FORMATS, LOW_TENSORS, LOWEST_FIRST, element_name
from onnxamp._errors import RuntimeFailure
from onnxamp._model.statistics import SENTINEL
from onnxamp._runtime.session import Provider, make_session, memory_of, run_values
from onnxamp._runtime.values import to_value

if TYPE_CHECKING:
    import onnxruntime as ort

Index: TypeAlias = tuple[int, ...]


RELATIVE_FLOOR: Final = 1e-3
"""Share of the reference's largest magnitude below which an element's error counts relative to this share."""

VANISHED_ABOVE: Final = 0.05
"""Share of the reference's largest magnitude above which a zero in the result is no rounding error."""

AT_MOST: Final[Mapping[str, str]] = MappingProxyType(
    {
        "rel_l2": "relative L2 error",
        "max_abs": "largest absolute error",
        "max_rel": "largest relative error",
        "required_tolerance": "required tolerance",
        "rmse": "RMS error",
        "mean_abs": "mean absolute error",
        "differing": "share of elements that differ",
        "detections": "error of the detections",
    }
)
"""Metrics of :class:`TensorDiff` that a limit bounds from above, in words."""

AT_LEAST: Final[Mapping[str, str]] = MappingProxyType(
    {
        "snr_db": "SNR in dB",
        "cosine": "cosine",
        "argmax_agreement": "top-1 agreement",
        "top5_agreement": "top-5 agreement",
    }
)
"""Those that a limit bounds from below."""

BOUNDS: Final[Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        **dict.fromkeys(AT_MOST, (0.0, inf)),
        "differing": (0.0, 1.0),
        "snr_db": (-inf, inf),
        "cosine": (-1.0, 1.0),
        "argmax_agreement": (0.0, 1.0),
        "top5_agreement": (0.0, 1.0),
    }
)
"""The least and the largest value that each of them can have."""

TOLERANCES: Final[Mapping[str, float]] = MappingProxyType(
    {"float32": 1e-5, **{low.name: low.tolerance for low in FORMATS.values()}}
)
"""Default limit of the relative L2 error per output, by the lower precision of the two models."""

LOWNESS: Final[Mapping[str, int]] = MappingProxyType(
    {name: place for place, name in enumerate((*LOWEST_FIRST, "float32"))}
)
"""Precisions, the lowest first."""


def metric_name(metric: str) -> str:
    """A metric in words."""
    return AT_MOST.get(metric) or AT_LEAST.get(metric) or metric


def decibels(relative_l2: float) -> float:
    """Signal-to-noise ratio in decibels of a relative L2 error; inf if it is zero."""
    if relative_l2 == 0:
        return inf
    return -20 * log10(relative_l2) if isfinite(relative_l2) else -inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """What all metrics derive from, of a result *f* and its reference *r*: the one place that defines them.

    NumPy fills it for outputs (:mod:`onnxamp._numerics.compare`), ONNX Runtime for all other values
    (:mod:`onnxamp._numerics.measure`), each over the elements that its documentation names.

    Attributes:
        elements: their number.
        error_sum: sum of abs(f - r).
        error_norm: Euclidean norm of f - r.
        reference_norm: Euclidean norm of r.
        dot: r . f, over elements where both are finite.
        dot_energies: sums of r^2 and of f^2 over these, in units in which ``dot`` has the product of both.
        is_comparable: whether there are such elements, or nothing differs.
    """

    elements: int
    error_sum: float
    error_norm: float
    reference_norm: float
    dot: float
    dot_energies: tuple[float, float]
    is_comparable: bool

    @property
    def mean_abs(self) -> float:
        """Mean abs(f - r)."""
        return self.error_sum / self.elements if self.elements else 0.0

    @property
    def rmse(self) -> float:
        """Root of the mean (f - r)^2."""
        return self.error_norm / sqrt(self.elements)

    @property
    def rel_l2(self) -> float:
        """Norm of f - r relative to that of r: 0 if equal, infinite if only r is zero."""
        if self.error_norm == 0:
            return 0.0
        return self.error_norm / self.reference_norm if self.reference_norm else inf

    @property
    def cosine(self) -> float:
        """Cosine of the angle between r and f: 1 if both are zero, NaN if no elements can be compared."""
        if not self.is_comparable:
            return nan
        reference, found = self.dot_energies
        norms = sqrt(reference) * sqrt(found)
        if norms == 0:
            return 1.0 if reference == found else 0.0
        return max(-1.0, min(1.0, self.dot / norms))


@dataclass(frozen=True, slots=True)
class Bad:
    """The first element that fails whatever the tolerance: ``kind`` is "NaN", "Inf" or "zero" (vanished)."""

    kind: str
    index: Index
    reference: float
    count: int
    """Number of elements that fail in the same way."""
    sample: int = 0


@dataclass(frozen=True, slots=True)
class TensorDiff:
    """Differences between a reference *a* and a result *b* of the same shape, computed in float64.

    Elements that are NaN on both sides, or the same infinity, are equal. Where one side alone is not finite, the error
    is infinite. Let *e* = abs(*a* - *b*), and ‖.‖ the Euclidean norm over all elements:

    ======================  ================================================================================
    ``mean_abs``            mean e
    ``max_abs``             max e
    ``max_rel``             max e / max(abs(a), 0.001 max abs(a)); the floor is for zeros of a
    ``required_tolerance``  least t with e <= t + t abs(a), as numpy.allclose with atol = rtol = t
    ``rel_l2``              ‖a - b‖ / ‖a‖
    ``rmse``                sqrt(mean e²)
    ``snr_db``              20 log10(‖a‖ / ‖a - b‖), signal-to-noise ratio in decibels; inf if equal
    ``cosine``              a · b / (‖a‖ ‖b‖) where both are finite; 1 if both are zero,
                            NaN if no position is finite on both sides and they differ
    ``argmax_agreement``    share of rows (last axis) in which b's largest element is a largest one of a
    ``top5_agreement``      mean share of b's five largest elements of a row that are among a's five largest
    ``differing``           share of elements that are not equal
    ``vanished``            number of floats that are exactly 0 in b, with abs(a) > 0.05 max abs(a), as after
                            an overflow that was divided away or a scale that was flushed
    ======================  ================================================================================

    Maxima and norms of *a* are over finite elements. Integers and booleans count as numbers, but do not vanish. For
    strings *e* is 0 or 1. If the shapes differ, all errors are infinite; for empty tensors all are 0.

    Over several samples (:func:`onnxamp._numerics.compare.merge`) maxima, ratios and the cosine are those of the worst
    sample, means and shares are over all elements or rows, and counts add up.
    """

    name: str
    reference_shape: tuple[int, ...]
    result_shape: tuple[int, ...]
    reference_dtype: str
    result_dtype: str
    size: int
    mean_abs: float
    max_abs: float
    max_rel: float
    required_tolerance: float
    rel_l2: float
    rmse: float
    snr_db: float
    cosine: float
    argmax_agreement: float | None
    """None for scalars, for strings, and if the last axis has fewer than two elements."""
    top5_agreement: float | None
    """None for scalars, for strings, and if the last axis has fewer than ten elements."""
    differing: float
    reference_nan: int
    result_nan: int
    reference_inf: int
    result_inf: int
    reference_zero: int
    result_zero: int
    worst_index: Index | None
    """The first element with the largest *e*; None for empty tensors and different shapes."""
    worst_reference: float | str | None
    worst_result: float | str | None
    vanished: int
    bad: Bad | None
    worst_sample: int = 0
    """Number of the sample, from 0, that ``worst_index`` belongs to."""
    detections: float | None = None
    """Error of the detections that the output lists; everything else is then over matched rows. None for others."""

    @property
    def is_float(self) -> bool:
        """Whether the reference holds floats."""
        return "float" in self.reference_dtype

    @property
    def alarm(self) -> str | None:
        """One sentence if the result fails whatever the tolerance: shape, NaN, Inf, vanished values, in this order."""
        if self.reference_shape != self.result_shape:
            return (
                f"The shape is {self.result_shape} instead of {self.reference_shape}."
            )
        if self.bad is None:
            return None
        count = f"{self.bad.count} of {self.size} elements"
        where = f"the first at {list(self.bad.index)}, where the reference is {self.bad.reference:.6g}"
        if self.bad.kind == "zero":
            return f"Values vanished: {count} are exactly zero without cause, {where}."
        return f"{self.bad.kind} where the reference is finite: {count}, {where}."


Kind: TypeAlias = Literal["quick", "measure", "vanished"]

_HEAD: Final = """
<ir_version: 8, opset_import: ["": 17]>
measure ({reference}[] reference, {found}[] found, int64[1] start, int64[1] end{more}) => ({sums}[n] measured)
{{
  zero = Constant <value = {sums} {{0.0}}> ()
  largest = Constant <value = {sums} {{{largest!r}}}> ()
  all = Constant <value = int64[1] {{-1}}> ()
  flat_r = Reshape (reference, all)
  flat_f = Reshape (found, all)
  part_r = Slice (flat_r, start, end)
  part_f = Slice (flat_f, start, end)
  r = Cast <to = {elem}> (part_r)
  f = Cast <to = {elem}> (part_f)
  abs_r = Abs (r)
  abs_f = Abs (f)
  zero_r = Equal (r, zero)
  zero_f = Equal (f, zero)
"""

_BODY: Final = {
    "quick": """
  nonzero_r = Not (zero_r)
  flushed = And (zero_f, nonzero_r)
  error = Sub (f, r)
  abs_error = Abs (error)
  bottom_r = Where (zero_r, largest, abs_r)
""",
    "measure": """
  sentinel = Constant <value = double {{{sentinel}}}> ()
  usual_r = Less (abs_r, sentinel)
  finite_f = LessOrEqual (abs_f, largest)
  common = And (usual_r, finite_f)
  number_r = Equal (r, r)
  number_f = Equal (f, f)
  nan_r = Not (number_r)
  nan_f = Not (number_f)
  infinite_r = Greater (abs_r, largest)
  infinite_f = Greater (abs_f, largest)
  new_nan = And (nan_f, number_r)
  new_infinite = And (infinite_f, usual_r)
  broken = Or (new_nan, new_infinite)
  nonzero_r = Greater (abs_r, zero)
  flushed = And (zero_f, nonzero_r)
  difference = Sub (f, r)
  error = Where (common, difference, zero)
  abs_error = Abs (error)
  common_r = Where (common, r, zero)
  common_f = Where (common, f, zero)
  top_r = Where (usual_r, abs_r, zero)
  top_f = Where (finite_f, abs_f, zero)
  some_r = And (usual_r, nonzero_r)
  bottom_r = Where (some_r, abs_r, largest)
""",
    "vanished": """
  above = Greater (abs_r, threshold)
  vanished = And (zero_f, above)
""",
}

_SUMS: Final = {
    "error_sum": ("ReduceSum", "abs_error"),
    "error_energy": ("ReduceSumSquare", "error"),
    "error_max": ("ReduceMax", "abs_error"),
    "reference_energy": ("ReduceSumSquare", "common_r"),
    "found_energy": ("ReduceSumSquare", "common_f"),
    "reference_max": ("ReduceMax", "top_r"),
    "found_max": ("ReduceMax", "top_f"),
    "reference_least": ("ReduceMin", "bottom_r"),
}
"""Field of a measurement -> how it is reduced, and from what."""

_UNMASKED: Final = {
    "common_r": "r",
    "common_f": "f",
    "top_r": "abs_r",
    "top_f": "abs_f",
}
"""What "quick" reduces instead: where all is finite there is nothing to mask."""

COUNTS: Final = {
    "reference_nan": "nan_r",
    "found_nan": "nan_f",
    "reference_inf": "infinite_r",
    "found_inf": "infinite_f",
    "reference_zero": "zero_r",
    "found_zero": "zero_f",
    "broken": "broken",
    "flushed": "flushed",
    "vanished": "vanished",
}
"""Count of a measurement -> the mask whose true elements it counts."""

FIELDS: Final[dict[Kind, tuple[str, ...]]] = {
    "quick": (*_SUMS, "reference_zero", "found_zero", "flushed"),
    "measure": (*_SUMS, *(name for name in COUNTS if name != "vanished")),
    "vanished": ("vanished",),
}
"""What each kind gives, in order. "quick" is for blocks without NaN, infinities and sentinels, and sums in float32."""

FLOATS: Final = LOW_TENSORS | {FLOAT}

MEASURABLE: Final = FLOATS | {
    f"tensor({name})"
    for name in [
        "double",
        "bool",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
    ]
}
"""Types of values that can be measured: those that Reshape, Slice and Cast take."""

NO_LEAST: Final = float(np.finfo(np.float32).max)
"""``reference_least`` from here on means that every element is zero, or none is ordinary."""


@cache
def meter(
    kind: Kind, provider: Provider, reference: str, found: str
) -> "ort.InferenceSession":
    """The session that measures tensors of two types ("tensor(float)", ...).

    Raises:
        RuntimeFailure: the types are not of tensors of numbers.
    """
    is_quick = kind == "quick"
    text = (_HEAD + _BODY[kind]).format(
        reference=_element(reference),
        found=_element(found),
        sentinel=SENTINEL,
        more=", double threshold" if kind == "vanished" else "",
        sums="float" if is_quick else "double",
        elem=TensorProto.FLOAT if is_quick else TensorProto.DOUBLE,
        largest=float(np.finfo(np.float32 if is_quick else np.float64).max),
    )
    model = parser.parse_model(text + "\n".join(_reductions(kind)) + "\n}")
    for entry in model.graph.input[:2]:
        entry.type.tensor_type.ClearField("shape")  # any rank
    return make_session(model, provider, optimize=False)


def _reductions(kind: Kind) -> list[str]:
    """The nodes that reduce to one element each, and join them."""
    elem = TensorProto.FLOAT if kind == "quick" else TensorProto.DOUBLE
    lines = []
    for name in FIELDS[kind]:
        op, operand = _SUMS.get(name, ("ReduceSum", f"count_{name}"))
        if name in COUNTS:
            lines.append(f"{operand} = Cast <to = {elem}> ({COUNTS[name]})")
        elif kind == "quick":
            operand = _UNMASKED.get(operand, operand)
        lines.append(f"v_{name} = {op} <keepdims = 1> ({operand})")
    joined = ", ".join(f"v_{name}" for name in FIELDS[kind])
    return [*lines, f"measured = Concat <axis = 0> ({joined})"]


def _element(kind: str) -> str:
    """Element type of a tensor type: "float16" of "tensor(float16)"."""
    if kind not in MEASURABLE:
        raise RuntimeFailure(
            f"Values of type {kind} cannot be measured: they are not tensors of numbers."
        )
    return element_name(kind)


def multiplied(
    value: "ort.OrtValue", factor: float, provider: Provider
) -> "ort.OrtValue":
    """A tensor of one of the :data:`FLOATS`, multiplied in float32 where it is."""
    session = _multiplier(memory_of(provider), str(value.data_type()))
    return run_values(
        session,
        {"value": value, "factor": to_value(np.array(factor, np.float32))},
        ["product"],
    )["product"]


@cache
def _multiplier(provider: Provider, kind: str) -> "ort.InferenceSession":
    elem = _element(kind)
    model = parser.parse_model(f"""
<ir_version: 8, opset_import: ["": 17]>
multiply ({elem}[] value, float factor) => ({elem}[] product)
{{
  exact = Cast <to = {TensorProto.FLOAT}> (value)
  scaled = Mul (exact, factor)
  product = CastLike (scaled, value)
}}""")
    for entry in (*model.graph.input[:1], *model.graph.output):
        entry.type.tensor_type.ClearField("shape")  # any rank
    return make_session(model, provider, optimize=False)
