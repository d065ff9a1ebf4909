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


@pytest.mark.slow
def test_picture_is_what_the_script_draws(tmp_path):
    drawn = tmp_path / "layers.svg"
    subprocess.run([sys.executable, ROOT / "scripts" / "draw_layers.py", "--out", drawn], check=True)
    assert drawn.read_bytes() == PICTURE.read_bytes(), "run python3 scripts/draw_layers.py"


def test_picture_names_all_rooms():
    named = {element.text for element in ET.parse(PICTURE).iter() if "label" in element.get("class", "")}
    assert named == {room or "onnxamp" for room in ROOMS} - {"__main__"}


def test_files_and_rooms_that_the_text_names_exist():
    named = {name for name in FILE.findall(TEXT) if not name.startswith("import")}
    assert named
    missing = [name for name in named if not any((folder / name).exists() for folder in (ROOT, ROOT / "onnxamp"))]
    assert missing == []
    assert {room.rstrip("/") for room in re.findall(r"`(_[a-z]+)/?`", TEXT)} <= set(ROOMS)
