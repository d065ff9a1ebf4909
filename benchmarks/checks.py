"""The promises that ``--check`` holds the figures to: ratios within one run, so that they mean the same everywhere."""

from collections.abc import Iterator, Mapping
from typing import Any

Facts = Mapping[str, Any]


def broken(facts: Facts, *, whole: bool) -> list[str]:
    """Each promise that is not kept, as a sentence; those of models that were not measured are left out.

    Small models (not ``whole``) are held to good results alone: they take no time.
    """
    models = {row["model"]: row for row in facts["models"]}
    rules = (_results, _bert, _stack, _scale, _large) if whole else (_results,)
    return [text for rule in rules for text in rule(models)]


def _results(models: Facts) -> Iterator[str]:
    for name, row in models.items():
        ours = row["tools"]["onnxamp"]
        if "failure" in ours:
            yield f"{name}: onnxamp gave no result: {ours['failure']}."
        elif not ours.get("loads") or ours.get("verdict") != "within limits":
            yield f"{name}: onnxamp's result does not load or is not within its limits: {ours.get('verdict')}."


def _bert(models: Facts) -> Iterator[str]:
    row = models.get("bert")
    if row is None or "seconds" not in row["tools"]["onnxamp"]:
        return
    peers = [facts["seconds"] for name, facts in _peers(row) if "seconds" in facts]
    ours = row["tools"]["onnxamp"]
    if peers and min(peers) < 5 * ours["seconds"]:
        times = min(peers) / ours["seconds"]
        yield f"bert: the fastest peer takes {times:.1f} times as long as onnxamp; 5 are promised."
    if ours.get("peak") and ours["peak"] > 2.5 * row["bytes"]:
        yield f"bert: the peak is {ours['peak'] / row['bytes']:.2f} times the file; 2.5 are promised."


def _stack(models: Facts) -> Iterator[str]:
    row = models.get("stack-50k")
    ours = row["tools"]["onnxamp"] if row else {}
    for name, facts in _peers(row) if row and "seconds" in ours else ():
        if facts.get("seconds", float("inf")) < ours["seconds"]:
            yield f"stack-50k: {name} is faster than onnxamp."
        if facts.get("casts_added", float("inf")) < ours["casts_added"]:
            yield f"stack-50k: {name} adds fewer Casts than onnxamp."


def _scale(models: Facts) -> Iterator[str]:
    ratio = scaling(models)
    if ratio is not None and ratio > 12:
        yield f"ten times the nodes take {ratio:.1f} times as long; at most 12 are promised."


def scaling(models: Facts) -> float | None:
    """How many times as long onnxamp takes for ten times the nodes."""
    times = [models[name]["tools"]["onnxamp"].get("seconds") for name in ("stack-5k", "stack-50k") if name in models]
    return times[1] / times[0] if len(times) == 2 and all(times) else None


def _large(models: Facts) -> Iterator[str]:
    row = models.get("large")
    if row is None or "seconds" not in row["tools"]["onnxamp"]:
        return
    ours, copy = row["tools"]["onnxamp"], row["tools"]["cp"]
    if ours["seconds"] > copy["seconds"]:
        yield f"large: onnxamp takes {ours['seconds'] / copy['seconds']:.2f} times as long as cp of the data file."
    if (ours.get("anonymous") or 0) > 512e6:
        yield f"large: {ours['anonymous'] / 1e6:.0f} MB of anonymous memory; 512 are promised."


def _peers(row: Facts) -> Iterator[tuple[str, Facts]]:
    yield from ((name, facts) for name, facts in row["tools"].items() if name not in ("onnxamp", "cp"))
