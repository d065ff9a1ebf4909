"""The data files: list presets and kernel tables."""

import importlib.util
import itertools
import json
import lzma
import subprocess
import sys
import tomllib

import onnx.defs
import onnxruntime as ort
import pytest
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema
from repository import ROOT

from onnxamp._decide.patterns.find import WALKS
from onnxamp._decide.patterns.named import FINDERS
from onnxamp._facts.kernels import kernel_table
from onnxamp._facts.targets import check_target
from onnxamp._options.lists import framework_names

DATA = ROOT / "onnxamp" / "_data"
REGISTRIES = ROOT / "scripts" / "registries"
SCRIPT = ROOT / "scripts" / "make_kernel_tables.py"
LISTS = ("conservative", "default", "fast", "mindspore", "paddle", "pytorch")
TABLES = ("cpu", "cuda")
PLUGINS = ("webgpu",)
ASKED = ("tensorrt", "openvino")


def preset(name):
    content = tomllib.loads((DATA / "oplists" / f"{name}.toml").read_text(encoding="utf-8"))
    content = preset(content.pop("extends")) | content if "extends" in content else content
    removed = content.pop("not_black", {})
    assert removed.keys() <= content["black"].keys()
    content["black"] = {op: source for op, source in content["black"].items() if op not in removed}
    return content


def file_of(name, folder=DATA / "targets"):
    return folder / name / "kernels.json"


def kernels(name):
    return json.loads(file_of(name).read_text(encoding="utf-8"))


def newest_dump(name):
    """The registry of the newest release that is known for a target."""
    files = REGISTRIES.glob(f"*/{name}.json.xz")
    return max(files, key=lambda path: version(path.parent.name))


def version(text):
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_kernel_tables", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def known_ops():
    """Every op that onnx or ONNX Runtime has a schema for, as the data files spell it."""
    schemas = itertools.chain(onnx.defs.get_all_schemas(), get_all_operator_schema())
    return {f"{s.domain}::{s.name}" if s.domain else s.name for s in schemas}


def skip_if_newer(name):
    """Skip the test if a table is of a newer onnxruntime than this one, which lacks ops then."""
    if version(ort.__version__) < version(kernels(name)["onnxruntime"]):
        pytest.skip("the table is of a newer onnxruntime than this one")


# Presets


def test_each_preset_is_tested():
    assert sorted(path.stem for path in (DATA / "oplists").glob("*.toml")) == sorted(LISTS)


@pytest.mark.parametrize("name", LISTS)
def test_preset_is_well_formed(name):
    content = preset(name)
    further = {"folds_batch_norm", "names", "forms", "white_names", "black_names", "trusts_kernels", "black_at"}
    assert set(content) - further == {"summary", "white", "black"}
    for names in (content.get("names", {}), content.get("forms", {})):
        assert list(names) == sorted(names)
        assert all(meant == list(dict.fromkeys(meant)) for meant in names.values())
    assert content.get("forms", {}).keys() <= framework_names().keys()
    assert {kind for kinds in content.get("forms", {}).values() for kind in kinds} <= FINDERS.keys() | WALKS.keys()
    for table in (content.get("white_names", {}), content.get("black_names", {})):
        assert table.keys() <= content.get("forms", {}).keys()
    assert content["summary"].endswith(".")
    for table in (content["white"], content["black"], *content.get("black_at", {}).values()):
        assert table
        assert list(table) == sorted(table)
        assert all(isinstance(source, str) and source.strip() for source in table.values())
    assert not set(content["white"]) & set(content["black"])
    assert not {op for entries in content.get("black_at", {}).values() for op in entries} & set(content["black"])
    assert content.get("black_at", {}).keys() <= {"O1", "O2"}


@pytest.mark.parametrize("name", LISTS)
def test_preset_names_existing_ops(name, known_ops):
    skip_if_newer("cuda")
    content = preset(name)
    named = {op for ops in content.get("names", {}).values() for op in ops}
    assert set(content["white"]) | set(content["black"]) | named <= known_ops


def test_presets_contain_each_other():
    default, conservative, fast = preset("default"), preset("conservative"), preset("fast")
    assert default["white"] == conservative["white"] == fast["white"]
    assert default["black"] == conservative["black"]
    assert fast["black"].items() < default["black"].items()
    for name in ("mindspore", "paddle"):
        assert set(preset(name)["white"]) <= set(default["white"])
        assert set(preset(name)["black"]) - {"Sum"} <= set(default["black"])  # as safe as what it adds


def test_plain_arithmetic_is_free():
    free = {"Add", "Div", "Gelu", "Mul", "Sigmoid", "Sqrt", "Sub", "Sum", "Tanh"}
    for name in LISTS:
        content = preset(name)
        listed = {"Sum"} if name == "paddle" else set()  # Paddle's black list names it
        assert free & (set(content["white"]) | set(content["black"])) == listed


def test_white_ops_can_run_low_on_cuda():
    table = kernels("cuda")
    low = {i for i, name in enumerate(table["types"]) if name in ("tensor(float16)", "tensor(bfloat16)")}
    for op in preset("default")["white"]:
        rows = table["kernels"][op]
        assert any(low & set(types) for _, _, accepted in rows for types in accepted.values()), op


# Kernel tables


@pytest.mark.parametrize("name", [*TABLES, *PLUGINS, *ASKED])
def test_table_is_well_formed(name, script):
    table = kernels(name)
    assert table.get("provider") == (script.PROVIDERS | script.PLUGINS).get(name)
    assert table["types"] == sorted(set(table["types"]))
    assert list(table["kernels"]) == sorted(table["kernels"])
    used = set()
    for rows in table["kernels"].values():
        assert rows
        for since, until, accepted in rows:
            assert 1 <= since <= (until or since)
            assert list(accepted) == sorted(accepted)
            for types in accepted.values():
                assert types == sorted(set(types))
                used.update(types)
    assert used == set(range(len(table["types"])))


@pytest.mark.webgpu
@pytest.mark.parametrize("name", PLUGINS)
def test_table_of_a_plugin_is_what_its_registry_says(name, script, tmp_path):
    if version(ort.__version__) != version(kernels(name)["onnxruntime"]):
        pytest.skip("the table is of another onnxruntime")
    assert script.main(["--plugin", name, "--to", str(tmp_path)]) == 0
    assert file_of(name, tmp_path).read_text() == file_of(name).read_text()


@pytest.mark.parametrize("name", [*TABLES, *PLUGINS, *ASKED])
def test_table_names_existing_ops(name, known_ops):
    skip_if_newer(name if name in TABLES else "cuda")
    assert set(kernels(name)["kernels"]) <= known_ops


def test_the_table_of_tensorrt_says_what_was_asked_and_when():
    table = kernels("tensorrt")
    assert version(table["tensorrt_rtx"]) >= (1, 7)
    assert table["date"] >= "2026-11-22"
    assert len(table["kernels"]) > 150
    for rule in tomllib.loads((DATA / "targets" / "tensorrt" / "builder.toml").read_text(encoding="utf-8"))["refusals"]:
        assert set(rule) - {"cure"} == {"says", "rule", "source"}


def combinations(rows):
    """What the rows accept: every binding of types, together with the parameters that it restricts."""
    return {
        frozenset(zip(sorted(row), binding, strict=True))
        for row in rows
        for binding in itertools.product(*(sorted(row[name]) for name in sorted(row)))
    }


def row(**types):
    return {name: frozenset(accepted) for name, accepted in types.items()}


@pytest.mark.parametrize(
    ("rows", "count"),
    [
        pytest.param([row(T="a"), row(T="b"), row(T="a")], 1, id="one parameter"),
        pytest.param([row(T="a", U="x"), row(T="b", U="y")], 2, id="equalities stay apart"),
        pytest.param([row(T=t, U=u) for t in "abc" for u in "xy"], 1, id="a product is one row"),
        pytest.param([row(T="a", U="xy"), row(T="b", U="x"), row(T="b", U="y")], 1, id="to the fixed point"),
        pytest.param([row(T="ab", U="x"), row(T="b", U="y")], 2, id="an overlap is no union"),
        pytest.param([row(T="a"), row(T="a", U="x"), row()], 3, id="an unnamed parameter is unrestricted"),
    ],
)
def test_merge_is_exact(script, rows, count):
    for order in itertools.permutations(rows):
        merged = script.merge(order)
        assert len(merged) == count
        assert combinations(merged) == combinations(rows)
        assert sorted(map(repr, merged)) == sorted(map(repr, script.merge(merged)))


def test_table_of_a_small_dump(script):
    dump = {
        "onnxruntime": "1.0",
        "provider": "P",
        "kernels": [
            {"domain": "", "op": "B", "since": 7, "until": None, "types": {"T": ["tensor(float)"]}},
            {"domain": "", "op": "B", "since": 7, "until": None, "types": {"T": ["tensor(float16)"]}},
            {"domain": "", "op": "B", "since": 1, "until": 6, "types": {}},
            {
                "domain": "com.microsoft",
                "op": "A",
                "since": 1,
                "until": None,
                "types": {"T": ["tensor(float)"]},
            },
            {
                "domain": "com.ms.internal.nhwc",
                "op": "C",
                "since": 1,
                "until": None,
                "types": {"T": ["tensor(x)"]},
            },
        ],
    }
    assert script.table(dump) == (
        '{"onnxruntime":"1.0","provider":"P",\n'
        '"types":["tensor(float)","tensor(float16)"],\n'
        '"kernels":{\n'
        '"B":[[1,6,{}],[7,null,{"T":[0,1]}]],\n'
        '"com.microsoft::A":[[1,null,{"T":[0]}]]}}\n'
    )


@pytest.mark.parametrize("name", TABLES)
def test_table_accepts_what_the_dump_accepts(name, script):
    """Row by row, the table of the dump's version and the dump it was made from accept the same."""

    def accepted(rows):
        groups = {}
        for key, types in rows:
            groups.setdefault(key, []).append(types)
        return {key: combinations(group) for key, group in groups.items()}

    dump = json.loads(lzma.decompress(newest_dump(name).read_bytes()))
    merged = [
        ((op, row.since, row.until), row.types)
        for op, rows in kernel_table(check_target(f"{name}@{dump['onnxruntime']}")).items()
        for row in rows
    ]
    raw = [
        ((f"{r['domain']}::{r['op']}" if r["domain"] else r["op"], r["since"], r["until"]), r["types"])
        for r in dump["kernels"]
        if r["domain"] not in script.INTERNAL_DOMAINS
    ]
    assert accepted(merged) == accepted(raw)


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_regenerated_byte_by_byte(name, script, tmp_path):
    assert script.main(["--from", str(newest_dump(name).parent), "--to", str(tmp_path)]) == 0
    assert file_of(name, tmp_path).read_bytes() == file_of(name).read_bytes()


# The script where it cannot do its work


CRASH = (
    "[E:onnxruntime:Default] Failed to load library /lib/libonnxruntime_providers_cuda.so with error: "
    "libcublasLt.so.13: cannot open shared object file: No such file or directory\n"
)


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "message"),
    [
        (-11, "", CRASH, "libonnxruntime_providers_cuda.so needs libcublasLt.so.13."),
        (0, "", "", "it said nothing"),
        (1, "", "Traceback\nImportError: no onnxruntime\n", "ImportError: no onnxruntime"),
        (0, '{"onnxruntime": "1.0", "kernels": []}', "", "registers no kernels for CPUExecutionProvider"),
    ],
)
def test_unreadable_registry(script, tmp_path, monkeypatch, capsys, *, returncode, stdout, stderr, message):
    result = subprocess.CompletedProcess([], returncode, stdout, stderr)
    monkeypatch.setattr(script.subprocess, "run", lambda *args, **kwargs: result)
    assert script.main(["--to", str(tmp_path / "tables")]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "tables").exists()


def test_the_wheel_of_the_cpu_gives_its_table_alone(script, tmp_path, monkeypatch):
    row = {"domain": "", "op": "A", "since": 1, "until": None, "types": {"T": ["tensor(float)"]}}
    registry = {"onnxruntime": "1.32.0", "kernels": [{"provider": "CPUExecutionProvider", **row}]}
    result = subprocess.CompletedProcess([], 0, json.dumps(registry), "")
    monkeypatch.setattr(script.subprocess, "run", lambda *args, **kwargs: result)
    assert script.main(["--to", str(tmp_path / "tables")]) == 0
    assert [path.name for path in (tmp_path / "tables").iterdir()] == ["cpu"]
    packed = lzma.compress(json.dumps({"provider": "CPUExecutionProvider", **registry}).encode())
    (tmp_path / "cpu.json.xz").write_bytes(packed)
    assert script.main(["--from", str(tmp_path), "--to", str(tmp_path / "again")]) == 0
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["cpu"]


def test_unreadable_dump(script, tmp_path, capsys):
    for name in ("cpu", "cuda"):
        packed = lzma.compress(b'{"provider": "CPUExecutionProvider", "kernels": [1]}')
        (tmp_path / f"{name}.json.xz").write_bytes(packed)
    assert script.main(["--from", str(tmp_path), "--to", str(tmp_path / "tables")]) == 1
    assert "holds no kernels of CUDAExecutionProvider" in capsys.readouterr().err
    assert not (tmp_path / "tables").exists()


def test_script_explains_itself():
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "--from DIR" in done.stdout
    assert "--child" not in done.stdout
