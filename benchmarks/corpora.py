"""What the verdict knows of whole corpora: of many small models, each converted as the command does it, in one process.

A model counts by what its validation says: the float16 values and how many are proven, how close the others come to the
end of float16's range on samples and hard inputs, and what ``false_alarms.py`` says of the nodes in float32. Of models
with inputs that are known to be hard, the result is compared with the original on these as well.
"""

import gc
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from false_alarms import false_alarms, reason_of, samples_of
from measure import engine_commit
from verdict_sums import FLOAT16_MAX, MOST_LISTED, by_headroom, facts_of, unneeded

import onnxamp
from onnxamp._base.errors import OnnxAmpError
from onnxamp._job.writing import Conversion
from onnxamp._numerics.results import DiffReport
from onnxamp._numerics.unseen import rooms

ROOT = Path(__file__).resolve().parents[1]
SEED = 77
"""Of random inputs on which a result is judged whose model has none of its own."""
ALARM_SECONDS = 4.0
"""Processor seconds for the samples of a model of a corpus."""
SLOW = 10.0
"""Seconds from which on a model leaves gigabytes in cycles, which are collected at once."""

Facts = dict[str, Any]


class Subject(NamedTuple):
    """A model of a corpus.

    Attributes:
        name: its name.
        saved: writes it into a folder, if it is no file yet, and returns its path.
        options: what it is converted with.
        samples: the inputs that it is validated on, rather than random ones.
        revealing: the inputs that its result is judged on.
    """

    name: str
    saved: Callable[[Path], Path]
    options: Mapping[str, Any] = {}
    samples: Path | None = None
    revealing: Path | None = None


class Corpus(NamedTuple):
    """A number of models.

    Attributes:
        name: the name in the results.
        subjects: returns the models.
        is_judged: whether the result of each model is judged on other inputs, and listed by name.
    """

    name: str
    subjects: Callable[[], Iterable[Subject]]
    is_judged: bool = False


def corpora(shared: Path | None, cases: Path | None) -> Iterator[Corpus]:
    """Yield the corpora that are at hand.

    Args:
        shared: the models of tests/real_models.py, if they are there.
        cases: models that once broke, with inputs that show it.
    """
    yield Corpus("test corpus", test_corpus)
    if shared is not None:
        yield Corpus("real models", partial(real_models, shared))
    if cases is not None:
        yield Corpus("cases", partial(broken_once, cases), is_judged=True)


def test_corpus() -> Iterator[Subject]:
    """Yield the models of the repository and of onnx's tests, as scripts/compare_results.py converts them."""
    sys.path.insert(0, str(ROOT / "scripts"))
    from compare_results import REAL_MODELS, corpus  # noqa: PLC0415 - found on the line above

    real = {f"models/{path.stem}" for path in REAL_MODELS.glob("*.onnx")}  # a corpus of their own
    for source in corpus():
        if source.name not in real:
            yield Subject(source.name, partial(_written, source.data), source.options)


def _written(data: bytes, folder: Path) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(data)
    return path


def real_models(folder: Path) -> Iterator[Subject]:
    """Yield the models of a folder, each with its inputs."""
    for path in sorted(folder.glob("*.onnx")):
        yield Subject(path.stem, partial(_there, path), samples=_inputs_of(path))


def broken_once(folder: Path) -> Iterator[Subject]:
    """Yield models with options in a JSON file and, but for some, inputs that once broke the result."""
    for path in sorted(folder.glob("*.onnx")):
        words = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
        options = {word.removeprefix("--"): value for word, value in zip(words[::2], words[1::2], strict=True)}
        yield Subject(path.stem, partial(_there, path), options, revealing=_inputs_of(path))


def _there(path: Path, folder: Path) -> Path:
    del folder
    return path


def _inputs_of(path: Path) -> Path | None:
    inputs = path.with_suffix(".npz")
    return inputs if inputs.is_file() else None


def measured_corpus(corpus: Corpus, folder: Path, say: Callable[[str], None]) -> Facts:
    """Return the row of a corpus; ``say`` gets a line for each model."""
    rows = list[Facts]()
    with patch.object(rooms, MOST_LISTED, 1 << 30):
        for subject in corpus.subjects():
            start = time.monotonic()
            row = model_row(subject, folder, is_judged=corpus.is_judged)
            rows.append(row)
            say(json.dumps(row))
            if time.monotonic() - start > SLOW:
                gc.collect()
    return {"corpus": corpus.name, "commit": engine_commit(), **summed(rows)}


def model_row(subject: Subject, folder: Path, *, is_judged: bool) -> Facts:
    """Return what the validated conversion of a model comes to."""
    low = folder / "low.onnx"
    low.unlink(missing_ok=True)
    with warnings.catch_warnings(action="ignore"):
        try:
            path = subject.saved(folder)
            conversion = onnxamp.convert_file(path, low, samples=subject.samples, **subject.options)
        except OnnxAmpError as error:
            return {"model": subject.name, "refused": str(error)}
        row = {"model": subject.name, **_facts(conversion)}
        if conversion.validation is not None and conversion.validation.passed:
            row["false alarms"] = _alarms(path, low, conversion, subject.options)
        if is_judged:
            row["verdict"] = _verdict(subject, path, low, conversion)
    return row


def _facts(conversion: Conversion) -> Facts:
    """Return what a validation says of the range of values."""
    found = conversion.validation
    if found is None or found.skipped:
        return {"skipped": "" if found is None else found.skipped}
    return {
        "passed": found.passed,
        "values": found.proof.values if found.proof else 0,
        "proven": found.proof.proven if found.proof else 0,
        "headroom": _by_headroom(found),
        "repaired by stress alone": found.cure is not None and reason_of(found.cure.failure) == "stress",
        "not run": list(found.not_run),
    }


def _by_headroom(found: DiffReport) -> list[int]:
    rest = found.proof.values - found.proof.proven if found.proof else 0
    return by_headroom([room.found / FLOAT16_MAX for room in found.rooms], rest)


def _alarms(path: Path, low: Path, conversion: Conversion, options: Mapping[str, Any]) -> Facts:
    """Return the traffic, and what of it stays in float32 without need; or why that is not known."""
    found = conversion.validation
    assert found is not None
    cured = found.cure.nodes if found.cure else ()
    reason = reason_of(found.cure.failure) if found.cure else "samples"
    try:
        return false_alarms(path, low, ALARM_SECONDS, options=options, cured=cured, reason=reason)
    except OnnxAmpError as error:
        return {"fault": f"{type(error).__name__}: {error}"}


def _verdict(subject: Subject, path: Path, low: Path, conversion: Conversion) -> str:
    """Return what a result is on other inputs than those of its validation: right, wrong, or why it is not known."""
    samples = onnxamp.load_samples(subject.revealing) if subject.revealing else samples_of(path, 1, SEED)
    found = onnxamp.diff_models(path, low, samples, provider="cpu")
    if found.skipped:
        return f"unknown: {found.skipped}"
    if not found.passed:
        said = conversion.validation.not_run if conversion.validation else ()
        why = found.failure or " ".join(found.warnings)
        return f"wrong{', as the verdict says' if said else ''}: {why}"
    return "stays in float32" if found.lowest == "float32" else "right"


def summed(rows: Sequence[Facts]) -> Facts:
    """Return what the rows of the models of a corpus come to, and the names of those that are worth a look."""
    compared = [row for row in rows if "passed" in row]
    alarms = [row["false alarms"] for row in compared if "traffic" in row.get("false alarms", {})]
    return {
        **facts_of(compared),
        "models": len(rows),
        "compared": len(compared),
        "found by stress alone": [row["model"] for row in compared if _is_found_by_stress(row)],
        "false alarms": unneeded(alarms),
        "verdicts": {row["model"]: row["verdict"] for row in rows if "verdict" in row},
        "failed": [row["model"] for row in compared if not row["passed"]],
    }


def _is_found_by_stress(row: Facts) -> bool:
    """Return whether stress found a fault that no random sample shows."""
    kept = row.get("false alarms", {}).get("validation")
    return bool(row["repaired by stress alone"] and kept and not kept["fails"])
