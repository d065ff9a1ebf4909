"""What tuning a pipeline found: each model's choice, what was tried, and what it took."""

from collections.abc import Iterator
from math import inf, isfinite
from pathlib import Path
from typing import Final

from onnxamp._pipeline.results import Trial, TunedMember, TunedPipeline
from onnxamp._report import parts
from onnxamp._report.machine import document
from onnxamp._report.text import count, number, percent, size
from onnxamp._report.tuning import time_text
from onnxamp._state.state import as_data

_UP: Final = 1.06
"""What a number is multiplied by so that two digits of it are not less than itself."""


def pipeline_report(tuned: TunedPipeline, *, state: Path | None = None) -> parts.Report:
    """All that tuning a pipeline has to say; ``state`` is the file that its measurements are in."""
    models = tuple(str(path) for path in (tuned.source, tuned.output) if path is not None)
    steps = (
        []
        if state or not tuned.stopped
        else [parts.Step("--state FILE keeps what was measured, to go on later.")]
    )
    return parts.Report(
        "tune pipeline",
        _verdict(tuned),
        models,
        (tuned.ran_on, tuned.function),
        _figures(tuned),
        (
            parts.section("Models", [_models(tuned), parts.Item(_times(tuned), parts.Level.NONE)]),
            parts.section("Kept float32", _kept(tuned)),
            parts.section("Tried", [_trials(tuned)] if tuned.trials else []),
            parts.section("Effort", parts.notes(_effort(tuned))),
        ),
        tuple(steps),
    )


def pipeline_json(tuned: TunedPipeline) -> str:
    """The same as JSON, without the decision about each node: plans hold these."""
    facts = as_data(tuned)
    for model in facts["models"]:
        del model["plan"]
    return document("tune pipeline", {"verdict": _status(tuned), **facts})


def _status(tuned: TunedPipeline) -> parts.Status:
    return parts.Status.PASSED if tuned.held else parts.Status.FAILED


def _compared(tuned: TunedPipeline) -> str:
    """What was measured at last, and what was allowed."""
    if tuned.metric:
        return f"{tuned.metric} is {number(tuned.error)}; the tolerance is {tuned.tolerance:.3g} for all models together."
    value = "nothing" if tuned.value is None else f"{tuned.value:.6g}"
    return (
        f"{tuned.function} returns {value}, in float32 {tuned.reference:.6g} ({tuned.better} is better): worse by"
        f" {number(tuned.error)}; the tolerance is {tuned.tolerance:.3g} for all models together."
    )


def _verdict(tuned: TunedPipeline) -> parts.Verdict:
    low, text = [model for model in tuned.models if not model.is_float32], _compared(tuned)
    status = _status(tuned)
    if not tuned.held:
        return parts.Verdict(status, "The pipeline does not meet the tolerance.", (text,))
    if not low:
        nearest = _nearest(tuned.trials)
        why = "No model has a choice in low precision that is no slower than float32: --allow-slower takes slower ones."
        if nearest is not None:
            why = (
                f"The nearest is {nearest.model} at {nearest.choice}, worse by {number(nearest.error)}:"
                f" --tolerance {_UP * nearest.error:.2g} takes it."
            )
        elif tuned.trials:
            why = "Every choice broke the pipeline; Tried says how."
        return parts.Verdict(
            status,
            "Nothing was converted: no model can be in low precision within the tolerance.",
            (why, text),
        )
    kept = (
        f", {count(len(tuned.models) - len(low), 'model')} stays float32"
        if len(tuned.models) - len(low) == 1
        else ""
    )
    sentence = f"The tolerance is met with {len(low)} of {count(len(tuned.models), 'model')} in low precision{kept}."
    return parts.Verdict(status, sentence, (text,))


def _nearest(trials: tuple[Trial, ...]) -> Trial | None:
    """The choice that missed by the least, alone."""
    able = [trial for trial in trials if not trial.others and isfinite(trial.error)]
    return min(able, key=lambda trial: trial.error, default=None)


def _speedup(before: float, after: float) -> str:
    return f"{before / after:.2f}×" if after else "–"


def _figures(tuned: TunedPipeline) -> tuple[parts.Figure, ...]:
    label = tuned.metric or "worse by"
    faster = _speedup(tuned.time_before, tuned.time)
    before, after = (
        sum(getattr(model, name) for model in tuned.models)
        for name in ("weights_before", "weights")
    )
    return (
        parts.Figure(
            label,
            number(tuned.error),
            f"tolerance {tuned.tolerance:.3g}",
            f"{label} {number(tuned.error)}",
        ),
        parts.Figure("speed-up", faster, f"estimates for {tuned.device}", f"speed-up {faster}"),
        parts.Figure(
            "weights",
            f"{size(before)} → {size(after)}",
            "",
            f"weights {size(before)} → {size(after)}",
        ),
    )


def _models(tuned: TunedPipeline) -> parts.Table:
    columns = (
        "order",
        "model",
        "choice",
        "alone",
        "together",
        "time",
        "speed-up",
        "calls",
        "nodes low",
        "exponents",
        "weights",
    )
    rows = (_model(place, tuned[name]) for place, name in enumerate(tuned.order, 1))
    return parts.table(
        columns, rows, right=(0, *range(3, 11)), key="model", drop=(9, 8, 7, 10, 5, 0)
    )


def _model(place: int, model: TunedMember) -> parts.Row:
    cells = (
        str(place),
        model.name,
        model.choice,
        "" if model.alone is None else number(model.alone),
        number(model.error),
        time_text(model.time),
        _speedup(model.time_before, model.time),
        f"{model.calls:,}",
        f"{model.nodes:,}",
        f"{model.exponents:,}" if model.exponents else "",
        f"{size(model.weights_before)} → {size(model.weights)}",
    )
    return parts.Row(cells, is_strong=not model.is_float32)


def _times(tuned: TunedPipeline) -> str:
    return (
        f"Models were decided in this order: the least error per time saved first, each as fast as the pipeline holds"
        f" with those before it. Times are estimates for {tuned.device}, per run of the pipeline."
    )


def _kept(tuned: TunedPipeline) -> Iterator[parts.Item]:
    """Why models stay float32."""
    for model in (model for model in tuned.models if model.is_float32):
        mine = [trial for trial in tuned.trials if trial.model == model.name]
        nearest = min(
            (one for one in mine if not one.held), key=lambda one: one.error, default=None
        )
        if nearest is None:
            text = (
                "nothing was tried: the search was over"
                if tuned.stopped
                else "nothing is faster or smaller"
            )
        elif nearest.error == inf:
            text = f"every choice breaks the pipeline, {nearest.choice} as well"
            text += f": {nearest.failure}" if nearest.failure else ""
        else:
            beside = f" beside {', '.join(nearest.others)}" if nearest.others else ""
            text = f"the nearest choice, {nearest.choice}{beside}, makes it worse by {number(nearest.error)}"
        yield parts.Item(f"{text.rstrip('.')}.", label=model.name)


def _trials(tuned: TunedPipeline) -> parts.Table:
    rows = (
        parts.Row(
            (one.model, one.choice, ", ".join(one.others), number(one.error), time_text(one.time)),
            parts.Status.PASSED if one.held else parts.Status.FAILED,
            one.failure,
        )
        for one in tuned.trials
    )
    return parts.table(
        ("model", "choice", "beside", "error", "time"),
        rows,
        right=(3, 4),
        shown=12,
        key="trial",
        drop=(2, 4),
    )


def _effort(tuned: TunedPipeline) -> Iterator[str]:
    recalled = f", {tuned.recalled:,} taken from the state file" if tuned.recalled else ""
    yield f"{count(tuned.runs + 1, 'run')} of the pipeline{recalled} ({tuned.ran_on})."
    if tuned.stopped:
        yield "The search ended because its time or its runs were over: --search-time and --runs give it more."
    if tuned.noise:
        yield f"Run twice in float32, the pipeline differs from itself by {tuned.noise:.2g}."
    if tuned.written_error is not None:
        yield f"As written, in sessions of ONNX Runtime, it is worse than in float32 by {number(tuned.written_error)}."
    elif any(model.target for model in tuned.models):
        yield f"What was written loads, but did not run: {tuned.note}."
    saved = sum(model.weights_before - model.weights for model in tuned.models)
    if tuned.time > tuned.time_before and saved > 0:
        before = sum(model.weights_before for model in tuned.models)
        yield f"By the estimate it is slower than float32; weights are {percent(saved, before)} smaller."
