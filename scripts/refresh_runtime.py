"""Bring the tables up to a release of ONNX Runtime, and print what changed as an entry of the changelog.

    python3 scripts/refresh_runtime.py 1.32.0
    python3 scripts/refresh_runtime.py 1.32.0 --minutes 30    ask for half an hour what runs, not for ten minutes

Everything that asks ONNX Runtime runs here, each in an environment of its own under build/runtimes:

registries    its kernels (make_kernel_history.py), kept in scripts/registries; kernels.json and history.json follow
schemas       the ops of its own domains (make_schemas.py)
arithmetic    how the CPU computes float16 (ask_engine.py)
accumulators  which normalizations of the CPU sum up in float32 (ask_accumulators.py)
placement     kernels that are registered but fail (ask_runs.py); each line is a row for placement.toml
wrong         the tests of wrong kernels, of graph optimizers that break models, and of versions, with that release

The wheels onnxruntime and onnxruntime-gpu are released apart. Where the second is missing, the facts about CUDA stay
those of its newest release. The kernels of CUDA are listed without a GPU, with the stand-in for its libraries
(tests/standin), which needs a C compiler. docs/maintain/new-runtime.md says what is left to do by hand.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from bootstrap import ROOT, Environment, run
from make_kernel_history import REGISTRIES, Rows, history, minor, ordinal, read_releases, rows_of
from make_kernel_tables import PROVIDERS, TARGETS, dump_file, read_dumps, table

RUNTIMES = ROOT / "build" / "runtimes"
SCRIPTS = ROOT / "scripts"
SCHEMAS = ROOT / "onnxamp" / "_data" / "runtime_schemas.json"
ASKED_TESTS = (
    "tests/facts/test_wrong_kernels.py",
    "tests/rewrite/test_avoid_optimizers.py",
    "tests/facts/test_versions.py",
)
"""Tests whose rows name versions; with a new release, those fail that no longer hold."""
MINUTES = 10.0


class Change(NamedTuple):
    """How the kernels of one op differ between two releases; types by parameter, as in registries."""

    op: str
    gained: str
    lost: str


def environment(package: str, version: str, *requirements: str) -> Environment | None:
    """An environment with a release of a package and onnxamp, or None where the package index has no such release."""
    found = Environment(RUNTIMES / f"{package}-{version}")
    if not found.python.exists():
        found.create()
    pip = [str(found.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if subprocess.run([*pip, f"{package}=={version}"], check=False, capture_output=True).returncode:
        shutil.rmtree(found.path)
        return None
    run([*pip, "-e", str(ROOT), *requirements])
    return found


def dump(found: Environment, variables: Mapping[str, str] | None = None) -> None:
    """Add the registry of an environment's ONNX Runtime to scripts/registries."""
    command = [str(found.python), str(SCRIPTS / "make_kernel_history.py"), "--dump"]
    subprocess.run(command, check=True, env={**os.environ, **(variables or {})})


def dump_cuda(found: Environment) -> None:
    """Add the registries of the CPU and of CUDA, with the stand-in for CUDA's libraries."""
    with tempfile.TemporaryDirectory() as folder:
        build = ROOT / "tests" / "standin" / "build.py"
        run([str(found.python), str(build), folder, "--tensorrt"])
        dump(found, {"LD_LIBRARY_PATH": folder})


def forget_older_patches(version: str) -> None:
    """Remove the registries of older patches of a release: the history knows one of each."""
    for path in REGISTRIES.iterdir():
        if path.name != version and minor(path.name) == minor(version):
            shutil.rmtree(path)


def write_tables() -> None:
    """Write kernels.json and history.json of each target from the registries."""
    releases = read_releases(REGISTRIES)
    for name in PROVIDERS:
        dumps = {release: found[name] for release, found in releases.items() if name in found}
        newest = max(dumps, key=ordinal)
        (TARGETS / name / "kernels.json").write_text(table(dumps[newest]), encoding="utf-8", newline="\n")
        (TARGETS / name / "history.json").write_text(history(dumps), encoding="utf-8", newline="\n")


def changes(old: Mapping[str, Rows], new: Mapping[str, Rows]) -> Iterator[Change]:
    """The ops whose kernels differ, by name."""
    for op in sorted({*old, *new}):
        before, after = accepted(old.get(op, [])), accepted(new.get(op, []))
        if before != after:
            yield Change(op, gained=_listed(after - before), lost=_listed(before - after))


def accepted(rows: Rows) -> set[tuple[int, str, str]]:
    """First opset, type parameter and type of all that the kernels of an op accept."""
    return {
        (since, parameter, kind)
        for since, _, types in rows
        for parameter, kinds in (types or {"": [""]}).items()
        for kind in kinds
    }


def _listed(found: set[tuple[int, str, str]]) -> str:
    """Types by opset and parameter, in one line: "13 T: bfloat16, float16"."""
    groups: dict[tuple[int, str], list[str]] = {}
    for since, parameter, kind in sorted(found):
        groups.setdefault((since, parameter), []).append(kind.removeprefix("tensor(").removesuffix(")"))
    return "; ".join(
        f"{since} {parameter}: {', '.join(kinds)}" if parameter else f"{since}"
        for (since, parameter), kinds in groups.items()
    )


def entry(version: str) -> str:
    """What changed in a release, as an entry of the changelog: kernels of each target against the release before."""
    lines = [f"* The facts about ONNX Runtime {version}:"]
    for name in PROVIDERS:
        if not dump_file(REGISTRIES / version, name).is_file():
            lines.append(f"  * {name}: no wheel of this release; the newest known one stays.")
            continue
        known = [path.name for path in REGISTRIES.iterdir() if dump_file(path, name).is_file()]
        before = max((release for release in known if ordinal(release) < ordinal(version)), key=ordinal)
        tables = {release: rows_of(read_dumps(REGISTRIES / release)[name]) for release in (before, version)}
        found = list(changes(tables[before], tables[version]))
        lines.append(f"  * {name}: the kernels of {len(found)} ops differ from {before}.")
        for change in found:
            words = [f"{sign} {types}" for sign, types in (("+", change.gained), ("-", change.lost)) if types]
            lines.append(f"    * {change.op}: {' '.join(words)}")
    return "\n".join(lines)


def schema_changes(old: str, new: str) -> str:
    """Which ops of ONNX Runtime's own domains have other schemas, in one line."""
    before, after = (
        {(row["domain"], row["op"], row["since"]): row for row in json.loads(text)["schemas"]} for text in (old, new)
    )
    found = sorted(key for key in {*before, *after} if before.get(key) != after.get(key))
    return ", ".join(f"{domain}::{op} {since}" for domain, op, since in found) or "none"


def ask(found: Environment, minutes: float) -> None:
    """Ask the CPU provider of an environment how it computes, and print which of its kernels fail."""
    python = str(found.python)
    run([python, str(SCRIPTS / "ask_engine.py"), "cpu"])
    run([python, str(SCRIPTS / "ask_accumulators.py"), "cpu"])
    answers = found.path / "runs.json"
    failing = [python, str(SCRIPTS / "ask_runs.py"), "cpu", "--answers", str(answers), "--minutes", str(minutes)]
    subprocess.run(failing, check=False)  # it prints what fails, and that is no reason to stop


def main(argv: list[str] | None = None) -> int:
    """Refresh the tables; the exit code is 0, or 1 if the package index has no such release or a test fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="the release, as in 1.32.0")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="how long to ask which kernels fail")
    options = parser.parse_args(argv)
    version = options.version
    tests = ("pytest", "pytest-xdist", "hypothesis", "scipy", "safetensors", "openpyxl")
    cpu = environment("onnxruntime", version, *tests)
    if cpu is None:
        print(f"The package index has no onnxruntime {version}.", file=sys.stderr)
        return 1
    dump(cpu)
    cuda = environment("onnxruntime-gpu", version)
    if cuda is not None:
        dump_cuda(cuda)
    forget_older_patches(version)
    write_tables()
    schemas = SCHEMAS.read_text(encoding="utf-8")
    run([str(cpu.python), str(SCRIPTS / "make_schemas.py")])
    ask(cpu, options.minutes)
    failed = subprocess.run([str(cpu.python), "-m", "pytest", "-q", *ASKED_TESTS], cwd=ROOT, check=False).returncode
    print(entry(version))
    print(f"  * Schemas that differ: {schema_changes(schemas, SCHEMAS.read_text(encoding='utf-8'))}.")
    return int(failed != 0)


if __name__ == "__main__":
    sys.exit(main())
