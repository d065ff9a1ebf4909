"""What all terminal reports are made of: tables that lose nothing, and consoles that go to no terminal."""

from dataclasses import replace

import pages
import pytest
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from onnxamp._report.check import run_report
from onnxamp._report.parts import make_console, make_table, plain


def printed(*parts: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    make_console().print(*parts)
    return capsys.readouterr().out.splitlines()


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


def table(*, empty: bool = True, **cells: str) -> Table:
    made = make_table(*cells, *([""] if empty else []), right=())
    made.add_row(*map(plain, cells.values()), *([""] if empty else []))
    return made


def test_a_column_of_nothing_costs_the_others_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(Padding(table(op="BatchNormalization", value="a_name"), (0, 0, 0, 2)), capsys=capsys)
    assert lines == ["  op                  value", "  BatchNormalization  a_name"]


@pytest.mark.parametrize("empty", [True, False])
def test_no_line_ends_in_blanks(empty: bool, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(table(empty=empty, op="Add", value="a"), Text("end  "), capsys=capsys)
    assert lines == [line.rstrip() for line in lines]
    assert lines[-1] == "end"


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("", 140), ("0", 140), ("many", 140)])
def test_the_width_is_that_of_columns(
    columns: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    lines = printed(Text("word " * 100), capsys=capsys)
    assert width - 5 <= max(map(len, lines)) <= width


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_tables_lose_nothing(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    cells = {"value": "v" * 30, "op": "o" * 18, "largest": "9.87e+65"}
    lines = printed(table(**cells), capsys=capsys)
    assert all(len(line) <= width for line in lines)
    told = "".join("".join(lines).split())
    assert sorted(told) == sorted("".join([*cells, *cells.values()]))


def test_long_commands_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print(Text("x " * 300), soft_wrap=True)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_where_nothing_is_ordinary_stands_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    """A largest magnitude of 0 is one of zeros; where all is infinite, there is none."""
    row = pages.run_check(1).values[0]
    endless = replace(row.measured, found_max=0.0, found_zero=0, found_inf=row.measured.elements)
    zeros = replace(row.measured, found_max=0.0, found_zero=row.measured.elements, found_inf=0)
    run = replace(
        pages.run_check(1),
        values=(replace(row, value="a", measured=endless), replace(row, value="b", measured=zeros)),
    )
    make_console().print(*run_report(run, verbose=True))
    a, b = (line.split() for line in capsys.readouterr().out.splitlines() if line.strip()[:2] in ("a ", "b "))
    assert a[3] == "–"
    assert b[3] == "0.00e+00"


@pytest.mark.parametrize(("count", "said"), [(1, "1 value checked"), (2, "2 values checked")])
def test_one_value_is_no_values(count: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = pages.run_check(2)
    run = replace(run, values=run.values[:count], first_bad=None)
    make_console().print(*run_report(run, verbose=False))
    assert said in capsys.readouterr().out
