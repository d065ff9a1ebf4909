"""How far a result may be from its reference: limits per output, held against what was measured."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isnan
from types import MappingProxyType
from typing import Final

from onnxamp._errors import ArgumentError
from onnxamp._numerics.metrics import TensorDiff
from onnxamp._numerics.results import Judgement

TOLERANCES: Final[Mapping[str, float]] = MappingProxyType({"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2})
"""Relative L2 error per output that is usual, by the lower precision of the two models."""

LOWNESS: Final[Mapping[str, int]] = MappingProxyType({"bfloat16": 0, "float16": 1, "float32": 2})
"""Precisions from the lowest."""

AT_MOST: Final = ("rel_l2", "max_abs", "max_rel", "required_tolerance", "rmse", "mean_abs", "differing")
"""Metrics of :class:`TensorDiff` that a limit bounds from above."""

AT_LEAST: Final = ("snr_db", "cosine", "argmax_agreement", "top5_agreement")
"""Those that a limit bounds from below."""


_NAMES: Final = {
    "rel_l2": "relative L2 error", "max_abs": "largest absolute error", "max_rel": "largest relative error",
    "required_tolerance": "required tolerance", "rmse": "RMS error", "mean_abs": "mean absolute error",
    "differing": "share of elements that differ", "snr_db": "SNR in dB", "argmax_agreement": "top-1 agreement",
    "top5_agreement": "top-5 agreement",
}  # fmt: skip


def metric_name(metric: str) -> str:
    """A metric in words."""
    return _NAMES.get(metric, metric)


@dataclass(frozen=True, slots=True)
class Limits:
    """``of[metric][output]`` is the limit for one output, ``of[metric][""]`` that for all others.

    An output for which nothing is said is held to the usual tolerance, as relative L2 error or, if it holds no floats
    and that is smaller, as share of elements that differ: labels flip, and pixels are off by one.
    """

    of: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def judge(self, outputs: Sequence[TensorDiff], lowest: str) -> tuple[Judgement, ...]:
        """Hold the limits against the outputs; ``lowest`` is the lower precision of the two models.

        Raises:
            ArgumentError: a limit names an output that there is not.
        """
        self.check(diff.name.partition("[")[0] for diff in outputs)
        return tuple(judgement for diff in outputs for judgement in self._judge(diff, lowest))

    def check(self, outputs: Iterable[str]) -> None:
        """Refuse limits for outputs that there are not.

        Raises:
            ArgumentError: a limit names another output.
        """
        names = set(outputs)
        for metric, limits in self.of.items():
            for name in limits:
                if name and name.partition("[")[0] not in names:
                    known = ", ".join(sorted(names))
                    raise ArgumentError(f"The limit for {metric} names {name!r}; the outputs are {known}.")

    def _judge(self, diff: TensorDiff, lowest: str) -> list[Judgement]:
        base = diff.name.partition("[")[0]  # an element of a sequence is held to the limits of the sequence
        said = {}
        for metric, limits in self.of.items():
            limit = next((limits[name] for name in (diff.name, base, "") if name in limits), None)
            if limit is not None and getattr(diff, metric) is not None:
                said[metric] = limit
        if not said:
            labels = not diff.is_float and diff.differing < diff.rel_l2
            said = {"differing" if labels else "rel_l2": TOLERANCES[lowest]}
        return [Judgement(diff.name, metric, *_held(diff, metric, limit)) for metric, limit in said.items()]


def _held(diff: TensorDiff, metric: str, limit: float) -> tuple[float, float, bool]:
    found = float(getattr(diff, metric))
    return found, limit, found <= limit if metric in AT_MOST else found >= limit


def make_limits(said: Mapping[str, Sequence[str]]) -> Limits:
    """Limits from texts, as the command line gives them: metric -> "0.01" (all outputs) or "NAME=0.01" each.

    Raises:
        ArgumentError: a metric is unknown, or a text is of another form.
    """
    made: dict[str, dict[str, float]] = {}
    for metric, texts in said.items():
        if metric not in AT_MOST + AT_LEAST:
            raise ArgumentError(f"Unknown metric {metric!r}: choose one of {', '.join(AT_MOST + AT_LEAST)}.")
        for text in texts:
            name, _, number = text.rpartition("=")
            try:
                limit = float(number)
            except ValueError:
                raise ArgumentError(f"The limit {text!r} is no number and not of the form OUTPUT=NUMBER.") from None
            if isnan(limit) or (limit < 0 and metric in AT_MOST):
                raise ArgumentError(f"The limit {text!r} for the {metric_name(metric)} can never hold.")
            made.setdefault(metric, {})[name] = limit
    return Limits(made)
