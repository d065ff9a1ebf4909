"""Report of a pipeline's tuning: the choice of each model, the trials, and the effort."""

from collections.abc import Iterator
from math import inf, isfinite
from pathlib import Path
from typing import Final

from onnxamp._pipeline.runs import TunedMember, TunedPipeline
from onnxamp._report.formats import document
from onnxamp._report.parts import (
    Figure,
    Item,
    Report,
    Row,
    Status,
    Step,
    Table,
    Verdict,
    hint,
    notes,
    section,
    table,
)
from onnxamp._report.text import count, number, percent, size
from onnxamp._report.tuning import time_text
from onnxamp._state import as_data

_TIMES: Final = (
    "Models were decided in this order, the least error per time saved first. Each is as fast as the tolerance allows"
    " with those before it. Times are estimates for {}, per run of the pipeline."
)
_UP: Final = 1.06
"""The factor that keeps a number of two digits from being rounded below itself."""


def pipeline_report(tuned: TunedPipeline, *, state: Path | None = None) -> Report:
    """Return the report of tuning a pipeline; ``state`` is the file that its measurements are in."""
    paths = (tuned.source, tuned.output)
    told = "--state FILE saves the measurements, so that a later run can continue."
    return Report(
        "tune pipeline",
        _verdict(tuned),
        tuple(str(path) for path in paths if path is not None),
        (tuned.ran_on, tuned.function),
        _figures(tuned),
        (
            section("Models", _models(tuned), hint(_TIMES.format(tuned.device))),
            section("Kept float32", _kept(tuned)),
            section("Tried", _trials(tuned)),
            section("Effort", notes(_effort(tuned))),
        ),
        () if state or not tuned.stopped else (Step(told),),
    )


def pipeline_json(tuned: TunedPipeline) -> str:
    """Return it as JSON, without the decision about each node, which plans contain."""
    facts = as_data(tuned)
    for model in facts["models"]:
        del model["plan"]
    return document("tune pipeline", {"verdict": _status(tuned), **facts})


def _status(tuned: TunedPipeline) -> Status:
    return Status.PASSED if tuned.held else Status.FAILED


def _compared(tuned: TunedPipeline) -> str:
    """Return the final measurement and the tolerance."""
    if tuned.metric:
        return f"{tuned.metric} is {number(tuned.error)}; the tolerance is {tuned.tolerance:.3g} for all models together."
    value = "nothing" if tuned.value is None else f"{tuned.value:.6g}"
    return (
        f"{tuned.function} returns {value}, in float32 {tuned.reference:.6g} ({tuned.better} is better): worse by"
        f" {number(tuned.error)}; the tolerance is {tuned.tolerance:.3g} for all models together."
    )


def _verdict(tuned: TunedPipeline) -> Verdict:
    low, text = (
        [model for model in tuned.models if not model.is_float32],
        _compared(tuned),
    )
    status = _status(tuned)
    if not tuned.held:
        return Verdict(status, "The pipeline does not meet the tolerance.", (text,))
    if not low:
        sentence = "Nothing was converted: no model can be in low precision within the tolerance."
        return Verdict(status, sentence, (_why_nothing(tuned), text))
    kept = len(tuned.models) - len(low)
    sentence = f"The tolerance is met with {len(low)} of {count(len(tuned.models), 'model')} in low precision"
    sentence += ", 1 model stays float32." if kept == 1 else "."
    return Verdict(status, sentence, (text,))


def _why_nothing(tuned: TunedPipeline) -> str:
    """Why no model is low: the choice that missed by the least, alone, if there is one."""
    if not tuned.trials:
        return "Every choice in low precision is slower than float32: --allow-slower accepts slower ones."
    able = [
        trial for trial in tuned.trials if not trial.others and isfinite(trial.error)
    ]
    if not able:
        return "Every choice broke the pipeline: the table below says how."
    nearest = min(able, key=lambda trial: trial.error)
    return (
        f"The nearest is {nearest.model} at {nearest.choice}, worse by {number(nearest.error)}:"
        f" --tolerance {_UP * nearest.error:.2g} accepts it."
    )


def _speedup(before: float, after: float) -> str:
    return f"{before / after:.2f}×" if after else "–"


def _figures(tuned: TunedPipeline) -> tuple[Figure, ...]:
    label, error = tuned.metric or "worse by", number(tuned.error)
    faster = _speedup(tuned.time_before, tuned.time)
    before = sum(model.weights_before for model in tuned.models)
    weights = f"{size(before)} → {size(sum(model.weights for model in tuned.models))}"
    return (
        Figure(label, error, f"tolerance {tuned.tolerance:.3g}", f"{label} {error}"),
        Figure(
            "speed-up", faster, f"estimates for {tuned.device}", f"speed-up {faster}"
        ),
        Figure("weights", weights, "", f"weights {weights}"),
    )


def _models(tuned: TunedPipeline) -> Table:
    numbers = (
        "alone",
        "together",
        "time",
        "speed-up",
        "calls",
        "nodes low",
        "exponents",
    )
    columns = ("order", "model", "choice", *numbers, "weights")
    rows = (_model(place, tuned[name]) for place, name in enumerate(tuned.order, 1))
    drop = (9, 8, 7, 10, 5, 0)
    return table(columns, rows, right=(0, *range(3, 11)), key="model", drop=drop)


def _model(place: int, model: TunedMember) -> Row:
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
    return Row(cells, is_strong=not model.is_float32)


def _kept(tuned: TunedPipeline) -> Iterator[Item]:
    """Why models stay float32."""
    for model in (model for model in tuned.models if model.is_float32):
        missed = [
            one for one in tuned.trials if one.model == model.name and not one.held
        ]
        if not missed:
            text = "nothing is faster or smaller"
            text = (
                "nothing was tried, because the search was over"
                if tuned.stopped
                else text
            )
            yield Item(f"{text}.", label=model.name)
            continue
        nearest = min(missed, key=lambda one: one.error)
        if nearest.error == inf:
            why = f": {nearest.failure}" if nearest.failure else ""
            text = f"every choice breaks the pipeline, {nearest.choice} as well{why}"
        else:
            beside = f" beside {', '.join(nearest.others)}" if nearest.others else ""
            text = f"the nearest choice, {nearest.choice}{beside}, makes it worse by {number(nearest.error)}"
        yield Item(f"{text.rstrip('.')}.", label=model.name)


def _trials(tuned: TunedPipeline) -> Table:
    rows = []
    for one in tuned.trials:
        beside, time = ", ".join(one.others), time_text(one.time)
        cells = (one.model, one.choice, beside, number(one.error), time)
        rows.append(
            Row(cells, Status.PASSED if one.held else Status.FAILED, one.failure)
        )
    columns = ("model", "choice", "beside", "error", "time")
    return table(columns, rows, right=(3, 4), shown=12, key="trial", drop=(2, 4))


def _effort(tuned: TunedPipeline) -> Iterator[str]:
    recalled = (
        f", {tuned.recalled:,} taken from the state file" if tuned.recalled else ""
    )
    yield f"{count(tuned.runs + 1, 'run')} of the pipeline{recalled} ({tuned.ran_on})."
    if tuned.stopped:
        yield "The search reached its limit of time or runs: --search-time and --runs raise it."
    if tuned.noise:
        yield f"Run twice in float32, the pipeline differs from itself by {tuned.noise:.2g}."
    if tuned.written_error is not None:
        yield f"As written, in sessions of ONNX Runtime, it is worse than in float32 by {number(tuned.written_error)}."
    elif any(model.target for model in tuned.models):
        yield f"The written models load, but did not run: {tuned.note}."
    saved = sum(model.weights_before - model.weights for model in tuned.models)
    if tuned.time > tuned.time_before and saved > 0:
        before = sum(model.weights_before for model in tuned.models)
        yield f"By the estimate it is slower than float32; weights are {percent(saved, before)} smaller."
