"""The pages of a folder of models: one per model, and an index with a table of them that sorts."""

from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

from onnxamp._job.folder import FolderReport, Row, page_of
from onnxamp._job.writing import Conversion
from onnxamp._model.storage import write_file
from onnxamp._paths.paths import made_folder
from onnxamp._report.batch import batch_report, status_of
from onnxamp._report.parts import Status
from onnxamp._report.text import number, size
from onnxamp._tuning.results import Tuned


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


def write_job_page(
    made: Conversion, tuned: Tuned | None, path: Path, result: Path
) -> None:
    """Write the page of one model, and create its folders.

    Args:
        made: the conversion.
        tuned: what level auto found; None if it was another level.
        path: the page.
        result: where the result is until the files of its folder take their places.

    Raises:
        OutputError: it cannot be written.
    """
    from onnxamp._audit.audit import audit_model  # noqa: PLC0415 - only pages show it
    from onnxamp._report.html.page import conversion_page  # noqa: PLC0415
    from onnxamp._report.html.render import write  # noqa: PLC0415

    made_folder(path.parent)
    write(
        conversion_page(
            made, made.validation, audit_model(result, made.plan.target), tuned
        ),
        path,
    )


def write_index(report: FolderReport, path: Path) -> None:
    """Write the index, with links to the pages that are beside it.

    Raises:
        OutputError: it cannot be written.
    """
    from onnxamp._report.html.render import render_index  # noqa: PLC0415 - only pages need jinja2

    made_folder(path.parent)
    lines = tuple(_line(row, path.parent) for row in report.rows)
    text = render_index(batch_report(report), lines)
    write_file(path, text.encode("utf-8", errors="backslashreplace"))


def _line(row: Row, folder: Path) -> Line:
    page = page_of(folder, row.name)
    link = quote(page.relative_to(folder).as_posix()) if page.exists() else None
    is_known = not row.has_failed or row.nodes > 0
    cells = (
        Cell("" if row.error is None else number(row.error), row.error),
        Cell(
            f"{row.low:,} of {row.nodes:,}" if is_known else "",
            row.low / row.nodes if row.nodes else None,
        ),
        Cell(f"+{row.casts:,}" if is_known else "", row.casts if is_known else None),
        Cell(
            size(row.bytes_after) if is_known else "",
            row.bytes_after if is_known else None,
        ),
    )
    remark = row.healed or row.message
    return Line(row.name, link, status_of(row), row.outcome, remark, cells)
