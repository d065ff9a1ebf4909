"""The picture in ARCHITECTURE.md shows the package as it is, and the text names what exists."""

import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest
from repository import ROOT
from rooms import ROOMS

PICTURE = ROOT / "docs" / "layers.svg"
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
FILE = re.compile(r"`(_?[\w.]+(?:/\w[\w.]*)+/?)`")
BESIDE = re.compile(r"`(\w+)`\*{0,2}(?: \(|,? in )`(_?[\w./]+\.(?:py|toml))`")


WALK = """
import sys
import onnxamp.__main__
from onnxamp._decide import mincut

solve = mincut.Network.solve

def tell(network):
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] != "onnxamp.__main__":
        code, module = frame.f_code, frame.f_globals["__name__"]
        if module.startswith("onnxamp."):
            print(code.co_qualname, module.removeprefix("onnxamp.").replace(".", "/") + ".py")
        frame = frame.f_back
    return solve(network)

mincut.Network.solve = tell
sys.argv = ["onnxamp", "convert", sys.argv[1], "-o", sys.argv[2], "-q"]
onnxamp.__main__.main()
"""


@pytest.mark.slow
def test_the_walk_from_the_command_to_the_cut_is_as_told(tmp_path):
    """The table names each function on the stack, from the first to the last; a default conversion solves one cut."""
    model = ROOT / "models" / "encoder.onnx"
    command = [sys.executable, "-c", WALK, str(model), str(tmp_path / "low.onnx")]
    stack = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    table = re.findall(r"^\| `([\w.]+)` \| `(_\w+/\w+\.py)` \|", TEXT, re.MULTILINE)
    assert [f"{name} {file}" for name, file in table] == stack[::-1]


@pytest.mark.slow
def test_picture_is_what_the_script_draws(tmp_path):
    drawn = tmp_path / "layers.svg"
    subprocess.run([sys.executable, ROOT / "scripts" / "draw_layers.py", "--out", drawn], check=True)
    assert drawn.read_bytes() == PICTURE.read_bytes(), "run python3 scripts/draw_layers.py"


def test_picture_names_all_rooms():
    named = {element.text for element in ET.parse(PICTURE).iter() if "label" in element.get("class", "")}
    assert named == {room or "onnxamp" for room in ROOMS} - {"__main__"}


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_that_a_page_names_exist(page):
    named = set(FILE.findall((ROOT / page).read_text(encoding="utf-8")))
    # Not those that a reader adds or builds.
    named = {name for name in named if not name.startswith(("import", "build/")) and "NAME" not in name}
    assert named
    missing = [name for name in named if not any((folder / name).exists() for folder in (ROOT, ROOT / "onnxamp"))]
    assert missing == []


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_hold_the_names_that_a_page_puts_beside_them(page):
    """As in "`Model` (`_model/model.py`)" and "`PASSES` in `_rewrite/prepare.py`"."""
    text = " ".join((ROOT / page).read_text(encoding="utf-8").split())
    pairs = BESIDE.findall(text)
    assert len(pairs) > 10
    for name, file in pairs:
        path = next(path for path in (ROOT / "onnxamp" / file, ROOT / file) if path.exists())
        assert re.search(rf"\b{name}\b", path.read_text(encoding="utf-8")), (name, file)


def test_rooms_that_the_text_names_exist():
    assert {room.rstrip("/") for room in re.findall(r"`(_[a-z]+)/?`", TEXT)} <= set(ROOMS)
