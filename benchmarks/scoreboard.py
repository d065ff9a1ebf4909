"""What onnxamp and three other converters make of models that anyone can get.

    python benchmarks/scoreboard.py    all models, all tools; writes the results and the page
    python benchmarks/scoreboard.py --models mel --tools onnxamp    one cell, printed
    python benchmarks/scoreboard.py --page    write the page from the results that are kept

The models come from wheels on PyPI, and from exports with random weights (scoreboard.toml). Each tool converts as its
documentation shows first, in an environment and a process of its own. A cell says whether it converts, opens in ONNX
Runtime, and is right, with float16 emulated on random inputs, as convert.py judges it. Writes
benchmarks/results/scoreboard.json and docs/explain/scoreboard.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import worker
from convert import environment
from measure import engine_commit, machine, watched
from tools import ROOT, TOOLS, Tool, interpreter

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "scoreboard.json"
PAGE = ROOT / "docs" / "explain" / "scoreboard.md"
EXPORTER = Tool(
    "exports",
    "exports",
    ("torch==2.13.0", "timm==1.0.31", "transformers==5.24.0", "onnx", "onnxscript"),
    "torch.onnx.export",
)
"""The environment that exports networks."""
CALLS = {"onnxamp": "onnxamp_validated"}
"""What worker.py calls, where it is not the tool's own name: onnxamp as its README shows it."""
VERSIONS = ("onnxruntime", "onnxconverter-common", "nvidia-modelopt")
SECONDS, MEMORY = 300.0, 16e9
"""What a conversion may take, and what its judgement may."""
REASON = 300
"""Characters of a reason on the page."""


def subjects() -> dict[str, dict[str, Any]]:
    """The models by name, as scoreboard.toml has them."""
    with (HERE / "scoreboard.toml").open("rb") as file:
        groups = tomllib.load(file)
    return {row["name"]: row for group in ("wheels", "exports") for row in groups[group]}


def source(row: Mapping[str, Any], cache: Path) -> Path:
    """The file of a model in the cache, which is got where it is missing."""
    path = cache / "scoreboard" / row["name"] / "model.onnx"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        if "package" in row:
            unpack(row["package"], row["member"], path)
        else:
            code = [
                str(interpreter(EXPORTER, cache / "environments")),
                str(HERE / "scoreboard_exports.py"),
                row["name"],
                str(path),
            ]
            subprocess.run(code, check=True)
    return path


def unpack(package: str, member: str, path: Path) -> None:
    """Copy a file out of a wheel."""
    wheels = path.parent / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(wheels), package], check=True)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path.write_bytes(archive.read(member))
    shutil.rmtree(wheels)


def cell(tool: str, python: Path, original: Path, cache: Path) -> dict[str, Any]:
    """Return the time and memory that a tool takes for a model, and the verdict on its result; or why it gives none."""
    folder = cache / "result"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    result = folder / "model.onnx"
    facts = json.dumps({"external": False, "blocked": []})
    command = [str(python), str(HERE / "worker.py"), CALLS.get(tool, tool), str(original), str(result), facts]
    done = watched(command, limit=SECONDS, memory=int(MEMORY), environment=environment(python))
    if "failure" in done:
        return {"failure": done["failure"], "anonymous": done.get("anonymous")}
    judge = [sys.executable, str(HERE / "judge.py"), str(original), str(result)]
    verdict = watched(judge, limit=SECONDS, memory=int(MEMORY), environment=os.environ)
    if "failure" in verdict:
        verdict = {"loads": True, "error": None, "verdict": verdict["failure"]}
    kept = ("casts_added", "bytes", "loads", "error", "verdict")
    return {
        "seconds": done["seconds"],
        "cpu": done["cpu"],
        "peak": done["peak"],
        "versions": done["versions"],
        **{name: verdict.get(name) for name in kept},
    }


def is_unchanged(found: Mapping[str, Any], size: int) -> bool:
    """Return whether the result is the original, because no conversion was within the limits."""
    return found["error"] == 0 and found["bytes"] > 0.99 * size


def shown(found: Mapping[str, Any], size: int) -> str:
    """A cell in a few words: a sign, and error, Casts, processor time and size; or what is wrong, or kept."""
    if "failure" in found:
        return "✘ no result"
    if not found["loads"]:
        return "✘ does not open"
    if is_unchanged(found, size):
        return f"= stays in float32, {found['cpu']:.1f} s"
    took = f"{found['cpu']:.1f} s, {found['bytes'] / size:.0%}"
    if found["verdict"] != "within limits":
        return f"✘ wrong, {took}"
    return f"✔ {found['error']:.1g}, {found['casts_added']:+} Casts, {took}"


def reason(found: Mapping[str, Any]) -> str:
    """Why a cell is no success, in a sentence; "" if it is one."""
    if "failure" in found:
        return str(found["failure"])
    return "" if found["loads"] and found["verdict"] == "within limits" else str(found["verdict"])


INTRODUCTION = """# Scoreboard

This page shows what onnxamp and three other converters make of models that anyone can get: files in wheels on PyPI,
and exports of timm and Transformers with random weights. Each tool converts to float16 as its documentation shows
first; onnxamp validates its result then, and its time includes that. A cell links to its command and, if something is
wrong, to the reason.

✔ means that the result opens in ONNX Runtime, and that its outputs match those of the original on random inputs, with
float16 emulated. The figures are the largest relative L2 error, the added Casts, the processor time, and the size of
the file against the original's. = means that onnxamp found no conversion within its limits and wrote the original.
"""


def page(facts: Mapping[str, Any]) -> str:
    """The page: a table whose cells link to their command and reason, which follow model by model."""
    titles = {name: tool["title"] for name, tool in facts["tools"].items()}
    lines = [INTRODUCTION, f"| model | {' | '.join(titles.values())} |", "|---" * (len(titles) + 1) + "|"]
    for row in facts["models"]:
        cells = (f"[{shown(row['tools'][tool], row['bytes'])}](#{row['model']})" for tool in titles)
        lines.append(f"| {row['title']}, {row['bytes'] / 1e6:.1f} MB | {' | '.join(cells)} |")
    signs = {tool: [shown(row["tools"][tool], row["bytes"])[0] for row in facts["models"]] for tool in titles}
    good = ", ".join(f"{title} {signs[tool].count('✔')}" for tool, title in titles.items())
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    machine = facts["machine"]
    lines += [
        "",
        f"Converted and right, of {len(facts['models'])}: {good}.",
        "",
        f"Measured on {facts['when'][:10]} on an {machine['processor']} with {machine['cores']} cores: onnxamp at",
        f"{facts['commit']}, {versions}.",
        "`python benchmarks/scoreboard.py` writes this page.",
    ]
    for row in facts["models"]:
        lines += section(row, titles)
    return "\n".join(lines) + "\n"


def section(row: Mapping[str, Any], titles: Mapping[str, str]) -> list[str]:
    """The lines about a model: where it comes from, the commands of its cells, and what is wrong in them."""
    lines = ["", f"## {row['model']}", "", f"{row['title']}: {row['from']}.", "", "```sh"]
    lines += [f"python benchmarks/scoreboard.py --models {row['model']} --tools {tool}" for tool in titles]
    lines += ["```", ""]
    for tool, title in titles.items():
        why = " ".join(reason(row["tools"][tool]).split())
        if why:
            lines.append(f"* {title}: {why if len(why) <= REASON else why[:REASON] + ' ...'}")
    return lines if lines[-1] else lines[:-1]


def measured(rows: Sequence[Mapping[str, Any]], tools: Sequence[Tool], cache: Path) -> dict[str, Any]:
    """What tools make of models, printed cell by cell."""
    pythons = {tool.name: interpreter(tool, cache / "environments") for tool in tools}
    models = []
    for row in rows:
        path = source(row, cache)
        size = path.stat().st_size
        made: dict[str, Any] = {}
        for tool in tools:
            made[tool.name] = cell(tool.name, pythons[tool.name], path, cache)
            sys.stderr.write(
                f"{row['name']:14} {tool.name:21} {shown(made[tool.name], size)} {reason(made[tool.name])}\n"
            )
        origin = f"`{row['member']}` of {row['package']}" if "package" in row else "exported by torch.onnx"
        models.append({"model": row["name"], "title": row["title"], "from": origin, "bytes": size, "tools": made})
    found: dict[str, str] = {}
    for cells in (row["tools"] for row in models):
        for facts in cells.values():
            found |= {name: facts["versions"][name] for name in VERSIONS if name in facts.get("versions", ())}
    return {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": engine_commit(),
        "machine": machine(),
        "versions": found,
        "judged_with": worker.versions(),
        "tools": {tool.name: {"title": tool.title, "calls": tool.calls} for tool in tools},
        "models": models,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; the whole is written, and parts are printed."""
    rows = subjects()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", choices=list(rows), help="only these")
    parser.add_argument("--tools", nargs="+", choices=[tool.name for tool in TOOLS], help="only these")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "onnxamp-benchmarks"
    parser.add_argument("--page", action="store_true", help="only write the page from the results that are kept")
    parser.add_argument("--cache", type=Path, default=cache, help="where models and environments are kept")
    options = parser.parse_args(arguments)
    if not options.page:
        facts = measured(
            [rows[name] for name in options.models or rows],
            [tool for tool in TOOLS if not options.tools or tool.name in options.tools],
            options.cache,
        )
        if options.models or options.tools:
            return
        text = json.dumps(facts, indent=1).replace(str(ROOT), ".").replace(str(options.cache), "CACHE")
        RESULTS.write_text(text + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RESULTS.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
