"""The HTML report as data and as text: escaping, structure, sizes, and what is left out."""

import io
import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from math import inf, nan
from pathlib import Path
from typing import Any

import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from repository import ROOT
from rich.console import Console

import onnxamp
from onnxamp._audit import Finding
from onnxamp._base.state import as_data
from onnxamp._decide.verdicts import title_of
from onnxamp._facts.dtypes import FORMATS
from onnxamp._fleet.index import write_index
from onnxamp._fleet.outcome import FolderReport, ModelOutcome
from onnxamp._numerics.results import Cure, Judgement
from onnxamp._report import named, number, percent
from onnxamp._report.comparison import diff_report
from onnxamp._report.conversion import conversion_notes, conversion_report
from onnxamp._report.html import Page, check_page, conversion_page, diff_page
from onnxamp._report.html.plot import plot_of
from onnxamp._report.html.render import render, write_page
from onnxamp._report.parts import Headline, Report, Severity, Status
from onnxamp._report.terminal import as_text
from onnxamp._tuning.results import KeptNode

BROKEN = (Judgement("logits", "rel_l2", 0.5, 1e-2, passed=False),)


class Reader(HTMLParser):
    """Elements, attributes and visible text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.inside: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.inside and self.inside.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        where = self.inside[-1] if self.inside else ""
        if where == "script":
            self.scripts.append(data)
        elif where != "style":
            self.text.append(data)

    @property
    def headings(self) -> list[str]:
        return [attrs["id"] or "" for tag, attrs in self.tags if tag == "h2"]

    @property
    def words(self) -> str:
        return " ".join("".join(self.text).split())


def data_of(html: str) -> dict[str, Any]:
    """The data that the page embeds."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found
    return json.loads(found[1])


def test_a_full_page_has_all_sections() -> None:
    read = Reader(render(pages.everything()))
    assert read.headings == [
        "along-title", "warnings-title", "outputs-title", "more-metrics-title", "limits-title",
        "large-weights-that-stay-in-float32-title", "weights-that-lost-elements-title", "nodes-and-weights-title",
        "notes-title", "nodes-title",
    ]  # fmt: skip
    assert "black list: Gather" in read.words
    assert "Converted to float16, but the result is wrong." in read.words
    assert "model.onnx → model_fp16.onnx" in read.words
    assert "CPU, emulated float16 · random inputs (seed 0)" in read.words
    assert "Weights that lost elements" in read.words
    assert pages.failing().cure.command in read.words


def test_all_notes_of_a_comparison_reach_the_page() -> None:
    for diff in (pages.diff(notes=("Left out: 'q'.",)), pages.failing(notes=("Left out: 'q'.",))):
        for page in (diff_page(diff), conversion_page(pages.conversion(), diff, None)):
            assert "Left out: 'q'." in Reader(render(page)).words


def test_what_accumulates_breaks_nowhere() -> None:
    bad = replace(pages.failing().first_bad, breaks=False)
    words = Reader(render(diff_page(pages.failing(first_bad=bad)))).words
    assert f"No single op is at fault: errors accumulate, and stay above the limit from {bad.value!r}" in words
    assert "The first bad value is" not in words
    assert "The first bad value is" in Reader(render(diff_page(pages.failing()))).words


def test_a_search_without_success_is_told() -> None:
    cure = Cure("", ("a", "b"), "No fix was found: trials with 2 nodes fail.", confirmed=False, trials=12)
    for page in (diff_page(pages.failing(cure=cure)), check_page(None, replace(pages.run_check(), cure=cure))):
        html = render(page)
        words = Reader(html).words
        assert "No fix was found: trials with 2 nodes fail." in words
        assert "No fix found" in words
        assert "Tried keeping 2 nodes in float32" in words
        assert "Next step" not in words
        assert 'id="command"' not in html


def test_a_check_tells_options_and_no_command() -> None:
    cure = Cure("--keep-fp32 a", ("a",), "Tried: no fault is left.", confirmed=True, trials=1)
    words = Reader(render(check_page(None, replace(pages.run_check(), cure=cure)))).words
    assert "Next step: convert the original with these options" in words
    assert "--keep-fp32 a" in words
    assert "with these options" not in Reader(render(diff_page(pages.failing()))).words


def test_terminal_and_page_advise_the_same() -> None:
    made = pages.conversion()
    made = replace(made, summary=replace(made.summary, fallbacks=(("n", "Det"), ("m", "Det"))))
    said = list(conversion_notes(made))
    assert len(said) == 5
    console = Console(width=1000, file=io.StringIO())
    console.print(as_text(conversion_report(made)))
    words = Reader(render(conversion_page(made, None, None))).words
    for sentence in said:
        assert sentence in words
        assert sentence in console.file.getvalue()
    assert "2 nodes have no kernel on cuda in any precision, so they run on the CPU: Det ×2." in said


def test_of_many_outputs_the_wrong_ones_are_shown() -> None:
    """A decoder has dozens, for its cache."""
    one, _ = pages.diff().outputs
    outputs = tuple(replace(one, name=f"present.{number}") for number in range(40))
    missed = Judgement("present.31", "rel_l2", 1e-3, 1e-4, passed=False)
    console = Console(file=io.StringIO(), width=120)
    console.print(as_text(diff_report(pages.diff(outputs=outputs, judgements=(missed,)))))
    shown = console.file.getvalue()
    rows = re.findall(r"present\.\d+", shown.partition("Outputs")[2])
    assert (len(rows), rows[:2]) == (12, ["present.31", "present.0"])
    assert "and 28 more" in shown


def test_numbers_keep_their_units() -> None:
    """No line ends between them; whoever copies the text gets a space that looks the same."""
    made = pages.tuned()
    html = render(conversion_page(pages.conversion(), None, None, made))
    sentence = re.search(r"<h1.*?</h1>", html, re.DOTALL)
    assert sentence is not None
    assert "&nbsp;%" in sentence[0]
    assert not re.search(r"\d (%|MB|kB)", sentence[0])
    assert re.search(r"<dd>[\d.]+&nbsp;MB</dd>", html)


def test_nothing_ordinary_has_no_range() -> None:
    """Where all is infinite, 0 is no largest magnitude."""
    layer = pages.layers(1)[0]
    endless = replace(layer.accumulated, reference_max=0.0, reference_least=float("inf"), reference_zero=0)
    page = diff_page(pages.diff(1, layers=(replace(layer, accumulated=endless),)))
    assert page.values[0].largest is None
    page = diff_page(pages.diff(1, layers=(replace(layer, accumulated=replace(endless, reference_zero=3)),)))
    assert page.values[0].largest == 0


def test_sections_without_data_are_left_out() -> None:
    assert Reader(render(check_page(None, None))).headings == []
    assert Reader(render(diff_page(pages.diff(0)))).headings == [
        "outputs-title", "more-metrics-title", "limits-title", "notes-title",
    ]  # fmt: skip
    assert Reader(render(conversion_page(pages.conversion(0), None, None))).headings == [
        "warnings-title", "large-weights-that-stay-in-float32-title", "weights-that-lost-elements-title",
        "nodes-and-weights-title", "notes-title",
    ]  # fmt: skip


@pytest.mark.parametrize("diff", [None, pages.diff(), pages.failing()])
@pytest.mark.parametrize("audit", [None, pages.audit()])
def test_any_part_may_be_missing(diff, audit) -> None:
    page = conversion_page(pages.conversion(), diff, audit)
    assert len(page.nodes) == (len(audit.nodes) if audit else 30)
    assert len(data_of(render(page))["nodes"]["name"]) == len(page.nodes)


def test_candidates_of_a_tuning() -> None:
    html = render(conversion_page(pages.conversion(), None, pages.audit(), pages.tuned()))
    read = Reader(html)
    assert read.headings[:2] == ["candidates-title", "along-title"]
    marks = [attrs for tag, attrs in read.tags if tag == "g" and attrs["class"].startswith("candidate")]
    assert [mark["class"] for mark in marks] == [
        "candidate", "candidate", "candidate holds chosen", "candidate holds",
    ]  # fmt: skip
    assert marks[2]["aria-label"].split("\n")[:2] == ["Candidate 2, written", "rel-l2 0.009"]
    for text in ("The tolerance is met with 33 % of the float traffic in float16.",
                 "rel-l2 is 0.009; the tolerance is 0.01 or less.", "tolerance: 0.01 or less",
                 "1 node: The tolerance is better spent elsewhere", "of the squared error",
                 "4.00×", "Sensitivities come from 48 samples", "tune, O2", "CPU, emulated float16"):  # fmt: skip
        assert text in read.words
    both = Reader(render(conversion_page(pages.conversion(), pages.diff(), None, pages.tuned())))
    assert "candidates-title" in both.headings
    assert "match the original" in both.words


def test_candidates_stand_where_they_belong() -> None:
    plot = plot_of(pages.tuned())
    assert [point.x for point in plot.points] == sorted(point.x for point in plot.points)
    assert [point.y for point in plot.points] == sorted(point.y for point in plot.points)
    above, below = [[p.y for p in plot.points if p.holds is held] for held in (False, True)]
    assert max(above) < plot.limit.at < min(below)
    assert all(0 <= at <= 100 for point in plot.points for at in (point.x, point.y))
    decibels = plot_of(pages.tuned(metric="snr"))
    assert {tick.text for tick in decibels.ys} >= {"40.0 dB", "∞ dB"}


def test_a_line_joins_what_is_best() -> None:
    """Not what is slower and less accurate than another, as low precision with many Casts may be."""
    made = pages.tuned()
    pairs = ((20.0, 4e-3), (10.0, 0.0), (30.0, 8e-3), (8.0, 2e-2), (40.0, 1e-2))
    found = tuple(replace(made.candidates[0], time=time, error=error) for time, error in pairs)
    plot = plot_of(replace(made, candidates=found, chosen=0, error=4e-3))
    assert plot.front == (plot.points[3], plot.points[1])
    html = render(
        conversion_page(pages.conversion(), None, None, replace(made, candidates=found, chosen=0, error=4e-3))
    )
    assert html.count('class="step"') == 1


@pytest.mark.parametrize("errors", [(0.0,), (inf, 1e-9, 0.0), (1e-12, 0.0), (1e-2, 1e-2), (3e-4,), (1e9, 1e-9)])
def test_fronts_of_any_shape(errors: tuple[float, ...]) -> None:
    made = pages.tuned()
    found = tuple(replace(made.candidates[0], error=error, time=float(i)) for i, error in enumerate(errors))
    tuned = replace(made, candidates=found, chosen=len(errors) - 1, error=errors[-1])
    plot = plot_of(tuned)
    assert 1 <= len(plot.ys) <= 10
    assert all(
        0 <= at <= 100 for row in (*plot.points, *plot.ys) for at in ([row.y] if hasattr(row, "y") else [row.at])
    )
    assert "candidates-title" in Reader(render(conversion_page(pages.conversion(), None, None, tuned))).headings


def test_a_tuning_that_does_not_hold() -> None:
    page = conversion_page(pages.conversion(), None, None, pages.tuned(chosen=0, error=4e-2, held=False))
    assert page.report.verdict == Headline(
        Status.FAILED,
        "The result does not meet the tolerance.",
        ("rel-l2 is expected to be 0.04; the tolerance is 0.01 or less.",),
    )
    nothing = conversion_page(pages.conversion(), None, None, pages.tuned(chosen=3, error=0.0))
    assert nothing.report.verdict.sentence.startswith("Nothing was converted")


@pytest.mark.parametrize("name", pages.HOSTILE)
def test_hostile_names_in_a_tuning(name: str) -> None:
    kept = (KeptNode(name, name, "costs accuracy", name),)
    read = Reader(
        render(conversion_page(pages.conversion(), None, None, pages.tuned(kept=kept, metric=name, inputs=name)))
    )
    assert [tag for tag, _ in read.tags].count("script") == 2
    assert "img" not in [tag for tag, _ in read.tags]
    assert " ".join(named(name).split()) in read.words


def test_equal_pages_are_equal_bytes() -> None:
    assert render(pages.everything()) == render(pages.everything())


def test_the_page_is_json() -> None:
    report = json.loads(json.dumps(as_data(pages.everything())))["report"]
    verdict = report[Report._fields.index("verdict")]
    assert verdict[Headline._fields.index("status")] == "failed"
    assert asdict(pages.everything())["nodes"][0]["op"] == "MatMul"


def test_nothing_is_loaded() -> None:
    read = Reader(render(pages.everything()))
    links = [value for _, attrs in read.tags for name, value in attrs.items() if name in ("src", "href", "srcset")]
    assert set(links) == {"data:,", "#nodes"}
    policy = next(attrs["content"] for tag, attrs in read.tags if tag == "meta" and attrs.get("http-equiv"))
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    style = render(pages.everything()).partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


def test_no_attribute_is_code() -> None:
    for tag, attrs in Reader(render(pages.everything())).tags:
        assert not [name for name in attrs if name.startswith("on") or name == "style"], tag


@pytest.mark.parametrize("name", pages.HOSTILE)
def test_names_are_nothing_but_text(name: str) -> None:
    plain = render(conversion_page(pages.conversion(), pages.bare("v", "n"), pages.audit()))
    finding = Finding("error", "kernel", name, name, name, name)
    diff = pages.bare(name, name, name)
    diff = replace(diff, failure=name, warnings=(name,), judgements=(Judgement(name, name, 1.0, 2.0, passed=False),))
    made = replace(pages.conversion(), source=Path(name), target=Path(name), notes=(name,))
    audit = pages.audit(findings=(finding, replace(finding, node="")))
    html = render(conversion_page(made, diff, audit))
    assert [t for t, _ in Reader(html).tags if t in ("script", "img", "style")] == ["style", "script", "script"]
    assert Reader(html).scripts[1] == Reader(plain).scripts[1]
    assert all(c.isprintable() or c == "\n" for c in html)
    data = data_of(html)
    assert named(name) in data["nodes"]["name"]
    assert named(name) in data["values"]["name"]
    assert named(name) in data["nodes"]["op"]["texts"]
    assert " ".join(named(name).split()) in Reader(html).words


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.text(max_size=60))
def test_any_name_survives(name: str) -> None:
    html = render(diff_page(pages.bare(name, name, name)))
    assert data_of(html)["nodes"]["name"] == [named(name)]
    assert html.count("<script") == 2
    assert html.encode("utf-8", errors="strict")


def test_long_names_are_cut_in_their_middle() -> None:
    text = "a" * 5000 + "\x00" * 5000 + "z" * 5000
    cut = named(text)
    assert len(cut) < 500
    assert (cut[0], cut[-1]) == ("a", "z")
    assert named("a" * 400) == "a" * 400
    assert len(named("\x00" * 399)) < 500


def test_a_command_is_never_cut() -> None:
    cure = replace(pages.failing().cure, command="onnxamp convert " + "x" * 5000)
    assert diff_page(pages.failing(cure=cure)).report.steps[0].command == cure.command
    assert cure.command in Reader(render(diff_page(pages.failing(cure=cure)))).words


@pytest.mark.parametrize(
    ("page", "status", "sentence"),
    [
        (conversion_page(pages.conversion(), pages.diff(), None), Status.PASSED, "both outputs match the original"),
        (conversion_page(pages.conversion(), None, None), Status.UNKNOWN, "not validated"),
        (conversion_page(pages.conversion(), pages.diff(skipped="No."), None), Status.UNKNOWN, "not validated"),
        (conversion_page(pages.conversion(), pages.failing(), None), Status.FAILED, "the result is wrong"),
        (conversion_page(pages.conversion(), pages.diff(warnings=("Off.",)), None), Status.INEXACT, "larger error"),
        (
            conversion_page(pages.conversion(), pages.diff(judgements=BROKEN), None),
            Status.FAILED,
            "outside the limits",
        ),
        (diff_page(pages.diff(judgements=BROKEN)), Status.FAILED, "more than the limits allow"),
        (diff_page(pages.diff()), Status.PASSED, "The models agree"),
        (diff_page(pages.diff(skipped="No.")), Status.UNKNOWN, "not compared"),
        (diff_page(pages.failing()), Status.FAILED, "The models differ"),
        (diff_page(pages.diff(warnings=("Off.",))), Status.INEXACT, "less closely"),
        (check_page(pages.audit(), None), Status.UNKNOWN, "nothing was run"),
        (check_page(None, pages.run_check()), Status.FAILED, "A value goes wrong"),
        (check_page(None, replace(pages.run_check(), first_bad=None, values=())), Status.PASSED, "Nothing breaks"),
    ],
)
def test_verdicts(page: Page, status: Status, sentence: str) -> None:
    verdict = page.report.verdict
    assert verdict.status is status
    assert sentence in verdict.sentence
    assert verdict.sentence in Reader(render(page)).words
    text = io.StringIO()
    Console(width=1000, file=text).print(as_text(page.report))
    assert verdict.sentence in text.getvalue()


def test_findings_decide_a_check() -> None:
    error = Finding("error", "kernel", pages.label(4), "LayerNormalization", "It has no kernel.", "Use --opset 18.")
    broken = check_page(pages.audit(findings=(error,)), None)
    assert broken.report.verdict.status is Status.FAILED
    assert f"LayerNormalization {pages.label(4)!r}: It has no kernel. Use --opset 18." in broken.report.verdict.details
    row = next(row for row in broken.nodes if Severity.ERROR in [message.level for message in row.messages])
    assert row.name == pages.label(4)
    warned = check_page(pages.audit(findings=(replace(error, severity="warning"),)), _calm())
    assert warned.report.verdict.status is Status.INEXACT


def _calm():
    return replace(pages.run_check(), first_bad=None, values=())


def test_what_no_node_carries_is_told_all_the_same() -> None:
    page = check_page(pages.audit(findings=(Finding("warning", "opset", "", "", "Too old.", ""),)), None)
    assert "Too old." in Reader(render(page)).words


def test_facts_meet_at_their_node() -> None:
    page = pages.everything()
    bad = next(row for row in page.nodes if row.name == pages.label(15))
    assert page.nodes[page.first_bad] == bad
    assert [message.level for message in bad.messages] == [Severity.ERROR, Severity.ERROR]
    assert (bad.op, bad.precision) == ("Mul", "float16")
    assert bad.reason == "low precision gains more than its Casts cost"
    masked = next(row for row in page.nodes if row.name == pages.label(2))
    assert (masked.precision, masked.why) == ("float32", "on the black list")
    assert (
        masked.messages[0].text
        == "kept in float32: low precision would change an attention mask: a sentinel lies before it"
    )
    value = next(value for value in page.values if value.name == f"{pages.label(7)}_out")
    assert page.nodes[value.node].name == pages.label(7)
    assert value.local == pytest.approx(2e-4)
    assert page.reasons == [("on the black list", 10)]


def test_casts_between_floats_are_told_from_others() -> None:
    page = pages.everything()
    assert {row.op for row in page.nodes if row.is_cast} == {"Cast"}
    assert sum(row.is_cast for row in page.nodes) == pages.audit().casts.count


def test_a_measured_node_that_the_audit_lacks_comes_behind_its_neighbor() -> None:
    audit = pages.audit()
    less = replace(audit, nodes=tuple(node for node in audit.nodes if node.node != pages.label(7)))
    names = [row.name for row in diff_page(pages.diff(), less).nodes]
    assert names.index(pages.label(7)) == names.index(pages.label(6)) + 1


def test_nodes_of_one_name_are_told_apart_by_scope_and_rank() -> None:
    made = pages.conversion(0)
    rows = tuple(
        replace(made.plan.rows[0], scope=scope, node="same", rank=rank, op="MatMul", low=low, reason=reason)
        for scope, rank, low, reason in (
            ("", 0, True, "white list"), ("", 1, False, "user pattern"), ("if.then_branch", 0, True, "cut"),
        )
    )  # fmt: skip
    node = replace(pages.audit(1).nodes[0], node="same", op="MatMul")
    audit = replace(
        pages.audit(0), nodes=(node, replace(node, position=1), replace(node, position=2, scope="if.then_branch"))
    )
    page = conversion_page(replace(made, plan=replace(made.plan, rows=rows)), None, audit)
    assert [row.why for row in page.nodes] == [
        title_of("white list", low=True), title_of("user pattern"), title_of("cut", low=True),
    ]  # fmt: skip


def test_a_node_whose_op_is_called_otherwise_is_still_the_same_node() -> None:
    node = replace(pages.audit(1).nodes[0], node="y", op="Cast", precision="mixed")
    page = diff_page(pages.bare("y", "y", "Identity"), replace(pages.audit(0), nodes=(node,)))
    assert [(row.name, row.op) for row in page.nodes] == [("y", "Cast")]


def test_an_unnamed_node_is_found_by_its_renamed_output() -> None:
    node = replace(pages.audit(1).nodes[0], node="y_fp16", op="Relu")
    page = diff_page(pages.bare("y", "y", "Relu"), replace(pages.audit(0), nodes=(node,)))
    assert [row.name for row in page.nodes] == ["y_fp16"]
    assert page.values[0].node == 0


@pytest.mark.parametrize("low", FORMATS.values(), ids=FORMATS.keys())
def test_the_window_is_that_of_the_low_type(low) -> None:
    window = data_of(render(diff_page(pages.diff(lowest=low.name))))["window"]
    assert window["name"] == low.name
    limits = (low.max_finite, low.smallest_normal, low.smallest_subnormal, low.epsilon / 2)
    assert window["limits"] == pytest.approx(limits, rel=1e-12)


def test_float32_models_have_no_window() -> None:
    assert diff_page(pages.diff(lowest="float32")).low is None
    assert data_of(render(diff_page(pages.diff(lowest="float32"))))["window"] is None


def test_what_json_cannot_say() -> None:
    layer = replace(pages.layers(1)[0], accumulated=pages.measurement(inf), local=pages.measurement(nan))
    values = data_of(render(diff_page(pages.diff(0, layers=(layer,)))))["values"]
    assert (values["local"], values["accumulated"]) == (["nan"], ["inf"])


@pytest.mark.parametrize(
    ("x", "text"),
    [(0.0, "0"), (1.0, "1"), (1.2345e-5, "1.23e-5"), (0.0123, "0.0123"), (-2e9, "-2e9"), (inf, "∞"), (-inf, "−∞"),
     (nan, "NaN"), (None, "–")],
)  # fmt: skip
def test_numbers(x: float | None, text: str) -> None:
    assert number(x) == text


@pytest.mark.parametrize(
    ("part", "whole", "text"), [(0, 10, "0 %"), (1, 1000, "<1 %"), (999, 1000, ">99 %"), (5, 10, "50 %"), (0, 0, "–")]
)
def test_shares(part: int, whole: int, text: str) -> None:
    assert percent(part, whole) == text


def test_size_of_a_page() -> None:
    assert len(render(pages.everything(1_000)).encode()) < 1_000_000


@pytest.mark.slow
def test_fifty_thousand_nodes() -> None:
    page = pages.everything(50_000)
    assert len(page.nodes) > 50_000
    assert len(render(page).encode()) < 15_000_000


def test_writing(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("old")
    path.chmod(0o640)
    write_page(pages.everything(), path)
    assert path.read_text(encoding="utf-8") == render(pages.everything())
    assert path.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]


def test_what_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(onnxamp.OutputError, match="does not exist"):
        write_page(pages.everything(), tmp_path / "missing" / "report.html")
    (tmp_path / "folder").mkdir()
    with pytest.raises(onnxamp.OutputError, match="Cannot write"):
        write_page(pages.everything(), tmp_path / "folder")
    assert [file.name for file in tmp_path.iterdir()] == ["folder"]


def test_a_real_conversion(tmp_path: Path) -> None:
    model = ROOT / "models" / "encoder.onnx"
    made = onnxamp.convert_file(model, tmp_path / "out.onnx", fold=False, validate=False)
    page = conversion_page(made, None, None)
    precisions = [row.precision for row in page.nodes if row.op != "Cast"]
    assert precisions.count("float16") == made.summary.nodes["low"]
    assert precisions.count("float32") == made.summary.nodes["float32"]
    assert {row.why for row in page.nodes if row.precision == "float32"} >= {title_of("decomposed pattern")}


def test_the_index_of_a_folder_names_what_is_worse(tmp_path) -> None:
    """In the row by its mark, and below the table by a sentence."""
    slow = ModelOutcome("slow.onnx", "converted", low=3, nodes=4, drawback="but slower by the estimate (0.95×)")
    fast = ModelOutcome("fast.onnx", "converted", low=4, nodes=4)
    folder = FolderReport(tmp_path, tmp_path, 1, 0.5, (slow, fast))
    write_index(folder, tmp_path / "index.html")
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert '<tr class="no-gain">' in page
    assert '<tr class="passed">' in page
    assert "Converted, but slower by the estimate (0.95×)" in page
