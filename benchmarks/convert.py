"""onnxamp beside other converters to float16: the same models, in the same run, each in its own process.

python benchmarks/convert.py [--check] [--quick] [--runs N] [--limit SECONDS] [--models NAME ...] [--tools NAME ...]

benchmarks/README.md says what is measured and how to read it. Writes benchmarks/results/convert.json, the README's
table and docs/benchmark.svg. --update measures the tools of --tools alone, and keeps the figures of the others.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import checks
import comparison
import picture
import worker
from measure import engine_commit, machine, warm, watched
from subjects import FULL, QUICK, Spec
from tools import ROOT, TOOLS, Tool, interpreter

HERE = Path(__file__).resolve().parent
COPY = "cp"
"""Stands among the tools where weights lie in a data file: copying that file."""


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small models, one run, tools that this Python has")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a promise is not kept")
    parser.add_argument("--runs", type=int, help="runs of each tool on each model [3; 1 with --quick]")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds that a run may take [120]")
    parser.add_argument("--memory", type=float, default=16.0, help="GB of anonymous memory that a run may take [16]")
    parser.add_argument("--models", nargs="+", choices=[spec.name for spec in FULL], help="only these")
    parser.add_argument("--tools", nargs="+", choices=[tool.name for tool in TOOLS], help="only these")
    parser.add_argument("--update", action="store_true", help="put these tools' figures among those that are kept")
    parser.add_argument("--out", type=Path, help="where the JSON goes [benchmarks/results/convert.json]")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onnxamp-benchmarks"
    parser.add_argument("--cache", type=Path, default=cache, help="where models and environments are kept")
    return parser.parse_args(arguments)


def pythons(tools: Sequence[Tool], folder: Path, *, quick: bool) -> tuple[dict[str, Path], dict[str, str]]:
    """The interpreter of each tool, and why there is none."""
    found, missing = {}, {}
    for tool in tools:
        if quick:
            found |= {tool.name: Path(sys.executable)} if tool.shares else {}
            continue
        try:
            found[tool.name] = interpreter(tool, folder)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            missing[tool.name] = str(error)
    return found, missing


def environment(python: Path) -> dict[str, str]:
    """What a tool's process sees: no modules from elsewhere, and no network."""
    kept = dict(os.environ) | {"HF_HUB_OFFLINE": "1"}
    if python != Path(sys.executable):
        kept.pop("PYTHONPATH", None)
    return kept


def run_once(tool: str, python: Path | None, spec: Spec, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One conversion. The result stays in the folder "result" beside the cached models."""
    folder = options.cache / "result"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    target = folder / "model.onnx"
    for path in source.parent.iterdir():
        warm(path)
    os.sync()  # what the run before has written does not slow this one down
    limits = {"limit": options.limit, "memory": int(options.memory * 1e9)}
    if python is None:
        start = time.perf_counter()
        subprocess.run(["cp", str(source.with_suffix(".data")), str(folder)], check=True)  # noqa: S607
        seconds = time.perf_counter() - start
        return {"tool": tool, "model": spec.name, "seconds": seconds, "process": seconds}
    facts = json.dumps({"external": spec.external, "blocked": sorted(black_list()) if spec.blocked else []})
    command = [str(python), str(HERE / "worker.py"), tool, str(source), str(target), facts]
    found = watched(command, environment=environment(python), **limits)
    return {"tool": tool, "model": spec.name, **found}


def black_list() -> frozenset[str]:
    from onnxamp import get_black_list  # noqa: PLC0415 - "--help" shall be quick

    return frozenset(get_black_list("conservative"))


def measured(
    specs: Sequence[Spec], found: Mapping[str, Path], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """All runs, interleaved: each round takes each model with each tool. A run that failed is not repeated."""
    runs: list[dict[str, Any]] = []
    verdicts: dict[str, dict[str, Any]] = {}
    for number in range(options.runs or (1 if options.quick else 3)):
        for spec in specs:
            source = spec.file(options.cache / "models")
            tools: dict[str, Path | None] = {**({COPY: None} if spec.external else {}), **found}
            for tool, python in tools.items():
                key = f"{spec.name} {tool}"
                if any(f"{run['model']} {run['tool']}" == key and "failure" in run for run in runs):
                    continue
                runs.append(run_once(tool, python, spec, source, options))
                tell(runs[-1], number)
                if key not in verdicts and tool != COPY and "failure" not in runs[-1]:
                    verdicts[key] = judged(source, options)
    shutil.rmtree(options.cache / "result", ignore_errors=True)
    return runs, verdicts


def judged(source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """What the result that was just written is worth."""
    command = [sys.executable, str(HERE / "judge.py"), str(source), str(options.cache / "result" / "model.onnx")]
    return watched(command, limit=10 * options.limit, memory=int(options.memory * 1e9), environment=os.environ)


def tell(run: Mapping[str, Any], number: int) -> None:
    said = run.get("failure") or f"{run['seconds']:.2f} s, {(run.get('anonymous') or 0) / 1e6:.0f} MB anonymous"
    sys.stderr.write(f"round {number + 1}  {run['model']:10} {run['tool']:21} {said}\n")
    sys.stderr.flush()


def summaries(
    specs: Sequence[Spec], runs: Sequence[Mapping[str, Any]], verdicts: Mapping[str, Mapping[str, Any]], cache: Path
) -> list[dict[str, Any]]:
    """Per model: its size, and each tool's medians, spread, verdict, and how many times slower it is than onnxamp."""
    rows = []
    for spec in specs:
        source = spec.file(cache / "models")
        tools: dict[str, dict[str, Any]] = {}
        for tool in dict.fromkeys(run["tool"] for run in runs if run["model"] == spec.name):
            own = [run for run in runs if (run["model"], run["tool"]) == (spec.name, tool)]
            tools[tool] = summary(own, verdicts.get(f"{spec.name} {tool}", {}))
        files = list(source.parent.iterdir())
        rows.append({
            "model": spec.name, "title": spec.title, "nodes": nodes_of(source), "sizes": spec.sizes,
            "bytes": sum(path.stat().st_size for path in files), "external": spec.external, "blocked": spec.blocked,
            "tools": times_ours(tools),
        })  # fmt: skip
    return rows


def summary(runs: Sequence[Mapping[str, Any]], verdict: Mapping[str, Any]) -> dict[str, Any]:
    """Medians of a tool's runs on a model; only "failure" where it gave no result."""
    failure = next((run["failure"] for run in runs if "failure" in run), None)
    if failure:
        return {"failure": failure, "anonymous": max((run.get("anonymous") or 0 for run in runs), default=0)}
    facts: dict[str, Any] = {"runs": len(runs)}
    for name in ("seconds", "process", "peak", "anonymous"):
        values = [run[name] for run in runs if run.get(name) is not None]
        if values:
            facts[name] = statistics.median(values)
            facts[f"{name}_spread"] = [min(values), max(values)]
    kept = ("casts_added", "bytes", "loads", "error", "ran_on", "verdict")
    not_judged = {"verdict": verdict["failure"]} if "failure" in verdict else {}
    return facts | {name: verdict[name] for name in kept if name in verdict} | not_judged


def updated(kept: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, Any]:
    """The figures that are kept, with those of the tools that were measured now; "machine" must be the same."""
    if kept["machine"]["processor"] != facts["machine"]["processor"]:
        raise SystemExit(f"The other figures are from a {kept['machine']['processor']}: measure all of them here.")
    now = set(facts["tools"])
    new = {row["model"]: row for row in facts["models"]}
    rows = [{**row, "tools": times_ours({**row["tools"], **new[row["model"]]["tools"]})} for row in kept["models"]]
    return {
        **kept,
        "versions": {**kept["versions"], **facts["versions"]},
        "tools": {**kept["tools"], **facts["tools"]},
        "models": rows,
        "runs": [run for run in kept["runs"] if run["tool"] not in now] + facts["runs"],
    }


def times_ours(tools: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How many times as long as onnxamp each tool takes, put among its facts."""
    ours = tools.get("onnxamp", {}).get("seconds")
    return {
        name: {**facts, "times_onnxamp": facts["seconds"] / ours} if ours and facts.get("seconds") else facts
        for name, facts in tools.items()
    }


def nodes_of(path: Path) -> int:
    import onnx  # noqa: PLC0415

    return len(onnx.load(path, load_external_data=False).graph.node)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    specs = [spec for spec in (QUICK if options.quick else FULL) if not options.models or spec.name in options.models]
    tools = [tool for tool in TOOLS if not options.tools or tool.name in options.tools]
    found, missing = pythons(tools, options.cache / "environments", quick=options.quick)
    runs, verdicts = measured(specs, found, options)
    versions = {run["tool"]: run["versions"] for run in runs if "versions" in run}
    when, commit = datetime.now(UTC).isoformat(timespec="seconds"), engine_commit()
    facts = {
        "machine": machine(), "versions": versions,
        "judged_with": worker.versions(),
        "limit": options.limit, "memory_limit": options.memory * 1e9, "black_list": sorted(black_list()),
        "tools": {tool.name: {"title": tool.title, "calls": tool.calls, "needs": tool.needs, "when": when,
                              **({"commit": commit} if tool.name == "onnxamp" else {})} for tool in tools},
        "not_available": missing, "models": summaries(specs, runs, verdicts, options.cache),
        "runs": [{name: item for name, item in run.items() if name != "versions"} for run in runs],
    }  # fmt: skip
    if options.update:
        facts = updated(json.loads(comparison.RESULTS.read_text(encoding="utf-8")), facts)
    whole = options.update or not (options.quick or options.models or options.tools or options.out)
    out = options.out or (comparison.RESULTS if whole else None)
    if out:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(facts, indent=1).replace(str(ROOT), ".") + "\n", encoding="utf-8")
    if whole:
        (ROOT / "docs" / "benchmark.svg").write_text(picture.draw(facts), encoding="utf-8")
        comparison.main([])
    sys.stdout.write(picture.table(facts))
    broken = checks.broken(facts, whole=not options.quick) if options.check else []
    for text in broken:
        sys.stdout.write(f"BROKEN: {text}\n")
    if broken:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
