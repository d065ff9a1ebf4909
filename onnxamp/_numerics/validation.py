"""Conversions that are validated before they are put in their place.

A result is written to a temporary name, loaded there, built where the target has a builder, and compared with the
original.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from onnxamp._convert.convert import Conversion, Sink, convert_to_file
from onnxamp._convert.plan import Plan
from onnxamp._errors import ArgumentError, RuntimeFailure
from onnxamp._model.formats import is_text
from onnxamp._model.model import Model
from onnxamp._model.protos import all_nodes
from onnxamp._numerics.accept import Accept
from onnxamp._numerics.diff import Comparison
from onnxamp._numerics.limits import Limits, make_limits
from onnxamp._numerics.metrics import TOLERANCES
from onnxamp._numerics.proof import UpgradeProof
from onnxamp._numerics.results import DiffReport
from onnxamp._numerics.rounding import WeightRounder
from onnxamp._numerics.whole import as_float16
from onnxamp._ops.profiles import computes_low
from onnxamp._options.auto import TOLERANCE
from onnxamp._options.levels import Level
from onnxamp._options.options import Options
from onnxamp._runtime.building import build_engine, can_build
from onnxamp._runtime.inputs import check_inputs
from onnxamp._runtime.loading import Loaded, load_file
from onnxamp._runtime.session import Provider, is_plugin, make_session, run
from onnxamp._target.versions import BUILDERS, device_of, older_installed, version_meant

_MARGIN: Final = 0.2
"""Share of the default limits that is left to inputs that were not seen, where errors are draws."""

Tune: TypeAlias = Callable[[Options, float, float], Plan | None]
"""What level auto finds with options, within a tolerance, in so many seconds; None where nothing may be low."""


class RefusedError(Exception):
    """A result that failed its validation, before it was put in its place; ``fault`` is why it does not load."""

    def __init__(self, report: DiffReport, casts: int, fault: str = "") -> None:
        super().__init__()
        self.report, self.casts, self.fault = report, casts, fault


@dataclass(frozen=True, slots=True)
class Validation:
    """How results are validated.

    Attributes:
        comparison: compares them with the original.
        failed: where a result goes that fails and is not cured.
        layers: compare all values, too; None if outputs miss their limits.
        heals: look for a cure.
        sampling: options of the command line that make it run on the same inputs.
        seconds: for which cures are looked for, about.
        progress: called with the activity, the work that is done, and all there is to do.
        rounder: rounds weights with compensation where the options ask for it.
        tune: measures what may be low where nothing else passes; None to leave that out.
    """

    comparison: Comparison
    failed: Path
    layers: bool | None
    heals: bool
    sampling: tuple[str, ...]
    seconds: float
    progress: Callable[[str, int, int], None]
    rounder: WeightRounder | None = None
    tune: Tune | None = None


def conversion_limits(
    dtype: str, tolerance: float | None = None, accept: Accept | None = None, *, is_tuned: bool = False
) -> Limits:
    """The limits of a conversion.

    Args:
        dtype: the low-precision type.
        tolerance: the largest error that is asked for; None for what is usual.
        accept: judges outputs in place of what is usual; a tolerance holds besides.
        is_tuned: whether the model was tuned to the tolerance: then what is usual is accepted, too.

    Raises:
        ArgumentError: the tolerance can never hold.
    """
    if is_tuned:
        tuned_to = TOLERANCE if tolerance is None else tolerance
        return Limits(tolerance=max(tuned_to, TOLERANCES[dtype]), accept=accept)
    if tolerance is None:
        return Limits(margin=_MARGIN, accept=accept)
    asked = make_limits({"rel_l2": tolerance})  # checks it, too
    return replace(asked, accept=accept) if accept is not None else Limits(tolerance=tolerance)


def _casts(model: Model) -> int:
    return sum(node.op_type == "Cast" for node in all_nodes(model.proto.graph.node))


def convert_and_compare(
    model: Model, sink: Sink, options: Options, validation: Validation, plan: Plan | None, proof: UpgradeProof
) -> tuple[Conversion, DiffReport]:
    """Convert, and put the result in its place if it passes or cannot be compared.

    Raises:
        RefusedError: it fails.
    """
    reports: list[DiffReport] = []

    def approve(written: Path) -> None:
        provider = validation.comparison.reference.provider
        place = provider if provider == device_of(options.target) and not is_plugin(provider) else None
        result = Model.read(written, model)
        loaded, asked = load_result(result, model, place), validation.comparison.samples
        ran_in = loaded.where(place)
        if not loaded.fault and options.target in BUILDERS and can_build():
            loaded = build_result(result, model, asked[0])
            ran_in = " and ".join(filter(None, (ran_in, loaded.by)))
        reference = validation.comparison.reference
        if not loaded.fault and place == "cpu" and asked.has(0) and result.stock.size <= reference.budget:
            loaded = run_result(result, model, asked[0])
        if loaded.fault:
            raise RefusedError(_unloadable(validation.comparison, sink, options, loaded), _casts(result), loaded.fault)
        everywhere = computes_low(options.target)
        report = validation.comparison.compare(
            as_float16(result) if everywhere else result,
            layers=validation.layers,
            progress=lambda done, total: validation.progress("validating", done, total),
        )
        ran_on = f"{report.ran_on} everywhere" if everywhere else report.ran_on
        reports.append(replace(report, ran_on=ran_on, result=str(sink.target), loaded=ran_in))
        if report.passed or report.skipped:
            return
        if options.level != Level.O0 or not is_plugin(validation.comparison.provider):
            raise RefusedError(reports[0], _casts(result))
        why = report.failure or next(iter(report.warnings), "")
        reports[0] = replace(reports[0], failure=None, skipped=f"Float32 itself is wrong there: {why}")

    made = convert_to_file(
        model,
        replace(sink, approve=approve),
        options,
        plan,
        proof,
        validation.rounder,
        shapes=_shapes(validation.comparison),
    )
    return made, reports[0]


def _shapes(comparison: Comparison) -> Mapping[str, tuple[int, ...]] | None:
    """Return the shapes of the first sample by input; None where there is none to be had."""
    if not comparison.samples.has(0):
        return None
    feeds = comparison.samples[0].items()
    return {name: feed.shape for name, feed in feeds if isinstance(feed, np.ndarray)}


def load_result(result: Model, original: Model, place: Provider | None) -> Loaded:
    """Load the file of a result. A fault that the original has as well is none of the conversion, so it does not count.

    Args:
        result: the result, read from its file.
        original: what it was converted from, read from a file as well.
        place: the provider, if it is the one that the result is meant for: kernels that another lacks are no fault.
    """
    found = load_file(result, place)
    if found.fault and original.path is not None:
        return Loaded() if load_file(original, place, in_text=is_text(original.path)).fault else found
    return found


def run_result(result: Model, original: Model, feeds: Mapping[str, Any]) -> Loaded:
    """Run a result on ONNX Runtime's CPU provider, whose kernels may fail although the session loads.

    A failure counts only where the original runs.
    """
    fault = _failure_of(result, feeds)
    if fault and _failure_of(original, feeds):
        return Loaded()
    return Loaded("ONNX Runtime", fault, "run")


def _failure_of(model: Model, feeds: Mapping[str, Any]) -> str:
    """Return why ONNX Runtime's CPU provider does not run a model, as a clause; "" where it does."""
    try:
        run(make_session(model.path or model.embedded(), lean=True), check_inputs(model.proto, feeds))
    except (ArgumentError, RuntimeFailure) as error:
        return str(error).removesuffix(".")
    return ""


def build_result(result: Model, original: Model, feeds: Mapping[str, Any]) -> Loaded:
    """Build an engine of a result. Refusals count only where the original is built."""
    built = build_engine(result, feeds)
    if built.refusals and build_engine(original, feeds).refusals:
        return Loaded()
    told = (f"{refusal.text} ({refusal.node})" if refusal.node else refusal.text for refusal in built.refusals)
    return Loaded(built.by, "; ".join(told), "build")


def _unloadable(compared: Comparison, sink: Sink, options: Options, loaded: Loaded) -> DiffReport:
    failure = f"{loaded.by} does not {loaded.does} the result: {loaded.fault.removesuffix('.')}."
    here = older_installed(options.target)
    if here:
        failure += f" It was converted for ONNX Runtime {version_meant(options.target)} (--target {here} is this one)."
    return DiffReport(
        compared.reference.model.label, str(sink.target), loaded.by, compared.samples.description,
        len(compared.samples), options.dtype, failure=failure,
    )  # fmt: skip
