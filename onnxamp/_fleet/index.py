"""The index of a folder's pages: a table of models that sorts, with links to their pages."""

import os
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from onnxamp._base.paths import made_folder
from onnxamp._fleet.outcome import FolderReport, ModelOutcome, page_of
from onnxamp._fleet.report import batch_report, result_of, status_of
from onnxamp._model.staging import write_file
from onnxamp._report import number, size
from onnxamp._report.html.render import render_index
from onnxamp._report.parts import Status


class Cell(NamedTuple):
    """A cell of the index, and the number by which it sorts; None sorts last."""

    text: str
    order: float | None


class Line(NamedTuple):
    """A model of the index: its page, if it has one, and the text below its name."""

    name: str
    link: str | None
    status: Status
    outcome: str
    remark: str
    cells: tuple[Cell, ...]


def write_index(report: FolderReport, path: Path) -> None:
    """Write the index, with links to the pages that are beside it.

    Raises:
        OutputError: it cannot be written.
    """
    made_folder(path.parent)
    lines = tuple(_line(row, path.parent) for row in report.rows)
    text = render_index(batch_report(report), lines)
    write_file(path, text.encode("utf-8", errors="backslashreplace"))


def _line(row: ModelOutcome, folder: Path) -> Line:
    page = page_of(folder, row.name)
    # A page of a model that could not be converted is that of an earlier result.
    has_page = page.exists() and row.has_result
    link = None
    if has_page:
        # File names need not be UTF-8.
        link = quote(os.fsencode(page.relative_to(folder).as_posix()))
    cells = [Cell("" if row.error is None else number(row.error), row.error)]
    if row.has_failed and not row.nodes:
        cells += [Cell("", None)] * 3
    else:
        low = row.low / row.nodes if row.nodes else None
        cells += [
            Cell(f"{row.low:,} of {row.nodes:,}", low),
            Cell(f"+{row.casts:,}", row.casts),
            Cell(size(row.bytes_after), row.bytes_after),
        ]
    remark = row.healed or row.message
    return Line(row.name, link, status_of(row), result_of(row), remark, tuple(cells))
