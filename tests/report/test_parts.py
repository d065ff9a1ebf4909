"""Reports on a terminal: tables that lose nothing, and consoles that go to no terminal."""

import io
import re
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace

import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from onnxamp._base.errors import printable
from onnxamp._report.check import check_report
from onnxamp._report.parts import (
    LINES,
    Figure,
    Headline,
    NextStep,
    Part,
    Report,
    Severity,
    Statement,
    Status,
    Table,
    TableRow,
    section,
)
from onnxamp._report.terminal import print_report


def printed(report: Report, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_report(report)
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def table(
    columns: Sequence[str],
    rows: Iterable[TableRow | Sequence[str]],
    *,
    right: Sequence[int] = (),
    prose: Sequence[int] = (),
    drop: Sequence[int] | None = None,
    shown: int | None = None,
) -> Table:
    every = tuple(row if isinstance(row, TableRow) else TableRow(tuple(row)) for row in rows)
    return Table(tuple(columns), right, every, shown, prose=prose, drop=drop)


def one_row(*, empty: bool = True, **cells: str) -> Report:
    nothing = [""] if empty else []
    return Report("test", sections=(section("Table", [table([*cells, *nothing], [[*cells.values(), *nothing]])]),))


def test_a_column_of_nothing_costs_the_others_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(one_row(op="BatchNormalization", value="a_name"), capsys)
    assert lines[2:] == ["  op                  value", "  BatchNormalization  a_name"]


@pytest.mark.parametrize("empty", [True, False])
def test_no_line_ends_in_blanks(empty: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = one_row(empty=empty, op="Add", value="a")._replace(steps=(NextStep("end  "),))
    lines = printed(report, capsys)
    assert lines == [line.rstrip() for line in lines]
    assert lines[-1] == " → end"


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", 140), ("0", 140), ("many", 140)])
def test_the_width_is_that_of_columns(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = printed(Report("test", steps=(NextStep("word " * 100),)), capsys)
    assert width - 5 <= max(map(len, lines)) <= width


def test_forced_colors_change_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the width nor the columns: FORCE_COLOR makes no terminal of a log."""
    cells = {f"column {at}": "a/long/name/of/a/value" for at in range(9)}
    report = one_row(**cells)._replace(steps=(NextStep("word " * 100),))
    plain = printed(report, capsys)
    monkeypatch.setenv("FORCE_COLOR", "1")
    colored = printed(report, capsys)
    assert colored != plain
    assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in colored] == plain


NODES = st.sampled_from((
    "/model/decoder/layers.11/self_attn/MatMul_1", "/model/decoder/layers.12/self_attn/MatMul_1", "MatMul_0", "",
    "模型/注意力/Softmax_é_output_0_and_more_of_it", "functional_1/conv2d_17/BiasAdd;block_3.expand/Relu6__231:0",
    "x" * 90, "a\u202eb\x1b[31m" * 9, "7" * 70,
))  # fmt: skip
NUMBERS = st.sampled_from(("4.28e-4", "0.9999999", "12.3 MB", "1,234,567", "54 %", "∞", "–", "0", "1.00 [0.98, 1.03]"))
PROSE = st.lists(st.one_of(NODES, NUMBERS, st.sampled_from(("the", "epsilon", "is", "lost:"))), max_size=12).map(
    " ".join
)
TITLES = st.sampled_from(("value", "relative L2", "nodes per provider", "/home/models/decoder.onnx"))
STATUSES = st.sampled_from((None, *Status))


@st.composite
def tables(draw: st.DrawFn) -> Table:
    kinds = [NODES, *draw(st.lists(st.sampled_from((NODES, NUMBERS, NUMBERS, NUMBERS, PROSE)), max_size=9))]
    titles = [
        draw(st.sampled_from(("value", "relative L2", "nodes per provider", "/home/models/decoder.onnx")))
        for _ in kinds
    ]
    rows = draw(st.lists(st.tuples(st.tuples(*kinds), STATUSES, PROSE), min_size=1, max_size=5))
    return table(
        titles, [TableRow(cells, status, remark) for cells, status, remark in rows],
        right=[at for at, kind in enumerate(kinds) if kind is NUMBERS],
        prose=[at for at, kind in enumerate(kinds) if kind is PROSE],
    )  # fmt: skip


ITEMS = st.builds(Statement, PROSE, st.sampled_from(Severity), NODES, st.lists(PROSE, max_size=5).map(tuple), PROSE)
FIGURES = st.builds(Figure, st.sampled_from(("Casts", "largest relative L2 error")), NUMBERS, PROSE, NUMBERS)
REPORTS = st.builds(
    Report, st.just("convert, O2 float16 for cuda"),
    st.one_of(st.none(), st.builds(Headline, st.sampled_from(Status), PROSE, st.lists(PROSE, max_size=3).map(tuple))),
    st.lists(NODES, max_size=2).map(tuple), st.lists(PROSE, max_size=2).map(tuple),
    st.lists(FIGURES, max_size=4).map(tuple),
    st.lists(
        st.builds(section, PROSE, st.lists(st.one_of(tables(), ITEMS, FIGURES), min_size=1, max_size=3)), max_size=2
    ).map(tuple),
    st.lists(PROSE.map(NextStep), max_size=1).map(tuple), st.none(),
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(REPORTS, st.sampled_from((40, 60, 80, 120, 200)), st.booleans(), st.booleans())
def test_no_line_is_too_wide_and_no_number_is_cut(report: Report, width: int, verbose: bool, brief: bool) -> None:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("COLUMNS", str(width))
        print_report(report, verbose=verbose, brief=brief)
    lines = out.getvalue().splitlines()
    assert max(map(cell_len, lines), default=0) <= width
    if brief:
        return
    told = "\n".join(lines)
    for figure in report.figures:
        assert figure.value in told
    for part in (part for one in report.sections for part in one.parts if isinstance(part, Table)):
        shown = [at for at in part.right if part.columns[at]]
        for row in part.rows:
            cells = [row.cells[at] for at in shown]
            line = [line for line in lines if cells and all(cell in line for cell in cells)]
            assert line or "Left out for lack of space" in told or not cells


@pytest.mark.slow
@settings(deadline=None)
@given(PROSE, st.integers(15, 60))
def test_numbers_in_prose_stay_whole(text: str, width: int) -> None:
    """All that fit into a line. Nothing is lost, and nothing is added."""
    lines = at_width(width, (Statement(text, Severity.NONE),))[2:]
    assert max(map(cell_len, lines), default=0) <= width
    assert "".join("".join(lines).split()) == "".join(printable(text).split())
    known = re.findall(r"(?:^| )([\d.,e-]+(?: (?:MB|%))?)(?= |$)", text)
    told = " ".join(line.strip() for line in lines)
    assert all(number in told for number in known if cell_len(number) <= width - 3)
    assert not any(line.strip().startswith(("MB", "%")) for line in lines)


def at_width(width: int, parts: tuple[Part, ...]) -> list[str]:
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out):
        patch.setenv("COLUMNS", str(width))
        print_report(Report("test", sections=(section("Parts", parts),)))
    return out.getvalue().splitlines()


@pytest.mark.slow
@settings(deadline=None)
@given(st.lists(NODES, min_size=1), st.integers(40, 80))
def test_names_fit_a_line_and_lose_their_middle(names: list[str], width: int) -> None:
    """Their ends stay, which tell names apart."""
    lines = at_width(width, (table(("name", "n"), [(name, "1") for name in names], right=(1,)),))
    assert max(map(cell_len, lines)) <= width
    assert len(lines) == 3 + len(names)
    for line, name in zip(lines[3:], map(printable, names), strict=True):
        shown = line.strip().removesuffix("1").strip().split("…")
        assert name.startswith(shown[0])
        assert name.rstrip().endswith(shown[-1])
        assert all(piece in name for piece in shown)


@pytest.mark.parametrize("width", [40, 60])
def test_different_names_look_different(width: int) -> None:
    """Names that differ only in their middle lose the path that they share."""
    scope = "StatefulPartitionedCall/model/encoder/transformer_layers"
    end = "self_attention_block/output_projection/MatMul/ReadVariableOp"
    names = [f"{scope}/layer_{number}/{end}" for number in range(12)]
    names += [f"model.layers.{number}.self_attention_output_projection_MatMul" for number in range(12)]
    shown = at_width(width, (table(("name", "n"), [(name, "1") for name in names], right=(1,)),))[3:]
    assert max(map(cell_len, shown)) <= width
    assert len(set(shown)) == len(names)


def test_reasons_are_never_broken_word_by_word() -> None:
    """A long name leaves half of the line to the reason beside it."""
    names = [f"model/{'block/' * 40}conv{number}/Conv2D" for number in range(3)]
    why = "a constant does not fit the low-precision type"
    layout = table(("node", "op", "reason"), [(name, "Conv", why) for name in names], prose=(2,))
    for width in (60, 80, 120):
        lines = at_width(width, (layout,))
        assert max(map(cell_len, lines)) <= width
        assert len(lines) <= 3 + 3 * len(names)


def test_columns_go_in_the_order_that_the_table_names(capsys: pytest.CaptureFixture[str]) -> None:
    """What holds nothing goes first; what is left out is named."""
    row = ("x" * 40, "1" * 9, "2" * 9, "", "3" * 9)
    made = table(("name", "a", "b", "empty", "c"), [row], right=(1, 2, 4), drop=(2, 1))
    for width, left in ((60, "empty"), (50, "b, empty"), (38, "a, b, empty")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", str(width))
            print_report(Report("test", sections=(section("Table", [made]),)))
        assert " ".join(capsys.readouterr().out.split()).endswith(f"Left out for lack of space: {left}.")


def test_nothing_is_cut_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    """A file, or a pipe: programs look for names there."""
    names = [f"/model/decoder/layers.{number}/" + "self_attn/" * 30 for number in range(3)]
    print_report(Report("test", sections=(section("Table", [table(("name", "n"), [(name, "1") for name in names])]),)))
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[3:]] == names
    report = Report(
        "test", sections=(section("T", [table(("name", "why"), [(names[0], "so that it is " * 5)], prose=(1,))]),)
    )
    print_report(report)
    (line,) = capsys.readouterr().out.splitlines()[3:]
    assert line == f"  {names[0]}  {'so that it is ' * 5}".rstrip()


def test_a_piped_table_of_long_names_has_no_padding(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Report("test", sections=(section("T", [table(("name", "n"), [("x" * 200, "1"), ("y", "2")])]),)))
    assert capsys.readouterr().out.splitlines()[2:] == ["  name  n", f"  {'x' * 200}  1", "  y  2"]


def test_a_success_takes_twelve_lines_at_most(capsys: pytest.CaptureFixture[str]) -> None:
    """What is left is named in the last line; a failure is told whole."""
    figures = tuple(Figure(f"figure {number}", "1", "so to say " * 30) for number in range(9))
    sections = (section("Notes", [Statement("note")] * 9), section("Warned", [Statement("no", Severity.WARNING)] * 9))
    names = (f"{'deep/' * 40}a.onnx", "b.onnx")
    for status in (Status.PASSED, Status.NO_GAIN, Status.INEXACT, Status.UNKNOWN, Status.FAILED):
        verdict = Headline(status, "Converted. " * 30, ("because " * 60, "Better: " * 60))
        report = Report("convert", verdict, names, ("CPU",) * 60, figures, sections, lines=LINES)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", "80")
            print_report(report)
            lines = capsys.readouterr().out.splitlines()
            assert max(map(cell_len, lines)) <= 80 or status is Status.FAILED
            assert (len(lines) <= LINES) == (status is not Status.FAILED)
            print_report(report, verbose=True)
        assert capsys.readouterr().out.count("note") == 9
        if status is not Status.FAILED:
            assert lines[-1] == "  -v shows more: notes, warned."


def test_the_verdict_stands_first_and_last(capsys: pytest.CaptureFixture[str]) -> None:
    verdict = Headline(Status.PASSED, "Converted to float16.")
    figures = (Figure("error", "1e-3", "", "error 1e-3"), Figure("Casts", "3", "", "3 Casts"))
    body = section("Table", [table(["n"], [[str(n)] for n in range(30)])])
    for sections in ((body,), ()):
        print_report(Report("convert", verdict, ("a.onnx", "b.onnx"), figures=figures, sections=sections))
        lines = capsys.readouterr().out.splitlines()
        assert lines[:2] == ["✔ Converted to float16.", "  a.onnx → b.onnx   convert"]
        assert (lines[-1] == "✔ b.onnx: Converted to float16, error 1e-3, 3 Casts") == bool(sections)


def test_one_line_if_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    note, problem = Statement("fine"), Statement("not fine", Severity.WARNING)
    figures = (Figure("error", "1e-3", "", "error 1e-3"), Figure("weights", "1 MB"))
    for status, items in ((Status.PASSED, [note]), (Status.FAILED, [note, problem])):
        report = Report("diff", Headline(status, "Compared.", ("why",)), ("a.onnx",), ("CPU",), figures,
                        (section("Notes", items),), (NextStep("Next:", "command"),))  # fmt: skip
        print_report(report, brief=True)
        lines = capsys.readouterr().out.splitlines()
        assert lines[0][2:] == "a.onnx: Compared, error 1e-3"
        assert lines[1:] == ([] if status is Status.PASSED else ["  why", "! not fine", "", " → Next:", "   command"])


def test_long_commands_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Report("test", steps=(NextStep("Next:", "x " * 300),)))
    assert [line.split() for line in capsys.readouterr().out.splitlines() if "x x" in line] == [["x"] * 300]


def test_a_long_table_is_shown_whole_on_demand(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report("test", sections=(section("Table", [table(["n"], [[str(n)] for n in range(9)], shown=4)]),))
    print_report(report)
    assert "… and 5 more (-v shows all)" in capsys.readouterr().out
    print_report(report, verbose=True)
    assert [line.strip() for line in capsys.readouterr().out.splitlines()][-1] == "8"


def test_where_nothing_is_ordinary_stands_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    """A largest magnitude of 0 is one of zeros; where all is infinite, there is none."""
    row = pages.run_check(1).values[0]
    endless = replace(row.measured, found_max=0.0, found_zero=0, found_inf=row.measured.elements)
    zeros = replace(row.measured, found_max=0.0, found_zero=row.measured.elements, found_inf=0)
    run = replace(
        pages.run_check(1),
        values=(replace(row, value="a", measured=endless), replace(row, value="b", measured=zeros)),
    )
    print_report(check_report(None, run), verbose=True)
    lines = (line.strip(" ✘") for line in capsys.readouterr().out.splitlines())
    a, b = (line.split() for line in lines if line[:2] in ("a ", "b "))
    assert a[3] == "–"
    assert b[3] == "0"


@pytest.mark.parametrize(("count", "said"), [(1, "1 value checked"), (2, "2 values checked")])
def test_one_value_is_no_values(count: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = pages.run_check(2)
    run = replace(run, values=run.values[:count], first_bad=None)
    print_report(check_report(None, run))
    assert said in capsys.readouterr().out
