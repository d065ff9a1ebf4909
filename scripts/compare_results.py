"""Compare the results of this checkout with those of another commit, byte for byte: a refactoring changes none.

    .venv/bin/python scripts/compare_results.py --against main

Both versions of the package convert the same models with the same options. Compared are the converted model, the plan,
warnings and errors; for a few models also what commands print, write and return. A line names each difference, and the
exit code is 1 if there is one.

By default each model is converted with a sample of the options that depends only on its name: about four minutes on one
core for each version. The results of a commit are kept in build/results, so that it is converted only once.
"""

import argparse
import faulthandler
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from itertools import chain, product, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import onnx
from onnx import ModelProto, TensorProto

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "results"
REAL_MODELS = Path(os.environ.get("ONNXAMP_REAL_MODELS") or ROOT.parent / "shared" / "models")
"""Real models that are not part of the repository, as in tests/real_models.py; there may be none."""

TIME_LIMIT = 300
"""Seconds after which a conversion or a command is ended, which counts as its result."""

TARGETS = sorted(path.parent.name for path in (ROOT / "onnxamp" / "_data" / "targets").glob("*/target.toml"))
SETTINGS: tuple[Mapping[str, Any], ...] = (
    *({"target": target} for target in TARGETS),
    *({"lists": lists} for lists in ("conservative", "fast", "mindspore")),
    {"strict": True},
    {"keep_io_types": False},
    {"fold": True},
    {"fold": False, "hazards": False},
    {"keep_functions": True, "freeze_defaults": True},
    {"opset": "keep"},
    {"split_k": False, "target": "webgpu"},
    {"from_dtype": "auto"},
    {"rescale": True},
    {"rounding": "compensated"},
    {"data_max": 10.0},
)
GRID = [
    {"level": "O0"},
    *({"level": level, "dtype": dtype, **settings}
      for settings, dtype, level in product(SETTINGS, ("float16", "bfloat16"), ("O2", "O1", "O3"))),
]  # fmt: skip
DEFAULT = {"level": "O2", "dtype": "float16", "target": "cuda"}

COMMANDS = (
    "convert model.onnx -o low.onnx",
    "convert model.onnx -o bfloat16.onnx --dtype bfloat16 --no-validate --format json",
    "convert model.onnx -o broken.onnx --level O3 --no-hazards --no-cure --target any",
    "inspect model.onnx --level O2 -v",
    "diff model.onnx low.onnx --layers",
    "check low.onnx --format json",
    "check missing.onnx",
)
COMMANDED = ("models/encoder", "models/recurrent", "graphs/rms_norm_pow")
"""Models that commands are given."""

Outcome = dict[str, str]
"""What a conversion came to: aspect -> text or digest."""


class Source(NamedTuple):
    """A model of the corpus."""

    name: str
    data: bytes
    options: Mapping[str, Any]
    """What the model is always converted with."""
    sampled: int
    """How many elements of GRID a sample takes."""


class Case(NamedTuple):
    """One thing to do with a model; ``options`` is None for the commands."""

    key: str
    path: str
    options: Mapping[str, Any] | None


def corpus() -> Iterator[Source]:
    """Yield the models of the repository, of the folder beside it, and of onnx's tests."""
    sys.path.insert(0, str(ROOT / "tests"))
    from graphs import CASES  # noqa: PLC0415 - found on the line above

    for name, case in CASES.items():
        yield Source(f"graphs/{name}", case.build().SerializeToString(), case.options, 16)
    for path in sorted((ROOT / "tests" / "golden").glob("*.txt")):
        _, options, text = path.read_text(encoding="utf-8").partition("----\n")[0].split("\n", 2)
        own = {name: value for name, value in json.loads(options).items() if name != "rule"}
        yield Source(f"golden/{path.stem}", onnx.parser.parse_model(text).SerializeToString(), own, 8)
    yield from files(sorted((ROOT / "models").rglob("*.onnx")), ROOT, 20)
    yield from files(sorted(REAL_MODELS.glob("*.onnx")), REAL_MODELS.parent, 12)
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    yield from files(sorted(data.glob("light/*.onnx")), data, 8)
    yield from files(
        [path for path in sorted(data.rglob("model.onnx")) if path.parent.name.startswith("test_")], data, 3
    )
    yield from node_tests()


def files(paths: list[Path], folder: Path, sampled: int) -> Iterator[Source]:
    """Yield models that are files below a folder."""
    for path in paths:
        yield Source(path.relative_to(folder).with_suffix("").as_posix(), path.read_bytes(), {}, sampled)


def node_tests() -> Iterator[Source]:
    """Yield onnx's tests of single nodes on floats, where the onnx package makes them instead of keeping files."""
    from onnx.backend.test.loader import load_model_tests  # noqa: PLC0415 - takes long

    with warnings.catch_warnings(action="ignore"):
        tests = load_model_tests(kind="node")
    for test in tests:
        types = [info.type.tensor_type.elem_type for info in test.model.graph.input] if test.model else []
        if TensorProto.FLOAT in types:
            yield Source(f"node/{test.name}", test.model.SerializeToString(deterministic=True), {}, 3)


def cases_of(source: Source, path: Path, everything: bool) -> Iterator[Case]:
    """Yield what is done with a model: its own options always, and a sample of the grid or all of it."""

    def rank(options: Mapping[str, Any]) -> int:
        return zlib.crc32(f"{source.name} {json.dumps(options, sort_keys=True)}".encode())

    name = f"{source.name}@{hashlib.sha256(source.data).hexdigest()[:8]}"
    grid = [{**source.options, **options} for options in GRID]
    sample = grid if everything else sorted(grid, key=rank)[: source.sampled]
    keys = {json.dumps(options, sort_keys=True): options for options in ({**DEFAULT, **source.options}, *sample)}
    yield from (Case(f"{name} {key}", str(path), options) for key, options in keys.items())
    if source.name in COMMANDED:
        yield Case(f"{name} {json.dumps(COMMANDS)}", str(path), None)


def convert(model: ModelProto, options: Mapping[str, Any]) -> Outcome:
    """Return what the installed package makes of a model."""
    outcome: Outcome = {}
    faulthandler.dump_traceback_later(TIME_LIMIT, exit=True)
    with warnings.catch_warnings(record=True, action="always") as caught:
        try:
            import onnxamp  # noqa: PLC0415 - that of one side or the other

            result = onnxamp.convert_model(model, **options)
            outcome["bytes"] = hashlib.sha256(result.SerializeToString(deterministic=True)).hexdigest()
            outcome["plan"] = hashlib.sha256(str(onnxamp.plan_model(model, **options)).encode()).hexdigest()
        except Exception as error:  # noqa: BLE001 - an error is a result like others
            outcome["error"] = normalized(f"{type(error).__name__}: {error}")
    faulthandler.cancel_dump_traceback_later()
    given = [f"{one.category.__name__}: {normalized(str(one.message))}" for one in caught]
    return {**outcome, "warnings": "\n".join(given)}


def command(path: Path) -> Outcome:
    """Return what commands print and write for a model, each in the folder that the ones before have filled."""
    outcome: Outcome = {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "model.onnx").write_bytes(path.read_bytes())
        for line in COMMANDS:
            words = [sys.executable, "-m", "onnxamp", *line.split()]
            done = subprocess.run(words, cwd=folder, capture_output=True, check=False, timeout=TIME_LIMIT)
            printed = (done.stdout + done.stderr).decode(errors="replace").replace(folder, "FOLDER")
            outcome[line] = f"exit code {done.returncode}\n{normalized(printed)}"
        for written in sorted(Path(folder).glob("*.onnx")):
            outcome[written.name] = hashlib.sha256(written.read_bytes()).hexdigest()
    return outcome


def normalized(text: str) -> str:
    """Return a text without addresses, temporary files and durations."""
    text = re.sub(r"\b0x[0-9a-f]+\b", "ADDRESS", text)
    text = re.sub(rf"{re.escape(tempfile.gettempdir())}/[\w./-]+", "FILE", text)
    return re.sub(r"\b\d+(\.\d+)? ?(s|ms|µs|min|seconds)\b", "TIME", text)


def work(jobs: Path, results: Path) -> None:
    """Do the cases of a file in this process, and append a line to the results for each."""
    path, model = "", ModelProto()
    with results.open("a", encoding="utf-8") as lines:
        for key, case_path, options in json.loads(jobs.read_text(encoding="utf-8")):
            if path != case_path:
                path, model = case_path, ModelProto.FromString(Path(case_path).read_bytes())
            outcome = command(Path(path)) if options is None else convert(model, options)
            print(json.dumps([key, outcome]), file=lines, flush=True)


def run_cases(tree: Path, cases: list[Case], scratch: Path) -> dict[str, Outcome]:
    """Return the outcomes of cases with the package in a tree; what a process dies of counts as an outcome."""
    jobs, results = scratch / "jobs.json", scratch / "results.jsonl"
    scratch.mkdir()
    results.touch()
    outcomes: dict[str, Outcome] = {}
    environment = {**os.environ, "PYTHONPATH": str(tree), "ONNXAMP_THREADS": "1", "COLUMNS": "140", "NO_COLOR": "1"}
    while waiting := [case for case in cases if case.key not in outcomes]:
        jobs.write_text(json.dumps(waiting), encoding="utf-8")
        child = [sys.executable, __file__, "--work", str(jobs), str(results)]
        done = subprocess.run(child, env=environment, capture_output=True, check=False)
        outcomes.update(json.loads(line) for line in results.read_text(encoding="utf-8").splitlines())
        if died := next((case for case in waiting if case.key not in outcomes), None):
            last_words = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
            outcomes[died.key] = {"error": f"the process died, exit code {done.returncode}: {last_words}"}
    return outcomes


def outcomes_of(tree: Path, cases: list[Case], jobs: int) -> dict[str, Outcome]:
    """Return the outcomes of all cases with the package in a tree, from several processes."""
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        shares = [cases[share::jobs] for share in range(jobs)]
        done = [pool.submit(run_cases, tree, share, Path(folder, str(n))) for n, share in enumerate(shares)]
        return dict(chain.from_iterable(one.result().items() for one in done))


def git(*arguments: str) -> str:
    """Return what git prints in this repository."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"git {arguments[0]}: {done.stderr.strip()}")
    return done.stdout.strip()


def outcomes_at(commit: str, cases: list[Case], jobs: int) -> dict[str, Outcome]:
    """Return the outcomes at a commit, and keep those that were not known yet."""
    store = RESULTS / f"{commit}.json"
    versions = {package: version(package) for package in ("onnx", "numpy", "protobuf")}
    stored = json.loads(store.read_text(encoding="utf-8")) if store.is_file() else {}
    known = stored["outcomes"] if stored.get("versions") == versions else {}
    if missing := [case for case in cases if case.key not in known]:
        with tempfile.TemporaryDirectory() as folder:
            git("worktree", "add", "--detach", folder, commit)
            try:
                known |= outcomes_of(Path(folder), missing, jobs)
            finally:
                git("worktree", "remove", "--force", folder)
        store.parent.mkdir(parents=True, exist_ok=True)
        store.write_text(json.dumps({"versions": versions, "outcomes": known}), encoding="utf-8")
    return {case.key: known[case.key] for case in cases}


def differences(before: Mapping[str, Outcome], after: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield a line for each aspect that differs, with the first line of text that does."""
    for key, outcome in after.items():
        for aspect in sorted(outcome.keys() | before[key].keys()):
            old, new = before[key].get(aspect, ""), outcome.get(aspect, "")
            if old != new:
                pairs = zip_longest(old.splitlines(), new.splitlines(), fillvalue="")
                was, now = next((pair for pair in pairs if pair[0] != pair[1]), (old, new))
                yield f"{key}: {aspect}: {was[:160]!r} became {now[:160]!r}"


def main(argv: list[str] | None = None) -> int:
    """Compare, and return 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", required=True, metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--all", action="store_true", help="convert every model with all options, which takes hours")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time [1]")
    parser.add_argument("--models", type=Path, nargs="+", metavar="FILE", help="take these instead of the corpus")
    parser.add_argument("--only", default="", metavar="REGEX", help="take models whose name matches")
    options = parser.parse_args(argv)
    given = [Source(path.stem, path.read_bytes(), {}, 16) for path in options.models or ()]
    sources = [source for source in given or corpus() if re.search(options.only, source.name)]
    with tempfile.TemporaryDirectory() as folder:
        cases: list[Case] = []
        for number, source in enumerate(sources):
            path = Path(folder, f"{number}.onnx")
            path.write_bytes(source.data)
            cases += cases_of(source, path, options.all)
        commit = git("rev-parse", "--verify", f"{options.against}^{{commit}}")
        before = outcomes_at(commit, cases, options.jobs)
        after = outcomes_of(ROOT, cases, options.jobs)
    found = list(differences(before, after))
    print(*found, sep="\n", end="\n" if found else "")
    errors = sum("error" in outcome for outcome in after.values())
    print(f"{len(sources)} models, {len(cases)} cases, {errors} of them errors: {len(found)} differences.")
    return 1 if found else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*map(Path, sys.argv[2:]))
    else:
        sys.exit(main())
