"""Overflow removed and overflow avoided: models whose values leave float16's range, converted in several ways.

python benchmarks/rescale.py [--real] [--on PLACE ...] [--cell S] [--limit S] [--jobs N] [--out FILE] [--check]
                             [MODEL ...]

"plain" is O3 as it is, "islands" is O3 with float32 wherever a value is out of range on the samples, "folded" is the
same with norms folded, and "rescaled" is O3 with exponents from the same samples. "small" is the same model with values
that fit anyway. --on says where they run: "emulated" on the CPU, and on a device that computes everything in float16
and whose overflow is NaN (float16_device.py); "cuda" and "webgpu", each converted for it, with the time. --real takes
models of real size, and writes benchmarks/results/rescale_real.json. Writes benchmarks/results/rescale.json and
docs/rescale.svg otherwise; --check fails where a promise is broken or not measured.

Everything that is measured is a process of its own, which --cell stops; --limit ends a model, in preparation and in
runs. The results are written anew after each, with what is missing and why. --jobs prepares all models at once, and
takes times afterwards.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf, nan
from os import environ
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any, Final

import onnxruntime
from measure import machine, watched
from overflowing import MODELS, REAL
from rescale_cells import TARGETS, WAYS, measure, needs, prepared, timed
from rescale_picture import draw

ROOT: Final = Path(__file__).parent.parent
CELLS: Final = Path(__file__).with_name("rescale_cells.py")
MOST_MEMORY: Final = 0.8
"""Share of the machine's memory that a cell may take."""

Facts = Mapping[str, Any]
Measure = Callable[[Path, str, str], dict[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A model that is measured.

    Attributes:
        name: of the model.
        places: where it runs.
        by: what measures a cell.
        folder: for its files.
        row: what is known of it, which grows.
    """

    name: str
    places: Sequence[str]
    by: Measure
    folder: Path
    row: dict[str, Any]

    def prepare(self, limit: float = inf, jobs: int = 1, told: Callable[[], None] = lambda: None) -> None:
        """Make, convert and emulate.

        Args:
            limit: seconds after which no cell is started.
            jobs: cells at a time.
            told: called after each cell.
        """
        start = time.perf_counter()
        for stage in prepared(self.places):
            with ThreadPoolExecutor(jobs) as pool:
                for _ in pool.map(lambda cell: self.add(cell, start, limit), stage):
                    told()

    def time(self, limit: float = inf, told: Callable[[], None] = lambda: None) -> None:
        """Run where times are taken; arguments as :meth:`prepare`."""
        start = time.perf_counter()
        for cell in timed(self.places):
            self.add(cell, start, limit)
            told()

    def add(self, cell: str, start: float, limit: float) -> None:
        """Measure a cell, or note why not."""
        lacking = [other for other in needs(cell) if other in self.row["missing"]]
        if lacking:
            found = {"failure": f"needs {lacking[0]!r}"}
        elif time.perf_counter() - start > limit:
            found = {"failure": f"not started: {limit:g} s were over"}
        else:
            found = self.by(self.folder, self.name, cell)
        with _ADDING:
            if why := found.pop("failure", None):
                self.row["missing"][cell] = why
            merge(self.row, found)


_ADDING: Final = Lock()
"""Held while rows grow and are written."""


def facts_of(name: str, places: Sequence[str] = ("emulated",), by: Measure = measure, **how: Any) -> dict[str, Any]:
    """All figures of one model; ``how`` as :meth:`Subject.prepare` takes it."""
    with tempfile.TemporaryDirectory(prefix="onnxamp-") as folder:
        subject = Subject(name, places, by, Path(folder), {"model": name, "missing": {}})
        subject.prepare(**how)
        subject.time(how.get("limit", inf))
    return subject.row


def merge(row: dict[str, Any], found: Facts) -> None:
    """Add what a cell found out to what is known."""
    for key, value in found.items():
        if isinstance(row.get(key), dict) and isinstance(value, Mapping):
            merge(row[key], value)
        else:
            row[key] = value


def apart(limit: float, jobs: int = 1) -> Measure:
    """Measures a cell in a process of its own, and stops it after so many seconds; ``jobs`` at a time."""
    room = Semaphore(jobs)

    def by(folder: Path, name: str, cell: str) -> dict[str, Any]:
        command = [sys.executable, str(CELLS), str(folder), name, cell]
        memory = int(machine()["memory"] * MOST_MEMORY)
        with room:
            found = watched(command, limit=limit, memory=memory, environment=environ)
        took, most = found.pop("process"), found.pop("anonymous")
        say(f"  {name:32}{cell:26}{took:7.1f} s {(most or 0) / 1e9:6.1f} GB  {found.get('failure', '')}")
        return found

    return by


def broken(facts: Facts) -> list[str]:
    """Each promise that a model breaks, as a sentence; of what was not measured, that it was not."""
    name, lacking = facts["model"], object()

    def of(*path: str) -> Any:
        found: Any = facts
        for key in path:
            found = found.get(key, lacking) if isinstance(found, Mapping) else lacking
        return found

    found = [f"{name}: {cell!r} was not measured: {why}." for cell, why in facts.get("missing", {}).items()]
    casts, most = of("rescaled", "casts"), of("islands", "casts")
    error, small = of("rescaled", "error"), of("small", "error")
    # Exponents leave room for inputs that are made to be hard, which costs the small numbers digits.
    checks = {
        "float32 islands are left": of("rescaled", "float32") in ([], lacking),
        "the error is more than three times that of values that fit": lacking in (error, small) or (
            None not in (error, small) and error <= 3 * small),
        "there are as many Casts as with islands": lacking in (casts, most) or casts < most,
        "float32 results differ": of("bits") is not False or "mel" in name,  # they may by a rounding behind a Log
        "NaN on a device that computes all in float16": of("rescaled", "device") is not None,
        "NaN or Inf on CUDA": of("rescaled", "cuda", "error") is not None,
        "NaN or Inf on WebGPU": of("rescaled", "webgpu", "error") is not None,
    }  # fmt: skip
    return found + [f"{name}: {text}." for text, holds in checks.items() if not holds]


def table(row: Facts) -> Iterator[str]:
    """The figures of a model, a line for each way."""
    bits = "" if "bits" not in row else ", float32 bits equal" if row["bits"] else ", float32 rounded differently"
    yield f"{row['model']}: {row.get('nodes', '?')} nodes{bits}"
    for way in ("float32", "tf32", *WAYS):
        one, text = row.get(way, {}), f"  {way:9}"
        if "casts" in one:
            text += f"{one['casts']:4} Casts {len(one['float32']):4} float32 nodes   about {one['estimate_us']:,.0f} µs"
        if "error" in one:
            text += f"   error {one['error'] or nan:.2e}   all in float16 {one['device'] or nan:.2e}"
        for place, title in (("cuda", "CUDA"), ("webgpu", "WebGPU")):
            if "error" in (seen := one.get(place, {})):
                text += f"   {title} {seen['error'] or nan:.2e}"
                text += f", {seen['milliseconds']:,.4g} ms" if "milliseconds" in seen else ""
                text += f", {seen['casts']} Casts" if "casts" in seen else ""
        if text.strip() != way:
            yield text


def written(rows: Sequence[Facts]) -> str:
    """The results as JSON, a figure of each model per line."""
    models = (",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in row.items()) for row in rows)
    body = ",\n".join(f" {{\n  {text}\n }}" for text in models)
    head = f'"machine": {json.dumps(machine())}, "onnxruntime": {json.dumps(onnxruntime.__version__)}'
    return f'{{{head}, "models": [\n{body}\n]}}\n'


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join((*MODELS, *REAL))}")
    parser.add_argument("--real", action="store_true", help="models of real size; it takes minutes and 5 GB of memory")
    parser.add_argument("--on", nargs="+", choices=list(TARGETS), default=["emulated"], metavar="PLACE",
                        help=f"where they run: {', '.join(TARGETS)} [emulated]")  # fmt: skip
    parser.add_argument("--cell", type=float, default=300.0, help="seconds that measuring one thing may take [300]")
    parser.add_argument(
        "--limit",
        type=float,
        default=1800.0,
        help="seconds after which a model starts nothing [1800]: in preparation, and in runs",
    )
    parser.add_argument("--jobs", type=int, default=1, help="prepare so many things and all models at once [1]")
    parser.add_argument("--out", type=Path, help="where the results go [benchmarks/results/rescale.json]")
    parser.add_argument("--check", action="store_true", help="fail if a promise is broken")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the results and the picture, and print a table."""
    given = options_of(arguments)
    usual = ROOT / "benchmarks" / "results" / ("rescale_real.json" if given.real else "rescale.json")
    out: Path | None = given.out or (None if given.models else usual)
    names, by = list(given.models or (REAL if given.real else MODELS)), apart(given.cell, given.jobs)
    rows = [{"model": name, "missing": {}} for name in names]

    def told() -> None:
        if out is not None:
            with _ADDING:
                write(out, written(rows))

    step = len(names) if given.jobs > 1 else 1
    for first in range(0, len(names), step):
        with tempfile.TemporaryDirectory(prefix="onnxamp-") as folder, ThreadPoolExecutor(step) as pool:
            subjects = []
            for number in range(first, first + step):
                subjects.append(Subject(names[number], given.on, by, Path(folder, str(number)), rows[number]))
                subjects[-1].folder.mkdir()
            list(pool.map(lambda subject: subject.prepare(given.limit, given.jobs, told), subjects))
            for subject in subjects:
                subject.time(given.limit, told)
                for line in table(subject.row):
                    say(line)
    if not given.models and given.out is None and not given.real and "emulated" in given.on:
        (ROOT / "docs" / "rescale.svg").write_text(draw(rows), encoding="utf-8")
    problems = [text for row in rows for text in broken(row)]
    for text in problems:
        say(f"BROKEN {text}")
    return int(bool(problems) and given.check)


def write(out: Path, text: str) -> None:
    """Write a file whole or not at all: whoever is stopped leaves the last results."""
    beside = out.with_name(f".{out.name}")
    beside.write_text(text)
    shutil.move(beside, out)


if __name__ == "__main__":
    sys.exit(main())
