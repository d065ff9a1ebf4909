"""Folders with links: no name, link or mount lets a result, a state or a page replace a file that is read."""

import os
from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from click.testing import Result
from commands import run, small

import onnxamp
from onnxamp._base import identity as module
from onnxamp._base.identity import identity, is_within

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links need a privilege on Windows")

SECRET = '{"secret": 1}'


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two models and data beside them, in a folder of a known kind."""
    monkeypatch.chdir(tmp_path)
    Path("in/sub").mkdir(parents=True)
    small().rename("in/m.onnx")
    small().rename("in/sub/n.onnx")
    Path("in/weights.bin").write_bytes(b"weights")
    Path("in/.hidden.bin").write_bytes(b"hidden")
    Path("samples/m").mkdir(parents=True)
    Path("samples/m/0.npz").write_bytes(b"numbers")
    Path("prompts.txt").write_text("text\n")
    Path("elsewhere").mkdir()
    Path("elsewhere/other.txt").write_text("other")
    Path("out").mkdir()


def contents() -> dict[Path, bytes]:
    """All that was there before the run, which may not change."""
    return {path: path.read_bytes() for folder in ("in", "samples", "elsewhere", "prompts.txt")
            for path in (Path(folder), *Path(folder).rglob("*")) if path.is_file()}  # fmt: skip


def link(place: str, to: str) -> None:
    """Make a symbolic link, with its folder."""
    path = Path(place)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(os.path.relpath(to, path.parent))


def hard(place: str, to: str) -> None:
    """Make a hard link, with its folder."""
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    Path(place).hardlink_to(to)


def refused(result: Result) -> bool:
    """Return whether a command ended with wrong usage, and one sentence that names a file."""
    error = result.output.splitlines()[-1]
    return result.exit_code == 2 and error.startswith("Error: ") and error.endswith(".") and "'" in error


LINKS: dict[str, Callable[[], None]] = {
    "a result": lambda: link("out/m.onnx", "in/m.onnx"),
    "a result over links": lambda: (link("elsewhere/l", "in/m.onnx"), link("out/m.onnx", "elsewhere/l")),
    "another model": lambda: link("out/m.onnx", "in/sub/n.onnx"),
    "a hard link": lambda: hard("out/m.onnx", "in/m.onnx"),
    "data": lambda: link("out/m.onnx", "in/weights.bin"),
    "hidden data": lambda: link("out/sub/n.onnx", "in/.hidden.bin"),
    "a hard link to data": lambda: hard("out/m.onnx", "in/weights.bin"),
    "an input": lambda: link("out/m.onnx", "samples/m/0.npz"),
    "prompts": lambda: hard("out/m.onnx", "prompts.txt"),
    "a folder": lambda: link("out/sub", "in/sub"),
    "a new folder": lambda: link("out/sub", "in/another"),
    "a new file": lambda: link("out/m.onnx", "in/another.onnx"),
    "the folder above": lambda: (Path("out").rmdir(), link("out", ".")),
    "folders above": lambda: (Path("in/sub/n.onnx").rename("in/n.onnx"), Path("in/sub/in").mkdir(),
                              Path("in/m.onnx").rename("in/sub/in/n.onnx"), link("out/sub", ".")),
    "a failed result": lambda: link("out/failed/m.onnx", "in/m.onnx"),
    "failed results": lambda: link("out/failed", "in"),
    "the state": lambda: link("out/.onnxamp.json", "in/m.onnx"),
    "a hard link to the state": lambda: hard("out/.onnxamp.json", "in/m.onnx"),
    "a state elsewhere": lambda: link("out/.onnxamp.json", "elsewhere/other.txt"),
    "a hard link to a state elsewhere": lambda: hard("out/.onnxamp.json", "elsewhere/other.txt"),
    "a new state": lambda: link("out/.onnxamp.json", "in/state"),
    "another result": lambda: link("out/m.onnx", "out/sub/n.onnx"),
    "the state of results": lambda: link("out/m.onnx", "out/.onnxamp.json"),
    "itself": lambda: link("out/m.onnx", "out/m.onnx"),
    "a circle of folders": lambda: link("out/sub", "out/sub"),
}  # fmt: skip


def in_folder(*options: str) -> None:
    """Convert the folder, which must refuse in one sentence and change nothing."""
    before = contents()
    result = run("convert", "in", "-o", "out", "--prompts", "prompts.txt", *options)
    assert refused(result), result.output
    assert contents() == before


@pytest.mark.parametrize("name", LINKS)
def test_nothing_is_written_through_a_link_to_what_is_read(name: str) -> None:
    LINKS[name]()
    in_folder("--inputs", "samples")


def test_a_link_from_the_results_into_a_linked_original() -> None:
    Path("in/m.onnx").rename("elsewhere/store.onnx")
    link("in/m.onnx", "elsewhere/store.onnx")
    link("out/m.onnx", "elsewhere/store.onnx")
    in_folder()


@pytest.mark.parametrize("place", ["pages/m.onnx.html", "pages/index.html"])
@pytest.mark.parametrize("link", [link, hard])
def test_pages_replace_nothing(place: str, link: Callable[[str, str], None]) -> None:
    link(place, "in/m.onnx")
    in_folder("--html", "pages")


def test_searches_are_not_kept_among_originals() -> None:
    link("out/.onnxamp", "in")
    before = contents()
    result = run("convert", "in", "-o", "out", "--level", "auto")
    assert refused(result), result.output
    assert contents() == before


@pytest.mark.parametrize("place", [".onnxamp.new", ".onnxamp.old"])
def test_no_file_of_a_package_waits_among_originals(place: str) -> None:
    for name in ("in/model_index.json", "in/sub/genai_config.json"):
        Path(name).write_text("{}")
    link(f"out/sub/{place}", "in")
    in_folder()


@pytest.mark.slow
def test_results_may_be_elsewhere_through_links_that_lead_to_nothing_that_is_read() -> None:
    link("out/sub", "elsewhere")
    link("out/m.onnx", "elsewhere/result.onnx")
    report = onnxamp.convert_folder("in", "out", jobs=1, validate=False)
    assert report.count("converted") == 2
    for path in ("elsewhere/result.onnx", "elsewhere/n.onnx"):
        assert onnx.load(path).graph.node[0].op_type == "Cast"


@pytest.fixture
def package() -> Path:
    """A folder whose tokenizer is a link to a file outside of it."""
    Path("in/sub/n.onnx").unlink()
    Path("in/unet").mkdir()
    Path("in/m.onnx").rename("in/unet/model.onnx")
    Path("in/model_index.json").write_text("{}")
    Path("elsewhere/secret.json").write_text(SECRET)
    return Path("in")


@pytest.mark.slow
def test_a_link_out_of_the_folder_is_not_copied(package: Path) -> None:
    Path("in/vocab.json").write_text("{}")
    link("in/tokenizer.json", "elsewhere/secret.json")
    link("in/inside.json", "in/vocab.json")
    (shipped,) = onnxamp.convert_folder(package, "out", jobs=1, validate=False).shipped
    assert (shipped.linked, shipped.copied) == (("tokenizer.json",), ("inside.json", "model_index.json", "vocab.json"))
    assert not os.path.lexists("out/tokenizer.json")
    printed = run("convert", package, "-o", "out", "--no-validate")
    assert "links to files outside the folder: tokenizer.json." in " ".join(printed.output.split())


@pytest.mark.slow
def test_links_into_the_store_of_a_cache_are_the_files_of_the_folder(package: Path) -> None:
    home = Path("hub/models--a--b")
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots").mkdir()
    (home / "blobs" / "0f").write_text("{}")
    package.rename(home / "snapshots" / "1e")
    link(f"{home}/snapshots/1e/tokenizer.json", f"{home}/blobs/0f")
    link(f"{home}/snapshots/1e/secret.json", "elsewhere/secret.json")
    (shipped,) = onnxamp.convert_folder(home / "snapshots" / "1e", "out", jobs=1, validate=False).shipped
    assert shipped.linked == ("secret.json",)
    assert Path("out/tokenizer.json").read_text() == "{}"
    assert not Path("out/tokenizer.json").is_symlink()


@pytest.mark.parametrize("make", [link, hard], ids=["link", "hard"])
@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "in/m.onnx", "-o", "x"),
        ("convert", "in/m.onnx", "-o", "y.onnx", "--save-plan", "x"),
        ("convert", "in/m.onnx", "-o", "y.onnx", "--html", "x"),
        ("convert", "in/m.onnx", "-o", "y.onnx", "--state", "x"),
        ("tune", "in/m.onnx", "-o", "x"),
        ("tune", "in/m.onnx", "-o", "y.onnx", "--state", "x"),
        ("diff", "in/m.onnx", "in/sub/n.onnx", "--html", "x"),
        ("diff", "in/m.onnx", "in/sub/n.onnx", "--save", "x"),
        ("diff", "in/m.onnx", "in/sub/n.onnx", "--state", "x"),
        ("check", "in/m.onnx", "--html", "x"),
        ("check", "in/m.onnx", "--state", "x"),
        ("view", "in/m.onnx", "-o", "x"),
        ("extract", "in/m.onnx", "--around", "first", "-o", "x"),
    ],
    ids=" ".join,
)
def test_no_command_replaces_a_model_under_another_name(
    arguments: tuple[str, ...], make: Callable[[str, str], None]
) -> None:
    make("x", "in/m.onnx")
    before = contents()
    result = run(*arguments)
    assert refused(result), result.output
    assert contents() == before


def test_a_link_that_leads_to_itself_is_no_output() -> None:
    link("x", "x")
    result = run("convert", "in/m.onnx", "-o", "x")
    assert refused(result), result.output


def test_names_in_either_case_are_one_file_where_the_system_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    names = Path("new/A.onnx"), Path("new/a.onnx")
    assert identity(names[0]) != identity(names[1])
    monkeypatch.setattr(module, "_ignores_case", lambda _: True)
    assert identity(names[0]) == identity(names[1])


def test_a_folder_is_within_another_under_whatever_name() -> None:
    link("elsewhere/back", "in/sub")
    assert is_within(Path("elsewhere/back/new/x.onnx"), Path("in"))
    assert is_within(Path("in"), Path("in"))
    assert not is_within(Path("in"), Path("in/sub"))
    assert not is_within(Path("in"), Path("missing"))
