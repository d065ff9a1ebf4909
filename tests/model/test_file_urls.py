"""URLs of local files: every form names the same file, wherever a path does."""

import os
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np
import onnx
import pytest
from commands import run, small

import onnxamp
from onnxamp import ArgumentError, debugging
from onnxamp._base.paths import as_path

pytestmark = pytest.mark.skipif(os.name == "nt", reason="drives have other URLs")

FORMS: dict[str, Callable[[Path], str]] = {
    "one slash": lambda path: f"file:{path}",
    "three slashes": lambda path: f"file://{path}",
    "localhost": lambda path: f"file://localhost{path}",
    "upper case": lambda path: f"FILE://LocalHost{path}",
    "escapes": lambda path: f"file://{''.join(f'%{byte:02x}' for byte in str(path)[1:].encode())}".replace("//", "///"),
    "quoted": lambda path: f"file:{quote(str(path))}",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in a folder whose name has signs that URLs escape, and another folder to work in."""
    home = tmp_path / "a b" / "ü?#"
    home.mkdir(parents=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    small().rename(home / "m.onnx")
    return home


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_path(form: str, folder: Path) -> None:
    assert as_path(FORMS[form](folder / "m.onnx")) == folder / "m.onnx"


@pytest.mark.parametrize("form", FORMS)
def test_inputs_and_outputs_of_commands(form: str, folder: Path) -> None:
    url = FORMS[form]
    np.savez(folder / "s.npz", X=np.ones((1, 2), np.float32))
    names = {name: url(folder / name) for name in ("m.onnx", "s.npz", "o.onnx", "state", "plan.json", "page.html")}
    result = run(
        "convert", names["m.onnx"], "-o", names["o.onnx"], "--inputs", names["s.npz"], "--state", names["state"],
        "--save-plan", names["plan.json"], "--html", names["page.html"],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert {path.name for path in folder.iterdir()} == names.keys()
    assert not list(Path().iterdir())
    assert run("diff", names["m.onnx"], names["o.onnx"], "--inputs", names["s.npz"]).exit_code == 0
    assert run("convert", names["m.onnx"], "-o", names["m.onnx"]).exit_code == 2


@pytest.mark.slow
def test_a_folder(folder: Path) -> None:
    report = onnxamp.convert_folder(f"file:{folder}", f"file:{folder.parent}/out", jobs=1, validate=False)
    assert report.count("converted") == 1
    assert (folder.parent / "out" / "m.onnx").is_file()


def test_functions(folder: Path) -> None:
    url = f"file:{folder}"
    state = f"{url}/state"
    conversion = onnxamp.convert_file(f"{url}/m.onnx", f"{url}/o.onnx", state=state)
    conversion.plan.save(f"{url}/plan.json")
    np.savez(folder / "s.npz", X=np.ones((1, 2), np.float32))
    samples = onnxamp.load_samples(f"{url}/s.npz")
    config = debugging.TensorCheckerConfig(True, debugging.DebugMode.CHECK_ALL, output_dir=f"{url}/dump")
    with debugging.tensor_checker(config):
        debugging.InferenceSession(f"{url}/m.onnx").run(None, samples[0])
    assert debugging.read_dump(f"{url}/dump")
    assert onnxamp.diff_models(f"{url}/m.onnx", f"{url}/o.onnx", samples=samples).passed
    assert onnx.load(folder / "o.onnx").graph.node[0].op_type == "Cast"
    assert {path.name for path in folder.iterdir()} == {"m.onnx", "o.onnx", "state", "plan.json", "s.npz", "dump"}
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:m.onnx", "./file:m.onnx"),
        ("file:", "three|absolute"),
        ("file://server/m.onnx", "machine 'server'"),
        ("file:///m%00.onnx", "zero byte"),
    ],
)
def test_what_names_no_local_file(url: str, why: str) -> None:
    with pytest.raises(ArgumentError, match=why):
        as_path(url)
    result = run("convert", url, "-o", "o.onnx")
    assert (result.exit_code, list(Path().iterdir())) == (2, [])


def test_a_file_whose_name_begins_like_a_url() -> None:
    assert as_path("./file:m.onnx") == Path("file:m.onnx")
    assert as_path("profile:/m.onnx") == Path("profile:/m.onnx")
