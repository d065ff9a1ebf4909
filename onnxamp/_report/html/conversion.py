"""The page of a conversion as a file, which includes an audit of the result."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from onnxamp._audit.audit import audit_model
from onnxamp._base.paths import made_folder
from onnxamp._job.writing import Conversion
from onnxamp._model.model import ModelSource
from onnxamp._numerics.results import DiffReport
from onnxamp._report.html import conversion_page
from onnxamp._report.html.render import write_page
from onnxamp._tuning.results import Tuned


def write_conversion(
    conversion: Conversion,
    tuned: Tuned | None,
    result: ModelSource,
    path: Path,
    *,
    compared: DiffReport | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Write the page of a conversion, which includes an audit of the result, and create its folder.

    Args:
        conversion: the conversion.
        tuned: the outcome of level auto; None at other levels.
        result: the result; it may not be in its place yet.
        path: the page.
        compared: the result against the original if there is no validation to show.
        shapes: shapes of the inputs, if they are known.

    Raises:
        OutputError: it cannot be written.
    """
    made_folder(path.parent)
    audit = audit_model(result, conversion.plan.target, shapes=shapes)
    write_page(
        conversion_page(conversion, conversion.validation, audit, tuned, compared),
        path,
    )
