"""Tables on disk, as CSV files and spreadsheets, in which names from models always remain text.

A spreadsheet treats a cell that starts with ``=``, ``+``, ``-`` or ``@`` as a formula, which may start programs. In
CSV, such text gets a leading apostrophe; in ``.xlsx`` files it is marked as text. Control characters, which could break
lines, terminals or the file, are escaped, with backslashes doubled. :func:`read_csv` reverses all of this.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from math import isfinite
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Final, TypeAlias

from onnxamp._base.errors import ArgumentError
from onnxamp._base.optional import require
from onnxamp._base.paths import as_path, cannot_read
from onnxamp._model.staging import write_file

Cell: TypeAlias = str | int | float | None
"""None for an empty cell."""

_LEADS: Final = frozenset("=+-@\uff1d\uff0b\uff0d\uff20'")
"""First characters of formulas, including full-width forms, and the apostrophe, so that one can always be removed."""

_ESCAPE: Final = re.compile(r"\\(?:\\|[nrt]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")
_MOST_ROWS: Final = 1_048_575
"""The maximum number of rows in a sheet, without its header."""
_LONGEST: Final = 32_767
"""The maximum number of characters in a cell."""
_WIDEST: Final = 60
"""The maximum width of a column, in characters."""


def table_path(path: str | PathLike[str]) -> Path:
    """Return the path of a table to write.

    Raises:
        ArgumentError: its suffix is neither .csv nor .xlsx.
    """
    if as_path(path).suffix.lower() not in (".csv", ".xlsx"):
        raise ArgumentError(
            f"Tables are written as .csv or .xlsx, but {fspath(path)!r} has neither suffix."
        )
    return as_path(path)


def write_table(
    path: str | PathLike[str],
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
) -> None:
    """Write a table, completely or not at all, in the format of the path's suffix.

    A spreadsheet highlights rows with flags in red.

    Args:
        columns: the names for the header.
        rows: one cell per column.

    Raises:
        ArgumentError: the suffix is unknown, or there are too many rows for a spreadsheet.
        OutputError: the file cannot be written; an existing file does not change.
    """
    path = table_path(path)
    form = _as_csv if path.suffix.lower() == ".csv" else _as_xlsx
    write_file(path, form(columns, list(rows)))


def read_csv(path: Path, columns: Sequence[str] = ()) -> list[dict[str, str]]:
    """Return the rows, by column, of a CSV file that :func:`write_table` wrote; empty cells are "".

    Raises:
        ArgumentError: the file cannot be read, lacks one of these columns, or has rows of different lengths.
    """
    try:
        lines = list(
            csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline=""))
        )
    except OSError as error:
        raise cannot_read(f"the table {str(path)!r}", error) from None
    except (ValueError, csv.Error) as error:
        raise ArgumentError(
            f"{str(path)!r} is not a table that onnxamp wrote: {error}."
        ) from None
    if not lines or any(len(line) != len(lines[0]) for line in lines):
        raise ArgumentError(
            f"{str(path)!r} is incomplete: it is empty, or its rows have different lengths."
        )
    header, *rest = lines
    if lacking := [column for column in columns if column not in header]:
        raise ArgumentError(
            f"The table {str(path)!r} has no column {lacking[0]!r}: was it written by another program?"
        )
    return [dict(zip(header, map(_unquoted, line), strict=True)) for line in rest]


def _as_csv(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes:
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(map(_quoted_row, rows))
    return stream.getvalue().encode()


def _quoted_row(row: Sequence[Cell]) -> list[Cell]:
    return [_quoted(cell) if isinstance(cell, str) else cell for cell in row]


def _quoted(text: str) -> str:
    text = escaped(text)
    return f"'{text}" if text[:1] in _LEADS else text


def _unquoted(cell: str) -> str:
    return _ESCAPE.sub(
        lambda match: match.group().encode("ascii").decode("unicode_escape"),
        cell.removeprefix("'"),
    )


def escaped(text: str) -> str:
    """Return text on one line, with backslashes and unprintable characters escaped."""
    return "".join(map(_escaped_character, text))


def _escaped_character(character: str) -> str:
    if character.isprintable() and character != "\\":
        return character
    return character.encode("unicode_escape").decode("ascii")


def _as_xlsx(columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> bytes:
    require("openpyxl", "A spreadsheet needs openpyxl", "xlsx")
    from openpyxl import Workbook  # noqa: PLC0415 - most users of the package write no spreadsheets
    from openpyxl.cell import WriteOnlyCell  # noqa: PLC0415
    from openpyxl.styles import Font, PatternFill  # noqa: PLC0415
    from openpyxl.utils import get_column_letter  # noqa: PLC0415

    if len(rows) > _MOST_ROWS:
        raise ArgumentError(
            f"A spreadsheet holds {_MOST_ROWS} rows, but there are {len(rows)}: write a .csv file."
        )
    book = Workbook(write_only=True)
    sheet = book.create_sheet("onnxamp")
    sheet.freeze_panes = "A2"
    sheet.auto_filter.ref = f"A1:{get_column_letter(len(columns))}{len(rows) + 1}"
    for number, column in enumerate(columns):
        texts = (cell for row in rows if isinstance(cell := row[number], str))
        longest = max(map(len, (column, " " * 10, *texts)))
        letter = get_column_letter(number + 1)
        sheet.column_dimensions[letter].width = min(_WIDEST, longest + 2)

    def styled(cell: Cell, **style: Any) -> Any:
        is_number = isinstance(cell, (int, float)) and isfinite(cell)
        if cell is None or cell == "" or is_number:
            result = WriteOnlyCell(sheet, cell if is_number else None)
        else:
            result = WriteOnlyCell(sheet, escaped(str(cell))[:_LONGEST])
            # openpyxl treats text that starts with "=" as a formula, and "#N/A" as an error.
            result.data_type = "s"
            result.quotePrefix = True
        for name, value in style.items():
            setattr(result, name, value)
        return result

    sheet.append([styled(column, font=Font(bold=True)) for column in columns])
    red = {"fill": PatternFill("solid", fgColor="FFC7CE")}
    for row in rows:
        is_flagged = dict(zip(columns, row, strict=True)).get("flags")
        style = red if is_flagged else {}
        sheet.append([styled(cell, **style) for cell in row])
    stream = io.BytesIO()
    book.save(stream)
    return stream.getvalue()
