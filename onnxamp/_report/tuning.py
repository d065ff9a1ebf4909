"""Reports of tuning: the candidates, the nodes that stay in float32 with reasons, and the effort."""

from collections import Counter
from collections.abc import Iterator
from math import ceil, floor, inf, log10
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from onnxamp._audit import Audit
from onnxamp._base.state import as_data
from onnxamp._base.words import count
from onnxamp._convert.plan import CONSTANTS
from onnxamp._decide.kinds import kinds
from onnxamp._decide.verdicts import Reason, title_of
from onnxamp._job.writing import Conversion
from onnxamp._numerics.results import DiffReport
from onnxamp._report import (
    as_sentence,
    detailed,
    number,
    percent,
    size,
    tally,
    time_text,
)
from onnxamp._report.comparison import partings, text_figures
from onnxamp._report.conversion import conversion_data, conversion_report
from onnxamp._report.parts import (
    LINES,
    Figure,
    Headline,
    NextStep,
    Part,
    Report,
    Statement,
    Status,
    Table,
    TableRow,
    hint,
    notes,
    section,
    table,
)
from onnxamp._tuning.metric import METRICS
from onnxamp._tuning.results import Candidate, CompensationEffect, Exponents, Tuned

_NOTHING_LINES: Final = 4
"""The lines on the terminal where nothing was gained: the verdict, the files, and what would have to change."""
_OPS: Final = 6
"""The number of op types that a statement names."""
_WHY: Final = {
    "never run": "No sample runs them, so level O2 decides about them",
    "costs accuracy": "The tolerance is better spent elsewhere",
    "breaks on its own": "They overflow or vanish on their own, or break the outputs",
    "goes with others": "They share their precision with others",
    "not worth its Casts": "Their Casts would take longer than they save",
    "not measured": "Their effect could not be measured",
}
_EXPECTED: Final = (
    "≈ marks an expected error, from the sensitivities and the errors of other converted models. All other errors were"
    " measured on the converted model with all samples."
)


def tuning_report(
    conversion: Conversion,
    tuned: Tuned,
    *,
    state: Path | None = None,
    audit: Audit | None = None,
    compared: DiffReport | None = None,
) -> Report:
    """Return the report of a tuning.

    Args:
        conversion: the conversion.
        tuned: the outcome of the search.
        state: the file with its measurements.
        audit: of the result.
        compared: the result against the original on texts, if it was not judged.
    """
    base = conversion_report(conversion, audit)
    mine = outcome_report(tuned, state)
    several = len(tuned.candidates) > 1 and state is not None
    step = NextStep(
        "--pick K with the same --state writes candidate K without measuring again."
    )
    texts = tuple[Figure, ...]()
    tokens = list[Statement]()
    if compared is not None:
        texts = tuple(text_figures(compared))
        tokens = notes(partings(compared))
    report = base._replace(
        figures=(*mine.figures, *texts, *base.figures),
        sections=(*mine.sections, section("Generated tokens", tokens), *base.sections),
        steps=(*base.steps, step) if several else base.steps,
        lines=LINES if tuned.candidates[tuned.chosen].nodes else _NOTHING_LINES,
    )
    if conversion.validation is not None:
        return report
    return report._replace(
        task=base.task.replace("convert", "tune", 1),
        verdict=mine.verdict,
        ran=mine.ran,
    )


def outcome_report(tuned: Tuned, state: Path | None = None) -> Report:
    """Return the sections about the tuning itself, without the model that was written."""
    return Report(
        f"tune, {tuned.plan.level} {tuned.plan.dtype} for {tuned.plan.target}",
        _verdict(tuned),
        ran=(tuned.ran_on, tuned.inputs),
        figures=_figures(tuned),
        sections=(
            section("Candidates", _candidates(tuned), _notes(tuned, state)),
            section("Kept in float32", _kept(tuned)),
            section("Effort", notes(effort(tuned))),
        ),
    )


def effort(tuned: Tuned) -> Iterator[str]:
    """Yield sentences about the effort of the search, and about nodes that no sample reaches."""
    samples = tuned.runs + tuned.recalled
    recalled = f" ({tuned.recalled:,} in the state file)" if tuned.recalled else ""
    measured = ""
    if samples:
        measured = f"Sensitivities come from {count(samples, 'sample')}{recalled}. "
    yield (
        f"{measured}{count(tuned.conversions, 'converted model')} ran on all samples ({tuned.ran_on})."
        f" {count(tuned.units, 'computing node')} could be in low precision."
    )
    if tuned.exponents is not None:
        yield _exponents(tuned, tuned.exponents)
    if tuned.compensation is not None:
        yield _compensation(tuned, tuned.compensation)
    if tuned.room is not None:
        yield _room(tuned, tuned.room)
    if tuned.coarse:
        yield (
            "The model rounds values to integers, so any other rounding may move its outputs. The default tolerance"
            f" therefore allows {number(tuned.coarse)} more; --tolerance X allows exactly X."
        )
    if tuned.stopped:
        yield "The search reached its time limit: --search-time SECONDS raises it."
    if tuned.noise:
        yield f"Run twice, the float32 model differs from itself by {tuned.noise:.2g}."
    if tuned.device_noise is not None:
        yield f"In float32, {tuned.ran_on} differs from the CPU by {error_text(tuned, tuned.device_noise)}."
    never = len(tuned.unseen) + sum(row.why == "never run" for row in tuned.kept)
    if never:
        yield (
            f"No sample runs {count(never, 'node')}, so level O2 decides about them ({len(tuned.unseen):,} low), and their"
            " error is unknown. Add inputs that reach them."
        )


def _room(tuned: Tuned, room: float) -> str:
    """Return the bound on the time that a better choice within the tolerance could save."""
    written = tuned.candidates[tuned.chosen]
    if not any(candidate.time < written.time for candidate in tuned.candidates):
        return "No candidate is faster than the written one, regardless of its error."
    return (
        "By the errors of the faster candidates, using the rest of the tolerance would save at most"
        f" {percent(room, 1.0)} of the time."
    )


def _exponents(tuned: Tuned, effect: Exponents) -> str:
    """Say whether exponents are used, and what they save."""
    what = f"{count(effect.values, 'value')} can be stored as multiples of powers of two so that they do not overflow"
    if effect.other is None:
        return f"{what}: with these exponents, all nodes can be in low precision (--no-rescale leaves them out)."
    with_them, without = _ways(tuned, effect)
    verdict = "used" if effect.used else "not used"
    return f"{what}. These exponents are {verdict}: with them {with_them}; without {without}."


def _compensation(tuned: Tuned, effect: CompensationEffect) -> str:
    """Say whether weights are rounded with compensation, and what that saves or why it was not tried."""
    if effect.other is None:
        asked = " --rounding compensated requests it." if effect.share else ""
        return f"Weights are rounded to nearest, not with compensation: {effect.why}.{asked}"
    with_it, without = _ways(tuned, effect)
    ways = [f"with compensation: {with_it}", f"to nearest: {without}"]
    way, left = ways if effect.used else reversed(ways)
    return f"Weights are rounded {way}; {left}."


def _ways(tuned: Tuned, effect: Exponents | CompensationEffect) -> list[str]:
    """Return the choices with and without a method, in this order."""
    assert effect.other is not None
    error = tuned.error if effect.error is None else effect.error
    ways = [(tuned.candidates[tuned.chosen], tuned.error), (effect.other, error)]
    return [
        f"{time_text(way.time)}, {count(way.casts, 'Cast')}, error {error_text(tuned, reached)}"
        for way, reached in (ways if effect.used else reversed(ways))
    ]


def error_text(tuned: Tuned, error: float) -> str:
    """Return an error as people read it; for the signal-to-noise ratio, in dB."""
    if tuned.metric != "snr":
        return number(error)
    if not error:
        return "∞ dB"
    return f"{-20 * log10(error):.1f} dB" if error < inf else "−∞ dB"


def tolerance_text(tuned: Tuned) -> str:
    """Return the tolerance as it was given; for the signal-to-noise ratio, in dB."""
    if tuned.metric == "snr":
        return f"{error_text(tuned, tuned.tolerance)} or more"
    return f"{tuned.tolerance:g} or less"


def speedup_text(before: float, after: float) -> str:
    """Return how many times as fast a model is, given its times."""
    return f"{before / after:.2f}×" if after else "–"


def measured_error(tuned: Tuned, position: int) -> float | None:
    """Return the error of a candidate; None if it is only predicted.

    The error of the written candidate is that of the result on all samples.
    """
    if position == tuned.chosen:
        return tuned.error
    return tuned.candidates[position].error


def known_error(tuned: Tuned, position: int) -> float:
    """Return the error of a candidate, or the predicted one."""
    measured = measured_error(tuned, position)
    return tuned.candidates[position].predicted if measured is None else measured


def _verdict(tuned: Tuned) -> Headline:
    written = tuned.candidates[tuned.chosen]
    verb = "is" if written.verified else "is expected to be"
    text = f"{tuned.metric} {verb} {error_text(tuned, tuned.error)}; the tolerance is {tolerance_text(tuned)}."
    if not tuned.held:
        sentence = "The result does not meet the tolerance."
        return Headline(Status.FAILED, sentence, (text,))
    if not written.nodes:
        return _unconverted(tuned, text)
    share = percent(written.bytes, 1.0)
    sentence = f"The tolerance is met with {share} of the float traffic in {tuned.plan.dtype}."
    details = (text, _slower(tuned, written)) if tuned.is_slower else (text,)
    return Headline(Status.PASSED, sentence, details)


def _slower(tuned: Tuned, candidate: Candidate) -> str:
    """Say that a candidate is slower than float32, why, and what can be done."""
    float32 = tuned.candidates[-1]
    share = 1 - candidate.weights / float32.weights if float32.weights else 0.0
    text = (
        f"By the estimate, {count(candidate.nodes, 'node')} in {tuned.plan.dtype} take {time_text(candidate.time)} with"
        f" {count(candidate.casts, 'Cast')}, {percent(candidate.time - float32.time, float32.time)} longer than float32"
        f" ({time_text(float32.time)}), for weights that are {percent(share, 1) if share > 0 else 'no'} smaller"
    )
    if candidate not in tuned.candidates:
        return f"{text}. --allow-slower converts them anyway."
    return f"{text}. --pick {len(tuned.candidates) - 1} keeps everything in float32."


def _unconverted(tuned: Tuned, text: str) -> Headline:
    """Return the verdict if everything stays in float32: whether that was picked, or why, and what would change it."""
    sentence = (
        "Nothing was converted: no node gains from low precision within the tolerance."
    )
    details = [_missing(tuned), text]
    # Times of whole models, where they were measured, say more than estimates.
    timed = dict(tuned.timed)
    if timed.get("result"):
        lead = f"{percent(timed['result'] - timed['float32'], timed['float32'])} longer than float32"
        sentence = "No candidate is faster: the model stays as it is."
        details = [
            f"Timed as whole models, the candidate takes {lead}. {_LARGER}",
            text,
        ]
    elif any(_is_low_enough(tuned, candidate) for candidate in tuned.candidates):
        sentence = f"Nothing was converted: candidate {tuned.chosen} keeps everything in float32."
        details = [text]
    elif tuned.rejected is not None:
        sentence = "No candidate is faster by the estimate: the model stays as it is."
        details = [_ANYWAY, _slower(tuned, tuned.rejected), text]
    return Headline(Status.NO_GAIN, sentence, tuple(details))


def _missing(tuned: Tuned) -> str:
    """Return what would have to change for a gain: the tolerance, or the model."""
    float32 = tuned.candidates[-1]
    faster = [
        candidate
        for candidate in tuned.candidates
        if candidate.time * _GAIN < float32.time
    ]
    if not faster:
        return f"By the estimate, no tolerance gains as much as 1 %. {_LARGER}"
    least = min(faster, key=attrgetter("best_known_error"))
    gain = speedup_text(float32.time, least.time)
    error = least.best_known_error
    reached = f"{tuned.metric} {error_text(tuned, error)}"
    given = f"The tolerance is {tolerance_text(tuned)}."
    if error == inf or (tuned.metric in METRICS and error >= _RUINED):
        return f"{given} By the estimate, every faster candidate ruins the outputs ({reached})."
    return (
        f"{given} By the estimate, {gain} is possible with {reached}:"
        f" try --tolerance {_accepting(tuned.metric, error)}."
    )


def _accepting(metric: str, error: float) -> str:
    """Return a tolerance of two digits that accepts an error."""
    if metric == "snr":
        return f"{floor(-200 * log10(error)) / 10:.1f}"
    unit = 10.0 ** (floor(log10(error)) - 1)
    return f"{ceil(error / unit) * unit:.2g}"


_RUINED: Final = 1.0
"""The error of a metric from which nothing is left of the outputs: no tolerance is proposed that accepts it."""
_GAIN: Final = 1.005
"""The speed-up from which another tolerance is proposed: what rounds to 1.00 gains nothing."""
_LARGER: Final = (
    "With larger inputs, such as a larger batch, low precision gains more."
)
_ANYWAY: Final = (
    "With larger inputs, such as a larger batch, low precision gains more. --allow-slower takes it anyway, for smaller"
    " weights."
)


def _is_low_enough(tuned: Tuned, candidate: Candidate) -> bool:
    """Return whether a candidate lowers something, and meets the tolerance by what is known."""
    return bool(candidate.nodes) and candidate.best_known_error <= tuned.tolerance


def _figures(tuned: Tuned) -> tuple[Figure, ...]:
    wanted = f"tolerance {tolerance_text(tuned)}"
    error = error_text(tuned, tuned.error)
    faster = speedup_text(
        tuned.candidates[-1].time, tuned.candidates[tuned.chosen].time
    )
    return (
        Figure(tuned.metric, error, wanted, f"{tuned.metric} {error}"),
        Figure("speed-up", faster, f"{tuned.times}", f"speed-up {faster}"),
    )


def _notes(tuned: Tuned, state: Path | None) -> Iterator[Statement]:
    """Yield notes about the candidates."""
    yield hint(f"Times are {tuned.times}.")
    if tuned.timed:
        each = ", ".join(
            f"{name} {seconds * 1e3:.3f} ms" for name, seconds in tuned.timed
        )
        yield hint(f"Times of whole models on {tuned.ran_on}: {each}.")
    if any(
        candidate.nodes and not candidate.verified for candidate in tuned.candidates
    ):
        yield hint(_EXPECTED)
    if len(tuned.candidates) > 1:
        free = "" if state else "; with --state FILE, without measuring again"
        yield hint(f"--pick K writes candidate K instead{free}.")


def _candidates(tuned: Tuned) -> Table:
    numbered = enumerate(tuned.candidates)
    return table("candidates", (_candidate(tuned, k, one) for k, one in numbered))


def _candidate(tuned: Tuned, position: int, candidate: Candidate) -> TableRow:
    measured = measured_error(tuned, position)
    is_chosen = position == tuned.chosen
    about = "" if candidate.verified else "≈ "
    cells = (
        str(position),
        time_text(candidate.time),
        speedup_text(tuned.candidates[-1].time, candidate.time),
        "" if measured is None else about + error_text(tuned, measured),
        error_text(tuned, candidate.predicted),
        f"{len(candidate.low):,}",
        f"{candidate.casts:,}",
        percent(candidate.flops, 1.0),
        percent(candidate.bytes, 1.0),
        size(candidate.weights),
        "← written" if is_chosen else "",
    )
    return TableRow(
        cells,
        Status.of(known_error(tuned, position) <= tuned.tolerance),
        is_strong=is_chosen,
    )


def _kept(tuned: Tuned) -> Iterator[Part]:
    """Yield the nodes that stay in float32, by reason."""
    for why, times in Counter(row.why for row in tuned.kept).most_common():
        mine = [row for row in tuned.kept if row.why == why]
        text = f"{_WHY[why]}: {tally((row.op for row in mine), _OPS)}."
        yield Statement(text, label=count(times, "node"), members=detailed(mine))
    nodes = {
        (row.scope, row.node): row
        for row in tuned.plan.rows
        if row.op not in CONSTANTS
    }
    reasons = Counter(row.reason for row in nodes.values() if not row.low)
    # Hazards that samples show were measured, and have another reason then.
    unmeasured = {Reason.NO_KERNEL.value, *(kind.value for kind in kinds())}
    for reason, times in reasons.most_common():
        if reason in unmeasured:
            text = as_sentence(f"{title_of(reason)}, as at other levels")
            yield Statement(text, label=count(times, "node"))


def tuning_facts(
    conversion: Conversion, tuned: Tuned, compared: DiffReport | None = None
) -> dict[str, Any]:
    """Return a conversion in JSON's types, with its tuning, and a comparison that did not decide about the result."""
    facts = as_data(tuned)
    del facts["plan"]
    for row, candidate in zip(facts["candidates"], tuned.candidates, strict=True):
        row["low"] = sorted(candidate.low)
    verdict = Status.of(tuned.held)
    judged = {"verdict": verdict, "tuning": facts, "comparison": compared}
    return conversion_data(conversion) | judged
