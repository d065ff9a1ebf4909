"""Write history.json in the folders of targets: how ONNX Runtime's kernels differ from those of the newest release.

    python scripts/make_kernel_history.py --dump    add the registry of the installed onnxruntime to scripts/registries
    python scripts/make_kernel_history.py           write the history of all releases in scripts/registries

Run the first once per release (scripts/refresh_runtime.py does), with the last patch of each. scripts/registries holds
VERSION/{cuda,cpu}.json.xz, in the form that make_kernel_tables.py reads, with the newest IR version and opset that the
release loads. Those up to 1.30 were reconstructed from the history: their rows are merged as in the tables, which
accept the same.

The history goes backwards: under "changes", a release maps the ops that differ from the release after it to their rows
at the time, as in the tables of make_kernel_tables.py, or to null if it had no kernel of them. "sha256" is the hash of
the table that results (:func:`fingerprint`).
"""

import argparse
import hashlib
import json
import lzma
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from make_kernel_tables import PROVIDERS, ROOT, TARGETS, UnreadableError, dump_file, read_dumps, read_runtime, table

REGISTRIES = ROOT / "scripts" / "registries"

# since, until, type parameter -> names of types
Rows = list[tuple[int, int | None, Mapping[str, list[str]]]]

ASK = """
import json, onnx, onnxruntime
from onnx import helper
onnxruntime.set_default_logger_severity(4)
def loads(ir, opset):
    x, y = (helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception:
        return False
    return True
print(json.dumps({"ir": max(n for n in range(8, 21) if loads(n, 17)),
                  "opset": max(n for n in range(17, 41) if loads(8, n))}))
"""


def rows_of(dump: Mapping) -> dict[str, Rows]:
    """Op -> the rows of its kernels, merged as in a table."""
    made = json.loads(table(dump))
    names = made["types"]
    return {
        op: [(since, until, {param: [names[i] for i in types] for param, types in accepted.items()})
             for since, until, accepted in rows]
        for op, rows in made["kernels"].items()
    }  # fmt: skip


def fingerprint(kernels: Mapping[str, Rows]) -> str:
    """The hash of a table: of its ops, rows and names of types, whatever their order."""
    ops = {op: sorted(json.dumps(row, sort_keys=True) for row in rows) for op, rows in kernels.items()}
    return hashlib.sha256(json.dumps(ops, sort_keys=True).encode()).hexdigest()


def minor(release: str) -> str:
    """The version of a release: "1.24" of "1.24.4"."""
    return ".".join(release.split(".")[:2])


def ordinal(release: str) -> list[int]:
    """The numbers of a version, by which releases are ordered."""
    return [int(part) for part in release.split(".")]


def history(dumps: Mapping[str, Mapping]) -> str:
    """The text of the history of a provider from its dumps by release, the newest first."""
    newest_first = sorted(dumps, key=ordinal, reverse=True)
    tables = {release: rows_of(dumps[release]) for release in newest_first}
    steps = {old: {op: tables[old].get(op) for op in _changed(tables[new], tables[old])}
             for new, old in pairwise(newest_first)}  # fmt: skip
    rows = [row for ops in steps.values() for kept in ops.values() for row in kept or ()]
    types = sorted({kind for _, _, accepted in rows for kinds in accepted.values() for kind in kinds})
    index = {name: number for number, name in enumerate(types)}
    versions = [
        f"{_json(minor(release))}:" + _json({
            "release": release, "ir": dumps[release]["ir"], "opset": dumps[release]["opset"],
            "sha256": fingerprint(tables[release]),
        })
        for release in newest_first
    ]  # fmt: skip
    lines = [f"{_json(minor(old))}:{{\n" + ",\n".join(_lines(ops, index)) + "}" for old, ops in steps.items()]
    parts = (
        f'{{"types":{_json(types)},\n"versions":{{\n', ",\n".join(versions),
        '},\n"changes":{\n', ",\n".join(lines), "}}\n",
    )  # fmt: skip
    return "".join(parts)


def _changed(new: Mapping[str, Rows], old: Mapping[str, Rows]) -> list[str]:
    """The ops that differ."""
    return sorted(op for op in {*new, *old} if new.get(op) != old.get(op))


def _lines(ops: Mapping[str, Rows | None], index: Mapping[str, int]) -> list[str]:
    """The rows of ops, one line each."""
    return [f"{_json(op)}:{_json(None if rows is None else _numbered(rows, index))}" for op, rows in ops.items()]


def _numbered(rows: Rows, index: Mapping[str, int]) -> list:
    return [
        [since, until, {param: [index[name] for name in names] for param, names in types.items()}]
        for since, until, types in rows
    ]


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def dump_installed(folder: Path) -> None:
    """Add the registry of the installed onnxruntime to a folder."""
    limits = json.loads(subprocess.run([sys.executable, "-c", ASK], capture_output=True, check=True).stdout)
    for name, dump in read_runtime().items():
        path = dump_file(folder / dump["onnxruntime"], name)
        path.parent.mkdir(parents=True, exist_ok=True)
        # The same registry gives the same bytes: xz holds no time.
        path.write_bytes(lzma.compress(json.dumps({**dump, **limits}).encode(), preset=9 | lzma.PRESET_EXTREME))


def read_releases(folder: Path) -> dict[str, dict[str, dict]]:
    """Release -> target -> the dump, of all releases in a folder."""
    return {path.name: read_dumps(path) for path in sorted(folder.iterdir()) if path.is_dir()}


def main(argv: list[str] | None = None) -> int:
    """Dump a registry or write the history; the exit code is 0, or 1 with nothing written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dumps", type=Path, metavar="DIR", default=REGISTRIES, help="the folder of dumps")
    parser.add_argument("--dump", action="store_true", help="add the registry of the installed onnxruntime to it")
    parser.add_argument("--to", type=Path, metavar="DIR", default=TARGETS, help="write DIR/TARGET/history.json")
    options = parser.parse_args(argv)
    try:
        if options.dump:
            dump_installed(options.dumps)
            return 0
        releases = read_releases(options.dumps)
    except UnreadableError as error:
        print(error, file=sys.stderr)
        return 1
    for name in PROVIDERS:
        dumps = {release: found[name] for release, found in releases.items() if name in found}
        path = options.to / name / "history.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(history(dumps), encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
