"""The screenshot in the README shows the page as it is; ``ONNXAMP_REGENERATE=1`` takes it again.

Fonts differ from machine to machine, so pictures are compared roughly. What they say is compared word by word: the
picture holds its own text.
"""

import os
import re
import shutil
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import run
from repository import ROOT

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install .[dev]")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")

PICTURE = ROOT / "docs" / "report.png"
WIDTH, HEIGHT = 1100, 1440
"""Pixels: down to the end of the ranges, which the edge does not cut."""
CELL = 20
"""Pixels of a square whose mean color is compared."""
TOLERANCE = 3
"""Mean difference, of 255: another font makes 0.4 to 0.8, a part that is missing 9."""
SIGNATURE = b"\x89PNG\r\n\x1a\n"

DIFFERENCE = """async ([one, other, width, height]) => {
  const cells = [];
  for (const data of [one, other]) {
    const image = new Image();
    image.src = `data:image/png;base64,${data}`;
    await image.decode();
    const canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext("2d");
    context.imageSmoothingQuality = "high";
    context.drawImage(image, 0, 0, width, height);
    cells.push(context.getImageData(0, 0, width, height).data);
  }
  const apart = cells[0].map((value, at) => Math.abs(value - cells[1][at]));
  return apart.reduce((sum, value) => sum + value, 0) / apart.length;
}"""
"""Mean difference of two pictures, of 255, both drawn as small as that."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


def chunks(picture: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Kinds and contents of the parts of a PNG file."""
    at = len(SIGNATURE)
    while at < len(picture):
        length, kind = struct.unpack_from(">I4s", picture, at)
        yield kind, picture[at + 8 : at + 8 + length]
        at += length + 12


def with_text(picture: bytes, text: str) -> bytes:
    """The picture with a text in it, as the standard's Description."""
    content = b"Description\0\0\0\0\0" + text.encode()
    parts = list(chunks(picture))
    parts.insert(-1, (b"iTXt", content))
    packed = (
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    return SIGNATURE + b"".join(packed)


def text_of(picture: bytes) -> str:
    return next((data.rpartition(b"\0")[2].decode() for kind, data in chunks(picture) if kind == b"iTXt"), "")


def size_of(picture: bytes) -> tuple[int, int]:
    return struct.unpack(">II", next(chunks(picture))[1][:8])


def words(text: str) -> list[str]:
    """Words without numbers, whose last digits are the processor's."""
    return re.sub(r"[\d.,⁰-⁹⁻¹²³]+(e[+-]?\d+)?", "#", text).split()


def write_report() -> Path:
    """The page of a comparison that fails: the decoder, all low, known hazards included."""
    shutil.copy(ROOT / "models" / "decoder.onnx", "decoder.onnx")
    made = run("convert", "decoder.onnx", "-o", "decoder_fp16.onnx", "--level", "O3", "--no-hazards", "--no-validate")
    assert made.exit_code == 0, made.output
    run("diff", "decoder.onnx", "decoder_fp16.onnx", "--html", "report.html", "-q")
    return Path("report.html").absolute()


@pytest.mark.slow
def test_the_screenshot_shows_the_page(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
    tab.goto(write_report().as_uri())
    texts = tab.evaluate("['header', '#along'].map((part) => document.querySelector(part).innerText).join(' ')")
    taken = with_text(tab.screenshot(), " ".join([texts, *tab.locator("#figure text").all_text_contents()]))
    if os.environ.get("ONNXAMP_REGENERATE") == "1":
        PICTURE.write_bytes(taken)
    shown = PICTURE.read_bytes()
    assert size_of(shown) == size_of(taken) == (WIDTH, HEIGHT)
    assert words(text_of(shown)) == words(text_of(taken))
    cells = (WIDTH // CELL, HEIGHT // CELL)
    apart = tab.evaluate(DIFFERENCE, [*(b64encode(one).decode() for one in (shown, taken)), *cells])
    assert apart < TOLERANCE, f"{PICTURE} looks different from the page: ONNXAMP_REGENERATE=1 takes it again"
    tab.close()


@pytest.mark.slow
def test_pictures_are_told_apart(browser: Any) -> None:
    """Else the comparison would say nothing."""
    tab = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
    tab.set_content("<p>Something else</p>")
    other = tab.screenshot()
    cells = (WIDTH // CELL, HEIGHT // CELL)
    pictures = [b64encode(one).decode() for one in (PICTURE.read_bytes(), other)]
    assert tab.evaluate(DIFFERENCE, [*pictures, *cells]) > TOLERANCE
    assert words(text_of(other)) != words(text_of(PICTURE.read_bytes()))
    tab.close()
