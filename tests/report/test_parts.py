"""Reports on a terminal: tables that lose nothing, and consoles that go to no terminal."""

from dataclasses import replace

import pages
import pytest

from onnxamp._report.check import check_report
from onnxamp._report.parts import Report, Step, section, table
from onnxamp._report.terminal import print_report


def printed(report: Report, capsys: pytest.CaptureFixture[str]) -> list[str]:
    print_report(report)
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def one_row(*, empty: bool = True, **cells: str) -> Report:
    nothing = [""] if empty else []
    return Report("test", sections=(section("Table", [table([*cells, *nothing], [[*cells.values(), *nothing]])]),))


def test_a_column_of_nothing_costs_the_others_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(one_row(op="BatchNormalization", value="a_name"), capsys)
    assert lines[2:] == ["  op                  value", "  BatchNormalization  a_name"]


@pytest.mark.parametrize("empty", [True, False])
def test_no_line_ends_in_blanks(empty: bool, capsys: pytest.CaptureFixture[str]) -> None:
    report = replace(one_row(empty=empty, op="Add", value="a"), steps=(Step("end  "),))
    lines = printed(report, capsys)
    assert lines == [line.rstrip() for line in lines]
    assert lines[-1] == " → end"


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", 140), ("0", 140), ("many", 140)])
def test_the_width_is_that_of_columns(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = printed(Report("test", steps=(Step("word " * 100),)), capsys)
    assert width - 5 <= max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_tables_lose_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cells = {"value": "v" * 30, "op": "o" * 18, "largest": "9.87e+65"}
    lines = printed(one_row(**cells), capsys)
    assert all(len(line) <= width for line in lines)
    told = "".join("".join(lines[2:]).split())
    assert sorted(told) == sorted("".join([*cells, *cells.values()]))


def test_long_commands_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(Report("test", steps=(Step("Next:", "x " * 300),)))
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
