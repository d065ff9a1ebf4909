"""Write history.json in the folders of targets: how ONNX Runtime's kernels differ from those of the newest release.

    python scripts/make_kernel_history.py --unpack DIR   write the registries of all releases that are known into DIR
    python scripts/make_kernel_history.py --dump DIR     add the registry of the installed onnxruntime to DIR
    python scripts/make_kernel_history.py DIR            write the history of all releases in DIR

Run the second once per release, in an environment with its onnxruntime-gpu and the libraries of CUDA, and with the
last patch of each release; or with the wheel onnxruntime, which has the same kernels for the CPU and none for CUDA.
DIR then holds DIR/VERSION/{cuda,cpu}.json, in the form that make_kernel_tables.py reads, with the newest IR version and
opset that the release loads.

The history goes backwards: under "changes", a release maps the ops that differ from the release after it to their rows
at the time, as in the tables of make_kernel_tables.py, or to null if it had no kernel of them. "sha256" is the hash of
the table that results (:func:`fingerprint`).
"""

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from make_kernel_tables import PROVIDERS, ROOT, TARGETS, UnreadableError, read_dumps, read_runtime, table

if TYPE_CHECKING:
    from onnxamp._facts.kernels import Kernel

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


def history(dumps: Mapping[str, Mapping]) -> str:
    """The text of the history of a provider from its dumps by release, the newest first."""
    newest_first = sorted(dumps, key=lambda release: [int(part) for part in release.split(".")], reverse=True)
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
        _write(folder, name, {**dump, **limits})


def unpack(folder: Path) -> None:
    """Write the registries of all known releases into a folder, with rows merged as in the tables."""
    sys.path.insert(0, str(ROOT))
    from onnxamp._facts.kernels import kernel_table  # noqa: PLC0415

    for name in PROVIDERS:
        known = json.loads((TARGETS / name / "history.json").read_text(encoding="utf-8"))
        for version, facts in known["versions"].items():
            kernels = [_raw(op, row) for op, rows in kernel_table(f"{name}@{version}").items() for row in rows]
            dump = {"onnxruntime": facts["release"], "provider": PROVIDERS[name], "kernels": kernels}
            _write(folder, name, {**dump, "ir": facts["ir"], "opset": facts["opset"]})


def _raw(op: str, row: "Kernel") -> dict:
    domain, _, op_type = op.rpartition("::")
    types = {param: sorted(names) for param, names in row.types.items()}
    return {"domain": domain, "op": op_type, "since": row.since, "until": row.until, "types": types}


def _write(folder: Path, name: str, dump: Mapping) -> None:
    path = folder / dump["onnxruntime"] / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dump), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Dump a registry or write the history; the exit code is 0, or 1 with nothing written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of dumps")
    parser.add_argument("--dump", action="store_true", help="add the registry of the installed onnxruntime to DIR")
    parser.add_argument("--to", type=Path, metavar="DIR", default=TARGETS, help="write DIR/TARGET/history.json")
    parser.add_argument("--unpack", action="store_true", help="write the registries of all known releases into DIR")
    options = parser.parse_args(argv)
    try:
        if options.unpack:
            unpack(options.folder)
            return 0
        if options.dump:
            dump_installed(options.folder)
            return 0
        releases = {path.name: read_dumps(path) for path in options.folder.iterdir() if path.is_dir()}
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
