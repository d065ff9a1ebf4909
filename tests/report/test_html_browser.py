"""The HTML report in a browser: what its script does, and what names from models cannot make it do."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pages
import pytest

from onnxamp._audit import Finding
from onnxamp._fleet.index import write_index
from onnxamp._fleet.outcome import FolderReport, ModelOutcome
from onnxamp._report import named
from onnxamp._report.html import Page, check_page, conversion_page, diff_page
from onnxamp._report.html.render import write_page

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install .[dev]")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(browser: Any, tmp_path: Path) -> Iterator[Any]:
    """A function that opens a page, and fails at the end if it complained, loaded anything or opened a dialog."""
    complaints: list[str] = []
    contexts = []

    def open_page(page: Page, **options: Any) -> Any:
        path = tmp_path / f"report{len(contexts)}.html"
        write_page(page, path)
        contexts.append(browser.new_context(**options))
        tab = contexts[-1].new_page()
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
        tab.on("request", lambda request: complaints.append(request.url) if request.url != path.as_uri() else None)
        tab.goto(path.as_uri())
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


def column(tab: Any, position: int) -> list[str]:
    """Texts of a column of the table of nodes."""
    return [text.strip() for text in tab.locator(f"#table tbody tr.row td:nth-child({position})").all_inner_texts()]


def names(tab: Any) -> list[str]:
    return column(tab, 2)


@pytest.mark.parametrize(
    "page",
    [
        pages.everything(), conversion_page(pages.conversion(0), None, None), diff_page(pages.diff()),
        check_page(pages.audit(), None), check_page(None, pages.run_check()), check_page(None, None),
        conversion_page(pages.conversion(), pages.diff(lowest="bfloat16"), pages.audit()), pages.everything(1),
    ],
    ids=["full", "no nodes", "diff", "audit", "run", "no check", "bfloat16", "one node"],
)  # fmt: skip
def test_every_page_opens_silently(opened, page) -> None:
    tab = opened(page)
    assert tab.locator("h1").is_visible()
    assert tab.locator("#figure svg").count() == bool(page.nodes)


@pytest.mark.slow
def test_the_table_sorts(opened) -> None:
    tab = opened(pages.everything())
    assert column(tab, 1) == [str(i) for i in range(len(pages.everything().nodes))]
    tab.click("#by-accumulated")
    assert tab.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    errors = column(tab, 7)
    assert errors[0] == "∞"
    numbers = [float(text) for text in errors[1:] if text]
    assert numbers == sorted(numbers, reverse=True)
    assert errors[-1] == ""
    tab.click("#by-accumulated")
    assert [text for text in column(tab, 7) if text] == errors[: len(numbers) + 1][::-1]
    assert column(tab, 7)[-1] == ""
    tab.click("#by-op")
    assert column(tab, 3) == sorted(column(tab, 3))


@pytest.mark.slow
def test_the_table_is_searched(opened) -> None:
    tab = opened(pages.everything())
    tab.fill("#search", "block/2 SOFTMAX")
    playwright.expect(tab.locator("#table tbody tr")).to_have_count(1)
    assert names(tab) == [pages.label(14)]
    assert tab.locator("#count").inner_text() == f"1 of {len(pages.everything().nodes)} nodes"
    tab.fill("#search", "no such thing")
    playwright.expect(tab.locator("#table tbody")).to_contain_text("No node matches")
    tab.click("#reset")
    assert len(names(tab)) == len(pages.everything().nodes)


@pytest.mark.slow
def test_the_table_is_filtered(opened) -> None:
    tab, page = opened(pages.everything()), pages.everything()
    tab.select_option("#precision", "=float32")
    assert len(names(tab)) == sum(row.precision == "float32" for row in page.nodes)
    tab.select_option("#op", "=Softmax")
    assert set(column(tab, 3)) == {"Softmax"}
    tab.click("#reset")
    tab.check("#trouble")
    assert names(tab) == [row.name for row in page.nodes if any(message.level > 1 for message in row.messages)]
    tab.click("[data-why='on the black list']")
    assert len(names(tab)) == dict(page.reasons)["on the black list"]


@pytest.mark.slow
def test_pages_of_the_table(opened) -> None:
    tab = opened(pages.everything(300))
    assert len(names(tab)) == 100
    tab.click("#next")
    assert column(tab, 1)[0] == "100"
    assert tab.locator("#place").inner_text().startswith("101 to 200 of ")
    tab.click("#previous")
    assert column(tab, 1)[0] == "0"
    assert tab.locator("#previous").is_disabled()


@pytest.mark.slow
def test_a_click_on_the_map_reaches_the_row(opened) -> None:
    page = pages.everything(2000)
    tab = opened(page)
    tab.fill("#search", "nothing is called like that")
    box = tab.locator("#figure").bounding_box()
    tab.locator("#figure").scroll_into_view_if_needed()
    tab.locator("#figure").click(position={"x": box["width"] * 0.62, "y": 40})
    here = tab.locator("#table tr.here")
    number = int(here.locator("td").first.inner_text().replace(",", ""))
    assert 0.5 < number / len(page.nodes) < 0.75
    assert here.locator("td.name").inner_text() == page.nodes[number].name
    playwright.expect(here).to_be_in_viewport(ratio=1)
    assert tab.evaluate("document.activeElement.closest('tr').classList.contains('here')")


@pytest.mark.slow
def test_pointing_at_the_map_tells_the_node(opened) -> None:
    page = pages.everything()
    tab = opened(page)
    figure = tab.locator("#figure")
    assert tab.locator("#tip").is_hidden()
    figure.hover(position={"x": 110, "y": 40})
    assert page.nodes[0].name in tab.locator("#tip").inner_text()
    tab.mouse.move(1, 1)
    assert tab.locator("#tip").is_hidden()


@pytest.mark.slow
def test_the_map_by_keyboard(opened) -> None:
    page = pages.everything()
    tab = opened(page)
    tab.focus("#figure")
    for _ in range(3):
        tab.keyboard.press("ArrowRight")
    assert tab.locator("#reading").inner_text().startswith(page.nodes[2].name)
    tab.keyboard.press("+")
    assert tab.locator("#span").inner_text().startswith("nodes ")
    tab.keyboard.press("Escape")
    assert tab.locator("#span").inner_text() == ""
    tab.keyboard.press("Enter")
    assert tab.locator("#table tr.here td.name").inner_text() == page.nodes[2].name
    tab.keyboard.press("Enter")
    assert tab.locator("#table tr.more").count() == 0


def tuning() -> Page:
    return conversion_page(pages.conversion(), None, pages.audit(), pages.tuned())


@pytest.mark.slow
def test_pointing_at_a_candidate_tells_it(opened) -> None:
    tab = opened(tuning())
    marks, tip = tab.locator("#front .candidate .mark"), tab.locator("#tip")
    for number in (0, 2):
        marks.nth(number).hover()
        assert tip.inner_text().startswith(f"Candidate {number}")
        assert tab.locator("tr.here").get_attribute("id") == f"candidate-{number}"
    tab.mouse.move(1, 1)
    assert tip.is_hidden()
    assert tab.locator("tr.here").count() == 0
    tab.focus("#front .candidate >> nth=3")
    assert "Candidate 3" in tip.inner_text()


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 820, 1000, 1141, 1200, 1400])
def test_candidates_fit(opened, width) -> None:
    """The plot and the table, which is a list on a phone."""
    tab = opened(tuning(), viewport={"width": width, "height": 800})
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    cut = tab.locator(".wide:has(table.candidate)").evaluate("one => one.scrollWidth - one.clientWidth")
    assert cut <= 0
    plot = tab.locator("#front .ground").bounding_box()
    assert plot["width"] > 200
    for box in (mark.bounding_box() for mark in tab.locator("#front .candidate .mark").all()):
        assert plot["x"] <= box["x"] < box["x"] + box["width"] <= plot["x"] + plot["width"]


def rescaled(count: int = 30, exponent: int = 9) -> Page:
    """A comparison in which every fifth value overflowed before exponents."""
    rows = tuple(
        replace(row, exponent=exponent, accumulated=pages.measurement(1e-3, 3e6, 2.0)) if number % 5 == 0 else row
        for number, row in enumerate(pages.layers(count))
    )
    return conversion_page(pages.conversion(count), pages.diff(count, layers=rows), pages.audit(count))


def dots(tab: Any) -> int:
    return (tab.locator("#figure path.before").get_attribute("d") or "").count("M")


@pytest.mark.slow
@pytest.mark.parametrize("width", [700, 1200])
def test_ranges_before_and_after_rescaling(opened, width) -> None:
    tab = opened(rescaled(), viewport={"width": width, "height": 900})
    assert "before and after rescaling" in tab.locator("#figure svg").text_content()
    assert "largest |x| before rescaling" in tab.locator("#legend").inner_text()
    assert "overflows" not in tab.locator("#legend").inner_text(), "what is stored does not"
    assert dots(tab) == 6
    shown = [text.bounding_box() for text in tab.locator("#figure text").all()]
    assert max(box["x"] + box["width"] for box in shown) <= width
    title = tab.locator("#figure text.title", has_text="Range of values").bounding_box()
    assert title["x"] + title["width"] < tab.get_by_text("largest", exact=True).bounding_box()["x"]
    tab.locator("#figure").hover(position={"x": 110, "y": 40})
    assert "largest |x| 3.00e6 · stored as 5,859" in tab.locator("#tip").inner_text()
    tab.click(f"#table td.name button >> text={pages.label(0).split('/')[-1]}")
    assert "x · 2⁻⁹" in tab.locator("tr.more").inner_text()


@pytest.mark.slow
def test_what_still_overflows_is_red(opened) -> None:
    tab = opened(rescaled(exponent=3))
    assert "overflows" in tab.locator("#legend").inner_text()


@pytest.mark.slow
def test_without_exponents_nothing_moved(opened) -> None:
    tab = opened(pages.everything())
    assert tab.locator("#figure path.before").count() == 0
    assert "rescaling" not in tab.locator("#along").inner_text()


@pytest.mark.slow
def test_dragging_zooms(opened) -> None:
    tab = opened(pages.everything(500))
    tab.locator("#figure").scroll_into_view_if_needed()
    box = tab.locator("#figure").bounding_box()
    tab.mouse.move(box["x"] + 200, box["y"] + 60)
    tab.mouse.down()
    tab.mouse.move(box["x"] + 300, box["y"] + 60, steps=4)
    tab.mouse.up()
    assert tab.locator("#span").inner_text().startswith("nodes ")
    assert tab.locator("#table tr.here").count() == 0
    tab.click("#zoom-all")
    assert tab.locator("#span").inner_text() == ""
    assert tab.locator("#zoom-all").is_disabled()


@pytest.mark.slow
def test_quantized_nodes_are_drawn(opened) -> None:
    told = {0: "int8 scales", 6: "int8 products", 7: "float8e4m3fn integers"}
    nodes = [replace(row, quantized=told.get(i, "")) for i, row in enumerate(pages.everything().nodes)]
    tab = opened(replace(pages.everything(), nodes=tuple(nodes)))
    marks = tab.locator("#figure path.quantized").get_attribute("d").split("M")[1:]
    assert len(marks) == 2
    assert len(tab.locator("#figure path.scales").get_attribute("d").split("M")[1:]) == 1
    legend = tab.locator("#legend").inner_text()
    assert "int8 Q/DQ, in the precision of its scale" in legend
    assert "product of dequantized int8" in legend
    assert "kernel with float8e4m3fn inside" in legend
    assert [text.split("\n")[1:] for text in column(tab, 4)[:8]] == [["int8"], *[[]] * 5, ["int8"], ["float8e4m3fn"]]
    tab.fill("#search", "product of dequantized")
    playwright.expect(tab.locator("#table tbody tr")).to_have_count(1)
    plain = opened(pages.everything())
    assert plain.locator("#figure path.scales").count() == 0
    assert "integer" not in plain.locator("#figure").inner_text()


@pytest.mark.slow
def test_a_row_opens(opened) -> None:
    tab = opened(pages.everything())
    button = tab.locator("#table td.name button").first
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    assert f"{pages.label(0)}_out" in tab.locator("tr.more").inner_text()
    button.click()
    assert tab.locator("tr.more").count() == 0


@pytest.mark.slow
def test_the_first_bad_value_is_marked(opened) -> None:
    tab = opened(pages.everything())
    assert "first bad: Mul: Inf" in tab.locator("#figure text.flag").text_content()
    assert opened(diff_page(pages.diff())).locator("#figure text.flag").count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(opened, scheme) -> None:
    tab = opened(pages.everything(), color_scheme=scheme)

    def brightness() -> int:
        color = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in color.removeprefix("rgb(").rstrip(")").split(","))

    before = brightness()
    assert (before > 600) == (scheme == "light")
    tab.click("#theme")
    assert (brightness() > 600) != (scheme == "light")
    tab.click("#theme")
    assert brightness() == before
    tab.click("#theme")
    tab.emulate_media(media="print")
    assert brightness() == 765


@pytest.mark.slow
def test_the_command_is_copied(opened) -> None:
    tab = opened(pages.everything(), permissions=["clipboard-read", "clipboard-write"])
    tab.click("#copy")
    playwright.expect(tab.locator("#copy")).to_have_text("Copied")
    assert tab.evaluate("navigator.clipboard.readText()") == pages.failing().cure.command


@pytest.mark.slow
@pytest.mark.parametrize("has_clipboard", [True, False], ids=["clipboard", "selection"])
def test_the_command_is_copied_without_permissions(opened, has_clipboard) -> None:
    """As users open pages: from disk; and where the browser hides the clipboard from scripts."""
    tab = opened(pages.everything())
    if not has_clipboard:
        tab.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    tab.click("#copy")
    playwright.expect(tab.locator("#copy")).to_have_text("Copied")
    tab.focus("#search")
    tab.keyboard.press("Control+V")
    assert tab.locator("#search").input_value() == pages.failing().cure.command


def folder_index(folder: Path) -> Path:
    """Three models, of which one has a page and one failed; names are hostile."""
    rows = (
        ModelOutcome("b.onnx", "converted", 5, 10, 2, 1e-3, bytes_after=4000, healed=pages.HOSTILE[1]),
        ModelOutcome(pages.HOSTILE[0], "failed", message=pages.HOSTILE[2]),
        ModelOutcome("a.onnx", "up to date", 9, 10, 12, 2e-5, bytes_after=90_000),
    )
    (folder / "b.onnx.html").write_text("<title>b</title>")
    write_index(FolderReport(folder, folder, 1, 1.0, rows), folder / "index.html")
    return folder / "index.html"


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 1200])
def test_the_index_of_a_folder(browser, tmp_path, width) -> None:
    tab = browser.new_page(viewport={"width": width, "height": 800})
    complaints: list[str] = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.goto(folder_index(tmp_path).as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") <= width

    def names_by(*titles: str) -> list[str]:
        for title in titles:
            tab.get_by_role("button", name=title, exact=True).click()
        return [text[0] for text in tab.locator("#models tbody th .name").all_inner_texts()]

    assert names_by("error") == ["a", "b", "<"]
    assert names_by("error") == ["b", "a", "<"]
    assert names_by("new Casts") == ["b", "a", "<"]
    assert names_by("weights", "weights") == ["a", "b", "<"]
    assert names_by("result") == ["b", "<", "a"]
    assert tab.locator("th[aria-sort]").inner_text() == "result"
    assert tab.locator("#models a").count() == 1
    tab.click("#models a")
    assert tab.title() == "b"
    assert complaints == []
    tab.close()


@pytest.mark.slow
def test_hostile_names_do_nothing(opened) -> None:
    """Everywhere at once: no element comes of them, no code runs, and each is read as it is."""
    layers, findings = [], []
    for i, name in enumerate(pages.HOSTILE):
        layers.append(replace(pages.bare(name, name, name).layers[0], position=i))
        findings.append(Finding("error", "kernel", name, name, name, name))
    evil = pages.HOSTILE[1]
    diff = replace(pages.bare(evil, evil, evil), layers=tuple(layers), failure=evil, warnings=pages.HOSTILE)
    made = replace(pages.conversion(), source=Path(evil), target=Path(evil), notes=pages.HOSTILE)
    tab = opened(conversion_page(made, diff, pages.audit(findings=tuple(findings))))
    assert tab.locator("script").count() == 2
    assert tab.locator("img").count() == 0
    told = names(tab)
    for name in pages.HOSTILE:
        assert " ".join(named(name).split()) in told
    for i in range(len(pages.HOSTILE)):
        tab.locator("#table td.name button").nth(i).click()
    tab.fill("#search", "<script>")
    playwright.expect(tab.locator("#table tbody tr.row")).to_have_count(
        sum("<script>" in name for name in pages.HOSTILE)
    )
    tab.locator("#figure").hover(position={"x": 110, "y": 40})
    assert tab.locator("script").count() == 2


@pytest.mark.slow
@pytest.mark.parametrize("width", [400, 820, 1400])
def test_nothing_sticks_out(opened, width) -> None:
    for page in (pages.everything(), diff_page(pages.bare("x" * 300, "y" * 300, "Z" * 80), pages.audit(2))):
        tab = opened(page, viewport={"width": width, "height": 800})
        tab.locator("#table td.name button").first.click()
        assert tab.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.slow
def test_narrow_screens_can_sort(opened) -> None:
    tab = opened(pages.everything(), viewport={"width": 400, "height": 800})
    tab.select_option("#sort", "accumulated")
    assert names(tab)[0] == pages.label(15)


@pytest.mark.slow
def test_without_scripts_the_rest_is_there(opened) -> None:
    tab = opened(pages.everything(), java_script_enabled=False)
    assert "need JavaScript" in tab.locator("body").inner_text()
    assert "logits" in tab.locator("body").inner_text()


@pytest.mark.slow
def test_fifty_thousand_nodes_work(opened) -> None:
    tab = opened(pages.everything(50_000))
    loaded = tab.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd")
    took = tab.evaluate(
        "(() => { const start = performance.now(); document.querySelector('#by-accumulated').click();"
        " document.querySelector('#zoom-in').click(); return performance.now() - start; })()"
    )
    assert (loaded < 10_000, took < 5_000) == (True, True)
    tab.fill("#search", "softmax_4999")
    playwright.expect(tab.locator("#count")).to_have_text("1 of 83,332 nodes")


LONG = "StatefulPartitionedCall/functional_1/" + "transformer_block_with_relative_position_bias/" * 4
"""The start of such a name as TensorFlow gives to nodes: 220 characters."""

OVERLAPS = """() => {
  const boxes = (selector) => [...document.querySelectorAll(selector)].map((one) => one.getBoundingClientRect());
  const meets = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  const texts = [...document.querySelectorAll("#figure text:not(.inside)")];
  const marks = boxes("#figure path.fill, #figure path.point");
  const met = (text, at) => [...marks, ...texts.slice(at + 1).map((other) => other.getBoundingClientRect())]
    .some((box) => meets(text.getBoundingClientRect(), box));
  return texts.filter(met).map((text) => text.textContent);
}"""
"""Labels of the figure that stand over what is drawn, or over another label."""


def crowded(count: int, low: str) -> Page:
    """A conversion whose values and outputs have long names."""
    result = pages.diff(count, lowest=low)
    layers = tuple(replace(one, value=LONG + one.value, node=LONG + one.node) for one in result.layers)
    outputs = tuple(replace(one, name=LONG + one.name) for one in result.outputs)
    judgements = tuple(replace(one, output=LONG + one.output) for one in result.judgements)
    result = replace(result, layers=layers, outputs=outputs, judgements=judgements)
    audit = pages.audit(count, (Finding("error", "type", pages.label(0), "MatMul", "it overflows", "keep it"),))
    return conversion_page(pages.conversion(count), result, audit)


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize(("count", "low"), [(3, "float16"), (300, "float16"), (30, "bfloat16")])
def test_nothing_is_cut_and_no_label_covers_a_mark(opened, width, count, low) -> None:
    tab = opened(crowded(count, low), viewport={"width": width, "height": 900})
    assert tab.evaluate(OVERLAPS) == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    wide = "[...document.querySelectorAll('.wide')].filter((one) => one.scrollWidth > one.clientWidth).length"
    assert tab.evaluate(wide) == 0
    tall = """[...document.querySelectorAll('.figures .remark, .hint')]
      .filter((one) => one.clientHeight > 2.2 * parseFloat(getComputedStyle(one).lineHeight || 20))
      .map((one) => one.textContent)"""
    assert tab.evaluate(tall) == []


@pytest.mark.slow
def test_the_legend_tells_all_that_is_drawn(opened) -> None:
    legend = opened(crowded(300, "float16")).locator("#legend").inner_text().split("\n")
    assert {"float16", "float32", "limits of float16"} <= set(legend)
    assert any("error" in one for one in legend)
