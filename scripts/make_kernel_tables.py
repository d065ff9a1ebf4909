"""Write kernels.json in the folders of targets: the kernels of ONNX Runtime, with their opsets and types.

    python scripts/make_kernel_tables.py               read the registry of the installed onnxruntime
    python scripts/make_kernel_tables.py --from DIR    read dumps of it, DIR/cuda.json.xz and DIR/cpu.json.xz, if there
    python scripts/make_kernel_tables.py --plugin webgpu    read that of a plugin provider, and write its table alone

A dump holds one row per registration: {"domain", "op", "since", "until", "types"}; scripts/registries has those of the
releases that are known. A table holds one line per op:

    "Abs":[[6,12,{"T":[3,4,5]}],[13,null,{"T":[2,3,4,5]}]]

Its key is the op type, behind "domain::" unless the domain is ai.onnx. A row is the opset range (null: still
current) and, for each type parameter, indices into the table's "types"; a parameter that a row does not name
is not restricted. Rows are merged only where that changes nothing in what they accept. The domains
com.ms.internal.nhwc and com.microsoft.nchwc are dropped: ONNX Runtime's own optimizer writes them, so no
model holds them.

The wheel onnxruntime registers no kernels for CUDA, and gives the table of the CPU alone. Nothing is written unless all
tables of what was read could be made.
"""

import argparse
import json
import lzma
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from pathlib import Path

UNNAMED = {
    "BatchNormalization": {14: ("U",), 15: ("T1", "T2")},
    "LayerNormalization": {1: ("V",)},
    "SimplifiedLayerNormalization": {1: ("V",)},
}
"""Op -> first opset -> parameters that a plugin's registry does not restrict, but its kernel does, to the type of T."""
INTERNAL_DOMAINS = {"com.ms.internal.nhwc", "com.microsoft.nchwc"}
OPEN_ENDED = 2**31 - 1  # what the registry calls a range without an end
ROOT = Path(__file__).resolve().parents[1]
TARGETS = ROOT / "onnxamp" / "_data" / "targets"


def registries() -> dict[str, str]:
    """The targets whose kernels are in a registry, with the names of their providers."""
    files = TARGETS.glob("*/target.toml")
    tables = {path.parent.name: tomllib.loads(path.read_text(encoding="utf-8")) for path in files}
    ordered = sorted(tables, key=lambda name: tables[name]["order"])
    return {name: tables[name]["registry"] for name in ordered if "registry" in tables[name]}


def is_plugin(name: str) -> bool:
    """Whether a package of its own brings the provider of a target."""
    return (TARGETS / name / "engine.toml").is_file()


PROVIDERS = {name: provider for name, provider in registries().items() if not is_plugin(name)}
PLUGINS = {name: provider for name, provider in registries().items() if is_plugin(name)}

# type parameter -> the element types that it may have, by name or by index
Types = Mapping[str, frozenset]


class UnreadableError(Exception):
    """The registry, or a dump of it, cannot be read; the message is one sentence for the terminal."""


def merge(rows: Iterable[Types]) -> list[Types]:
    """Unite rows that agree in all type parameters but one, until none do.

    A row accepts the product of its sets, so uniting one factor of two products that agree in the others adds
    no combination and loses none. The result does not depend on the order of the rows.
    """
    merged = {frozenset(row.items()) for row in rows}
    while True:
        before = len(merged)
        for name in sorted({name for row in merged for name, _ in row}):
            merged = _unite(merged, name)
        if len(merged) == before:
            return [dict(row) for row in merged]


def _unite(rows: set[frozenset], name: str) -> set[frozenset]:
    """Unite on one type parameter the rows that have it and agree in all others."""
    united = {row for row in rows if all(key != name for key, _ in row)}
    groups = defaultdict(frozenset)
    for row in rows - united:
        others = frozenset(item for item in row if item[0] != name)
        groups[others] |= dict(row)[name]
    return united | {others | {(name, types)} for others, types in groups.items()}


def table(dump: Mapping) -> str:
    """The text of a table: a header, then one line per op."""
    raw = [row for row in dump["kernels"] if row["domain"] not in INTERNAL_DOMAINS]
    names = sorted({name for row in raw for types in row["types"].values() for name in types})
    index = {name: i for i, name in enumerate(names)}
    kernels = defaultdict(lambda: defaultdict(list))
    for row in raw:
        key = row["op"] if row["domain"] in ("", "ai.onnx") else f"{row['domain']}::{row['op']}"
        types = {name: frozenset(index[t] for t in accepted) for name, accepted in row["types"].items()}
        kernels[key][row["since"], row["until"]].append(types)
    lines = [f"{_json(key)}:{_json(_rows(kernels[key]))}" for key in sorted(kernels)]
    return "".join(
        (
            f'{{"onnxruntime":{_json(dump["onnxruntime"])},"provider":{_json(dump["provider"])},\n',
            f'"types":{_json(names)},\n"kernels":{{\n',
            ",\n".join(lines),
            "}}\n",
        )
    )


def _rows(ranges: Mapping[tuple[int, int | None], list[Types]]) -> list:
    """All rows of one op, merged and in a fixed order."""
    rows = [
        [since, until, {name: sorted(types[name]) for name in sorted(types)}]
        for (since, until), group in ranges.items()
        for types in merge(group)
    ]
    return sorted(rows, key=lambda row: (row[0], OPEN_ENDED if row[1] is None else row[1], _json(row[2])))


def _json(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def dump_file(folder: Path, name: str) -> Path:
    """The dump of a target in a folder."""
    return folder / f"{name}.json.xz"


def read_dumps(folder: Path) -> dict[str, dict]:
    """Read the dumps of a folder: of the CPU, and of CUDA if there is one."""
    dumps = {}
    for name, provider in PROVIDERS.items():
        path = dump_file(folder, name)
        if name != "cpu" and not path.exists():
            continue
        try:
            dumps[name] = json.loads(lzma.decompress(path.read_bytes()))
        except (OSError, ValueError, lzma.LZMAError) as error:
            message = f"{path} is not a dump of a kernel registry: {error}."
            raise UnreadableError(message) from error
        if dumps[name].get("provider") != provider or not dumps[name].get("kernels"):
            message = f"{path} holds no kernels of {provider}."
            raise UnreadableError(message)
    return dumps


def read_runtime() -> dict[str, dict]:
    """Read the registry of the installed onnxruntime: of the CPU, and of CUDA if it was built with that.

    In a child process, since the call brings the interpreter down where the library of a provider cannot be
    loaded.
    """
    child = subprocess.run(
        [sys.executable, __file__, "--child"], capture_output=True, text=True, errors="replace", check=False
    )
    if child.returncode or not child.stdout.strip():
        raise UnreadableError(_what_is_missing(child.returncode, child.stderr))
    registry = json.loads(child.stdout)
    dumps = {}
    for name, provider in PROVIDERS.items():
        kernels = [row for row in registry["kernels"] if row["provider"] == provider]
        if kernels:
            dumps[name] = {"onnxruntime": registry["onnxruntime"], "provider": provider, "kernels": kernels}
    if "cpu" not in dumps:
        message = f"The installed onnxruntime registers no kernels for {PROVIDERS['cpu']}."
        raise UnreadableError(message)
    return dumps


def _what_is_missing(returncode: int, stderr: str) -> str:
    """Say in one sentence why the child process gave no registry."""
    failures = re.findall(r"Failed to load library (\S+) with error: (\S+?): cannot open shared object", stderr)
    if failures:
        needs = ", ".join(f"{Path(library).name} needs {missing}" for library, missing in failures)
        return f"onnxruntime cannot list its kernels here, since a library is missing: {needs}."
    last = (stderr.strip().splitlines() or ["it said nothing"])[-1]
    return f"onnxruntime could not list its kernels (exit code {returncode}): {last}"


def print_registry() -> None:
    """Print the registry as JSON: the part that can crash."""
    import onnxruntime as ort  # noqa: PLC0415 - reading dumps needs no onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_opkernel_def  # noqa: PLC0415

    if hasattr(ort, "preload_dlls"):  # CUDA's libraries may be pip's; what it prints is no part of the registry
        with redirect_stdout(sys.stderr):
            ort.preload_dlls()
    print(json.dumps({"onnxruntime": ort.__version__, "kernels": [_row(kernel) for kernel in get_all_opkernel_def()]}))


def _row(kernel: object) -> dict:
    since, until = kernel.version_range
    return {
        "provider": kernel.provider,
        "domain": kernel.domain,
        "op": kernel.op_name,
        "since": since,
        "until": None if until == OPEN_ENDED else until,
        "types": {name: sorted(types) for name, types in kernel.type_constraints.items()},
    }


def read_plugin(name: str) -> dict[str, dict]:
    """Read the registry of a plugin provider, which has to be installed and to work here."""
    import onnxruntime as ort  # noqa: PLC0415 - reading dumps needs no onnxruntime
    from onnxruntime.capi.onnxruntime_pybind11_state import get_registered_ep_kernel_defs  # noqa: PLC0415

    sys.path.insert(0, str(ROOT))
    from onnxamp import OnnxAmpError  # noqa: PLC0415
    from onnxamp._runtime.sessions.plugins import engine_called  # noqa: PLC0415

    try:
        provider = engine_called(name).provider
    except OnnxAmpError as error:
        raise UnreadableError(str(error)) from error
    rows = [tied for kernel in get_registered_ep_kernel_defs(provider) for tied in _tied(_row(kernel))]
    return {name: {"onnxruntime": ort.__version__, "provider": provider, "kernels": rows}}


def _tied(row: dict) -> list[dict]:
    """A row, or one per type of T where its kernel wants other parameters to have the same."""
    params = UNNAMED.get(row["op"], {}).get(row["since"], ())
    if not params:
        return [row]
    return [row | {"types": row["types"] | {param: [one] for param in ("T", *params)}} for one in row["types"]["T"]]


def main(argv: list[str] | None = None) -> int:
    """Make the tables; the exit code is 0, or 1 with nothing written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--from", dest="dumps", type=Path, metavar="DIR", help="read the dumps in DIR")
    parser.add_argument(
        "--to", dest="tables", type=Path, metavar="DIR", default=TARGETS, help="write DIR/TARGET/kernels.json"
    )
    parser.add_argument("--plugin", choices=list(PLUGINS), help="read the registry of this plugin provider")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        print_registry()
        return 0
    try:
        if options.plugin is not None:
            dumps = read_plugin(options.plugin)
        else:
            dumps = read_runtime() if options.dumps is None else read_dumps(options.dumps)
    except UnreadableError as error:
        print(error, file=sys.stderr)
        return 1
    texts = {name: table(dump) for name, dump in dumps.items()}
    for name, text in texts.items():
        path = options.tables / name / "kernels.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
